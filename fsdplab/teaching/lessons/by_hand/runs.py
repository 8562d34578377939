"""The results of by-hand training: a Run for each way, as a table with the twin and the formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fsdplab.common.words import MISSING
from fsdplab.teaching.core.comm_log import bytes_sent
from fsdplab.teaching.core.display import HasTable, Table, table
from fsdplab.teaching.core.exercise import Call

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Run:
    """One way of training, measured: losses, distance from the twin, and what the last step sent and held, in bytes."""

    name: str
    losses_by_rank: Sequence[Sequence[float]]
    twin_losses: Sequence[float]
    differing: Sequence[str]
    largest: float
    apart: float
    calls: Sequence[Call]
    calls_in_backward: int
    lab: tuple[int, int]  # collectives and bytes that the lab's own ledger counted; zeros for other ways
    moments: Sequence[int]  # by rank
    parameters: int
    elements: int
    ratios: Mapping[str, float]
    held: Sequence[int]
    ready: Sequence[int]
    sent: Sequence[int]

    @property
    def ranks(self) -> int:
        return len(self.losses_by_rank)

    @property
    def losses(self) -> tuple[float, ...]:
        """The mean over ranks, step by step."""
        return tuple(fmean(step) for step in zip(*self.losses_by_rank, strict=True))

    @property
    def payload(self) -> int:
        """P: the bytes of all parameters."""
        return FLOAT * self.elements

    @property
    def collectives(self) -> int:
        """Collectives of one step on one rank."""
        return self.lab[0] or len(self.calls)

    @property
    def bytes_sent(self) -> int:
        """Bytes that one rank sends in one step."""
        return self.lab[1] or round(sum(bytes_sent(call, self.ranks) for call in self.calls))

    @property
    def moment_bytes(self) -> int:
        """Bytes of Adam's moments on the rank that has most."""
        return max(self.moments)

    @property
    def is_counted(self) -> bool:
        """Whether its messages could be counted: torch's DDP sends from C++."""
        return bool(self.collectives)

    @property
    def verdict(self) -> str:
        """`"equal in every bit"`, or how many parameters differ and by how much."""
        if not self.differing:
            return "equal in every bit"
        return f"{len(self.differing)} of {self.parameters} differ, by {self.largest:.1e} at most"


@dataclass(frozen=True, repr=False)
class Runs(HasTable):
    """Several ways to train the same thing; shows as one table. Iterates over its runs."""

    runs: tuple[Run, ...]
    formula: str

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __getitem__(self, index: int) -> Run:
        return self.runs[index]

    @property
    def moment_bytes(self) -> int:
        """Bytes of Adam's moments on a rank of the first run, the learner's."""
        return self.runs[0].moment_bytes

    def table(self) -> Table:
        """Losses of the first and last step, parameters beside the twin's,
        and one step's messages beside the formula.
        """
        twin, first = self.runs[0].twin_losses, self.runs[0]
        expected = 2 * first.payload * (first.ranks - 1) // first.ranks
        rows = [
            ["the unsharded twin", f"{twin[0]:.6f}", f"{twin[-1]:.6f}", "", "", "", f"{2 * FLOAT * first.elements:,}"]
        ]
        for run in self.runs:
            counts = [f"{run.collectives}", f"{run.bytes_sent:,}"] if run.is_counted else [MISSING, MISSING]
            ends = [f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}"]
            rows.append([run.name, *ends, run.verdict, *counts, f"{run.moment_bytes:,}"])
        losses = ["loss, step 1", f"loss, step {len(twin)}"]
        header = ["", *losses, "parameters beside the twin's", "messages a step", "bytes sent", "moment bytes"]
        caption = (
            f"Measured on {first.ranks} real ranks, bytes on one of them. Formula of the bytes sent: {self.formula} ="
            f" {expected:,}."
        )
        return table(header, rows, caption)


@dataclass(frozen=True, repr=False)
class Faulty:
    """A faulty version trained with AdamW and with SGD; its gradients show the error, its losses may not."""

    runs: tuple[Run, Run]

    def losses(self) -> Table:
        """Loss by loss beside the twin's, for both optimizers."""
        adamw, sgd = self.runs
        last = len(adamw.losses) - 1
        steps = sorted({0, 1, last // 2, last})
        header = ["step", "AdamW: twin", "AdamW: this version", "SGD: twin", "SGD: this version"]
        columns = (adamw.twin_losses, adamw.losses, sgd.twin_losses, sgd.losses)
        rows = [[step + 1, *(f"{losses[step]:.4f}" for losses in columns)] for step in steps]
        return table(header, rows, f"Measured: mean loss over {adamw.ranks} real ranks.")

    def gradients(self) -> Table:
        """The first step's gradients, grouped by how many times the twin's they are."""
        groups: dict[str, list[str]] = {}
        for name, ratio in self.runs[0].ratios.items():
            groups.setdefault(f"{ratio:.2f}", []).append(name)
        rows = [[f"{ratio} x", len(names), _some(names)] for ratio, names in sorted(groups.items())]
        caption = "Measured in the first step: the gradient's norm over that of the twin's."
        return table(["size beside the twin's", "how many", "parameters"], rows, caption)


def _some(names: list[str], most: int = 9) -> str:
    """Names of the model's outside and of block 0; the other blocks repeat them."""
    shown = [
        name.removeprefix("blocks.") for name in names if not name.startswith("blocks.") or name.startswith("blocks.0.")
    ]
    return ", ".join(shown[:most]) + (" ..." if len(names) > most else "")
