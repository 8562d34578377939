"""The state of the strategy lab, without widgets: choices, the current batch, and results.

    idle -> running -> done | failed
               |
               +-> cancelling -> cancelled          and from any of the four resting states -> running again

The view calls the methods of its buttons (`choose`, `begin`, `cancel`), the runner's thread those of the run
(`started`, `stepped`, `recorded`, `ended`). After each, all subscribers are called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdplab.common.words import plural
from fsdplab.figures.fastest import core_words
from fsdplab.figures.view import RunView, view, with_verdicts
from fsdplab.records import RunRecord, comparison_json, drift_sentence
from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads.own.sources import is_own

from .choices import PRESETS, SEQUENCE, Choices, check, label, own_model

BUSY = ("running", "cancelling")


@dataclass(frozen=True)
class BatchProgress:
    """The progress of a batch: run `run` of `runs` (from 1), step `step` of `steps`; before its first step a run is
    starting. Before the first run `label` says what the batch waits for. `share` is how much of all runs' steps is
    done, 0 to 1.
    """

    run: int = 0
    runs: int = 0
    label: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    share: float = 0.0

    def __str__(self) -> str:
        if not self.run:
            return self.label or ("starting" if self.runs else "")
        where = f"step {self.step} of {self.steps}" if self.step else "its ranks are starting"
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        return f"run {self.run} of {self.runs}, {self.label}: {where}{loss}"


@dataclass
class Batch:
    """The runs of one press of Run, and their records so far; a finished twin is the reference of the others.

    Number 0 is all batches together; it has no reference, for they may have trained different things. A batch of an
    earlier kernel has records only, and no specs; `folder` is where its records lie, `name` what the user calls it.
    """

    number: int
    specs: tuple[RunSpec, ...]
    records: list[RunRecord] = field(default_factory=list)
    name: str = ""
    folder: Path | None = None

    @property
    def rows(self) -> list[RunRecord]:
        """The records in tables and figures: all but the twin's, unless there is no other."""
        return [record for record in self.records if record.spec["engine"] != "twin"] or self.records

    @property
    def reference(self) -> RunRecord | None:
        """The twin's record, where it ran and finished."""
        twins = [record for record in self.records if record.spec["engine"] == "twin" and record.status == "finished"]
        return twins[0] if twins and self.number else None

    @property
    def comparison(self) -> dict[str, Any]:
        """The records side by side, as `fsdplab compare --json` writes them."""
        return comparison_json(self.rows, self.reference)

    @property
    def views(self) -> list[RunView]:
        """The rows as tables show them, each with the verdict on its losses."""
        return with_verdicts(self.rows, self.comparison)

    @property
    def title(self) -> str:
        """A title for menus: `1: gpt-tiny, 2 ranks, fp32, prefetch 1, 2 runs`."""
        if not self.number:
            return f"all batches: {plural(len(self.rows), 'run')}"
        first = self.specs[0].as_dict() if self.specs else self.records[0].spec
        told = self.records[0].spec if self.records else first  # a spec has the path of a model of one's own
        prefetch = first.get("prefetch")
        parts = [self.name, str(told.get("model") or ""), plural(first["world_size"], "rank")]
        parts += [str(first.get("precision") or ""), "" if prefetch is None else f"prefetch {prefetch}"]
        parts += [_network(first), plural(len(self.specs or self.records), "run")]
        return f"{self.number}: {', '.join(filter(None, parts))}"


def _network(spec: Mapping[str, Any]) -> str:
    """The emulated network of a spec; a kept record may lack any setting."""
    if spec.get("link"):
        return f"link {spec['link']}"
    return f"as {spec.get('as_model')} on {spec['emulate']}" if spec.get("emulate") else ""


