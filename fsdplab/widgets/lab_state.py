"""The state of the strategy lab, without widgets: choices, the current batch, and results.

    idle -> running -> done | failed
               |
               +-> cancelling -> cancelled          and from any of the four resting states -> running again

The view calls the methods of its buttons (`choose`, `begin`, `cancel`), the runner's thread those of the run
(`stepped`, `recorded`, `ended`). After each, all subscribers are called.
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
from fsdplab.figures.lab.choices import PRESETS, SEQUENCE, Choices, check
from fsdplab.figures.view import RunView, view, with_verdicts
from fsdplab.records import RunRecord, comparison_json, drift_sentence
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.watcher import loss_words, step_words
from fsdplab.workloads.own.sources import is_own, name_of


@dataclass
class Batch:
    """The runs of one press of Measure, and their records so far; a finished twin is the reference of the others.

    Number 0 is all batches together; it has no reference, for they may have trained different things. A batch of an
    earlier kernel has records only, and no specs; `folder` is where its records lie, `name` what the user calls it.
    """

    number: int
    specs: tuple[RunSpec, ...]
    records: list[RunRecord] = field(default_factory=list)
    name: str = ""
    folder: Path | None = None

    @property
    def order(self) -> list[tuple[str, str]]:
        """Strategy and engine of each run, which tell them apart."""
        return [(spec.strategy, spec.engine) for spec in self.specs]

    @property
    def rows(self) -> list[RunRecord]:
        """The records in tables and figures: all but the twin's, unless there is no other."""
        without_the_twin = [record for record in self.records if record.spec["engine"] != "twin"]
        return without_the_twin or self.records

    @property
    def reference(self) -> RunRecord | None:
        """The twin's record, where it ran and finished."""
        if not self.number:
            return None
        for record in self.records:
            if record.spec["engine"] == "twin" and record.status == "finished":
                return record
        return None

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
        """A title for menus: `1: gpt-tiny, 2 ranks, fp32, prefetch 1, 2 runs`; a kept record may lack any setting."""
        if not self.number:
            return f"all batches: {plural(len(self.rows), 'run')}"
        # the settings of the batch: those of its specs, else, as of an earlier kernel, of its records
        recorded: Mapping[str, Any] = {}
        if self.records:
            recorded = self.records[0].spec
        spec = recorded
        if self.specs:
            spec = self.specs[0].as_dict()
        # of a model of one's own the record has the name, the spec the place of its source
        model = recorded.get("model") if self.records else spec.get("model")
        parts = [self.name]
        parts.append(str(model or ""))
        parts.append(plural(spec["world_size"], "rank"))
        parts.append(str(spec.get("precision") or ""))
        if "prefetch" in spec:
            parts.append(f"prefetch {spec['prefetch']}")
        if spec.get("link"):
            parts.append(f"link {spec['link']}")
        elif spec.get("emulate"):
            parts.append(f"as {spec.get('as_model')} on {spec['emulate']}")
        # how many were asked for, not how many have ended
        runs = self.specs or self.records
        parts.append(plural(len(runs), "run"))
        known = [part for part in parts if part]
        return f"{self.number}: {', '.join(known)}"


