"""Reads published measurements into plans: one row of `data/published.csv`, or of any file with its columns, a case.

What a source means by its words is read from them in one place, for all of its rows (`_CONVENTIONS` names the few that
the words do not say): which bytes "reserved", "active" or "steady" are, how gradients and masters are kept, what the
training loop holds. A row whose words are not known here is left out with the reason; nothing is set by a row's name.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fsdplab.common.errors import UserError
from fsdplab.common.files import read_file
from fsdplab.common.names import IN_GROUPS, OVER_ALL_RANKS, STRATEGY_ROWS, UNSHARDED
from fsdplab.workloads.shapes import Experts, ModelShape

from .hardware import Gpu, find_gpu
from .memory import memory_of
from .plan_spec import PlanSpec
from .published_words import DTYPES, Dtypes, optimizer_of, plain, why_unread
from .step_time import has_known_flops, step_time

COLUMNS = (
    "id",
    "source",
    "model",
    "params_B",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "vocab",
    "seq_len",
    "micro_batch_per_gpu",
    "grad_accum",
    "gpus",
    "gpus_per_node",
    "gpu",
    "interconnect",
    "framework",
    "strategy",
    "param_dtype",
    "reduce_dtype",
    "optimizer",
    "activation_checkpointing",
    "compile",
    "fp8",
    "tokens_per_s_per_gpu",
    "peak_mem_GiB",
    "notes",
)
_OPTIONAL = ("loss", "experts")  # columns that a file may lack
_LARGEST_FILE = 10**7
_NEAR_COUNT = 0.02  # of a stated number of parameters, what a shape may differ by
_DECIDES = 1.1  # times the memory, from which on a choice that is not stated decides a prediction
_GIB = 2**30


SPEED, MEMORY = "tokens/s", "memory"
FIT, HELD_OUT = "fit", "held out"
# the sources whose figures the constants were fitted to, or the rules were written beside; all others are held out
SEEN = {
    SPEED: ("MosaicML", "torchtitan PR #165"),
    MEMORY: ("torchtitan PR #165", "torchtitan", "DeepSpeed", "accelerate"),
}


class PublishedError(UserError, ValueError):
    """A file of measurements that is not usable, or a row; the message is one line."""


@dataclass(frozen=True)
class MemoryFigure:
    """Published bytes of a rank and what they are: reserved, used (allocated, active), states between two steps, or
    states by the source's own arithmetic.
    """

    kind: str
    nbytes: float


@dataclass(frozen=True)
class Case:
    """One usable row: the plan of it, and what was published."""

    id: str
    source: str
    spec: PlanSpec
    scale: float  # parameters that were stated over those of the shape, where a row has no shape
    memory: tuple[MemoryFigure, ...]
    tokens_per_s: float | None
    without_time: str  # why a throughput that was published is not predicted; else empty
    recomputed: float = 1.0  # part of the blocks that the plan's checkpointing holds for
    ran_out: bool = False  # the run ended out of memory
    without_memory: str = ""  # why memory that was published is not predicted


class LeftOut(NamedTuple):
    """A row that is not predicted, or a figure of it, and why."""

    id: str
    source: str
    reason: str


def read_published(path: Path) -> tuple[list[Case], list[LeftOut]]:
    """Read the usable rows of a file, and the others with the reason; raises PublishedError, one line."""
    cases, left_out = [], []
    for number, row in enumerate(_rows(path), start=2):
        name = row["id"] or f"line {number}"
        try:
            cases.append(_case(name, row))
        except ValueError as error:
            left_out.append(LeftOut(name, _source(row), " ".join(str(error).split())))
    if not cases:
        why = f" ({left_out[0].id}: {left_out[0].reason[:80]})" if left_out else ""
        raise PublishedError(f"{path} has no usable row{why}; expected the columns of data/published.csv")
    return cases, left_out


def _rows(path: Path) -> list[Mapping[str, str]]:
    try:
        text = read_file(path, _LARGEST_FILE).decode("utf-8-sig")
    except OSError as error:
        raise PublishedError(f"{path}: {error.strerror or error}; give a CSV of published measurements") from None
    except UnicodeDecodeError:
        raise PublishedError(f"{path} is no text; expected a CSV of published measurements") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        present = reader.fieldnames or ()
        missing = [column for column in COLUMNS if column not in present]
        lines = [] if missing else list(reader)
    except csv.Error as error:
        raise PublishedError(f"{path} is no CSV file ({error}); expected the columns of data/published.csv") from None
    if missing:
        raise PublishedError(f"{path} lacks the column {missing[0]}; expected {', '.join(COLUMNS)}")
    rows: list[Mapping[str, str]] = []
    for line in lines:
        rows.append({column: (line.get(column) or "").strip() for column in (*COLUMNS, *_OPTIONAL)})
    return rows


def _case(name: str, row: Mapping[str, str]) -> Case:
    memory = tuple(_memory_figures(row["peak_mem_GiB"]))
    speed = None
    if row["tokens_per_s_per_gpu"]:
        speed = _number(row, "tokens_per_s_per_gpu")
    ran_out = row["peak_mem_GiB"] == "OOM"
    if not memory and speed is None and not ran_out:
        raise PublishedError("neither memory nor tokens/s were published")
    _check_known(row)
    if not row["layers"] and (speed is not None or any(figure.kind != "arithmetic" for figure in memory)):
        raise PublishedError("the model's layers were not published")
    gpu = _gpu_of(row) if row["gpu"] else find_gpu("h100-80gb")
    shape, scale = _shape_of(name, row)
    recomputed = _recomputed(row)
    recomputed_blocks = None if recomputed == 1 else round(recomputed * shape.layers)
    spec = PlanSpec(
        model=shape,
        gpu=gpu,
        recomputed_blocks=recomputed_blocks,
        **_mesh(row),
        **_work(row),
        **_dtypes(row),
        **_adapters(row),
        **_CONVENTIONS.get(_source(row), {}),
    )
    undecided = _undecided_memory(row, spec) if memory else ""
    if undecided and speed is None:
        raise PublishedError(undecided)
    return Case(
        id=name,
        source=_source(row),
        spec=spec,
        scale=scale,
        memory=() if undecided else memory,
        tokens_per_s=speed,
        without_time=_without_time(row),
        recomputed=recomputed,
        ran_out=ran_out,
        without_memory=undecided,
    )


def _without_time(row: Mapping[str, str]) -> str:
    """Why a throughput of the row is not predicted; "" where it is."""
    if "not stated" in row["interconnect"]:
        return "the rate of its link is not stated"
    return "" if row["gpu"] else "the GPU is not named"


def _undecided_memory(row: Mapping[str, str], spec: PlanSpec) -> str:
    """Why no memory is predicted of a row that does not state its loss: with another one it differs by a tenth."""
    if row["loss"] or not row["layers"]:
        return ""
    eager = memory_of(replace(spec, loss="eager")).used_bytes
    fused = memory_of(replace(spec, loss="fused")).used_bytes
    if eager < _DECIDES * fused:
        return ""
    return f"its loss is not stated, and an eager one needs {eager / fused:.2f} times the memory of a fused one"


# Words of a row, and what of it is not modelled.
_NOT_MODELLED = {
    r"step in the backward": "an optimizer that steps in the backward is not planned here",
    r"activation offload": "activations in host memory are not planned here",
    r"whole sequences": "tensor parallelism that keeps sequences whole is not planned here",
    r"padded experts": "experts that are padded to the busiest are not planned here, and how busy it was is not said",
    r"not packed": "its sequences have lengths of their own",
}


def _check_known(row: Mapping[str, str]) -> None:
    """Raises PublishedError for a row that says something that is not modelled, or that is not known."""
    said = f"{row['strategy']} {row['optimizer']}".lower()
    for words, reason in _NOT_MODELLED.items():
        if re.search(words, said):
            raise PublishedError(reason)
    unread = why_unread(row)
    if unread:
        raise PublishedError(unread)


# What the words of a source's rows do not say, read from its code. The training loop of PR #165 held the logits, in
# float32, until its backward had ended (torchtitan deletes them since mid 2024). fsdp_qlora's train.py does so too, and
# transformers' loss of that time is of a shifted copy. atorch's fsdp_llama2.py puts torch.autocast ("amp_native")
# around modules that FSDP gathers in float32, and its loop holds a step's outputs until the next forward has ended.
_CONVENTIONS: dict[str, dict[str, Any]] = {
    "torchtitan PR #165": {"keeps_logits": True},
    "fsdp_qlora": {"keeps_logits": True, "shifts_logits": True},
    "atorch": {"keeps_logits": True, "keeps_outputs": True, "shifts_logits": True, "autocast": True},
}


# Words of a row's source, and a short name of who measured; the first that is found counts.
_SOURCES = {
    "PR #165": "torchtitan PR #165",
    "Trainy": "Trainy",
    "docs/performance.md (2024)": "torchtitan on A100",
    "asyncTP": "torchtitan 2025",
    "torchtitan": "torchtitan",
    "mosaicml": "MosaicML",
    "DeepSpeedExamples": "DeepSpeed",
    "1910.02054": "ZeRO",
    "accelerate": "accelerate",
    "KempnerForge": "KempnerForge",
    "fms-fsdp": "fms-fsdp",
    "maximizing-training": "PyTorch blog",
    "atorch": "atorch",
    "vectorlm": "vectorlm",
    "torchtune": "torchtune",
    "fsdp_qlora": "fsdp_qlora",
    "NeMo Framework": "NeMo",
    "Megatron-Bridge": "Megatron-Bridge",
}


def _source(row: Mapping[str, str]) -> str:
    """A short name of who measured."""
    for words, name in _SOURCES.items():
        if words in row["source"]:
            return name
    return row["source"][:40]


def _number(row: Mapping[str, str], column: str) -> float:
    text = row[column]
    try:
        number = float(text)
    except ValueError:
        raise PublishedError(f"{column} is {text[:30]!r}; expected a number") from None
    if not 0 < number < 1e15:
        raise PublishedError(f"{column} is {text[:30]!r}; expected a number above 0")
    return number


def _count(row: Mapping[str, str], column: str, otherwise: int) -> int:
    """A whole number; empty: `otherwise`."""
    return round(_number(row, column)) if row[column] else otherwise


_MEMORY_KINDS = {"analytic": "arithmetic", "steady": "states", "reserved": "reserved"}  # others are used


def _memory_figures(text: str) -> Iterator[MemoryFigure]:
    """`50.35 active; 63.90 reserved` in GiB; `31.4 GB decimal, analytic` in units of 1e9 bytes."""
    for part in text.split(";"):
        figure = re.match(r"([0-9.]+)\s*(.*)", part.strip())
        if figure is None:
            continue
        words = figure[2]
        unit = 1e9 if "GB decimal" in words else _GIB
        kinds = [kind for word, kind in _MEMORY_KINDS.items() if word in words]
        yield MemoryFigure(kinds[0] if kinds else "used", float(figure[1]) * unit)


def _gpu_of(row: Mapping[str, str]) -> Gpu:
    """The row of the hardware table that the words name, with the network that the row states."""
    words = row["gpu"]
    sizes = re.findall(r"(\d+(?:\.\d+)?)\s*Gi?B(?!/)", words)
    kind = re.search(r"[A-Z]{1,3}\s?\d{2,4}[A-Z]?", words)
    if kind is None:
        raise PublishedError(f"gpu is {words[:40]!r}; expected a GPU's name")
    name = kind[0]
    if sizes and name in ("H100", "A100"):  # which come in several sizes
        name += f"-{round(float(sizes[0]) / 8) * 8}gb"
    gpu = find_gpu(name)
    network = re.search(r"(\d+)\s*Gb/s\s*(.*)", row["interconnect"])
    if network is None:
        return gpu
    bytes_per_s = float(network[1]) * 1e9 / 8
    if "node" in network[2] and "per GPU" not in network[2]:
        bytes_per_s = bytes_per_s / 8  # the GPUs of a node share it
    return replace(gpu, nic_bytes_per_s=bytes_per_s)


# In the order in which they are looked for: groups first, since their full name is "hybrid FSDP", then ZeRO's stages:
# "shard_grad_op (ZeRO-2, P_os+g)" is stage 2.
_STRATEGY_WORDS = {word: name for name in (*IN_GROUPS, *OVER_ALL_RANKS) for word in STRATEGY_ROWS[name].other_names}
_DEGREES = ("tp", "cp", "pp", "vp", "ep")


# FSDP2 inside torchtitan's pipelines: units are gathered once a step, and gradients reduced by its last micro-batch
# (torch.distributed.pipelining.stage, `backward_maybe_with_nosync`), which is ZeRO-2's traffic and peak.
_PIPELINED = "zero2"


def _mesh(row: Mapping[str, str]) -> dict[str, Any]:
    said = row["strategy"].lower()
    gpus = _count(row, "gpus", 1)
    degrees = dict.fromkeys(_DEGREES, 1)
    for name in _DEGREES:
        stated = re.search(rf"\b{name}\s*=?\s*(\d+)", said)
        if stated:
            degrees[name] = int(stated[1])
    strategy = _strategy_in(said, gpus)
    if degrees["pp"] > 1 and "torchtitan" in row["framework"] + row["source"]:
        strategy = _PIPELINED
    return dict(
        gpus=gpus,
        gpus_per_node=_count(row, "gpus_per_node", 8),
        strategy=strategy,
        offload="offload" in said,
        tensor_parallel=degrees["tp"],
        context_parallel=degrees["cp"],
        pipeline_parallel=degrees["pp"],
        expert_parallel=degrees["ep"],
        virtual_stages=degrees["vp"],
        schedule="interleaved" if degrees["vp"] > 1 else "1f1b",
        async_tensor="async tp" in said,
    )


def _strategy_in(said: str, gpus: int) -> str:
    for word, name in _STRATEGY_WORDS.items():
        if word in said:
            return name
    if gpus == 1:
        return UNSHARDED[0]
    raise PublishedError(f"strategy is {said[:40]!r}, which is not known here")


def _work(row: Mapping[str, str]) -> dict[str, Any]:
    notes = row["notes"]
    loss = row["loss"].partition(",")[0].lower() or "eager"
    checkpointing = _checkpointing(row)
    micro_batch, grad_accum = _count(row, "micro_batch_per_gpu", 1), _count(row, "grad_accum", 1)
    over_the_pipeline = "over the pipeline" in notes
    if over_the_pipeline:  # a batch that the pipeline cuts into as many parts as it has stages
        stages = int(re.findall(r"\bpp\s*(\d+)", row["strategy"].lower())[0])
        micro_batch, grad_accum = micro_batch // stages, stages
    return dict(
        seq=_count(row, "seq_len", 1),
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        checkpointing=checkpointing,
        compile=row["compile"] == "y",
        loss=loss,
        float_logits="16-bit" not in row["loss"],
        fp8=row["fp8"] == "y",
        no_sync="no_sync" in notes or over_the_pipeline,
        flash_1="Triton" in notes,
        whole_logits="logits gathered" in notes,
    )


def _checkpointing(row: Mapping[str, str]) -> str:
    """The policy of the blocks that are checkpointed; which these are says `_recomputed`."""
    words = row["activation_checkpointing"].lower()
    kind = words.split()[0].strip(",") if words else "none"
    if kind not in ("none", "selective", "full"):
        raise PublishedError(f"activation_checkpointing is {words!r}, which is not known here")
    if kind == "selective" and "block" in words:
        return "full"
    if kind == "selective" and "fms-fsdp" in row["source"]:
        raise PublishedError("its selective checkpointing is of some whole blocks, how many is not known here")
    return kind


def _recomputed(row: Mapping[str, str]) -> float:
    """The part of the blocks that is checkpointed: `selective, every 2nd block` and `selective, 40% of blocks`."""
    words = row["activation_checkpointing"].lower()
    if "block" not in words:
        return 1.0
    part = re.search(r"(\d+)\s*%", words)
    if part:
        return int(part[1]) / 100
    every = re.search(r"every (\d+)", words)
    if every:
        return 1 / int(every[1])
    raise PublishedError("its selective checkpointing is of some whole blocks, how many is not known here")


def _dtypes(row: Mapping[str, str]) -> dict[str, Any]:
    """Slices that are masters, or (DeepSpeed, ZeRO) masters beside slices in 16 bits; `bf16` alone is bf16 all over."""
    dtypes = DTYPES.get(plain(row["param_dtype"]), Dtypes("bf16", "fp32"))
    masters, master = "slices", dtypes.master
    reduced = "bf16" if plain(row["reduce_dtype"]).startswith("bf16") else "fp32"
    if row["framework"].startswith(("DeepSpeed", "ZeRO")):
        masters, master, reduced = "separate", "fp32", "bf16"
    if "bf16 master" in row["notes"]:
        master = "bf16"
    return dict(
        param_dtype=dtypes.param,
        reduce_dtype=reduced,
        master_dtype=master,
        masters=masters,
        optimizer=optimizer_of(row["optimizer"]) or "adamw",
    )


_TELL_OF_ADAPTERS = ("framework", "strategy", "param_dtype", "optimizer", "notes")
_USUAL_RANK = 64


def _adapters(row: Mapping[str, str]) -> dict[str, Any]:
    """LoRA on a frozen base, which is in 4 bits where a row says so; a rank that is not stated is 64."""
    words = " ".join(row[column] for column in _TELL_OF_ADAPTERS).lower()
    if not re.search(r"\bq?lora\b", words):
        return {}
    base = None  # the dtype of computing
    if re.search(r"\bqlora\b|\bnf4\b|\b4.?bit", words):
        base = "nf4"
    elif "base rests in fp32" in words:
        base = "fp32"
    rank = re.search(r"\brank\s*=?\s*(\d+)", words)
    return {"lora_rank": int(rank[1]) if rank else _USUAL_RANK, "base_dtype": base}


def _shape_of(name: str, row: Mapping[str, str]) -> tuple[ModelShape, float]:
    """The shape whose number of parameters is the stated one: with or without a gate, with the head tied or not.

    A row without layers states its parameters only: then a shape stands for it, and the scale is returned.
    """
    stated = _number(row, "params_B") * 1e9
    if not row["layers"]:
        shape = _candidate(name, {**row, **_STAND_IN}, gated=False, tied=True)
        return shape, stated / shape.parameters
    shapes = []
    for gated in (True, False):
        for tied in (False, True):
            shapes.append(_candidate(name, row, gated=gated, tied=tied))
    nearest = min(shapes, key=lambda shape: abs(shape.parameters - stated))
    if abs(nearest.parameters / stated - 1) > _NEAR_COUNT:
        billions, nearest_billions = stated / 1e9, nearest.parameters / 1e9
        raise PublishedError(
            f"no known kind of block gives {billions:g} B parameters; the nearest has {nearest_billions:g} B"
        )
    return nearest, 1.0


_STAND_IN = {
    "layers": "32",
    "hidden": "4096",
    "ffn": "16384",
    "heads": "32",
    "kv_heads": "32",
    "vocab": "50368",
    "seq_len": "2048",
}


def _mixture(row: Mapping[str, str]) -> Experts | None:
    """`128 x 768, 8 a token` is 128 experts, 768 wide, of which a token takes 8."""
    said = re.match(r"(\d+) x (\d+), (\d+) a token", row["experts"])
    if said is None:
        return None
    count, width, per_token = map(int, said.groups())
    return Experts(count, per_token, width)


def _candidate(name: str, row: Mapping[str, str], *, gated: bool, tied: bool) -> ModelShape:
    """A block like Llama's, or like GPT's with biases, fused products and learned positions."""
    heads, width, mixture = _count(row, "heads", 0), _count(row, "hidden", 0), _mixture(row)
    stated = re.search(r"heads of (\d+)", row["experts"])
    if not heads or width % heads and not stated:
        raise PublishedError(f"{heads} heads do not divide a width of {width}")
    head_width = int(stated[1]) if stated else width // heads
    seq = _count(row, "seq_len", 2048)
    return ModelShape(
        name=row["model"] or name,
        layers=_count(row, "layers", 0),
        width=width,
        heads=heads,
        kv_heads=_count(row, "kv_heads", heads),
        head_width=head_width,
        ffn=_count(row, "ffn", 4 * width),
        mixture=mixture,
        vocabulary=_count(row, "vocab", 0),
        context=max(seq, 1),
        gated=gated,
        norm_bias=not gated,
        qkv_bias=not gated,
        output_bias=not gated,
        ffn_bias=not gated,
        fused=not gated,
        positions=0 if gated else seq,
        tied=tied,
    )


# ---- their times


def why_untimed(case: Case) -> str:
    """Return why no time of a case is predicted; else nothing."""
    gpu = case.spec.gpu
    if case.without_time or has_known_flops(gpu):
        return case.without_time
    return f"no bf16 FLOP/s are known for {gpu.name}"


def timed(cases: Iterable[Case]) -> list[Case]:
    """Return the cases whose published throughput can be predicted."""
    return [case for case in cases if case.tokens_per_s is not None and not why_untimed(case)]


def step_s(case: Case, seconds_of: Callable[[PlanSpec], float]) -> float:
    """Return the seconds of a case's step by those of a plan's.

    Where a part of the blocks is checkpointed: that part of the seconds with, the rest without.
    """
    with_s = seconds_of(case.spec)
    if case.recomputed == 1:
        return with_s
    without_s = seconds_of(replace(case.spec, checkpointing="none"))
    return case.recomputed * with_s + (1 - case.recomputed) * without_s


def closed_form_s(spec: PlanSpec) -> float:
    """Return the seconds of a plan's step, as `fsdplab plan` predicts them."""
    return step_time(spec).step_s
