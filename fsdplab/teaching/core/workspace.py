"""The learner's folder, `my_fsdp/`: every exercise as a Python file of its own, and what was passed and predicted.

An exercise is saved in `my_fsdp/<id>.py`, because ranks are separate processes and import from files. Ids such as
`01.ring_all_gather` are no module names, so the folder's `__init__.py` finds them by their last part: `from my_fsdp
import ring_all_gather` works in any later notebook and on any rank.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.common.files import write_whole

_ID = re.compile(r"\d\d\.[a-z][a-z0-9_]*\Z")
_INIT = '''\
"""My own pieces of a sharding engine, one file an exercise: `from my_fsdp import ring_all_gather`."""

import importlib.util
from pathlib import Path


def __getattr__(name):
    files = sorted(Path(__file__).parent.glob(f"[0-9][0-9].{name}.py"))
    if not files:
        raise AttributeError(f"my_fsdp has no {name}: its exercise has not been run in this folder")
    spec = importlib.util.spec_from_file_location(f"my_fsdp_{name}", files[-1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
'''


class WorkspaceError(ValueError):
    """The learner's folder cannot be used as asked; the message names the file and what to do."""


def checked_id(exercise: str) -> str:
    """Return the id itself if it is well formed, as `01.ring_all_gather` is; WorkspaceError otherwise."""
    if not _ID.match(exercise) or keyword.iskeyword(exercise.split(".")[-1]):
        raise WorkspaceError(
            f"{exercise!r} is not an exercise id; expected two digits, a dot and the function's name, "
            "such as 01.ring_all_gather"
        )
    return exercise


def function_name(exercise: str) -> str:
    """Return the function that an exercise defines: `function_name("01.ring_all_gather") == "ring_all_gather"`."""
    return checked_id(exercise).split(".")[1]


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Return the function `name` of the file at `path`; WorkspaceError where the file defines no such function."""
    module = loaded(path.read_text(encoding="utf-8"), f"exercise_{name}", str(path))
    function = getattr(module, name, None)
    if not callable(function):
        raise WorkspaceError(f"{path.name} defines no function {name}: write `def {name}(...)` in the exercise's cell")
    return function


def loaded(source: str, name: str, file: str) -> types.ModuleType:
    """Return a module made from a source text."""
    made = types.ModuleType(name)
    made.__file__ = file
    sys.modules[name] = made  # dataclasses look their module up by name
    exec(compile(source, file, "exec", dont_inherit=True), made.__dict__)
    return made


def has_code(source: str) -> bool:
    """Return whether anything stands in a source but comments and blank lines."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in source.splitlines())


def fingerprint(source: str) -> str:
    """Return a hash of a source text without trailing blanks: a pass counts for this text only."""
    lines = [line.rstrip() for line in source.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Workspace:
    """The folder `my_fsdp` at `path`; made when something is first written."""

    path: Path

    def file_of(self, exercise: str) -> Path:
        """Return the path of the learner's version of an exercise."""
        return self.path / f"{checked_id(exercise)}.py"

    def source_of(self, exercise: str) -> str | None:
        """Return the learner's saved source, or None where nothing was saved yet."""
        path = self.file_of(exercise)
        if not path.exists():
            return None
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise WorkspaceError(f"{path} is not UTF-8 text; save it as UTF-8, or run its cell again") from error

    def save(self, exercise: str, source: str) -> Path:
        """Write the learner's source and return its file."""
        path = self.file_of(exercise)
        self.open()
        write_whole(path, source.strip("\n") + "\n")
        return path

    def open(self) -> None:
        """Make the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "__init__.py").exists():
            write_whole(self.path / "__init__.py", _INIT)

    def make_importable(self) -> None:
        """Let `from my_fsdp import ...` find this folder in this process, before any other of that name."""
        parent = str(self.path.resolve().parent)
        # first in the path, and once, however often a notebook is opened
        sys.path[:] = [parent, *(entry for entry in sys.path if entry != parent)]

    def failed_tries(self, exercise: str) -> int:
        """Return how many checks of this exercise have failed so far: each one unlocks a hint."""
        return int(self.read("progress.json").get(exercise, {}).get("failed_tries", 0))

    def note_failure(self, exercise: str) -> int:
        """Count one failed check and return the new number."""
        tries = self.failed_tries(exercise) + 1
        self._note(exercise, failed_tries=tries)
        return tries

    def note_pass(self, exercise: str, source: str, written: str = "") -> None:
        """Remember that this very source passed its check; of a stage, `written` is the exercise whose file it is."""
        # of the text and not of its time: saving the same text again keeps the pass
        news = {"passed": fingerprint(source)}
        if written:
            news["written"] = written
        self._note(exercise, **news)

    def note_right_answer(self, question: str, answer: str) -> None:
        """Remember the right answer to a question, as it was given."""
        self._note(question, answer=answer)

    def right_answer(self, question: str) -> str:
        """Return the answer that was right when it was given; empty where there was none."""
        return str(self.read("progress.json").get(question, {}).get("answer", ""))

    def has_passed(self, exercise: str) -> bool:
        """Return whether the source that is saved now is one that passed."""
        noted = self.read("progress.json").get(exercise, {})
        # a pass counts for the text that passed: an edit afterwards takes it back
        source = self.source_of(noted.get("written", exercise))
        return source is not None and noted.get("passed") == fingerprint(source)

    def _note(self, exercise: str, **news: object) -> None:
        """Add facts on an exercise to the learner's progress."""
        progress = self.read("progress.json")
        progress[exercise] = {**progress.get(exercise, {}), **news}
        self.write("progress.json", progress)

    def read(self, name: str) -> dict[str, Any]:
        """Read one of the folder's JSON files as a dict (empty where it does not exist yet)."""
        path = self.path / name
        if not path.exists():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise WorkspaceError(f"{path} is damaged ({error}); delete it to start that record afresh") from error
        if not isinstance(content, dict):
            raise WorkspaceError(
                f"{path} holds a {type(content).__name__}, expected a JSON object; delete it to start afresh"
            )
        for id, noted in content.items():
            if not isinstance(noted, dict):
                raise WorkspaceError(
                    f"{path} holds a {type(noted).__name__} for {id!r:.60}, expected a JSON object; delete the file to"
                    " start afresh"
                )
        return content

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace one of the folder's JSON files as a whole."""
        self.open()
        write_whole(self.path / name, json.dumps(content, indent=1, sort_keys=True) + "\n")
