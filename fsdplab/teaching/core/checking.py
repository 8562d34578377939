"""`check`, `hint`, `solution`: run the learner's saved function, on real ranks where it sends something, and report
the result.

A solution runs beside the exercise's reference, and judging.py compares what the two did; what did not return on all
ranks is told here. Time is never judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdplab.common.files import write_whole
from fsdplab.sessions import Failure, RanksFailed
from fsdplab.sessions.launch.failure_report import UNLIKE

from .course_state import CheckFailed, current
from .display import Note, present
from .errors import words_for
from .exercise import Choice, Question
from .exercise_file import Exercise
from .judging import judge
from .on_ranks import LeftUnfinished, StillWaiting, Unreadable
from .registry import find
from .run_submission import behaviours
from .verdicts import Feedback, Verdict
from .waiting import doing
from .workspace import Workspace, fingerprint, function_name, load_function

_ENDLESS = "a loop that never ends: what its condition asks for stays true in one of the cases"
_BEGUN = (
    "a message was begun and never waited for: call `.wait()` on what isend and irecv return, before you return; or the"
    " ranks called different collectives (an `if rank == 0` around one, say)"
)
_STILL_TRAINS = (
    "it returned, and the check still trained with what it chose: this machine is slow or busy (`fsdplab doctor` says"
    " how many cores there are, and how fast it computes in bf16). Or the ranks called different collectives"
)
_TOO_BUSY = "this machine is too busy to start ranks in time, or the code never lets go of the interpreter: check again"
_ENDED = (
    "a rank process ended: look for exit() or a crash (reading or filling a tensor without memory is one, or with less"
    " than its shape needs: a storage counts bytes, not elements)"
)
_MISMATCHED = (
    "the ranks' collectives do not fit together: at the same moment one rank called another collective than the rest,"
    " or the same with another number of bytes. Every rank makes the same calls, with equal sizes, in the same order"
)
_BEGINS = re.compile(r"async_op=True|\b(isend|irecv|batch_isend_irecv)\(")
_WAITS = re.compile(r"\.(wait|is_completed|synchronize|get_future)\(")
GRADES = ("a nudge", "a pointer", "nearly the solution")


def check(exercise: str, hints: int = 0) -> None:
    """Check the learner's function on real ranks; `hints=2` adds the first two hints to a failed check's report.

    A failed check prints in the learner edition and raises CheckFailed in the teacher edition.
    """
    deliver(grade(exercise, hints))


def grade(exercise: str, hints: int = 0) -> Verdict:
    """The verdict of one check, noted in the learner's folder; `check` shows it."""
    found, workspace = find(exercise, Exercise), current().workspace
    written = found.written_as.id
    source = workspace.source_of(written)
    unwritten = _unwritten(found, source)
    if unwritten:
        return Verdict(exercise, unwritten)
    where = "" if found.pure or found.world_size == 1 else f" on {found.world_size} ranks"
    with doing(f"checking {exercise}{where}"):
        feedback = feedback_on(found, workspace.file_of(written), workspace)
    if feedback is None:
        workspace.note_pass(exercise, source or "", written if found.is_stage else "")
        return Verdict(exercise, None, f"Right{where}{',' if where else ''} in every case.")
    return failed(found, feedback, workspace, hints)


def failed(item: Exercise | Question, feedback: Feedback, workspace: Workspace, hints: int) -> Verdict:
    """The verdict of a failed try: it is counted, and unlocks the next hint."""
    unlocked = min(workspace.note_failure(item.id), len(item.hints))
    shown_hints = tuple(f"Hint {n} ({GRADES[n - 1]}): {text}" for n, text in enumerate(item.hints[:hints], 1))
    note = f'hint("{item.id}") shows {"the first hint" if unlocked == 1 else f"{unlocked} hints"} now.'
    return Verdict(item.id, feedback, "" if shown_hints else note, shown_hints)


def deliver(verdict: Verdict) -> None:
    """Show the verdict; in the teacher edition a failed one raises instead."""
    if not verdict.passed and current().edition == "teacher":
        raise CheckFailed(str(verdict))
    present(verdict)


