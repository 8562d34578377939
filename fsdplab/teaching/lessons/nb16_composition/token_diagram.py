"""An expert layer as a picture: tokens travel to their experts in an all-to-all, and the answers travel back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, LANE_COLOURS
from fsdplab.teaching.core.diagrams import HeldCell, cells_in_time

MOMENTS = ("route", "all-to-all", "experts compute", "all-to-all back", "weighted sum")
MOST_ROWS = 16  # of a picture that a screen holds
_OWN, _SENT, _COMPUTED = "tokens of the rank's text", "tokens at an expert", "an expert's answers"
_BACK, _SUMMED = "answers that came back", "sum of a token's answers"
_KINDS = {
    _OWN: LANE_COLOURS["compute in forward"],
    _SENT: COLLECTIVE_COLOURS["all_gather"],
    _COMPUTED: LANE_COLOURS["compute in backward"],
    _BACK: COLLECTIVE_COLOURS["all_gather in backward"],
    _SUMMED: COLLECTIVE_COLOURS["all_reduce"],
}
CHOICES = ((0, 2), (1, 2), (0, 3), (2, 3))


@dataclass(frozen=True)
class Routing:
    """The experts that each token goes to, on `ranks` ranks with equally many tokens and experts, in order.

    ValueError where there is no such layer: `Routing(((0, 2), (1, 2), (0, 3), (2, 3)), ranks=2, experts=4)` is one.
    """

    choices: Sequence[Sequence[int]]
    ranks: int
    experts: int

    def __post_init__(self) -> None:
        for what, count in (("tokens", len(self.choices)), ("experts", self.experts)):
            if self.ranks < 2 or count < self.ranks or count % self.ranks:
                raise ValueError(
                    f"{count} {what} cannot be spread evenly over {self.ranks} ranks; expected 2 ranks or more, and a"
                    f" multiple of them of {what}"
                )
        for token, chosen in enumerate(self.choices):
            if not chosen or len({*chosen}) < len(chosen) or not {*chosen} <= {*range(self.experts)}:
                raise ValueError(
                    f"token {token} goes to experts {list(chosen)}; expected different experts of 0 to"
                    f" {self.experts - 1}, such as {CHOICES[0]}"
                )
        if self.experts + 2 * self.ranks > MOST_ROWS:
            raise ValueError(
                f"{self.experts} experts on {self.ranks} ranks take {self.experts + 2 * self.ranks} rows; expected at"
                f" most {MOST_ROWS}: draw a smaller layer"
            )

    def home(self, token: int) -> int:
        """The rank that a token belongs to."""
        return token * self.ranks // len(self.choices)

    def place(self, expert: int) -> int:
        """The rank that holds an expert."""
        return expert * self.ranks // self.experts

    def tokens_of(self, rank: int) -> list[int]:
        """The tokens of a rank's own text."""
        return [token for token in range(len(self.choices)) if self.home(token) == rank]

    def sent_to(self, expert: int) -> list[int]:
        """The tokens that chose an expert."""
        return [token for token, chosen in enumerate(self.choices) if expert in chosen]

    @property
    def travelling(self) -> int:
        """The copies of tokens that leave their rank, in each of the two all-to-alls."""
        return sum(
            self.place(expert) != self.home(token) for token, chosen in enumerate(self.choices) for expert in chosen
        )


def token_cells(routing: Routing) -> Iterator[HeldCell]:
    """What each rank and each of its experts holds, moment by moment."""
    for rank in range(routing.ranks):
        own, tokens = routing.tokens_of(rank), f"rank {rank}: its tokens"
        chosen = ", ".join(f"t{token}: " + " ".join(f"e{each}" for each in routing.choices[token]) for token in own)
        yield HeldCell(tokens, 0, _OWN, chosen)
        yield HeldCell(f"rank {rank}: answers", 3, _BACK, chosen)
        yield HeldCell(tokens, 4, _SUMMED, _names(own))
    for expert in range(routing.experts):
        if sent := routing.sent_to(expert):
            row = _expert_row(routing, expert)
            yield HeldCell(row, 1, _SENT, _by_home(routing, sent, routing.place(expert)))
            yield HeldCell(row, 2, _COMPUTED, f"e{expert} of {_names(sent)}")


def _names(tokens: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def _by_home(routing: Routing, tokens: Sequence[int], rank: int) -> str:
    """`t3, rank 0's t0 t1`."""
    own = [token for token in tokens if routing.home(token) == rank]
    said = [_names(own)] if own else []
    for other in range(routing.ranks):
        came = [token for token in tokens if routing.home(token) == other != rank]
        said += [f"rank {other}'s {_names(came)}"] if came else []
    return ", ".join(said)


def _expert_row(routing: Routing, expert: int) -> str:
    return f"rank {routing.place(expert)}: expert e{expert}"


def token_diagram(choices: Sequence[Sequence[int]] = CHOICES, ranks: int = 2, experts: int = 4) -> go.Figure:
    """The five moments of an expert layer, with a play button; `choices` are the experts of each token.

    ValueError where tokens or experts cannot be spread over the ranks, or a token chooses experts that there are not.
    """
    routing = Routing(choices, ranks, experts)
    rows = []
    for rank in range(ranks):
        held = [expert for expert in range(experts) if routing.place(expert) == rank]
        rows += [
            f"rank {rank}: its tokens",
            *(_expert_row(routing, expert) for expert in held),
            f"rank {rank}: answers",
        ]
    loads = [len(routing.sent_to(expert)) for expert in range(experts)]
    return cells_in_time(
        list(token_cells(routing)), rows, MOMENTS, _KINDS,
        f"An expert layer: {routing.travelling} copies of tokens leave their rank, {routing.travelling} answers return",
        f"Drawn from the rule, nothing was run: {len(choices)} tokens (t) and {experts} experts (e) on {ranks} ranks of"
        " an ep group",
        f"Tokens and experts on {ranks} ranks over five moments. The router sends "
        + "; ".join(f"token {token} to experts {', '.join(map(str, chosen))}" for token, chosen in enumerate(choices))
        + f". After the first all-to-all the experts hold {', '.join(map(str, loads))} tokens. They compute, and the"
        " second all-to-all brings each answer back to its token's rank, where the answers of a token are summed.",
    )  # fmt: skip
