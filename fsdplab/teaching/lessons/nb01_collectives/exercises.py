"""Notebook 01: a ring all-gather by hand, and the numbers that describe a collective (bytes, algbw, busbw)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdplab.teaching.core.exercise import Call, Case, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference, Feedback

_STUB = '''\
import torch
import torch.distributed as dist


def ring_all_gather(mine):
    """Join every rank's `mine` [k, ...] in rank order: [n * k, ...]. Send to one neighbour only."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))  # one block a rank
    whole[rank] = mine
    for step in range(n - 1):
        ...  # send a block to rank + 1 while receiving one from rank - 1 (mod n)
    return whole.flatten(0, 1)
'''

_REFERENCE = '''\
import torch
import torch.distributed as dist


def ring_all_gather(mine):
    """Join every rank's `mine` [k, ...] in rank order: [n * k, ...]. Send to one neighbour only."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = mine.new_zeros((n, *mine.shape))  # one block a rank
    whole[rank] = mine
    for step in range(n - 1):
        sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)
        dist.recv(whole[(rank - step - 1) % n], src=(rank - 1) % n)
        sending.wait()
    return whole.flatten(0, 1)
'''

_RANKS = 3
_SEND = "sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)"
_RECEIVE = "dist.recv(whole[(rank - step - 1) % n], src=(rank - 1) % n)"
_BODY = f"    for step in range(n - 1):\n        {_SEND}\n        {_RECEIVE}\n        sending.wait()\n"


def _cases() -> list[Case]:
    """Floats in two dimensions, and whole numbers in one: every element says whose it is."""
    floats = [100.0 * rank + torch.arange(6.0).reshape(2, 3) for rank in range(_RANKS)]
    counts = [1000 * rank + torch.arange(4) for rank in range(_RANKS)]
    return [_case("floats [2, 3] a rank", floats), _case("whole numbers [4] a rank", counts)]


def _case(name: str, slices: list[torch.Tensor]) -> Case:
    return Case(name, tuple((piece,) for piece in slices), (torch.cat(slices),) * len(slices))


def _explain(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    """Which ring step should have brought the first wrong block, and what probably came instead."""
    if difference.problem == "shape":
        return None, "the blocks are stacked or one is missing: join them along the first dimension, [n * k, ...]"
    if difference.problem == "type":
        return None, "a list of blocks is not yet the result: join them with torch.cat"
    if difference.problem != "value" or difference.index is None:
        return None, "compare with what torch.cat of all slices gives"
    slices = [arguments[0] for arguments in case.arguments]
    rows = len(slices[0])
    owner = difference.index[0] // rows
    step = (trial.rank - owner) % _RANKS
    held = [_owner_of(block, slices) for block in trial.returned.split(rows)]
    when = f"{step} of {_RANKS - 1} (the block of rank {owner})" if step else "before the first (its own block)"
    return when, _cause(held, trial.rank)


def _owner_of(block: torch.Tensor, slices: list[torch.Tensor]) -> int | None:
    """Whose slice a block of the result is; None for nobody's."""
    return next((rank for rank, piece in enumerate(slices) if torch.equal(piece, block)), None)


def _cause(held: list[int | None], rank: int) -> str:
    """The likely mistake behind a result whose blocks belong to the ranks `held`."""
    left = (rank - 1) % _RANKS
    elsewhere = any(owner not in (None, place) for place, owner in enumerate(held))
    if held.count(None) == _RANKS - 1 and not elsewhere:
        return (
            "no block has arrived: the loop neither sends nor receives, or receives into something that is not returned"
        )
    if None in held and not elsewhere:
        return (
            "a block never arrived: count your steps, n - 1 of them, and see that each brings another block: pass on"
            " what you have just received"
        )
    if held.count(left) > 1:
        return (
            "the same block arrives at every step: after the first, forward the block that you have just received, not"
            " your own"
        )
    if held.count((rank - 2) % _RANKS) > 1:
        return (
            "one receive buffer was used for all steps, and the last block overwrote the others: receive into a fresh"
            " buffer"
        )
    if held == [(rank - step) % _RANKS for step in range(_RANKS)]:
        return "blocks lie in the order of their arrival, the own one first; the result wants them in rank order"
    return "blocks lie in the wrong places: what arrives at step s is owned by rank `(r - s - 1) % n`"


