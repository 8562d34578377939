"""Notebook 17: names are the libraries' own, a made trace is read as it was simulated, comparisons find causes."""

from __future__ import annotations

import dataclasses
import gzip
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.checkpoint import state_dict

import fsdplab.engine
from fsdplab import checkpoint
from fsdplab.common.names import STRATEGIES
from fsdplab.profiling.traces.import_traces import record_of_traces
from fsdplab.sessions import RunSpec, call_on_ranks
from fsdplab.teaching import failures, porting
from fsdplab.teaching.core import on_ranks
from fsdplab.teaching.lessons.nb17_porting import lesson
from fsdplab.teaching.lessons.nb17_porting.lesson import TERMS, found, write_traces

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


# --- terms


def names_in(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def known_to(holders: tuple[object, ...], name: str) -> bool:
    """Whether one of the modules, classes or functions has the name, as an attribute, a field or an argument."""
    return any(hasattr(each, name) or name in arguments_of(each) for each in holders)


def arguments_of(thing: object) -> set[str]:
    return set(inspect.signature(thing).parameters) if callable(thing) else set()


FSDP1 = (fsdp, fsdp.FullyShardedDataParallel, fsdp.FullyShardedDataParallel.__init__)
POLICIES = (fsdp.MixedPrecision, fsdp.CPUOffload, fsdp.ShardingStrategy, fsdp.StateDictType)
FSDP2 = (
    fsdp,
    fsdp.FSDPModule,
    fsdp.fully_shard,
    fsdp.MixedPrecisionPolicy,
    nn.Module,
    nn.parallel,
    torch.distributed.tensor,
)
LAB = (
    fsdplab.engine,
    fsdplab.engine.FSDPModule,
    fsdplab.engine.shard_model,
    checkpoint,
    nn.Module,
    torch.distributed.tensor,
)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.choice)
def test_the_names_are_those_of_the_libraries(term):
    elsewhere = {
        "ModuleWrapPolicy",
        "flat_param",
        "FlatParameter",
        "Block",
        "block",
        "model",
        "units",
        "nn",
        "utils",
        "torch",
    }
    words = {"True", "False"}

    def parts(cell: str) -> set[str]:
        return {each for name in names_in(cell) for each in re.findall(r"[A-Za-z_]\w*", name)} - words

    for name in parts(term.fsdp1) - elsewhere:
        assert known_to((*FSDP1, *POLICIES), name), f"FSDP1 has no {name}"
    for name in parts(term.fsdp2) - elsewhere - {"clip_grad_norm_"}:
        assert known_to((*FSDP2, state_dict), name), f"FSDP2 has no {name}"
    fields = {field.name for field in dataclasses.fields(RunSpec)} | set(STRATEGIES) | {"checkpoint", "save"}
    for name in parts(term.lab) - elsewhere:
        assert name in fields or known_to(LAB, name), f"the lab has no {name}"


def test_a_plugin_of_accelerate_has_the_fields():
    accelerate = pytest.importorskip("accelerate")
    plugin = {field.name for field in dataclasses.fields(accelerate.FullyShardedDataParallelPlugin)}
    renamed = {
        "fsdp_transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
        "fsdp_offload_params": "cpu_offload",
    }
    named = {name.partition(":")[0] for term in TERMS for name in names_in(term.accelerate) if name.startswith("fsdp_")}
    assert len(named) >= 6
    for name in named:
        assert renamed.get(name, name.removeprefix("fsdp_")) in plugin, name


def test_a_word_finds_its_row_from_any_column():
    assert [term.choice for term in found("no_sync")] == ["accumulate without reducing"]
    assert {found(word)[0].lab for word in ("SHARD_GRAD_OP", "stage: 2", "reshard_after_forward=False")} == {
        "`shard_grad_op`"
    }
    with pytest.raises(ValueError, match="is in no row"):
        porting.terms("tensor_parallel_size")
    assert "`" not in str(porting.terms())


# --- what to check first


@pytest.fixture(scope="module")
def recorded():
    return {failures.CARDS[letter]: failures.card(letter) for letter in "CAF"}


