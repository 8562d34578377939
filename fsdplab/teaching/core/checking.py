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
from .on_ranks import InCase, LeftUnfinished, StillWaiting, Unreadable
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
    """Return the verdict of one check, noted in the learner's folder; `check` shows it."""
    item, workspace = find(exercise, Exercise), current().workspace
    file_id = item.written_as.id
    source = workspace.source_of(file_id)
    unwritten = _unwritten(item, source)
    # nothing to run: no try is counted
    if unwritten:
        return Verdict(exercise, unwritten)

    on_ranks = "" if item.pure or item.world_size == 1 else f" on {item.world_size} ranks"
    with doing(f"checking {exercise}{on_ranks}"):
        feedback = feedback_on(item, workspace.file_of(file_id), workspace)
    if feedback is not None:
        return failed(item, feedback, workspace, hints)
    workspace.note_pass(exercise, source or "", file_id if item.is_stage else "")
    right = f"Right{on_ranks}, in every case." if on_ranks else "Right in every case."
    return Verdict(exercise, None, right)


def failed(item: Exercise | Question, feedback: Feedback, workspace: Workspace, hints: int) -> Verdict:
    """Return the verdict of a failed try: it is counted, and unlocks the next hint."""
    # each failed try unlocks one more hint
    unlocked = min(workspace.note_failure(item.id), len(item.hints))
    if hints:
        shown_hints = []
        for number, text in enumerate(item.hints[:hints], 1):
            shown_hints.append(f"Hint {number} ({GRADES[number - 1]}): {text}")
        if shown_hints:
            return Verdict(item.id, feedback, "", tuple(shown_hints))
    how_many = "the first hint" if unlocked == 1 else f"{unlocked} hints"
    return Verdict(item.id, feedback, f'hint("{item.id}") shows {how_many} now.')


def deliver(verdict: Verdict) -> None:
    """Show the verdict; in the teacher edition a failed one raises instead."""
    if not verdict.passed and current().edition == "teacher":
        raise CheckFailed(str(verdict))
    present(verdict)


def hint(exercise: str) -> None:
    """Show the hints that failed tries have unlocked, from a nudge to nearly the solution."""
    present(Note(tuple(_unlocked_hints(exercise))))


def _unlocked_hints(exercise: str) -> list[str]:
    """Return a line for each unlocked hint, or one that says why there is none."""
    item = find(exercise)
    if isinstance(item, Choice):
        return [f"{exercise}: a wrong answer is explained as soon as it is given"]
    unlocked = min(current().workspace.failed_tries(exercise), len(item.hints))
    if not unlocked:
        return [f"{exercise}: no hint yet; every failed try unlocks one, so try first"]
    lines = []
    for number, text in enumerate(item.hints[:unlocked], 1):
        lines.append(f"Hint {number} of {len(item.hints)} ({GRADES[number - 1]}): {text}")
    return lines


def solution(exercise: str) -> Callable[..., Any]:
    """Return the learner's function where its check passed, else the reference, and print which."""
    function = find(exercise, Exercise).function
    path = solution_file(exercise)
    whose, why = "the reference", "yours has not passed its check yet"
    # the reference lies in a folder of its own
    if path == current().workspace.file_of(exercise):
        whose, why = "your", "its check passed"
    print(f"{exercise}: using {whose} {function} ({why})")
    return load_function(path, function)


def solution_file(exercise: str) -> Path:
    """Return the file of the version that `solution` takes, for ranks to load."""
    item, workspace = find(exercise, Exercise), current().workspace
    if workspace.has_passed(exercise):
        return workspace.file_of(exercise)
    reference = Workspace(workspace.path / "reference")
    return reference.save(exercise, item.reference)


_IN_USE = '''\
"""The functions in use, yours where their checks passed. Written by the course; edit the exercises instead."""

from pathlib import Path

from fsdplab.teaching.core.workspace import load_function

HERE = Path(__file__).parent
'''


def use(*exercises: str, more: str = "") -> None:
    """Print whose functions are in use, and let cells on ranks import them: `from my_fsdp.in_use import shard`.

    `more` is Python that makes something of them there.
    """
    workspace, lines = current().workspace, [_IN_USE]
    for exercise in exercises:
        solution(exercise)
        name, file = function_name(exercise), solution_file(exercise).relative_to(workspace.path).as_posix()
        lines.append(f'{name} = load_function(HERE / "{file}", "{name}")\n')
    workspace.open()
    write_whole(workspace.path / "in_use.py", "".join(lines) + more)


def _unwritten(exercise: Exercise, source: str | None) -> Feedback | None:
    """Return feedback where there is nothing to run yet: no cell was run, or the stub is untouched."""
    expected = f"a cell that begins with %%exercise {exercise.written_as.id} and defines {exercise.function}"
    untouched = partial(Feedback, expected=expected, untouched=True)
    if source is None:
        then = "run the exercise's cell, then this one"
        return untouched("There is nothing to check yet.", got="no such cell was run", cause=then)
    if fingerprint(source) == fingerprint(exercise.stub):
        headline = "This is still the stub; it was not run."
        return untouched(headline, got="the stub as it was given", cause="write the missing lines first")
    return None


def feedback_on(exercise: Exercise, path: Path, workspace: Workspace) -> Feedback | None:
    """Return the feedback on a saved solution, or None where it is right: it is run beside the reference."""
    solutions = [(exercise, path)]
    if exercise.expected is None:
        reference_file = Workspace(workspace.path / "reference").save(exercise.id, exercise.reference)
        # one launch runs both, the reference first
        solutions.insert(0, (exercise, reference_file))
    try:
        *references, learner = behaviours(solutions, workspace)
    except RanksFailed as failure:
        return feedback_on_failure(exercise, failure.report)
    reference = references[0] if references else None
    feedback = unwaited(judge(exercise, learner, reference), learner.source)
    return feedback or feedback_on_other_ranks(exercise, path, workspace)