def _rules(case: Case, trials: Sequence[Trial]) -> Feedback | None:
    """Right values are not enough: a ring uses no collective, one neighbour, and P (n-1)/n bytes."""
    for trial in trials:
        broken = _collective_used(trial) or _not_one_neighbour(trial) or _too_many_bytes(case, trial)
        if broken:
            return broken
    return None


def _sends(trial: Trial) -> list[Call]:
    return [call for call in trial.calls if call.kind == "send"]


def _collective_used(trial: Trial) -> Feedback | None:
    others = [call.kind for call in trial.calls if call.kind not in ("send", "recv", "barrier")]
    if not others:
        return None
    cause = f"{others[0]} does the whole work; the exercise is to do it with isend and recv"
    return Feedback(
        "The values are right, but a collective was used.", "send and recv only", others[0], cause, trial.rank
    )


def _not_one_neighbour(trial: Trial) -> Feedback | None:
    peers = sorted({call.peer for call in _sends(trial) if call.peer is not None})
    if len(peers) == 1 and peers[0] in ((trial.rank + 1) % _RANKS, (trial.rank - 1) % _RANKS):
        return None
    got = f"sends to {' and '.join(f'rank {peer}' for peer in peers)}"
    cause = "every rank sends its block to everybody; in a ring it talks to one neighbour and forwards what it received"
    return Feedback(
        "The values are right, but this is no ring.", "every rank sends to one neighbour", got, cause, trial.rank
    )


def _too_many_bytes(case: Case, trial: Trial) -> Feedback | None:
    piece = case.arguments[trial.rank][0]
    allowed = (_RANKS - 1) * piece.numel() * piece.element_size()
    sent = sum(call.nbytes for call in _sends(trial))
    if sent <= allowed:
        return None
    cause = "more bytes than needed: everything gathered so far is sent again; send only the block that arrived last"
    if len(_sends(trial)) > _RANKS - 1:
        cause = "more messages than needed: after n - 1 steps everybody has every block"
    return Feedback(
        "The values are right, but too much was sent.",
        f"P (n-1)/n = {allowed} bytes",
        f"{sent} bytes",
        cause,
        trial.rank,
    )


def _looped(*lines: str, before: str = "", after: str = "return whole.flatten(0, 1)") -> str:
    """The reference with another loop: every line of `lines` stands in the loop's body."""
    loop = "".join(f"        {line}\n" for line in lines)
    return edited(
        _REFERENCE, (_BODY, f"{before}    for step in range(n - 1):\n{loop}"), ("return whole.flatten(0, 1)", after)
    )


_NEIGHBOURS = ("out = dist.isend({}, dst=(rank + 1) % n)", "dist.recv(incoming, src=(rank - 1) % n)", "out.wait()")

