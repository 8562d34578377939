"""Predicts what a run will take: peak memory by category, bytes sent, seconds of a step. Starts no process.

Memory is played allocation by allocation (planning/lab_memory), bytes are the formula's, seconds need a calibration
of this machine. What no model here covers is None, with the reason: another engine's buffers, a GPU's allocator, a
compiled block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from fsdplab.planning import Traffic
from fsdplab.planning.lab_memory import LabRun, MicroBatch, memory_of_step, peak_of_step, unit_parameters
from fsdplab.planning.lab_step_time import StepSeconds, step_seconds
from fsdplab.planning.recorded_plan import recorded_muon, recorded_state_bytes, recorded_traffic
from fsdplab.records.summary import Peak, Predicted
from fsdplab.sessions.calibration import Calibration
from fsdplab.sessions.formula import lab_run, step_choices, traffic_of
from fsdplab.sessions.spec import RunSpec

if TYPE_CHECKING:
    from fsdplab.sessions.own_optimizer import OwnStep


@dataclass(frozen=True)
class Prediction:
    """A run's cost by arithmetic, of its worst rank. Bytes, seconds; None where it is not predicted: see `why_not`.

    `exposed_s` is what no computing hides: without a link CPU ranks copy themselves, so all of it is exposed. `fits` is
    whether the peak fits the spec's emulated card; None without a card or a peak.
    """

    by_category: dict[str, int] | None
    bytes_per_step: int | None
    step_time_s: float | None
    exposed_s: float | None
    fits: bool | None
    why_not: str = ""

    @property
    def peak_bytes(self) -> int | None:
        """The sum of the categories at the peak."""
        if self.by_category is None:
            return None
        return sum(self.by_category.values())

    def recorded(self) -> Predicted:
        """Return it as a record keeps it."""
        return Predicted(Peak(self.peak_bytes, self.by_category), self.step_time_s, self.exposed_s, self.why_not)


def predict(spec: RunSpec, calibration: Calibration | None = None) -> Prediction:
    """Predict peak memory by category, bytes sent by a rank in a step, and with a calibration seconds of a step.

    >>> predict(RunSpec(strategy="full_shard", model="gpt-tiny")).bytes_per_step
    764160
    """
    if spec.engine == "twin":
        return Prediction(None, None, None, None, None, "the twin is no rank of a run")
    if spec.own_model:
        return predict_own(spec)
    why_not = _not_modelled(spec)
    traffic = traffic_of(spec, spec.strategy)
    if why_not:
        return _prediction(spec, traffic, None, None, why_not)
    peak = dict(_peak(lab_run(spec)))
    return _prediction(spec, traffic, peak, _seconds(spec, traffic, calibration), "")


def predict_own(spec: RunSpec) -> Prediction:
    """Predict a user's own model from a recording of its first micro-batch in this process."""
    why_not = _not_modelled(spec)
    if why_not:
        return Prediction(None, None, None, None, None, why_not)
    from fsdplab.sessions.recorded_model import own_step_of, recording_or_why  # which imports torch

    recording = recording_or_why(spec)
    if isinstance(recording, str):
        return Prediction(None, None, None, None, None, recording)
    own_step = own_step_of(spec)
    prediction = predict_recorded(spec, recording, own_step)
    # the bytes sent follow from the parameters alone, the memory does not
    if own_step and own_step.why_not:
        return replace(prediction, by_category=None, fits=None, why_not=own_step.why_not)
    return prediction


def predict_recorded(spec: RunSpec, recording: MicroBatch, own: OwnStep | None = None) -> Prediction:
    """Predict the same for any model, from a recording of one of its micro-batches (`sessions/micro_batch.py`) with the
    units, the precision and the checkpointing of `spec`, and the step of its own optimizer. Seconds are not known
    before a run.
    """
    why_not = _not_modelled(spec)
    choices = step_choices(spec)
    # groups of ranks that hold the same shards
    replicas = spec.replicas if spec.row.in_groups else 1
    traffic = recorded_traffic(recording, spec.strategy, spec.world_size, replicas, spec.micro_batches)
    if own is not None:
        choices = replace(
            choices, foreach=False, state_bytes=own.state_bytes, step_scratch=own.scratch // choices.shards
        )
    elif spec.optimizer == "muon":
        # each matrix has an owner among the ranks of a shard group, which gets its momentum and sends its update
        stepping = recorded_muon(recording, spec.world_size // replicas, not spec.row.cuts)
        packed, other = stepping.held
        state = recorded_state_bytes(recording)
        choices = replace(choices, state_bytes=state, step_buffers=packed, step_scratch=other)
        traffic += stepping.traffic()
    peak = None
    if not why_not:
        peak = peak_of_step(choices, recording)
    return _prediction(spec, traffic, peak, None, why_not)


def _prediction(
    spec: RunSpec, traffic: Sequence[Traffic], peak: dict[str, int] | None, step: StepSeconds | None, why_not: str
) -> Prediction:
    fits = None
    if peak is not None and spec.card is not None:
        # both in bytes; without a card or a peak it stays None
        fits = sum(peak.values()) <= spec.card
    step_s, exposed_s = None, None
    if step:
        # CPU ranks copy themselves, so all of communication is exposed
        step_s, exposed_s = step.step_s, step.communication_s
    sent = sum(row.step_bytes for row in traffic)
    return Prediction(peak, sent, step_s, exposed_s, fits, why_not)


def _seconds(spec: RunSpec, traffic: Sequence[Traffic], calibration: Calibration | None) -> StepSeconds | None:
    """Return the parts of a step; None where no rates are measured, or for another number of ranks."""
    # rates depend on how many ranks share cores and memory
    if calibration is None or calibration.ranks != spec.world_size or not _has_rates(spec):
        return None
    run = lab_run(spec)
    return step_seconds(run, traffic, [*unit_parameters(run).values()], calibration.rates)


def needs_calibration(spec: RunSpec) -> bool:
    """Return whether the seconds of this run's step are predicted from a calibration of the machine."""
    return spec.engine == "lab" and not spec.own_model and not _not_modelled(spec) and _has_rates(spec)


def _has_rates(spec: RunSpec) -> bool:
    """Not behind an emulated link, whose waiting hides behind computing, nor for offload and Muon."""
    return not spec.linked and spec.offload == "none" and spec.optimizer != "muon"


def _not_modelled(spec: RunSpec) -> str:
    """Return why the memory of a run is not predicted; empty where it is."""
    if spec.engine != "lab":
        return f"the buffers of {spec.engine} are its own and not modelled"
    if spec.device_type != "cpu":
        return "between GPUs use fsdplab plan: here CPU ranks are modelled"
    if spec.transport == "gloo" and spec.world_size > 1:
        return "gloo copies what it sends in threads of its own, and that is not modelled; shared memory is"
    if spec.compile != "none":
        return "what a compiled block saves is the compiler's choice"
    return ""


@lru_cache(maxsize=64)
def _peak(run: LabRun) -> dict[str, int]:
    return memory_of_step(run)