def unwaited(feedback: Feedback | None, source: str) -> Feedback | None:
    """Refuse a solution that begins a message and waits for none, though its values are right by luck.

    This is the one thing that is read from the source, since ranks cannot see it: on one machine most messages have
    arrived when the values are looked at.
    """
    # nothing was begun, or something is waited for
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
    """Return the feedback on a right solution that is wrong on another number of ranks."""
    elsewhere = _OnOtherRanks(exercise.path)
    if not elsewhere.world_size:
        return None
    reference = Workspace(workspace.path / "reference").save(exercise.id, exercise.reference)
    try:
        right, learner = behaviours([(elsewhere, reference), (elsewhere, path)], workspace)
        feedback = judge(elsewhere, learner, right)
    except RanksFailed as failure:
        if failure.report.kind in ("hung", "timeout"):  # a busy machine
            return None
        feedback = feedback_on_failure(elsewhere, failure.report)
    if feedback is None:
        return None
    headline = f"{exercise.function} is right on {exercise.world_size} ranks, and not on {elsewhere.world_size}."
    # the remedy as the reference does it
    ask = "`dist.get_world_size()`" if "get_world_size" in exercise.reference else "the argument that holds it"
    cause = f"the number of ranks is written down, and this runs on any number: take {ask}"
    return replace(feedback, headline=headline, cause=cause, rank=feedback.rank or 0)


def feedback_on_failure(exercise: Exercise, report: Failure) -> Feedback:
    """Return the feedback on a solution that did not return on all ranks: it raised, waits, or ended a rank."""
    who, hung = "every rank", exercise.hung
    if exercise.pure:
        who, hung = "the call", _ENDLESS
    name, got = exercise.function, report.message.splitlines()[0]
    step = None if report.step is None else str(report.step)
    feedback = partial(Feedback, expected=f"{who} returns from {name}", got=got, rank=report.rank, step=step)

    if StillWaiting.__name__ in got:
        # what stands behind the error's name is where the function stood
        line = got.partition(f"{StillWaiting.__name__}: ")[2]
        return feedback(f"{name} did not return within {exercise.time_limit:g} s.", got=line, cause=hung)
    if LeftUnfinished.__name__ in got:
        return feedback(
            f"{name} left messages unfinished.",
            expected="every message that is begun arrives",
            got=got.partition(f"{LeftUnfinished.__name__}: ")[2],
            cause=_STILL_TRAINS if exercise.settings.facts_only else _BEGUN,
        )
    if report.kind == "raised":
        trace, case = _trace_and_case(report)
        in_case = f" (case: {case})" if case else ""
        where = _last_frames(exercise, trace)
        return feedback(f"{name} raised an error{in_case}.", got=where, cause=words_for(_error(trace)))
    if report.kind in ("hung", "timeout"):
        return feedback(f"{name} did not end.", cause=_TOO_BUSY)
    # gloo aborts a rank that receives other bytes than it waits for; a damaged heap ends a rank by SIGABRT too
    return feedback(f"{name} ended the run.", cause=_MISMATCHED if UNLIKE in got else _ENDED)


def _trace_and_case(report: Failure) -> tuple[str, str]:
    """Return the traceback of the learner's error, and the case in which it was raised, "" where none is named."""
    whole = (report.traceback or report.message).strip()
    # `...on_ranks.InCase: floats [4]` is the last line, below the error that it was raised from
    named = re.search(rf"^(?:[\w.]+\.)?{InCase.__name__}: (.*)\Z", whole, re.MULTILINE)
    if named is None:
        return whole, ""
    trace, _, _ = whole.rpartition("\n\nThe above exception was the direct cause")
    return trace, named.group(1)


def _last_frames(exercise: Exercise, trace: str) -> str:
    """Return the error itself, under the last line of this exercise's file that led to it, or of another of theirs."""
    # paths from the learner's folder on: the rest is this machine's
    text = re.sub(r'"[^"]*/(my_fsdp/[^"]*)"', r'"\1"', trace)
    lines = [line.strip() for line in text.strip().splitlines()]
    file_name = f"/{exercise.written_as.id}.py"
    of_learner, of_exercise = [], []  # the places of lines such as `File "my_fsdp/05.shard.py", line 4, in shard`
    for place, line in enumerate(lines):
        if line.startswith("File") and "my_fsdp" in line:
            of_learner.append(place)
            if file_name in line:
                of_exercise.append(place)
    frames = of_exercise or of_learner
    # the line that says where, and the source line below it
    shown = lines[frames[-1] : frames[-1] + 2] if frames else []
    return "\n".join([*shown, _as_learners_read_it(_error(trace))])


def _as_learners_read_it(error: str) -> str:
    """Return an error as it is shown: one about a value that cannot be read names the value's type instead.

    >>> _as_learners_read_it("on_ranks.Unreadable: NoneType: TypeError: object of type 'NoneType' has no len()")
    'None: nothing is returned'
    """
    unreadable = re.search(rf"{Unreadable.__name__}: (\w+): (.*)", error)
    if unreadable is None:
        return error
    type_name, message = unreadable.groups()
    if type_name == "NoneType":
        return "None: nothing is returned"
    return f"a value of type {type_name}: {message}"


def _error(trace: str) -> str:
    """Return the error at a traceback's end, on one line: torch indents the lines of a long message."""
    lines = trace.strip().splitlines()
    # the last line without an indent begins the error, and indented ones go on with it
    begins = max(place for place, line in enumerate(lines) if not line.startswith(" "))
    return " ".join(line.strip() for line in lines[begins:])