ring_all_gather = Exercise(
    id="01.ring_all_gather",
    title="A ring all-gather",
    statement=(
        "Write ring_all_gather(mine) with isend and recv: every rank talks to its neighbours only, in n - 1 steps."
    ),
    stub=_STUB,
    reference=_REFERENCE,
    hints=(
        (
            "Draw three ranks in a circle. After the first step, which block does each rank own that its right"
            " neighbour lacks?"
        ),
        (
            "At step s, rank r sends the block of rank `(r - s) % n`, which it has just received, and receives that of"
            " `(r - s - 1) % n`. If everybody sends first and waits, nobody receives: start the send, receive, then"
            " wait for the send."
        ),
        (
            "In the loop: `sending = dist.isend(whole[(rank - step) % n], dst=(rank + 1) % n)`, then `dist.recv` into "
            "`whole[(rank - step - 1) % n]` from `(rank - 1) % n`, then `sending.wait()`."
        ),
    ),
    cases=_cases,
    explain=_explain,
    rules=_rules,
    hung=(
        "deadlock: a rank waits for a message, or for a receiver, that never comes. Begin the send with isend, receive,"
        " then wait for the send; `dst` is rank + 1 and `src` is rank - 1, both modulo n"
    ),
    world_size=_RANKS,
    wrong=(
        Wrong(
            "own block every time",
            edited(_REFERENCE, (_SEND, "sending = dist.isend(mine, dst=(rank + 1) % n)")),
            "forward",
        ),
        Wrong("one step short", edited(_REFERENCE, ("range(n - 1)", "range(n - 2)")), "count your steps"),
        Wrong("empty loop", _looped("pass"), "neither sends nor receives"),
        Wrong("one step more", edited(_REFERENCE, ("range(n - 1)", "range(n)")), "more messages than needed"),
        Wrong(
            "received over one's own",
            edited(_REFERENCE, (_RECEIVE, _RECEIVE.replace("step - 1", "step + 1"))),
            "wrong places",
        ),
        Wrong(
            "mirrored owners",
            edited(_REFERENCE, ("return whole.flatten(0, 1)", "return whole.flip(0).flatten(0, 1)")),
            "wrong places",
        ),
        Wrong(
            "order of arrival",
            edited(
                _REFERENCE,
                ("return whole.flatten(0, 1)", "return torch.cat([whole[(rank - step) % n] for step in range(n)])"),
            ),
            "in rank order",
        ),
        Wrong(
            "one receive buffer",
            _looped(
                _NEIGHBOURS[0].format("blocks[-1].clone()"),
                *_NEIGHBOURS[1:],
                "blocks.append(incoming)",
                before="    blocks, incoming = [mine], torch.empty_like(mine)\n",
                after="return torch.cat([blocks[(rank - owner) % n] for owner in range(n)])",
            ),
            "receive buffer",
        ),
        Wrong("stacked", edited(_REFERENCE, ("return whole.flatten(0, 1)", "return whole")), "stacked"),
        Wrong("a list", edited(_REFERENCE, ("return whole.flatten(0, 1)", "return list(whole)")), "torch.cat"),
        Wrong(
            "returns nothing",
            edited(_REFERENCE, ("    return whole.flatten(0, 1)\n", "    print(whole)\n")),
            "returns nothing",
        ),
        Wrong(
            "default dtype",
            edited(_REFERENCE, ("mine.new_zeros((n, *mine.shape))", "torch.zeros((n, *mine.shape))")),
            "dtype",
        ),
        Wrong(
            "the library's collective",
            _looped(
                "pass", after="blocks = list(whole)\n    dist.all_gather(blocks, mine)\n    return torch.cat(blocks)"
            ),
            "does the whole work",
        ),
        Wrong(
            "to everybody",
            _looped(
                "peer, source = (rank + step + 1) % n, (rank - step - 1) % n",
                "out = dist.isend(mine, dst=peer)",
                "dist.recv(whole[source], src=source)",
                "out.wait()",
            ),
            "to everybody",
        ),
        Wrong(
            "everything each time",
            _looped(
                _NEIGHBOURS[0].format("whole"),
                *_NEIGHBOURS[1:],
                "whole = torch.maximum(whole, incoming)",
                before="    incoming = torch.empty_like(whole)\n",
            ),
            "more bytes than needed",
        ),
        Wrong(
            "send before receive",
            edited(
                _REFERENCE,
                (_SEND, "dist.send(whole[(rank - step) % n], dst=(rank + 1) % n)"),
                ("        sending.wait()\n", ""),
            ),
            "deadlock",
            ends="hangs",
        ),
        Wrong(
            "receive before send",
            edited(
                _REFERENCE,
                (
                    _BODY,
                    f"    for step in range(n - 1):\n        {_RECEIVE}\n        {_SEND}\n        sending.wait()\n",
                ),
            ),
            "never comes",
            ends="hangs",
        ),
        Wrong(
            "sends past the last rank",
            edited(_REFERENCE, ("dst=(rank + 1) % n", "dst=rank + 1")),
            "the ring is not closed",
            ends="raises",
        ),
        Wrong(
            "receives from before the first",
            edited(_REFERENCE, ("src=(rank - 1) % n", "src=rank - 1")),
            "the ring is not closed",
            ends="raises",
        ),
        Wrong("no import", edited(_REFERENCE, ("import torch.distributed as dist", "")), "imports", ends="raises"),
    ),
)