class LabState:
    """Choices, status, progress, batches of records, last error; `subscribe` to be called after every change. Safe to
    use from two threads.

    >>> state = LabState(ranks=9)
    >>> state.begin(), state.status, state.request.errors
    ((), 'idle', {'ranks': 'ranks is 9; expected one of 1, 2, 3, 4'})
    """

    def __init__(self, fixed: Mapping[str, Any] | None = None, **choices: Any) -> None:
        self.fixed, chosen = _with_own_model(dict(fixed or {}), choices)
        self.choices = _begun_with(self.fixed, chosen)
        self.request = check(self.choices, self.fixed)
        self.status = "idle"
        self.progress = BatchProgress()
        self.batches: list[Batch] = []
        self.job: RunRecord | None = None  # one of one's own, beside which runs are shown
        self.kept_words = ""
        self.last_error: str | None = None
        self._presses = 0
        self._done: dict[int, float] = {}  # run of the batch -> the part of its steps that is done
        self._observers: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    def subscribe(self, observer: Callable[[], None]) -> Callable[[], None]:
        """Call `observer()` after every change, on the thread that made it; returns what ends that."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    @property
    def busy(self) -> bool:
        """Whether runs are going on, or being ended."""
        return self.status in BUSY

    @property
    def batch(self) -> Batch | None:
        """The latest batch that has a record."""
        return next((batch for batch in reversed(self.batches) if batch.records), None)

    @property
    def offered(self) -> list[Batch]:
        """The batches that have records; after several of them, all together."""
        full = [batch for batch in self.batches if batch.records]
        whole = Batch(0, (), [record for batch in full for record in batch.records])
        return [*full, whole] if len(full) > 1 else full

    @property
    def message(self) -> str:
        """The line under the buttons: what is running, or how it ended and what is possible now."""
        if self.status == "running":
            return str(self.progress)
        if self.status == "cancelling":
            return "cancelling: the ranks are being ended"
        if self.status == "idle":
            return self._ready()
        kept = f"{plural(len(self.batches[-1].records), 'record')} of {plural(len(self.batches[-1].specs), 'run')} kept"
        if self.status == "cancelled":
            return f"cancelled by you: {kept}; press Measure to start again"
        if self.status == "failed":
            return f"failed: {self.last_error}; {kept}, and the lab can be used on"
        latest = self.batches[-1]
        warnings = " ".join(filter(None, [core_words(latest.views), drift_sentence(latest.comparison)]))
        return f"done: {kept}. {warnings}" if warnings else f"done: {kept}"

    def _ready(self) -> str:
        if self.last_error:
            return self.last_error
        left_out = f" ({self.request.left_out})" if self.request.left_out else ""
        if self.request.errors:
            return "not ready: see the choice marked in red"
        if self.request.plans:
            return "these GPUs are not here: their runs are simulated and cannot be measured"
        return f"ready to measure {plural(len(self.request.specs), 'run')}{left_out}{self.kept_words}"

    def take_back(self, batches: Sequence[Batch], left: str = "") -> None:
        """Offer the batches of an earlier kernel, of whose runs `left` says which stayed on disk."""
        with self._told():
            self.batches = [*batches, *self.batches]
            self._presses = max([self._presses, *(batch.number for batch in batches)])
            some = "1 batch" if len(batches) == 1 else f"{len(batches)} batches"
            parts = [f"{some} of earlier runs below"] if batches else []
            self.kept_words = "".join(f"; {words}" for words in [*parts, *([left] if left else [])])

    # ---- methods of the controls and buttons

    def choose(self, **changes: Any) -> None:
        """Change choices; errors are in `request.errors`. A running batch keeps its choices."""
        with self._told():
            self.choices = replace(self.choices, **changes)
            self.request = check(self.choices, self.fixed)
            if not self.busy:
                self.status, self.last_error = "idle", None

    def begin(self) -> tuple[RunSpec, ...]:
        """Start a batch: its specs, which the caller now runs; none while another batch is running or where a choice is
        wrong.
        """
        with self._told():
            if self.busy:
                return ()
            if self.request.errors:
                self.status = "idle"
                self.last_error = "nothing was started: " + "; ".join(self.request.errors.values())
                return ()
            if not self.request.specs:
                self.last_error = "nothing was started: runs on these GPUs are simulated and cannot be measured"
                return ()
            self._presses += 1
            self.batches.append(Batch(self._presses, self.request.specs))
            self.status, self.last_error, self.kept_words, self._done = "running", None, "", {}
            self.progress = BatchProgress(runs=len(self.request.specs))
            return self.request.specs

    def cancel(self) -> bool:
        """Ask the running batch to end; False when there is none."""
        with self._told():
            if self.status != "running":
                return False
            self.status = "cancelling"
            return True

    def show_job(self, job: RunRecord) -> None:
        """Offer a recorded job as a batch of its own, and say beside measured runs what it took."""
        with self._told():
            self.job = job
            number = 1 + max((batch.number for batch in self.batches), default=0)
            self.batches.append(Batch(number, (), [job], "your job"))
            self._presses = max(self._presses, number)

    # ---- methods of the run

    def waits(self, words: str) -> None:
        """The batch has not begun: `words` say what it waits for."""
        with self._told():
            self._running()
            self.progress = replace(self.progress, label=words)

    def started(self, run: int) -> None:
        """Run number `run` (from 0) of the batch begins."""
        with self._told():
            specs = self._running().specs
            self._done[run] = 0.0
            self._show(run, 0, specs[run].total_steps, None)

    def stepped(self, run: int, step: int, steps: int, loss: float) -> None:
        """Run number `run`, which has begun, has done `step` of its `steps`."""
        with self._told():
            self._running()
            self._done[run] = min(1.0, step / steps)
            self._show(run, step, steps, loss)

    def recorded(self, record: RunRecord) -> None:
        """A run ended, well or badly; keep its record, in the order of the runs."""
        with self._told():
            batch = self._running()
            order = [(spec.strategy, spec.engine) for spec in batch.specs]
            batch.records.append(record)
            batch.records.sort(key=lambda each: order.index((each.spec["strategy"], each.spec["engine"])))
            self._done[order.index((record.spec["strategy"], record.spec["engine"]))] = 1.0
            self.progress = replace(self.progress, share=self._share())
            if record.status == "failed":
                self.last_error = f"{view(record).label}: {_one_line(record)}"

    def ended(self, error: str | None = None) -> None:
        """No rank is left: the batch is done, cancelled, or failed because of a run that failed or of `error`."""
        with self._told():
            self._running()
            self.last_error = error or self.last_error
            self.status = "cancelled" if self.status == "cancelling" else "failed" if self.last_error else "done"

    def _show(self, run: int, step: int, steps: int, loss: float | None) -> None:
        specs = self.batches[-1].specs
        self.progress = BatchProgress(run + 1, len(specs), label(specs[run]), step, steps, loss, self._share())

    def _share(self) -> float:
        return sum(self._done.values()) / len(self.batches[-1].specs)

    def _running(self) -> Batch:
        if not self.busy:
            raise RuntimeError(f"no batch is running (status {self.status}); call begin() first")
        return self.batches[-1]

    @contextmanager
    def _told(self) -> Iterator[None]:
        """One change under the lock; the observers are called when it is complete."""
        with self._lock:
            yield
            for observer in [*self._observers]:
                observer()


def _with_own_model(fixed: dict[str, Any], given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model of one's own among the choices, a Workload or a file, is offered by its name; ModelError where it cannot
    be read.
    """
    model = given.get("model", "gpt-20m")
    if isinstance(model, str) and not is_own(model):
        return fixed, given
    fixed = {**fixed, "model": RunSpec(model=model).model}
    own = own_model(fixed)
    assert own is not None
    preset = PRESETS.get(given.get("preset", "laptop"))
    emulated = {} if preset and preset.gpu else {"card": "none"}  # that of the laptop is of its own model's size
    return fixed, {**emulated, **given, "model": own.name}


def _begun_with(fixed: Mapping[str, Any], given: Mapping[str, Any]) -> Choices:
    """The preset's choices with those given; `fixed` sizes of a batch say how many tokens a rank reads."""
    preset = PRESETS.get(given.get("preset", "laptop"))
    begun = replace(preset.choices if preset else Choices(), **given)
    if "tokens" in given or not {"batch_size", "sequence_length"} & {*fixed}:
        return begun
    return replace(begun, tokens=fixed.get("batch_size", 2) * fixed.get("sequence_length", SEQUENCE))


def _one_line(record: RunRecord) -> str:
    message = (record.failure or {}).get("message") or "it left no report"
    return message.splitlines()[0].rstrip(".")