def hint(exercise: str) -> None:
    """Show the hints that failed tries have unlocked, from a nudge to nearly the solution."""
    item = find(exercise)
    unlocked = 0 if isinstance(item, Choice) else min(current().workspace.failed_tries(exercise), len(item.hints))
    if isinstance(item, Choice):
        shown_hints = [f"{exercise}: a wrong answer is explained as soon as it is given"]
    elif not unlocked:
        shown_hints = [f"{exercise}: no hint yet; every failed try unlocks one, so try first"]
    else:
        shown_hints = [
            f"Hint {n} of {len(item.hints)} ({GRADES[n - 1]}): {text}"
            for n, text in enumerate(item.hints[:unlocked], 1)
        ]
    present(Note(tuple(shown_hints)))


def solution(exercise: str) -> Callable[..., Any]:
    """The learner's function where its check passed, else the reference; says which."""
    found = find(exercise, Exercise)
    path = solution_file(exercise)
    mine = path == current().workspace.file_of(exercise)
    why = "its check passed" if mine else "yours has not passed its check yet"
    print(f"{exercise}: using {'your' if mine else 'the reference'} {found.function} ({why})")
    return load_function(path, found.function)


def solution_file(exercise: str) -> Path:
    """The file of the version that `solution` takes, for ranks to load."""
    found, workspace = find(exercise, Exercise), current().workspace
    if workspace.has_passed(exercise):
        return workspace.file_of(exercise)
    reference = Workspace(workspace.path / "reference")
    return reference.save(exercise, found.reference)


_IN_USE = '''\
"""The functions in use, yours where their checks passed. Written by the course; edit the exercises instead."""

from pathlib import Path

from fsdplab.teaching.core.workspace import load_function

HERE = Path(__file__).parent
'''


def use(*exercises: str, more: str = "") -> None:
    """Say whose functions are in use, and let cells on ranks say `from my_fsdp.in_use import shard`; `more` is Python
    that makes something of them there.
    """
    workspace, lines = current().workspace, [_IN_USE]
    for exercise in exercises:
        solution(exercise)
        name, file = function_name(exercise), solution_file(exercise).relative_to(workspace.path).as_posix()
        lines.append(f'{name} = load_function(HERE / "{file}", "{name}")\n')
    workspace.open()
    write_whole(workspace.path / "in_use.py", "".join(lines) + more)


def _unwritten(exercise: Exercise, source: str | None) -> Feedback | None:
    """Feedback where there is nothing to run yet: no cell was run, or the stub is untouched."""
    expected = f"a cell that begins with %%exercise {exercise.written_as.id} and defines {exercise.function}"
    told = partial(Feedback, expected=expected, untouched=True)
    if source is None:
        then = "run the exercise's cell, then this one"
        return told("There is nothing to check yet.", got="no such cell was run", cause=then)
    if fingerprint(source) == fingerprint(exercise.stub):
        headline = "This is still the stub; it was not run."
        return told(headline, got="the stub as it was given", cause="write the missing lines first")
    return None


def feedback_on(exercise: Exercise, path: Path, workspace: Workspace) -> Feedback | None:
    """The feedback on a saved solution, or None where it is right: it is run beside the reference."""
    reference = Workspace(workspace.path / "reference").save(exercise.id, exercise.reference)
    beside = [] if exercise.expected is not None else [(exercise, reference)]
    try:
        *references, learner = behaviours([*beside, (exercise, path)], workspace)
    except RanksFailed as failure:
        return feedback_on_failure(exercise, failure.report)
    right = references[0] if references else None
    found = unwaited(judge(exercise, learner, right), learner.source)
    return found or feedback_on_other_ranks(exercise, path, workspace)


def unwaited(feedback: Feedback | None, source: str) -> Feedback | None:
    """Refuse a solution that begins a message and waits for none, though its values are right by luck.

    This is the one thing that is read from the source, since ranks cannot see it: on one machine most messages have
    arrived when the values are looked at.
    """
    if not _BEGINS.search(source) or _WAITS.search(source):
        return feedback
    if feedback is not None:
        return replace(feedback, cause=_BEGUN)
    headline = "The values are right by luck: a message is not waited for."
    return Feedback(headline, "`.wait()` on what the call returns", "no `.wait()` in the cell", _BEGUN, 0)


@dataclass(frozen=True)
class _OnOtherRanks(Exercise):
    """The exercise on the second number of ranks that its file names."""

    @property
    def world_size(self) -> int:
        return self.settings.also_on


