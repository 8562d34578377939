"""What the strategy lab copies: PyTorch code that shards, files that Accelerate reads, commands that run the same."""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import fsdplab
from fsdplab.figures.lab.choices import Choices, check
from fsdplab.figures.lab.copies import command, copies
from fsdplab.planning.copy_as import Sharded, accelerate_yaml, of_plan, pytorch
from fsdplab.planning.hardware import find_gpu
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.sessions import RunSpec
from fsdplab.workloads.shapes import model
from tests.own_models import zoo

pytestmark = pytest.mark.quick
STRATEGIES = ("no_shard", "zero1", "zero2", "shard_grad_op", "full_shard", "hybrid_shard")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_code_shards_and_trains(alone: None, strategy: str, optimizer: str) -> None:
    if strategy == "zero1" and optimizer == "muon":
        return  # ZeroRedundancyOptimizer is AdamW's
    what = Sharded(strategy, 1, ("Block",), 1, "bf16", "none", 2, optimizer, "cpu")
    names = {"model": zoo.stack(), "Block": zoo.Block}
    exec(compile(pytorch(what), "copied", "exec"), names)
    model, trained = names["model"], names["optimizer"]
    if strategy not in ("no_shard", "zero1"):
        assert sum(isinstance(each, FSDPModule) for each in model.modules()) == 4
    for _ in range(2):
        model(torch.randn(3, 32)).float().square().mean().backward()
        trained.step()
        trained.zero_grad()


RUNS = [
    *(
        RunSpec(model="gpt-tiny", strategy=name, shard_size=1 if name == "hybrid_shard" else None)
        for name in STRATEGIES
    ),
    *(RunSpec(model="gpt-tiny", units=units, prefetch=2) for units in ("linear", "model")),
    RunSpec(model="llama-20m", precision="bf16", checkpoint="full"),
    RunSpec(model="gpt-tiny", optimizer="muon"),
    RunSpec(model="gpt-tiny", offload="cpu"),
]


def copied_and_trained(text: str) -> float:
    """Run what was copied on this rank, as torchrun would, and take a step; return the norm of the gradients."""
    names: dict = {}
    exec(compile(text, "copied", "exec"), names)
    module, optimizer = names["model"], names["optimizer"]
    tokens = torch.arange(16).view(1, 16) % 7
    out = module(tokens)
    getattr(out, "logits", out).float().square().mean().backward()
    norm = sum(float(value.grad.norm()) for value in module.parameters() if value.grad is not None)
    optimizer.step()
    return norm


def test_what_is_copied_of_a_run_runs_as_it_is(ranks) -> None:
    texts = [copies(replace(run, world_size=2, device="cpu"))["PyTorch"] for run in RUNS]
    for text in texts:
        assert all(norm > 0 for norm in ranks(2, copied_and_trained, text)), text


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-20m"])
def test_what_is_copied_of_a_plan_runs_as_it_is(alone: None, name: str) -> None:
    pytest.importorskip("transformers")
    plan = PlanSpec(model=model(name), gpu=find_gpu("4090"), gpus=2, seq=64, param_dtype="fp32")
    what = replace(of_plan(plan), ranks=1, device="cpu", optimizer="adamw")
    assert copied_and_trained(pytorch(what)) > 0


def test_torchrun_runs_a_copied_file(tmp_path: Path) -> None:
    file = tmp_path / "this_file.py"
    file.write_text(copies(RunSpec(model="gpt-tiny", device="cpu"))["PyTorch"] + "\nprint(type(model).__name__)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0 and ended.stdout.count("FSDPGPT") == 2, ended.stderr[-2000:]
    assert "# torchrun --nproc-per-node 2 this_file.py\n" in file.read_text()


def test_a_plan_with_offload_is_copied_with_its_policy(alone: None) -> None:
    plan = PlanSpec(model=model("llama-3.1-8b"), gpu=find_gpu("4090"), gpus=8, offload=True)
    what = replace(of_plan(plan), ranks=1, units=("Block",), device="cpu", optimizer="adamw", program=())
    assert "  fsdp_offload_params: true" in accelerate_yaml(what).splitlines()
    code, without = pytorch(what), replace(what, offload=False)
    assert code.count("offload_policy=CPUOffloadPolicy(pin_memory=False)") == 2
    assert pytorch(replace(what, device="cuda")).count("offload_policy=CPUOffloadPolicy()") == 2
    names = {"model": zoo.stack(), "Block": zoo.Block}
    exec(compile(code, "copied", "exec"), names)
    names["model"](torch.randn(3, 32)).float().square().mean().backward()
    assert "offload" not in pytorch(without) + accelerate_yaml(without)


def test_recomputed_blocks_are_units(alone: None) -> None:
    names = {"model": zoo.stack(), "Block": zoo.Block}
    exec(
        compile(pytorch(Sharded("full_shard", 1, ("Block",), checkpoint="full", device="cpu")), "copied", "exec"), names
    )
    names["model"](torch.randn(3, 32)).square().mean().backward()
    assert sum(isinstance(each, FSDPModule) for each in names["model"].modules()) == 4


@pytest.mark.parametrize(("strategy", "units"), [*itertools.product(STRATEGIES, [(), ("Block", "Stem")])])
def test_accelerate_reads_the_file(tmp_path: Path, strategy: str, units: tuple[str, ...]) -> None:
    config = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "config.yaml"
    path.write_text(accelerate_yaml(Sharded(strategy, 4, units, 2)))
    read = config.load_config_from_file(str(path))
    assert read.num_processes == 4 and read.mixed_precision == "no"
    kinds = {"no_shard": "MULTI_GPU", "zero1": "DEEPSPEED", "zero2": "DEEPSPEED"}
    assert read.distributed_type.value == kinds.get(strategy, "FSDP")


def test_the_command_runs_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdplab.cli.options import RUN

    (spec,) = check(Choices(strategies=("hybrid_shard",), ranks=4, prefetch=2, precision="bf16")).specs
    words = shlex.split(command(spec))
    flags = {name: (flag.names or (f"--{name.replace('_', '-')}",))[0] for name, flag in RUN.items()}
    given = dict(zip(words[3::2], words[4::2]))
    assert words[:3] == ["fsdplab", "run", "hybrid_shard"] and set(given) <= {*flags.values(), "--card"}
    kinds = {name: type(getattr(spec, name)) for name, flag in flags.items() if flag in given}
    again = {name: kind(given[flags[name]]) for name, kind in kinds.items()}
    assert RunSpec(**{"strategy": "hybrid_shard", "card": 330_000_000, **again}) == spec


def test_a_workload_of_a_notebook_is_called_in_python() -> None:
    work = fsdplab.Workload(zoo.stack, zoo.numbers, zoo.squares)
    spec = RunSpec(model=work, prefetch=2)
    found = copies(spec)
    assert found["Command line"] == "fsdplab.run(work, strategy='full_shard', prefetch=2, profile=0)"
    assert "isinstance(module, Block)" in found["PyTorch"] and "cls_to_wrap: Block" in found["Accelerate"]
    whole = copies(RunSpec(model=work, units="model"))
    assert "isinstance" not in whole["PyTorch"] and "NO_WRAP" in whole["Accelerate"]


def test_a_plan_is_copied_in_the_words_of_published_models() -> None:
    (plan,) = check(Choices("8 x H100", "llama-3.1-8b", 8, ("full_shard",), link="450GB/s", tokens=4096)).runs
    found = copies(plan)
    assert "LlamaDecoderLayer" in found["PyTorch"] and found["Command line"].startswith("fsdplab plan --strategy")
