"""Sentences on A beside B: a reader's guess beside the answer, and what B takes more or less than A."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isclose

from fsdplab.common.sizes import parse_size, percent, seconds, size, times_as_much

from .outcomes import Outcome

_ALIKE = 0.02  # steps that differ by less are equally long, for a guess
_NEAR = 0.1  # a guess of memory that is off by less is near
LEAST = 0.005  # of a step or of the memory: less is no change
# words for less, more and equal
_OF_AMOUNTS = ("less", "more", "as much")
_OF_TIMES = ("shorter", "longer", "as long")


@dataclass(frozen=True)
class Guess:
    """What the reader expects of A and B before the answer is shown: whose step is shorter, and what B's peak is."""

    on: bool = False
    given: bool = False
    faster: str = ""
    memory: str = ""


# ---- the guess


def guessed_bytes(memory: str, unit: str) -> int:
    """A typed guess in bytes; a number alone is in `unit`: `guessed_bytes("180", "MB") == 180_000_000`."""
    if memory.strip()[-1:].isdigit():
        memory += unit
    return parse_size(memory)


def judge(guess: Guess, a: Outcome, b: Outcome, unit: str = "MB") -> str:
    """The guess beside the answer, in one line; ValueError says what it lacks, for the reader beside the button."""
    if guess.faster not in ("A", "B", "equal"):
        raise ValueError("First choose A, B or equal: whose step do you expect to be shorter?")
    if not guess.memory.strip():
        raise ValueError(f"Now write how much memory you expect B to need, in {unit}: a rough number is enough.")
    try:
        memory = guessed_bytes(guess.memory, unit)
    except ValueError:
        expected = f"expected a number of {unit}, or a size with its unit, such as 1.5GB"
        raise ValueError(f"The memory is {guess.memory!r:.40}; {expected}.") from None
    # what is not simulated of A or B is not judged
    parts = []
    if a.step and b.step:
        parts.append(_on_the_step(guess.faster, a.step.total, b.step.total))
    if b.peak:
        nearness = _nearness(memory, b.peak)
        parts.append(f"You said {size(memory)} for B: it needs {size(b.peak)} ({nearness}).")
    return " ".join(parts)


def _on_the_step(guessed: str, a_s: float, b_s: float) -> str:
    """`Right: B has the shorter step (A 919 ms, B 850 ms).`, or the same after `You said A`."""
    # 2 % of the shorter step
    if abs(a_s - b_s) <= _ALIKE * min(a_s, b_s):
        answer = "equal"
        words = "the steps are equally long"
    else:
        answer = "A" if a_s < b_s else "B"
        words = f"{answer} has the shorter step"
    verdict = "Right"
    if answer != guessed:
        verdict = f"You said {guessed}"
    return f"{verdict}: {words} (A {seconds(a_s)}, B {seconds(b_s)})."


def _nearness(guessed: int, peak: int) -> str:
    off = guessed / peak - 1
    if abs(off) <= _NEAR:
        return "within 10 %"
    direction = "much" if off > 0 else "little"
    return f"{percent(abs(off))} too {direction}"


# ---- the difference


def difference(a: Outcome, b: Outcome, names: tuple[str, str], precision: str = "fp32") -> str:
    """What B takes beside A, in one sentence each on memory, step and messages, as far as both are known."""
    a_name, b_name = names
    parts = []
    if a.peak and b.peak:
        than = "as" if a.peak == b.peak else "than"
        amount = _beside(a.peak, b.peak, size, _OF_AMOUNTS)
        parts.append(f"B, {b_name}, needs {size(b.peak)} a rank, {amount} {than} A, {a_name}.")
    if a.step and b.step:
        b_takes = b.step.total
        longer = _beside(a.step.total, b_takes, seconds, _OF_TIMES)
        parts.append(f"Its step takes {seconds(b_takes)}, {longer}.")
    # one rank alone sends nothing with any strategy
    if a.sent is not None and b.sent is not None and a.sent + b.sent:
        sends = _sends(a.sent, b.sent)
        parts.append(_on_the_messages(a, b, sends, precision))
    # of several nodes only
    if a.sent_by_a_node and b.sent_by_a_node:
        b_sends = b.sent_by_a_node
        amount = _beside(a.sent_by_a_node, b_sends, size, _OF_AMOUNTS)
        parts.append(f"Over the network, its nodes send {size(b_sends)} each, {amount}.")
    return " ".join(parts)


def _on_the_messages(a: Outcome, b: Outcome, sends: str, precision: str) -> str:
    """Say what B sends beside A: `It sends 1.5 times as much, and 320 ms are exposed (A: 180 ms).`"""
    # an element is then two bytes in gathers and four in reductions, so this is not the ratio of elements
    if precision == "bf16" and "times" in sends:
        sends += " (gathers in bf16, reductions in fp32)"
    if a.step and b.step:
        b_exposed = seconds(b.step.exposed)
        a_exposed = seconds(a.step.exposed)
        sends += f", and {b_exposed} are exposed (A: {a_exposed})"
    return f"It sends {sends}."


def _sends(by_a: int, by_b: int) -> str:
    """Say what B sends in a step beside A; one rank alone sends nothing."""
    if not by_a:
        return f"{size(by_b)}, where A sends nothing"
    if not by_b:
        return f"nothing, where A sends {size(by_a)}"
    return times_as_much(by_b / by_a)


def _beside(a: float, b: float, say: Callable[[float], str], words: tuple[str, str, str]) -> str:
    """B's amount beside A's, with the words for less, more and equal: `141 MB (38 %) less`, or `as much`."""
    less, more, equal = words
    if isclose(a, b):
        return equal
    amount = say(abs(b - a))
    part = abs(b / a - 1)
    if part >= LEAST:
        amount += f" ({percent(part)})"
    word = less if b < a else more
    return f"{amount} {word}"