def feedback_on_other_ranks(exercise: Exercise, path: Path, workspace: Workspace) -> Feedback | None:
    """The feedback on a right solution that is wrong on another number of ranks."""
    elsewhere = _OnOtherRanks(exercise.path)
    if not elsewhere.world_size:
        return None
    reference = Workspace(workspace.path / "reference").save(exercise.id, exercise.reference)
    try:
        right, learner = behaviours([(elsewhere, reference), (elsewhere, path)], workspace)
        found = judge(elsewhere, learner, right)
    except RanksFailed as failure:
        if failure.report.kind in ("hung", "timeout"):  # a busy machine
            return None
        found = feedback_on_failure(elsewhere, failure.report)
    if found is None:
        return None
    headline = f"{exercise.function} is right on {exercise.world_size} ranks, and not on {elsewhere.world_size}."
    ask = "`dist.get_world_size()`" if "get_world_size" in exercise.reference else "the argument that holds it"
    cause = f"the number of ranks is written down, and this runs on any number: take {ask}"
    return replace(found, headline=headline, cause=cause, rank=found.rank or 0)


def feedback_on_failure(exercise: Exercise, report: Failure) -> Feedback:
    """The feedback on a solution that did not return on all ranks: it raised, waits for a message, or ended a rank."""
    who, hung = ("the call", _ENDLESS) if exercise.pure else ("every rank", exercise.hung)
    name, got = exercise.function, report.message.splitlines()[0]
    step = None if report.step is None else str(report.step)
    told = partial(Feedback, expected=f"{who} returns from {name}", got=got, rank=report.rank, step=step)
    if StillWaiting.__name__ in got:
        stood = got.partition(f"{StillWaiting.__name__}: ")[2]
        return told(f"{name} did not return within {exercise.time_limit:g} s.", got=stood, cause=hung)
    if LeftUnfinished.__name__ in got:
        return told(
            f"{name} left messages unfinished.",
            expected="every message that is begun arrives",
            got=got.partition(f"{LeftUnfinished.__name__}: ")[2],
            cause=_STILL_TRAINS if exercise.settings.facts_only else _BEGUN,
        )
    if report.kind == "raised":
        where = _last_frames(exercise, report)
        return told(f"{name} raised an error.", got=where, cause=words_for(_error(report)))
    if report.kind in ("hung", "timeout"):
        return told(f"{name} did not end.", cause=_TOO_BUSY)
    # gloo aborts a rank that receives other bytes than it waits for; a damaged heap ends a rank by SIGABRT too
    return told(f"{name} ended the run.", cause=_MISMATCHED if UNLIKE in got else _ENDED)


def _last_frames(exercise: Exercise, report: Failure) -> str:
    """The error itself, under the last line of this exercise's own file that led to it, or of another of theirs."""
    text = re.sub(r'"[^"]*/(my_fsdp/[^"]*)"', r'"\1"', report.traceback or report.message)
    lines = [line.strip() for line in text.strip().splitlines()]
    learners = [index for index, line in enumerate(lines) if line.startswith("File") and "my_fsdp" in line]
    own = [index for index in learners if f"/{exercise.written_as.id}.py" in lines[index]] or learners
    there = lines[own[-1] : own[-1] + 2] if own else []
    return "\n".join([*there, _as_learners_read_it(_error(report))])


def _as_learners_read_it(error: str) -> str:
    """An error as it is shown: where what was returned cannot be read, that is said instead of the check's own error.

    >>> _as_learners_read_it("on_ranks.Unreadable: NoneType: TypeError: object of type 'NoneType' has no len()")
    'None: nothing is returned'
    """
    unread = re.search(rf"{Unreadable.__name__}: (\w+): (.*)", error)
    if unread is None:
        return error
    return "None: nothing is returned" if unread[1] == "NoneType" else f"a value of type {unread[1]}: {unread[2]}"


def _error(report: Failure) -> str:
    """The error at a traceback's end, on one line: torch indents the lines of a long message."""
    lines = (report.traceback or report.message).strip().splitlines()
    begins = max(at for at, line in enumerate(lines) if not line.startswith(" "))
    return " ".join(line.strip() for line in lines[begins:])
