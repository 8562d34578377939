"""The words that a table of measurements may have, column by column; a row with another word is not read.

A word that is passed over changes what a row means: "bf16 (pure)" beside "pure bf16" once became float32 masters. So
every value is matched whole. `notes` alone is prose: of it those words are read that `published.py` looks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.words import did_you_mean


class Dtypes(NamedTuple):
    """What a row computes with, and what its optimizer updates."""

    param: str
    master: str


# `bf16` alone is bf16 all over. Under DeepSpeed and ZeRO, which keep masters beside it, `published.py` says so.
DTYPES = {
    "bf16": Dtypes("bf16", "bf16"),
    "pure bf16": Dtypes("bf16", "bf16"),
    "bf16 (pure)": Dtypes("bf16", "bf16"),
    "bf16 pure": Dtypes("bf16", "bf16"),
    "bf16 compute": Dtypes("bf16", "fp32"),
    "bf16 compute, fp32 shards": Dtypes("bf16", "fp32"),
    "bf16 compute, fp32 masters": Dtypes("bf16", "fp32"),
    "bf16 (mixed)": Dtypes("bf16", "fp32"),
    "mixed bf16": Dtypes("bf16", "fp32"),
    "fp16 + fp32 master": Dtypes("fp16", "fp32"),
    "fp32": Dtypes("fp32", "fp32"),
}
REDUCE_DTYPES = ("", "bf16", "fp32", "fp32 (composer >=0.16.4 default; pinned dep, not in table)")
LOSSES = ("", "eager", "eager, 16-bit", "fused", "fused, compiled", "fused, chunked logits", "chunked")
YES_OR_NO = ("", "y", "n")
RECOMPUTATIONS = ("none", "full", "selective", "selective (op)")
_SOME_BLOCKS = re.compile(r"selective, (every \d+(st|nd|rd|th) block|\d+% of blocks|some blocks)")
OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "adamw (fused)": "adamw",
    "decoupled_adamw": "adamw",
    "8-bit adamw": "adamw-8bit",
    "adamw 8-bit": "adamw-8bit",
    "muon": "muon",
    "sgd": "sgd",
    "sgd with momentum": "sgd-momentum",
}
_BESIDE_AN_OPTIMIZER = re.compile(
    r"q?lora( rank ?\d+)?|rank ?\d+|sequences not packed|step in the backward|activation offload(ing)?"
)
_FRAMEWORKS = re.compile(
    r"(torch (fsdp[12]|ddp)|nvidia nemo|torchtune)( \([^()]*\))?|deepspeed zero-[123]|deepspeed|zero-dp|"
)
_EXPERTS = re.compile(r"(\d+ x \d+, \d+ a token(; heads of \d+)?)?")
_MEMORY = re.compile(r"[\d.]+( (active|reserved|allocated|used|peak|steady allocated|gb decimal, analytic|analytic))?")
_GPU = re.compile(
    r"(nvidia |geforce |tesla )?(rtx )?[a-z]{1,3}?\s?\d{2,4}[a-z]?( sxm\d?)?( [\d.]+\s?gi?b)?( hbm\d\w?)?( [\d.]+tb/s)?"
    r"( sxm\d?)?( 500w)?"
)
_LINKS = re.compile(
    r"|nvlink( intra-node| in a node of \d+)?|pcie of an older board, rate not stated"
    r"|\d+ gb/s (per gpu|per node|node-node)( (infiniband|rdma|roce|inter-node|\(cx-7\)))*"
    r"|\d+ gb/s (infiniband|rdma|roce) per (gpu|node)( inter-node)?"
)
_DEGREES = re.compile(r"\b(fsdp|tp|cp|pp|vp|ep)\s*=?\s*\d+")
_BESIDE_A_STRATEGY = (
    "async tp",
    "cpu offload",
    "offload",
    "padded experts",
    "whole sequences",
    "single gpu",
    "fsdp",
    "p_os+g+p",
    "p_os+g",
    "p_os",
    "x",
)


def plain(value: str) -> str:
    """Return a value in lower case with single blanks.

    >>> plain(" BF16   (pure)")
    'bf16 (pure)'
    """
    return " ".join(value.lower().split())


def why_unread(row: Mapping[str, str]) -> str:
    """Return which word of a row is not known, as a reason to leave it out; "" where all are."""
    value = {name: plain(text) for name, text in row.items() if isinstance(text, str)}
    checks = (
        ("param_dtype", value["param_dtype"] in DTYPES or not value["layers"], DTYPES),
        ("reduce_dtype", value["reduce_dtype"] in REDUCE_DTYPES, REDUCE_DTYPES),
        ("loss", value["loss"] in LOSSES, LOSSES),
        ("compile", value["compile"] in YES_OR_NO, YES_OR_NO),
        ("fp8", value["fp8"] in YES_OR_NO, YES_OR_NO),
        ("activation_checkpointing", _knows_recomputation(value), RECOMPUTATIONS),
        ("optimizer", _knows_optimizer(value["optimizer"]), OPTIMIZERS),
        ("framework", _FRAMEWORKS.fullmatch(value["framework"]), ("torch FSDP2", "torch FSDP1", "DeepSpeed ZeRO-3")),
        ("experts", _EXPERTS.fullmatch(value["experts"]), ("8 x 7168, 2 a token",)),
        ("gpu", not value["gpu"] or _GPU.fullmatch(value["gpu"]), ("H100 80GB", "A100 SXM 40GB", "RTX 4090 24GB")),
        ("interconnect", _knows_parts(_LINKS, value["interconnect"]), ("400 Gb/s per GPU", "800 Gb/s per node")),
        ("strategy", not unread_strategy(value["strategy"]), STRATEGY_ROWS),
        ("peak_mem_GiB", _knows_memory(value["peak_mem_GiB"]), ("50.35 active", "63.9 reserved", "OOM")),
    )
    for name, known, words in checks:
        if not known:
            return _refused(name, row[name], words)
    return _unstated(value)


def _refused(name: str, value: str, known: Iterable[str]) -> str:
    words = [word for word in known if word]
    meant = did_you_mean(plain(value), words)
    return f"{name} is {value[:40]!r}, which is not known here{meant}; expected words such as {', '.join(words[:6])}"


def _unstated(value: Mapping[str, str]) -> str:
    """What a measured row must state, since no usual value of it is known."""
    if not value["layers"]:
        return ""  # arithmetic of a source, of which a shape stands for the model
    interleaved = re.search(r"\bvp\s*=?\s*\d+", value["strategy"])
    if interleaved and not (value["micro_batch_per_gpu"] and value["grad_accum"]):
        return "the micro-batches of its interleaved pipeline are not stated"
    for name in ("seq_len", "micro_batch_per_gpu", "gpus", "activation_checkpointing"):
        if not value[name]:
            return f"{name} is not stated"
    return ""


def _knows_recomputation(value: Mapping[str, str]) -> bool:
    said = value["activation_checkpointing"]
    return not said or said in RECOMPUTATIONS or bool(_SOME_BLOCKS.fullmatch(said))


def _knows_optimizer(said: str) -> bool:
    return not said or optimizer_of(said) is not None


def optimizer_of(said: str) -> str | None:
    """Return a plan's optimizer for that of a row, `AdamW, LoRA, rank 64`; None where a word of it is not known."""
    first, *rest = [part.strip() for part in plain(said).split(",")]
    adapted = re.fullmatch(r"(.*?) q?lora( rank ?\d+)?", first)
    name = adapted[1] if adapted else first
    if not all(_BESIDE_AN_OPTIMIZER.fullmatch(part) for part in rest):
        return None
    return OPTIMIZERS.get(name)


def _knows_parts(pattern: re.Pattern[str], said: str) -> bool:
    return all(pattern.fullmatch(part.strip()) for part in said.split(";"))


def _knows_memory(said: str) -> bool:
    return said in ("", "oom") or _knows_parts(_MEMORY, said)


def unread_strategy(said: str) -> str:
    """Return what of a strategy's words is not known; "" where all are.

    >>> unread_strategy("full_shard FSDP 4 x TP 2, async TP"), unread_strategy("full_shard without prefetch")
    ('', 'without prefetch')
    """
    other_names = [name for row in STRATEGY_ROWS.values() for name in row.other_names]
    other_names.sort(key=len, reverse=True)  # a long name may have a short one in it
    rest = _DEGREES.sub(" ", plain(said))
    for name in (*other_names, *STRATEGY_ROWS, *_BESIDE_A_STRATEGY):
        rest = re.sub(rf"(?<![\w+-]){re.escape(name)}(?![\w+-])", " ", rest)
    without_marks = re.sub(r"[(),]", " ", rest)
    return " ".join(without_marks.split())
