"""An exercise is one Python file, `teaching/exercises/05/shard.py`, which a teacher reads from top to bottom.

Its docstring holds the title, the statement and three hints. Then comes the reference. nbgrader's marks, `### BEGIN
SOLUTION` and `### END SOLUTION`, enclose what learners write: in the stub `...` stands there, with the text that
follows the mark as a comment; `##` is a line of the stub, where the stub is working code.

After `# ---- check: on 3 ranks, also on 2, within 1e-6` come `cases(rank, n)`, which yields (name, *arguments), and
perhaps `observe(function, *arguments) -> {fact: value}`, `SAYS = {fact: what to say where it is the first that
differs}` and `EXPECTED = {fact: value}` where running the reference takes long. Otherwise the reference's results are
expected. SAYS has two more names: "hung", for a check that does not end, and "otherwise", where no cause is found.

A function that is written in stages has a file for each stage with docstring and check alone: `# ---- check: of
fully_shard, on 2 ranks` checks what is written in the exercise `fully_shard` of the same folder.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from .workspace import checked_id, loaded

_CHECK = re.compile(r"^# ---- check(?:: (.*?))? *$", re.MULTILINE)
_SETTINGS = {
    "world_size": r"on (\d+) ranks?",
    "also_on": r"also on (\d+)",
    "tolerance": r"within ([\d.e+-]+)",
    "time_limit": r"in (\d+) s",
    "pure": r"(pure)",
    "facts_only": r"(facts only)",
    "part_of": r"of (\w+)",
}
_KINDS: Mapping[str, Callable[[str], Any]] = {
    "world_size": int,
    "also_on": int,
    "pure": bool,
    "facts_only": bool,
    "part_of": str,
}
HUNG = "deadlock: the ranks wait for each other, because some rank receives what no rank sends"


class ExerciseError(ValueError):
    """A file that is no exercise; the message names the file, the line, and what is expected there."""


@dataclass(frozen=True)
class Settings:
    """The line of the check: how many ranks, the relative tolerance, and the seconds that one case may take.

    A `pure` function sends nothing: it is called in the notebook's process, once for each rank's arguments. With
    `facts_only` the collectives are not compared (an exercise that trains). `part_of` names the exercise of the same
    folder whose function a stage checks. A right solution is tried `also_on` another number of ranks, so that no number
    of ranks is written down in it; 0 for an exercise where that number plays no part.
    """

    world_size: int = 1
    also_on: int = 0
    tolerance: float = 0.0
    time_limit: float = 12.0
    pure: bool = False
    facts_only: bool = False
    part_of: str = ""


@dataclass(frozen=True)
class Exercise:
    """The exercise in the file at `path`; its id is the folder's and the file's name, `05.shard`."""

    path: Path

    @property
    def id(self) -> str:
        """Return the id, as `check` takes it."""
        return checked_id(f"{self.path.parent.name}.{self.path.stem}")

    @property
    def function(self) -> str:
        """Return the name of the function to write."""
        return self.written_as.path.stem

    @property
    def written_as(self) -> Exercise:
        """Return the exercise whose function this checks: itself, unless it is a stage of another."""
        if not self.is_stage:
            return self
        return Exercise(self.path.with_name(f"{self.settings.part_of}.py"))

    @cached_property
    def text(self) -> str:
        """Return the whole file."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _paragraphs(self) -> list[str]:
        """Return the docstring's paragraphs: the title, the statement, the hints."""
        return inspect.cleandoc(ast.get_docstring(ast.parse(self.text, str(self.path))) or "").split("\n\n")

    @property
    def title(self) -> str:
        """Return the first line of the docstring."""
        return self._paragraphs[0]

    @property
    def statement(self) -> str:
        """Return what is to be written."""
        return " ".join(" ".join(self._paragraphs[1:-1]).split())

    @cached_property
    def hints(self) -> tuple[str, ...]:
        """Return a nudge, a pointer, and nearly the solution."""
        # the first piece is what stands before `1. `, and empty
        numbered = re.split(r"^\d\. ", self._paragraphs[-1], flags=re.MULTILINE)
        return tuple(" ".join(hint.split()) for hint in numbered[1:])

    @cached_property
    def settings(self) -> Settings:
        """Return what the line `# ---- check: ...` says; ExerciseError for words that are none."""
        line = _CHECK.search(self.text)
        if line is None:
            raise ExerciseError(f"{self.path}: no line `# ---- check: ...`; the cases stand after it")
        chosen: dict[str, Any] = {}
        # "on 3 ranks, also on 2, within 1e-6" are three settings
        for words in filter(None, (line[1] or "").split(", ")):
            name, value = self._setting(words)
            chosen[name] = value
        return Settings(**chosen)

    def _setting(self, words: str) -> tuple[str, Any]:
        """Return the setting that some words of the check's line make: `on 3 ranks` is `("world_size", 3)`."""
        for name, form in _SETTINGS.items():
            match = re.fullmatch(form, words)
            if match:
                # numbers are floats unless `_KINDS` says otherwise
                return name, _KINDS.get(name, float)(match[1])
        raise ExerciseError(
            f"{self.path}: {words!r} in the line of the check; expected `on 3 ranks`, `also on 2`,"
            " `within 1e-6`, `in 30 s`, `pure`, `facts only` or `of another_exercise`"
        )

    @property
    def is_stage(self) -> bool:
        """Return whether this checks the function of another exercise."""
        return bool(self.settings.part_of)

    @property
    def world_size(self) -> int:
        """Return how many ranks, or for a pure function how many ranks' arguments."""
        return self.settings.world_size

    @property
    def tolerance(self) -> float:
        """Return by how much a number may differ, relative to the largest expected one."""
        return self.settings.tolerance

    @property
    def time_limit(self) -> float:
        """Return the seconds that one case may take, from a common start of the ranks."""
        return self.settings.time_limit

    @property
    def pure(self) -> bool:
        """Return whether it is called in the notebook's process."""
        return self.settings.pure

    @property
    def _starts(self) -> int:
        """Return the number of lines up to the docstring's end."""
        return ast.parse(self.text).body[0].end_lineno or 0

    @cached_property
    def _solution(self) -> list[str]:
        """Return the lines between docstring and check."""
        check = _CHECK.search(self.text)
        before_check = self.text if check is None else self.text[: check.start()]
        # the docstring is the learner's statement, and no part of the solution
        return before_check.split("\n")[self._starts :]

    def _kept(self, stub: bool = False) -> str:
        """Return the solution's source, or with gaps where learners write."""
        lines: list[str] = []
        gap: list[str] | None = None  # the stub's lines for the marked part that we are in
        stub_lines: list[str] = []  # those that the part itself gives, by `##`
        for line in self._solution:
            bare = line.lstrip()
            indent = line[: len(line) - len(bare)]
            if bare.startswith("### BEGIN SOLUTION"):
                comment = bare.removeprefix("### BEGIN SOLUTION").strip()
                gap = [f"{indent}...  # {comment}" if comment else f"{indent}..."]
                stub_lines = []
            elif bare.startswith("### END SOLUTION"):
                if stub:
                    # the `##` lines where the stub is working code, else the dots with their comment
                    lines += stub_lines or gap or []
                gap = None
            elif bare.startswith("## ") or bare == "##":
                stub_lines.append((indent + bare[3:]).rstrip())
            # the reference keeps every line, the stub those outside of the marked part
            elif not stub or gap is None:
                lines.append(line)
        return "\n".join(lines).strip("\n") + "\n"

    @cached_property
    def reference(self) -> str:
        """Return the solution's source."""
        if self.is_stage:
            return self.written_as.reference
        return self._kept()

    @cached_property
    def stub(self) -> str:
        """Return what a learner begins with."""
        if self.is_stage:
            return self.written_as.stub
        return self._kept(stub=True)

    @cached_property
    def returns(self) -> bool:
        """Return whether the reference returns a value."""
        # a function that only changes its arguments is not asked for a value
        return any(isinstance(node, ast.Return) and node.value for node in ast.walk(ast.parse(self.reference)))

    def module(self) -> types.ModuleType:
        """Return the whole file as a module: its cases and its observation."""
        return _module(self.path, self.text)

    @property
    def expected(self) -> Mapping[str, Any] | None:
        """Return the facts that a right solution leads to, where they stand in the file."""
        facts: Mapping[str, Any] | None = getattr(self.module(), "EXPECTED", None)
        return facts

    def says(self, fact: str, got: Mapping[str, Any], right: Mapping[str, Any]) -> str:
        """Return what the file says of a fact that differs, or nothing.

        SAYS has a text, or a function of all facts, got and right.
        """
        said: str | Callable[..., str] = getattr(self.module(), "SAYS", {}).get(fact, "")
        if isinstance(said, str):
            return said
        return said(got, right)

    @property
    def hung(self) -> str:
        """Return the likely cause where a check does not end."""
        return str(getattr(self.module(), "SAYS", {}).get("hung", HUNG))

    @property
    def otherwise(self) -> str:
        """Return what to say where no cause is found: the file's own sentence, or nothing."""
        return str(getattr(self.module(), "SAYS", {}).get("otherwise", ""))

    def complaints(self) -> list[str]:
        """Return what the file lacks, a line each."""
        try:
            module = self.module()
            # a stub with a gap must be Python too, since its cell is run as it was given
            for source in (self.stub, self.reference):
                compile(source, str(self.path), "exec")
        except ExerciseError as error:
            return [str(error)]
        except Exception as error:  # whatever a file that is being written raises
            return [f"{self.path}: cannot be used: {type(error).__name__}: {error}"]
        complaints = []
        # a nudge, a pointer, nearly the solution
        if len(self.hints) != 3:
            complaints.append(f"{self.id}: expected three hints, 1. to 3., got {len(self.hints)}")
        needed_functions = ["cases"]
        # a stage has checks alone: its function is defined in the exercise that it is a stage of
        if not self.is_stage:
            needed_functions.insert(0, self.function)
        for name in needed_functions:
            if not callable(getattr(module, name, None)):
                complaints.append(f"{self.path}: defines no function {name}(...)")
        if not self.statement:
            complaints.append(f"{self.id}: no statement between title and hints")
        if self.stub == self.reference:
            complaints.append(f"{self.id}: no part to write, ### BEGIN SOLUTION")
        return complaints


@lru_cache
def _module(path: Path, text: str) -> types.ModuleType:
    """Run a file as a module, once for each text that it has had."""
    return loaded(text, f"exercise_file_{path.parent.name}_{path.stem}", str(path))
