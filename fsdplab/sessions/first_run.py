"""Predicts step times of a user's own model on this machine, from one run of it that was measured.

How long its operators take here is not known before a run. After one, the host's time in that run follows: the time at
which the simulator plays the recorded program in as many seconds as were measured. Of another strategy the program is
another, the operators are the same, the copies are as much longer as it sends more, and the optimizer updates its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fsdplab.records import RunRecord
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads.own.sources import name_of, source_of

if TYPE_CHECKING:
    from fsdplab.planning.program import StepWork

# What two runs must have in common for their operators to take equally long.
_SAME = (
    "world_size",
    "batch_size",
    "sequence_length",
    "micro_batches",
    "precision",
    "checkpoint",
    "compile",
    "offload",
    "optimizer",
    "transport",
    "emulate",
)
_PLAYED = ("strategy", "shard_size", "prefetch", "units", "link", "link_across", "link_queues")
_NO_LINK = "1000000GB/s"  # whose messages take no time: the copies of the ranks are the host's time
_HALVINGS = 40


@dataclass(frozen=True)
class StepHere:
    """A predicted step on this machine: seconds, the scatter of the run that it is from (0.03 is ±3 %; None with fewer
    than 4 timed steps), and that run's strategy.
    """

    seconds: float
    scatter: float | None
    of: str


def step_here(base: RunRecord, spec: RunSpec) -> StepHere | None:
    """Predict the step of `spec` on the machine on which `base`, a run of the same work, was measured; None where
    `base` does not tell, as `why_no_base` says, or is of other work.

    Example without a link: a step of 200 ms, of which 20 ms are copies of 40 MB and 30 ms the optimizer, is one of
    150 ms + 30 ms + 15 ms where 60 MB are sent and each of two ranks updates a half.
    """
    if why_no_base(base) or not _of_the_same_work(base, spec):
        return None
    measured, profile, copying = base.summary.step_time_s, base.summary.profile, base.summary.comm.copying_s
    assert measured.median and profile and profile.optimizer_s is not None and copying is not None
    # the parts are known of profiled steps, which are longer than timed ones
    longer = 1 + max(0.0, profile.overhead or 0.0)
    copying_s = copying / longer
    optimizer_s = (profile.optimizer_s - (profile.exchange_s or 0.0)) / longer
    # the same work under the choices of the run that was measured
    of_base: dict[str, Any] = {name: base.spec.get(name) for name in _PLAYED}
    base_spec = replace(spec, card=None, **of_base)
    version = _version(spec)
    host_s = _host_seconds(base_spec, version, optimizer_s, measured.median)
    if host_s is None:
        return None
    # copies take as much longer as more is sent
    base_sent = _sent(base_spec, version)
    sent = _sent(replace(spec, card=None), version)
    if sent and not base_sent:
        return None  # the run sent nothing, so nothing is known of copies
    new_copying_s = copying_s * sent / base_sent if base_sent else 0.0
    # one rank updated all, two ranks a half each: half the seconds
    new_optimizer_s = optimizer_s * _updated_by(base_spec) / _updated_by(spec)
    play = _player(spec, new_optimizer_s)
    return StepHere(play(host_s - copying_s + new_copying_s), measured.scatter, str(base.spec["strategy"]))


def why_no_base(record: RunRecord) -> str:
    """Return why other strategies' steps cannot be predicted from this run; "" where they can."""
    summary = record.summary
    if record.status != "finished" or record.spec.get("engine") != "lab" or not summary.step_time_s.median:
        return "it is no finished run of the lab's engine with timed steps"
    if record.environment.get("device", "cpu") != "cpu":
        return "its ranks were on GPUs"
    if summary.short_of_cores:
        return "its ranks were short of cores"
    if summary.profile is None or summary.profile.optimizer_s is None or summary.comm.copying_s is None:
        return "no step of it was profiled"
    return ""


def predict_from_the_first(pairs: Sequence[tuple[RunSpec, RunRecord]]) -> None:
    """Give the records of a user's own model the step that the first of them predicts for them, and save these."""
    of_own_models = [(spec, record) for spec, record in pairs if spec.own_model and spec.engine == "lab"]
    bases = [record for _, record in of_own_models if not why_no_base(record)]
    if not bases:
        return
    for spec, record in of_own_models:
        if record is bases[0] or record.status != "finished":
            continue
        step = step_here(bases[0], spec)
        if step is not None:
            predicted = replace(
                record.summary.predicted, step_time_s=step.seconds, step_scatter=step.scatter, step_from=step.of
            )
            record.summary = replace(record.summary, predicted=predicted)
            record.save()


def _of_the_same_work(base: RunRecord, spec: RunSpec) -> bool:
    """Return whether two runs train the same version of a model in the same way."""
    if not spec.own_model or spec.engine != "lab" or spec.device_type != "cpu":
        return False
    workload = base.environment.get("workload") or {}
    if base.spec.get("model") != name_of(spec.model) or workload.get("digest") != _version(spec):
        return False
    return all(base.spec.get(name) == getattr(spec, name) for name in _SAME)


def _version(spec: RunSpec) -> str:
    """Return what changes when the model is edited."""
    return source_of(spec.model).digest


@lru_cache(maxsize=256)
def _sent(spec: RunSpec, version: str) -> int:
    return predict(spec).bytes_per_step or 0


def _work(spec: RunSpec) -> StepWork:
    """Return the recorded step on the steady card: its proportions count here, and its links."""
    from fsdplab.sessions.recorded_model import steady_work  # which imports torch

    if not spec.link:
        spec = replace(spec, link=_NO_LINK)
    return steady_work(spec)


def _updated_by(spec: RunSpec) -> int:
    """Return how many ranks share the optimizer's step."""
    if not spec.row.cuts:
        return 1
    # ranks of one shard group: each updates its shard
    return spec.world_size // spec.replicas


def _player(spec: RunSpec, optimizer_s: float) -> Callable[[float], float]:
    """Return a function: the host's seconds outside the optimizer -> seconds of a step."""
    from fsdplab.planning.program import program_of
    from fsdplab.planning.simulation.simulated_step import simulate_program

    work = replace(_work(spec), optimizer_s=optimizer_s)
    program = program_of(work)

    def play(host_s: float) -> float:
        # by how much forward and backward on this machine exceed those on the steady card
        longer = host_s / (work.compute_s - optimizer_s)
        return simulate_program(_slowed(work, longer), program, spec.link_queues).step_s

    return play


def _slowed(work: StepWork, longer: float) -> StepWork:
    """Return the work with forward and backward `longer` times as long."""
    units = []
    for unit in work.units:
        units.append(replace(unit, forward_s=unit.forward_s * longer, backward_s=unit.backward_s * longer))
    return replace(work, root=units[0], blocks=tuple(units[1:]))


@lru_cache(maxsize=64)
def _host_seconds(spec: RunSpec, version: str, optimizer_s: float, measured_s: float) -> float | None:
    """Find the host's seconds at which a step takes as long as measured, by bisection; None where 0 is too long."""
    play = _player(spec, optimizer_s)
    # the host cannot work for longer than the step lasts
    low, high = 0.0, measured_s
    if play(low) > measured_s:
        return None
    # 40 halvings of a step of 1 s leave a picosecond
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if play(middle) > measured_s:
            high = middle
        else:
            low = middle
    return low
