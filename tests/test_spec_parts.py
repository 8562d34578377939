"""The parts of a run: each is checked alone, a spec has the fields and rules of all, and an error names its field."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from string import Formatter

import pytest

from fsdplab.cli.options import in_flags
from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.sessions import RunSpec, SpecError
from fsdplab.sessions.compare_runs import SAME
from fsdplab.sessions.spec import EngineChoice, Measuring, Network, Placement, Sharding, WorkloadPart
from fsdplab.sessions.spec.rules import Rule

pytestmark = pytest.mark.quick

PARTS = (WorkloadPart, Sharding, EngineChoice, Network, Measuring, Placement)
RULES = [rule for part in (*PARTS, RunSpec) for rule in vars(part).get("RULES", ())]
# the spec of a record that was written before there were parts
OLD = {
    "strategy": "zero1", "engine": "lab", "world_size": 4, "model": "gpt-tiny", "text": None, "batch_size": 2,
    "sequence_length": 64, "steps": 4, "warmup": 2, "micro_batches": 1, "precision": "fp32", "units": "auto",
    "prefetch": 1, "learning_rate": 0.0003, "optimizer": "adamw", "transport": "auto", "checkpoint": "none",
    "offload": "none", "compile": "none", "profile": 0, "link": "eth10", "link_across": None, "link_queues": 1,
    "emulate": None, "as_model": None, "shard_size": None, "seed": 0, "card": None, "device": "cpu", "memory": True,
    "time_limit": 120.0, "start": "auto",
}  # fmt: skip


def names(part: type) -> list[str]:
    return [each.name for each in fields(part)]


def test_a_spec_has_each_field_of_its_parts_once_and_no_other() -> None:
    assert names(RunSpec) == [name for part in PARTS for name in names(part)]
    assert len(set(names(RunSpec))) == len(names(RunSpec))


def test_a_spec_of_an_old_record_is_read() -> None:
    spec = RunSpec(**OLD)
    assert spec == RunSpec(strategy="zero1", world_size=4, model="gpt-tiny", link="eth10", device="cpu")
    assert set(OLD) == set(names(RunSpec)) and json.loads(json.dumps(spec.as_dict())) == OLD


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_alone_is_frozen_and_has_the_defaults_of_a_spec(part: type) -> None:
    alone, spec = part(), RunSpec()
    assert all(getattr(alone, name) == getattr(spec, name) for name in names(part))
    with pytest.raises(FrozenInstanceError):
        setattr(alone, names(part)[0], None)
    with pytest.raises(TypeError, match="positional"):
        part(1)


def test_what_rests_as_shards_can_be_offloaded():
    for strategy, row in STRATEGY_ROWS.items():
        if row.can_offload:
            assert Sharding(strategy=strategy, offload="cpu").offload == "cpu"
    assert STRATEGY_ROWS["hybrid_shard"].can_offload and not STRATEGY_ROWS["zero2"].can_offload


@pytest.mark.parametrize(
    "part,wrong,field",
    [
        (WorkloadPart, {"model": "gpt-20"}, "model"),
        (WorkloadPart, {"sequence_length": 257}, "sequence_length"),
        (WorkloadPart, {"text": "/nowhere/at/all"}, "text"),
        (Sharding, {"strategy": "zero4"}, "strategy"),
        (Sharding, {"shard_size": 2}, "shard_size"),
        (Sharding, {"strategy": "zero2", "offload": "cpu"}, "offload"),
        (EngineChoice, {"learning_rate": -1}, "learning_rate"),
        (Network, {"link": "fast"}, "link"),
        (Network, {"link_across": "fast", "link": "eth10"}, "link_across"),
        (Network, {"emulate": "8xH100"}, "as_model"),
        (Network, {"emulate": "8xH1000", "as_model": "llama-3.1-8b"}, "emulate"),
        (Network, {"emulate": "8xH100", "as_model": "llama-9"}, "as_model"),
        (Measuring, {"warmup": 1}, "warmup"),
        (Measuring, {"card": 10**9, "memory": False}, "card"),
        (Placement, {"world_size": 10**6}, "world_size"),
        (Placement, {"start": "hot"}, "start"),
    ],
)
def test_an_error_names_the_field_to_blame_in_a_part_and_in_a_spec(part: type, wrong: dict, field: str) -> None:
    for kind in (part, RunSpec):
        with pytest.raises(SpecError) as refused:
            kind(**wrong)
        assert refused.value.field == field and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong,field",
    [
        ({"engine": "torch-ddp"}, "strategy"),
        ({"engine": "torch-fsdp2", "checkpoint": "full"}, "checkpoint"),
        ({"engine": "twin", "offload": "cpu"}, "offload"),
        ({"engine": "torch-fsdp1", "units": "linear"}, "units"),
        ({"engine": "torch-fsdp2", "prefetch": 0}, "prefetch"),
        ({"engine": "twin", "transport": "shm"}, "transport"),
        ({"transport": "nccl"}, "transport"),
        ({"strategy": "hybrid_shard"}, "shard_size"),
        ({"strategy": "hybrid_shard", "shard_size": 3}, "shard_size"),
        ({"link_across": "eth10"}, "link_across"),
        ({"model": "llama-3.1-405b"}, "model"),
    ],
)
def test_an_error_between_parts_names_the_field_to_blame(wrong: dict, field: str) -> None:
    with pytest.raises(SpecError) as refused:
        RunSpec(**{"device": "cpu", **wrong})
    assert refused.value.field == field == refused.value.fields[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule.fields))
def test_a_rule_names_only_what_a_spec_has(rule: Rule) -> None:
    assert set(rule.fields) <= set(names(RunSpec))
    templates = [words for words in (getattr(rule, "message", 0), getattr(rule, "remedy", 0)) if isinstance(words, str)]
    for _, name, _, _ in [piece for template in templates for piece in Formatter().parse(template)]:
        assert name is None or (name.startswith("s.") and hasattr(RunSpec(), name[2:]))


def test_runs_are_compared_on_one_workload() -> None:
    assert SAME == ("model", "text", "seed", "batch_size", "sequence_length", "micro_batches", "world_size")


@pytest.mark.parametrize(
    "wrong,said",
    [
        ({"world_size": 0}, "--world-size is 0; expected a whole number of at least 1"),
        (
            {"engine": "torch-fsdp2", "prefetch": 2},
            "--prefetch is 2, but engine torch-fsdp2 has its own rule; leave --prefetch 1, or give --engine lab",
        ),
        (
            {"engine": "torch-fsdp1", "units": "linear"},
            "--units is linear, but engine torch-fsdp1 has its own; leave --units auto, or give --engine lab or"
            " torch-fsdp2",
        ),
        (
            {"engine": "torch-ddp"},
            "engine torch-ddp cannot do full_shard; expected no_shard; give --strategy no_shard, or --engine lab",
        ),
        (
            {"emulate": "8xH100"},
            "--emulate 8xH100, --as None; give both, such as --emulate 8xH100, --as llama-3.1-8b, or none of them",
        ),
    ],
)
def test_the_command_line_names_flags_where_python_names_fields(wrong: dict, said: str) -> None:
    with pytest.raises(SpecError) as raised:
        RunSpec(**wrong)
    assert in_flags(raised.value) == said


def test_every_whole_number_of_a_run_fits_into_its_record():
    """A card of 10 million TB was trained on, and the record could not be opened again."""
    whole = [field for field in fields(RunSpec) if "least" in field.metadata]
    # ranks of a shard group divide the ranks
    unbounded = [field.name for field in whole if field.metadata.get("most", 2**63) >= 2**63]
    assert unbounded == ["shard_size"] and len(whole) > 8
    with pytest.raises(SpecError, match="card is 9223372036854775808; expected a whole number from 1 to 9,223,372"):
        RunSpec(card=2**63)