gather_bytes = Question(
    id="01.gather_bytes",
    statement="A unit of P = 48 MB is all-gathered over n = 4 ranks. How many MB does one rank send?",
    unit="MB",
    expected=36.0,
    slips=(
        Slip("the factor (n-1)/n was forgotten: a rank's own block need not travel to itself", value=48.0),
        Slip("that is one block, P/n; in a ring a rank forwards n - 1 of them", value=12.0),
        Slip("that is the sum over all ranks; the question is about one", value=144.0),
        Slip("that is what an all_reduce moves, twice as much", value=72.0),
    ),
    hints=(
        "Count the blocks that one rank sends in your ring, and how large each is.",
        "A block is P/n, and there are n - 1 steps.",
        "48 MB / 4 in each of 3 steps.",
    ),
    explanation="P (n-1)/n: three blocks of 12 MB.",
)

reduce_bytes = Question(
    id="01.reduce_bytes",
    statement="The same 48 MB of gradients are all-reduced over the same 4 ranks. How many MB does one rank send?",
    unit="MB",
    expected=72.0,
    slips=(
        Slip("that is one half of it: the reduce-scatter, or the all-gather that follows it", value=36.0),
        Slip("the factor (n-1)/n was forgotten, in both halves", value=96.0),
        Slip("the payload itself: an all_reduce is two collectives on it, each with a factor (n-1)/n", value=48.0),
        Slip("that is the sum over all ranks; the question is about one", value=288.0),
    ),
    hints=(
        "An all-reduce is made of two collectives that you know.",
        "A reduce-scatter moves as much as an all-gather.",
        "Twice the last answer.",
    ),
    explanation="2 P (n-1)/n: a reduce-scatter and an all-gather.",
)

algbw = Question(
    id="01.algbw",
    statement="An all_reduce of 64 MB over 4 ranks takes 80 ms. What is its algbw in GB/s?",
    unit="GB/s",
    expected=0.8,
    slips=(
        Slip("that is the busbw; algbw is simply P / t", value=1.2),
        Slip("the time divided by the bytes: turn the fraction round", value=1.25),
        Slip("gigabits a second: 8 times as many", factor=8.0),
    ),
    hints=("Ask what the caller sees: so many bytes, in so much time.", "algbw = P / t.", "0.064 GB / 0.080 s."),
    explanation="P / t = 0.064 GB / 0.080 s.",
)

busbw = Question(
    id="01.busbw",
    statement="The same all_reduce (64 MB, 4 ranks, 80 ms): what is its busbw in GB/s?",
    unit="GB/s",
    expected=1.2,
    slips=(
        Slip("that is the algbw; the wires carried more than P", value=0.8),
        Slip("that is the factor of an all_gather, (n-1)/n; an all_reduce has twice that", value=0.6),
        Slip("the factor is 2 (n-1)/n; here it was taken as 2", value=1.6),
        Slip("gigabits a second: 8 times as many", factor=8.0),
    ),
    hints=(
        "busbw asks what each link carried, so that all_gather and all_reduce can be compared.",
        "busbw = algbw times 2 (n-1)/n for an all_reduce.",
        "0.8 GB/s times 2 times 3/4.",
    ),
    explanation="0.8 GB/s x 2 x 3/4: what every link carried.",
)

ITEMS = (ring_all_gather, gather_bytes, reduce_bytes, algbw, busbw)
