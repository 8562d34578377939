"""The course's terms, each in a sentence or two of plain English, with a reference where a fact comes from.

One list for all notebooks: `teaching.glossary("busbw")` shows an entry, `notebooks/GLOSSARY.md` holds all of them, and
a notebook links a term's first use to its entry there. `python -m fsdplab.teaching.core.glossary` prints that page.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from .display import Note, present

_DOCS = "https://docs.pytorch.org/docs/stable"


@dataclass(frozen=True)
class Term:
    """One entry: the word as the course writes it, its meaning, and where to read more (title, address)."""

    word: str
    meaning: str
    reference: tuple[str, str] | None = None

    @property
    def anchor(self) -> str:
        """The entry's place on the page: `"emulated card"` is at `#emulated-card`."""
        return "".join(letter for letter in self.word.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


_COLLECTIVES = ("torch.distributed: collective functions", f"{_DOCS}/distributed.html#collective-functions")
_NCCL_TESTS = ("NCCL tests: performance", "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md")
_DDP = ("Li et al. 2020, PyTorch Distributed", "https://arxiv.org/abs/2006.15704")
_ZERO = ("Rajbhandari et al. 2020, ZeRO", "https://arxiv.org/abs/1910.02054")
_FSDP = ("Zhao et al. 2023, PyTorch FSDP", "https://arxiv.org/abs/2304.11277")
_FULLY_SHARD = ("torch.distributed.fsdp.fully_shard", f"{_DOCS}/distributed.fsdp.fully_shard.html")

TERMS = (
    Term("activation", "A result of forward that autograd keeps until backward has used it."),
    Term(
        "Adam",
        "An optimizer that keeps two running averages (moments) for every parameter: of its gradient, and of the"
        " gradient's square. In fp32 they take 8 bytes a parameter.",
        ("Kingma and Ba 2015, Adam", "https://arxiv.org/abs/1412.6980"),
    ),
    Term(
        "algbw",
        "The bandwidth that the caller of a collective sees: the payload's bytes divided by the time it took.",
        _NCCL_TESTS,
    ),
    Term(
        "all-gather",
        "A collective: every rank gives its own block, and every rank gets all blocks, joined in rank order.",
        _COLLECTIVES,
    ),
    Term(
        "all-reduce",
        "A collective: every rank gives a whole vector, and every rank gets the sum of all of them.",
        _COLLECTIVES,
    ),
    Term(
        "bf16",
        "A number of 2 bytes with the range of fp32 and 8 significant bits. Small updates are lost in it, so masters"
        " stay in fp32.",
    ),
    Term("broadcast", "A collective: one rank gives a tensor, and every rank gets it.", _COLLECTIVES),
    Term("bucket", "Several gradients that are sent in one message, because a message also pays for its start.", _DDP),
    Term(
        "busbw",
        "The bandwidth of each rank's link during a collective: algbw times (n-1)/n for an all-gather or a"
        " reduce-scatter, twice that for an all-reduce. It can be compared across collectives and numbers of ranks.",
        _NCCL_TESTS,
    ),
    Term("collective", "A call that all ranks of a group make together, such as an all-gather.", _COLLECTIVES),
    Term(
        "DDP",
        "Distributed data parallel: every rank keeps the whole model, reads other data, and gradients are averaged."
        " The lab calls it no_shard.",
        _DDP,
    ),
    Term("drop", "Give the memory of a gathered unit back; only this rank's slice stays. PyTorch says reshard."),
    Term(
        "emulated card",
        "A limit on a rank's bytes that the lab sets. A run that needs more is marked as over the card: a GPU of that"
        " size would run out of memory.",
    ),
    Term(
        "emulated link",
        "A bandwidth and a latency that the lab sets: a message is not done before it would be on such a network.",
    ),
    Term("exposed", "Communication time in which the rank computes nothing: the part that makes a step longer."),
    Term(
        "FSDP",
        "Fully sharded data parallel: every rank keeps a slice of each parameter, gradient and optimizer state, and"
        " gathers a unit only while it computes with it. The lab calls it full_shard.",
        _FSDP,
    ),
    Term(
        "fully_shard", "PyTorch's function that puts FSDP on a module; the lab's engine has one like it.", _FULLY_SHARD
    ),
    Term("gather", "Bring a unit's slices together on a rank, by an all-gather. PyTorch says unshard.", _FULLY_SHARD),
    Term("gloo", "The library with which CPU ranks exchange messages in torch.distributed."),
    Term("hook", "A function of yours that torch calls at a certain moment, for example when a gradient is ready."),
    Term("ledger", "The list of every message of a run: which unit, which collective, how many bytes, when."),
    Term("link", "What carries a rank's messages: a network card, NVLink, or here the machine's own memory."),
    Term("masters", "The fp32 copy of parameters that the optimizer updates where a model computes in bf16."),
    Term("micro-batch", "A part of a batch: its gradients are added to those of the other parts before the step."),
    Term(
        "model states",
        "Parameters, gradients and the optimizer's state: with Adam in fp32, 16 bytes a parameter.",
        _ZERO,
    ),
    Term("NCCL", "NVIDIA's library with which GPU ranks exchange messages in torch.distributed."),
    Term("overlap", "Communication that runs while the rank computes, so that it costs no time of its own."),
    Term("padding", "Zero rows that make all slices equally long, because a collective wants equal blocks."),
    Term("payload", "The bytes of a collective's whole data, in formulas P; a rank usually sends less or more than P."),
    Term("peak", "The most bytes that a rank holds at any moment of a step."),
    Term("prefetch", "Begin a unit's gather while the unit before it still computes."),
    Term("rank", "One process of a training job. All ranks run the same program, and each has a number from 0."),
    Term(
        "reduce-scatter",
        "A collective: every rank gives a whole vector, and each rank gets one block of the sum of all vectors.",
        _COLLECTIVES,
    ),
    Term(
        "ring",
        "A way to run a collective: each rank sends to its right neighbour only, n - 1 times.",
        ("Patarasuk and Yuan 2009, Bandwidth optimal all-reduce", "https://doi.org/10.1016/j.jpdc.2008.09.002"),
    ),
    Term(
        "root",
        "The unit of all parameters that no other unit holds (embeddings, last norm, head). It stays gathered from its"
        " forward to its backward.",
        _FULLY_SHARD,
    ),
    Term("slice", "The part of a tensor that one rank keeps: its rows, 1/n of all. Also called a shard."),
    Term("storage", "The memory behind a tensor. Several tensors may share one; it can be emptied and filled again."),
    Term("twin", "The same training on one process without sharding, on all ranks' data, to compare results with."),
    Term(
        "unit",
        "Parameters that are gathered, dropped and reduced together: usually those of one transformer block.",
        _FULLY_SHARD,
    ),
    Term("world size", "The number of ranks, in formulas n.", _COLLECTIVES),
    Term(
        "ZeRO",
        "Zero redundancy optimizer: ZeRO-1 shards the optimizer's state, ZeRO-2 the gradients too, ZeRO-3 the"
        " parameters as well (that is what FSDP does).",
        _ZERO,
    ),
)


def glossary(*words: str) -> None:
    """Show the entries of some terms, `glossary("busbw", "unit")`, or all of them."""
    chosen = [find(word) for word in words] if words else TERMS
    present(Note(tuple(f"`{term.word}`: {term.meaning}{_read(term)}" for term in chosen)))


def _read(term: Term) -> str:
    return f" Read: {term.reference[0]}, {term.reference[1]}" if term.reference else ""


def find(word: str) -> Term:
    """The entry of a word, however it is written; LookupError with the near ones."""
    key = _key(word)
    for term in TERMS:
        if _key(term.word) == key:
            return term
    known = {_key(term.word): term.word for term in TERMS}
    near = [known[each] for each in difflib.get_close_matches(key, known, n=3, cutoff=0.5)]
    raise LookupError(
        f"the glossary has no {word!r}" + (f"; near: {', '.join(near)}" if near else "; glossary() shows all terms")
    )


def _key(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "").replace(" ", "")


def page() -> str:
    """The glossary as Markdown, one heading a term, so that a notebook can link to it."""
    parts = [
        "# Glossary",
        "",
        'The terms of the course. In a notebook `teaching.glossary("busbw")` shows an entry.',
        "",
    ]
    for term in TERMS:
        more = f" ([{term.reference[0]}]({term.reference[1]}))" if term.reference else ""
        parts += [f"## {term.word}", "", f"{term.meaning}{more}", ""]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