class LabState:
    """Choices, status, progress, batches of records, last error; `subscribe` to be called after every change. Safe to
    use from two threads.

    `share` is how much of all steps of the batch is done, 0 to 1; `message` the line under the buttons.

    >>> state = LabState(ranks=9)
    >>> state.begin(), state.status, state.request.errors
    ((), 'idle', {'ranks': 'ranks is 9; expected one of 1, 2, 3, 4'})
    """

    def __init__(self, fixed: Mapping[str, Any] | None = None, **choices: Any) -> None:
        self.fixed, self.choices = _begun_with(dict(fixed or {}), choices)
        self.request = check(self.choices, self.fixed)
        self.status = "idle"
        self.batches: list[Batch] = []
        self.job: RunRecord | None = None  # one of one's own, beside which runs are shown
        self.kept_words = ""
        self.last_error: str | None = None
        self.share = 0.0
        self._doing = ""
        self._done: dict[int, float] = {}  # run of the batch -> the part of its steps that is done
        self._observers: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    def subscribe(self, observer: Callable[[], None]) -> None:
        """Call `observer()` after every change, on the thread that made it."""
        self._observers.append(observer)

    @property
    def busy(self) -> bool:
        """Whether runs are going on, or being ended."""
        return self.status in ("running", "cancelling")

    @property
    def records(self) -> list[RunRecord]:
        """Those of all batches."""
        return [record for batch in self.batches for record in batch.records]

    @property
    def offered(self) -> list[Batch]:
        """The batches that have records; after several of them, all together."""
        full = [batch for batch in self.batches if batch.records]
        # one batch alone is all of them
        if len(full) <= 1:
            return full
        return [*full, Batch(0, (), self.records)]

    @property
    def batch(self) -> Batch | None:
        """The latest batch that has a record."""
        for batch in reversed(self.batches):
            if batch.records:
                return batch
        return None

    @property
    def next_number(self) -> int:
        """That of the next batch."""
        numbers = [batch.number for batch in self.batches]
        return 1 + max(numbers, default=0)

    @property
    def message(self) -> str:
        """What is running, or how it ended and what is possible now."""
        if self.status == "running":
            return self._doing
        if self.status == "cancelling":
            return "cancelling: the ranks are being ended"
        if self.status == "idle":
            return self._ready()
        # every other status is that of a batch
        latest = self.batches[-1]
        records = plural(len(latest.records), "record")
        runs = plural(len(latest.specs), "run")
        kept = f"{records} of {runs} kept"
        if self.status == "cancelled":
            return f"cancelled by you: {kept}; press Measure to start again"
        if self.status == "failed":
            return f"failed: {self.last_error}; {kept}, and the lab can be used on"
        done = f"done: {kept}"
        # why its times may be worth less: too few free cores, or a first run that took another time when repeated
        warnings = [core_words(latest.views), drift_sentence(latest.comparison)]
        said = [warning for warning in warnings if warning]
        if said:
            done += f". {' '.join(said)}"
        return done

    def _ready(self) -> str:
        if self.last_error:
            return self.last_error
        if self.request.errors:
            return "not ready: see the choice marked in red"
        if not self.request.specs:
            return "these GPUs are not here: their runs are simulated and cannot be measured"
        ready = f"ready to measure {plural(len(self.request.specs), 'run')}"
        if self.request.left_out:
            ready += f" ({self.request.left_out})"
        return ready + self.kept_words

    # ---- methods of the controls and buttons

    def offer(self, batches: Sequence[Batch], words: str = "") -> None:
        """Show batches that are there already; `words` say so beside "ready"."""
        with self._told():
            self.batches += batches
            if words:
                self.kept_words += f"; {words}"

    def choose(self, **changes: Any) -> None:
        """Change choices; errors are in `request.errors`. A running batch keeps its choices."""
        with self._told():
            self.choices = replace(self.choices, **changes)
            self.request = check(self.choices, self.fixed)
            # a batch that has ended is no longer what the message is about
            if not self.busy:
                self.status = "idle"
                self.last_error = None

    def begin(self) -> tuple[RunSpec, ...]:
        """Start a batch: its specs, which the caller now runs; none while another batch is running or where a choice is
        wrong.
        """
        with self._told():
            if self.busy:
                return ()
            if not self.request.specs:
                why = "runs on these GPUs are simulated and cannot be measured"
                # a wrong choice is the reason that is told first
                if self.request.errors:
                    why = "; ".join(self.request.errors.values())
                self.status = "idle"
                self.last_error = f"nothing was started: {why}"
                return ()
            # from here on `batches[-1]` is the one that runs
            self.batches.append(Batch(self.next_number, self.request.specs))
            self.status = "running"
            self.last_error = None
            # earlier batches are announced until a new one begins
            self.kept_words = ""
            self.share = 0.0
            self._doing = "starting"
            self._done = {}
            return self.request.specs

    def cancel(self) -> bool:
        """Ask the running batch to end; False when there is none."""
        with self._told():
            if self.status != "running":
                return False
            self.status = "cancelling"
            return True

    # ---- methods of the run

    def waits(self, words: str) -> None:
        """The batch has not begun: `words` say what it waits for."""
        with self._told():
            self._doing = words

    def stepped(self, spec: RunSpec, step: int = 0, steps: int = 1, loss: float = 0.0) -> None:
        """A run has done `step` of its `steps`; 0: its ranks are starting."""
        with self._told():
            batch = self.batches[-1]
            place = batch.order.index((spec.strategy, spec.engine))
            # 3 of 12 steps are a quarter of this run
            self._count(place, step / steps)
            doing = "its ranks are starting"
            if step:
                doing = f"{step_words(spec, step, steps)}, {loss_words(spec, loss)}"
            name = RunView(spec.strategy, spec.engine, spec.world_size).label
            self._doing = f"run {place + 1} of {len(batch.specs)}, {name}: {doing}"

    def recorded(self, record: RunRecord) -> None:
        """A run ended, well or badly; keep its record, in the order of the runs."""
        with self._told():
            batch = self.batches[-1]
            batch.records.append(record)
            # runs that take turns may end in another order than they are listed
            places = {run: place for place, run in enumerate(batch.order)}

            def place_of(record: RunRecord) -> int:
                return places[record.spec["strategy"], record.spec["engine"]]

            batch.records.sort(key=place_of)
            # a run that failed counts too, as it does no more steps
            self._count(place_of(record), 1.0)
            if record.status == "failed":
                failure = record.failure or {}
                message = failure.get("message") or "it left no report"
                first_line = message.splitlines()[0]
                self.last_error = f"{view(record).label}: {first_line.rstrip('.')}"

    def ended(self, error: str | None = None) -> None:
        """No rank is left: the batch is done, cancelled, or failed because of a run that failed or of `error`."""
        with self._told():
            # `error` ended the whole batch; without it a failed run may have left one
            self.last_error = error or self.last_error
            if self.status == "cancelling":
                self.status = "cancelled"
            elif self.last_error:
                self.status = "failed"
            else:
                self.status = "done"

    def _count(self, run: int, part: float) -> None:
        self._done[run] = min(1.0, part)
        # all runs of a batch have as many steps, so each has an equal share
        self.share = sum(self._done.values()) / len(self.batches[-1].specs)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """One change under the lock; the observers are called when it is complete."""
        with self._lock:
            yield
            for observer in [*self._observers]:
                observer()


def _begun_with(fixed: dict[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], Choices]:
    """The fields of each RunSpec, and the preset's choices with those given. A model of one's own among these, a
    Workload or a file, becomes a field, and is chosen by its name; ModelError where it cannot be read.
    """
    # what is wrong with an unknown preset is for `check` to say
    preset = PRESETS.get(given.get("preset", ""), PRESETS["laptop"])
    begun = replace(preset.choices, **given)
    model: Any = begun.model
    if not isinstance(model, str) or is_own(model):
        fixed = {**fixed, "model": RunSpec(model=model).model}
        begun = replace(begun, model=name_of(fixed["model"]))
        if "card" not in given and not preset.gpu:
            begun = replace(begun, card="none")  # the laptop's is of its own model's size
    # a rank reads batch times sequence tokens; what is not fixed is the laptop's, 2 and 128
    sets_tokens = "batch_size" in fixed or "sequence_length" in fixed
    if sets_tokens and "tokens" not in given:
        sequences = fixed.get("batch_size", 2)
        sequence = fixed.get("sequence_length", SEQUENCE)
        begun = replace(begun, tokens=sequences * sequence)
    return fixed, begun