def test_the_first_difference_is_the_cause(recorded):
    table = porting.tried(recorded)
    first = {
        name: next((row[0] for row in table.rows if row[at + 1] == "DIFFERS"), "") for at, name in enumerate(recorded)
    }
    assert first == {
        "wrong divisor": "length of the first gradients",
        "bf16 masters": "dtype of what the optimizer holds",
        "no reshard": "",
    }
    assert porting.differences(recorded["wrong divisor"]) == 1 and porting.differences(recorded["no reshard"]) == 0
    assert len(porting.what_to_check().rows) == len(table.rows) == 6


# --- libraries


def test_without_the_libraries_a_record_is_shown_and_says_so(monkeypatch):
    monkeypatch.setattr(lesson, "LIBRARIES", ("no_such_library",))
    seen = porting.hugging_face()
    assert "no_such_library not installed here: this was recorded on 2 CPU ranks" in str(porting.losses(seen))
    assert "transformers 5." in porting.lora(seen).caption
    told = json.loads(porting.RECORDED.read_text(encoding="utf-8"))
    both = list(told["losses"].values())
    assert both[0] == both[1] and len(both[0]) == 4, "equal in every digit"
    assert told["lora"]["frozen that moved"] == 0 and told["lora"]["state"] == told["lora"]["trained"]


# --- a made trace


def test_a_made_trace_is_read_as_it_was_simulated_and_says_that_it_is_made(tmp_path):
    step = porting.simulated()
    files = write_traces(step.table("timeline"), tmp_path, 4)
    read = record_of_traces(files)
    simulated = step.table("breakdown")[0]
    for row in read.table("breakdown"):
        for part in ("compute_only", "overlapped", "exposed"):
            assert row[f"{part}_ns"] == pytest.approx(simulated[f"{part}_ns"], rel=1e-6)
    assert {row["rank"] for row in read.table("breakdown")} == {0, 1, 2, 3}
    assert porting.exposed_percent(read) == pytest.approx(
        100 * simulated["exposed_ns"] / simulated["step_ns"], abs=0.01
    )
    rows = porting.as_simulated(step, read).rows
    assert [row[1] for row in rows[:3]] == [row[2] for row in rows[:3]]
    told = json.loads(gzip.decompress(files[0].read_bytes()))
    assert told["made"] == "of a simulated step; no GPU ran" and all(
        each["args"]["made"] for each in told["traceEvents"]
    )


# --- cells on ranks


def cell(name: str) -> str:
    """The source of a cell of the notebook, without its first line, the magic."""
    cells = json.loads((NOTEBOOKS / "17_to_fully_shard.ipynb").read_text(encoding="utf-8"))["cells"]
    return next("".join(each["source"]) for each in cells if each["id"] == name).partition("\n")[2]


def printed_by(name: str, tmp_path) -> list[str]:
    values = call_on_ranks(
        on_ranks.__file__, "run_cell", world_size=2, payload={"workspace": str(tmp_path), "source": cell(name)},
        time_limit=120,
    )  # fmt: skip
    return values.output


def test_under_sequence_parallelism_a_norm_gets_half_of_the_tokens(tmp_path):
    for text in printed_by("sequence-parallel", tmp_path):
        assert "gets [2, 16, 64]" in text
        ours, twins = re.search(r"loss (\S+) twin (\S+)", text).groups()
        assert float(ours) == pytest.approx(float(twins), rel=1e-5)


def test_under_context_parallelism_gradients_are_the_twins(tmp_path):
    for text in printed_by("context-parallel", tmp_path):
        off, most = map(float, re.search(r"by (\S+), of (\S+)", text).groups())
        assert off < 1e-5 * most and "Warning" not in text


def test_two_blocks_share_one_graph_and_lose_nothing(tmp_path):
    for text in printed_by("compile", tmp_path):
        losses = re.findall(r"loss (\S+) graphs (\d)", text)
        assert [graphs for _, graphs in losses] == ["0", "1"]
        assert float(losses[0][0]) == pytest.approx(float(losses[1][0]), rel=1e-6)
