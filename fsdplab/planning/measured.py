"""Steps that somebody measured beside the same steps simulated: published runs like a plan's, and recorded runs.

A simulation and the closed form are one program with equal inputs, so that they agree says nothing of either. These
are the figures that are not this package's own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdplab.records import RunRecord

from .bands import kind_of
from .plan_spec import PlanSpec
from .published import Case, read_published
from .simulation import simulate_work, work_of
from .simulation.replay import Replay, replays
from .validate import FIT, HELD_OUT, SEEN, SPEED, closed_form_s, step_s, timed

STEP, SIMULATED_PARTS, EXPOSED = "step", "of it compute and link", "exposed on the link"
RECORDED = "recorded here"
_EACH = 3  # runs of fitted sources, and of held-out ones
# what counts as far as one e-fold of a size does
_OTHER_KIND, _OTHER_GPU, _OTHER_STRATEGY, _OTHER_CHECKPOINTING = 4.0, 1.0, 0.5, 0.5


@dataclass(frozen=True)
class Measured:
    """One quantity of one run, in seconds: in closed form, simulated, and measured by others or on ranks.

    `part`: whether constants were fitted to its source, or it was held out; RECORDED where it ran with this package.
    """

    run: str
    source: str
    part: str
    quantity: str
    closed_form_s: float | None
    simulated_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated_s / self.measured_s

    @property
    def seconds(self) -> tuple[float | None, float, float]:
        """In closed form, simulated, measured."""
        return self.closed_form_s, self.simulated_s, self.measured_s

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "ratio": self.ratio}


def published_like(spec: PlanSpec, path: Path) -> list[Measured]:
    """The published steps nearest to a plan's: of sources that were fitted, then of held-out ones."""
    simulable = [case for case in timed(read_published(path)[0]) if case.spec.pipeline_parallel == 1]
    cases = sorted(simulable, key=lambda case: _distance(case.spec, spec))
    seen = {part: [case for case in cases if _part(case) == part] for part in (FIT, HELD_OUT)}
    return [_published(case) for part in (FIT, HELD_OUT) for case in seen[part][:_EACH]]


def simulated_s(spec: PlanSpec) -> float:
    """Seconds of a plan's simulated step."""
    return simulate_work(work_of(spec).shared(streams=True)).step_s


def _published(case: Case) -> Measured:
    measured_s = case.spec.step_tokens / (case.tokens_per_s or math.nan) / case.spec.gpus
    both = step_s(case, closed_form_s), step_s(case, simulated_s)
    return Measured(case.id, case.source, _part(case), STEP, *both, measured_s)


def _part(case: Case) -> str:
    return FIT if case.source in SEEN[SPEED] else HELD_OUT


def _distance(one: PlanSpec, other: PlanSpec) -> float:
    """How unlike two jobs are: e-folds of their sizes, and what is another."""
    sizes: Sequence[Callable[[PlanSpec], float]] = (
        lambda spec: spec.model.parameters, lambda spec: spec.gpus, lambda spec: spec.seq,
        lambda spec: spec.micro_batch * spec.seq,
    )  # fmt: skip
    far = sum(abs(math.log(size(one) / size(other))) for size in sizes)
    return (
        far
        + _OTHER_KIND * (kind_of(one) != kind_of(other))
        + _OTHER_GPU * (one.gpu.name != other.gpu.name)
        + _OTHER_STRATEGY * (one.strategy != other.strategy)
        + _OTHER_CHECKPOINTING * (one.checkpointing != other.checkpointing)
    )


def recorded(record: RunRecord, name: str = "") -> list[Measured]:
    """Every profiled step of a run, and what of it was exposed; raises ReplayError, one line.

    Without a `name` the run has its folder's.
    """
    run = name or record.path.name
    return [each for replay in replays(record) for each in _of_a_replay(record, f"{run}, step {replay.step}", replay)]


def _of_a_replay(record: RunRecord, run: str, found: Replay) -> list[Measured]:
    told = f"{record.spec['model']} on {record.spec['world_size']} CPU ranks, {record.spec['strategy']}"
    step = Measured(run, told, RECORDED, STEP, found.closed_form_s, found.simulated_s, found.measured_s)
    alike_s = found.measured_s - found.not_simulated_s
    parts = Measured(run, told, RECORDED, SIMULATED_PARTS, None, found.simulated_s, alike_s)
    exposed = Measured(run, told, RECORDED, EXPOSED, None, found.simulated_exposed_s, found.measured_exposed_s)
    return [step, parts, exposed]


def spread(rows: Iterable[Measured]) -> tuple[float, float, float]:
    """The middle, the least and the largest of simulated over measured."""
    ratios = [row.ratio for row in rows]
    return statistics.median(ratios), min(ratios), max(ratios)
