"""Sentences on A beside B: a reader's guess beside the answer, and what B takes more or less than A."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdplab.common.sizes import parse_size, percent, seconds, size, times_as_much

from .outcomes import Outcome

_ALIKE = 0.02  # steps that differ by less are equally long, for a guess
_NEAR = 0.1  # a guess of memory that is off by less is near
LEAST = 0.005  # of a step or of the memory: less is no change


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
    """The guess beside the answer, in one line; ValueError says what a guess must be."""
    if guess.faster not in ("A", "B", "equal"):
        raise ValueError(f"the guess of the step is {guess.faster!r}; expected A, B or equal")
    try:
        memory = guessed_bytes(guess.memory, unit)
    except ValueError:
        expected = f"expected a number of {unit}, or a size with its unit"
        raise ValueError(f"the guess of the memory is {guess.memory!r}; {expected}") from None
    parts = []
    if a.step and b.step:
        parts.append(_on_the_step(guess.faster, a.step.total, b.step.total))
    if b.peak:
        parts.append(f"You said {size(memory)} for B: it needs {size(b.peak)} ({_nearness(memory, b.peak)}).")
    return " ".join(parts)


def _on_the_step(guessed: str, a_s: float, b_s: float) -> str:
    shorter, longer = sorted((a_s, b_s))
    if longer - shorter <= _ALIKE * shorter:
        answer, words = "equal", "the steps are equally long"
    elif a_s < b_s:
        answer, words = "A", "A has the shorter step"
    else:
        answer, words = "B", "B has the shorter step"
    verdict = "Right" if answer == guessed else f"You said {guessed}"
    return f"{verdict}: {words} (A {seconds(a_s)}, B {seconds(b_s)})."


def _nearness(guessed: int, peak: int) -> str:
    off = guessed / peak - 1
    if abs(off) <= _NEAR:
        return "within 10 %"
    return f"{percent(abs(off))} too {'much' if off > 0 else 'little'}"


# ---- the difference


def difference(a: Outcome, b: Outcome, names: tuple[str, str], precision: str = "fp32") -> str:
    """What B takes beside A, in one sentence each on memory, step and messages."""
    parts = []
    if a.peak and b.peak:
        than = "as" if a.peak == b.peak else "than"
        amount = _beside(a.peak, b.peak, size, ("less", "more", "as much"))
        parts.append(f"B, {names[1]}, needs {size(b.peak)} a rank, {amount} {than} A, {names[0]}.")
    if a.step and b.step:
        longer = _beside(a.step.total, b.step.total, seconds, ("shorter", "longer", "as long"))
        parts.append(f"Its step takes {seconds(b.step.total)}, {longer}.")
    if a.sent and b.sent:
        parts.append(_on_the_messages(a, b, b.sent / a.sent, precision))
    if a.sent_by_a_node and b.sent_by_a_node:
        amount = _beside(a.sent_by_a_node, b.sent_by_a_node, size, ("less", "more", "as much"))
        parts.append(f"Over the network, its nodes send {size(b.sent_by_a_node)} each, {amount}.")
    return " ".join(parts)


def _on_the_messages(a: Outcome, b: Outcome, ratio: float, precision: str) -> str:
    sends = times_as_much(ratio)
    if precision == "bf16" and ratio != 1:
        sends += " (gathers in bf16, reductions in fp32)"
    if a.step and b.step:
        sends += f", and {seconds(b.step.exposed)} are exposed (A: {seconds(a.step.exposed)})"
    return f"It sends {sends}."


def _beside(a: float, b: float, say: Callable[[float], str], words: tuple[str, str, str]) -> str:
    """B's amount beside A's, with the words for less, more and equal: `141 MB (38 %) less`, or `as much`."""
    less, more, equal = words
    if a == b:
        return equal
    amount, part = say(abs(b - a)), abs(b / a - 1)
    if part >= LEAST:
        amount += f" ({percent(part)})"
    return f"{amount} {less if b < a else more}"
