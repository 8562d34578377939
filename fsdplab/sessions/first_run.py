"""Step times of a model of one's own on this machine, from one run of it that was measured.

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
    """The step of `spec` on the machine on which `base`, a run of the same work, was measured; None where `base` does
    not tell, as `why_no_base` says, or is of other work.

    Example without a link: a step of 200 ms, of which 20 ms are copies of 40 MB and 30 ms the optimizer, is one of
    150 ms + 30 ms + 15 ms where 60 MB are sent and each of two ranks updates a half.
    """
    if why_no_base(base) or not _of_the_same_work(base, spec):
        return None
    measured, profile, copying = base.summary.step_time_s, base.summary.profile, base.summary.comm.copying_s
    assert measured.median and profile and profile.optimizer_s is not None and copying is not None
    longer = 1 + max(0.0, profile.overhead or 0.0)  # profiled steps, of which these parts are known
    copied, updated = copying / longer, (profile.optimizer_s - (profile.exchange_s or 0.0)) / longer
    played: dict[str, Any] = {name: base.spec.get(name) for name in _PLAYED}
    first, version = replace(spec, card=None, **played), _version(spec)
    host = _host_seconds(first, version, updated, measured.median)
    if host is None:
        return None
    sent_then, sent = (_sent(replace(each, card=None), version) for each in (first, spec))
    copies = copied * sent / sent_then if sent_then else 0.0
    if sent and not sent_then:
        return None  # the run sent nothing, so nothing is known of copies
    stepping = updated * _updated_by(first) / _updated_by(spec)
    return StepHere(_player(spec, stepping)(host - copied + copies), measured.scatter, str(base.spec["strategy"]))


def why_no_base(record: RunRecord) -> str:
    """Why other strategies' steps cannot be told from this run; "" where they can."""
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
    """Give the records of a model of one's own the step that the first of them predicts for them, and save these."""
    own = [(spec, record) for spec, record in pairs if spec.own_model and spec.engine == "lab"]
    base = next((record for _, record in own if not why_no_base(record)), None)
    for spec, record in own:
        if base is None or record is base or record.status != "finished":
            continue
        found = step_here(base, spec)
        if found is None:
            continue
        told = replace(
            record.summary.predicted, step_time_s=found.seconds, step_scatter=found.scatter, step_from=found.of
        )
        record.summary = replace(record.summary, predicted=told)
        record.save()


def _of_the_same_work(base: RunRecord, spec: RunSpec) -> bool:
    if not spec.own_model or spec.engine != "lab" or spec.device_type != "cpu":
        return False
    told = base.environment.get("workload") or {}
    alike = (base.spec.get("model"), told.get("digest")) == (name_of(spec.model), _version(spec))
    return alike and all(base.spec.get(name) == getattr(spec, name) for name in _SAME)


def _version(spec: RunSpec) -> str:
    """What tells that the model was edited."""
    return source_of(spec.model).digest


@lru_cache(maxsize=256)
def _sent(spec: RunSpec, version: str) -> int:
    return predict(spec).bytes_per_step or 0


def _work(spec: RunSpec) -> StepWork:
    """The recorded step on the steady card: its proportions count here, and its links."""
    from fsdplab.sessions.recorded_model import steady_work  # which imports torch

    return steady_work(spec if spec.link else replace(spec, link=_NO_LINK))


def _updated_by(spec: RunSpec) -> int:
    """How many ranks share the optimizer's step."""
    return spec.world_size // spec.replicas if spec.row.cuts else 1


def _player(spec: RunSpec, optimizer_s: float) -> Callable[[float], float]:
    """Seconds of a step by the host's seconds outside the optimizer."""
    from fsdplab.planning.program import program_of
    from fsdplab.planning.simulation.simulated_step import simulate_program

    work = replace(_work(spec), optimizer_s=optimizer_s)
    program = program_of(work)

    def play(host_s: float) -> float:
        longer = host_s / (work.compute_s - optimizer_s)
        return simulate_program(_slowed(work, longer), program, spec.link_queues).step_s

    return play


def _slowed(work: StepWork, longer: float) -> StepWork:
    """The work with forward and backward `longer` times as long."""
    root, *blocks = (
        replace(unit, forward_s=unit.forward_s * longer, backward_s=unit.backward_s * longer) for unit in work.units
    )
    return replace(work, root=root, blocks=tuple(blocks))


@lru_cache(maxsize=64)
def _host_seconds(spec: RunSpec, version: str, optimizer_s: float, measured_s: float) -> float | None:
    """The host's seconds at which a step takes as long as measured, by bisection; None where even none is too long."""
    play = _player(spec, optimizer_s)
    low, high = 0.0, measured_s
    if play(low) > measured_s:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if play(middle) > measured_s else (middle, high)
    return low
