"""Every argument, method and key that a remedy names is one of the library that it is said for."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.metadata import version
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from packaging.version import Version

from fsdplab.profiling.vocabulary import (
    _BY_ENGINE,
    _BY_TRAINER,
    _DDP,
    _DEEPSPEED,
    _FSDP1,
    _FSDP2,
    _OF_AN_ENGINE,
    _TORCH,
)

pytestmark = pytest.mark.quick


def calls_in(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each call in a text, with the names of its own arguments.

    >>> list(calls_in("use shard(a=1, policy=Policy(b=2)), or free()"))
    [('shard', ('a', 'policy')), ('Policy', ('b',)), ('free', ())]
    """
    for found in re.finditer(r"(\w+)\(", text):
        depth, own = 1, ""
        for letter in text[found.end() :]:
            depth += (letter == "(") - (letter == ")")
            if not depth:
                break
            own += letter if depth == 1 else ""
        yield found[1], tuple(re.findall(r"(\w+)=", own))


def unknown(words: Mapping[str, str], of: Mapping[str, Any]) -> list[str]:
    """The calls of these words that none of the callables `of` takes: `fully_shard(missing=)`."""
    wrong = []
    for text in words.values():
        for name, arguments in calls_in(text):
            if name not in of:
                wrong += [f"{name}()"] if arguments else []
                continue
            taken = inspect.signature(of[name]).parameters
            wrong += [f"{name}({each}=)" for each in arguments if each not in taken]
    return wrong


def test_calls_of_torch():
    from torch.distributed import fsdp
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.utils.checkpoint import checkpoint
    from torch.utils.data import DataLoader

    of = {name: getattr(fsdp, name) for name in fsdp.__all__} | {
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel, "AdamW": torch.optim.AdamW,
        "DataLoader": DataLoader, "checkpoint": checkpoint, "ModuleWrapPolicy": fsdp.wrap.ModuleWrapPolicy,
        "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
    }  # fmt: skip
    for words in (_TORCH, _FSDP1, _FSDP2, _DDP):
        assert unknown(words, of) == []


def all_words_of(trainer: str) -> dict[str, str]:
    """What a trainer sets in its own words, of every engine."""
    of_engines = [words for (name, _), words in _OF_AN_ENGINE.items() if name == trainer]
    listed = [(f"{number} {word}", text) for number, words in enumerate(of_engines) for word, text in words.items()]
    return {**_BY_TRAINER[trainer], **dict(listed)}


def test_methods_and_strategies_of_torch():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.fsdp import FSDPModule, ShardingStrategy

    of_fsdp2, of_fsdp1, of_ddp = (" ".join(words.values()) for words in (_FSDP2, _FSDP1, _DDP))
    methods = re.findall(r"\.(set_\w+)\(", of_fsdp2)
    assert methods and all(hasattr(FSDPModule, name) for name in methods)
    assert {*re.findall(r"ShardingStrategy\.(\w+)", of_fsdp1)} <= {*ShardingStrategy.__members__}
    assert "register_comm_hook" in of_ddp and hasattr(torch.nn.parallel.DistributedDataParallel, "register_comm_hook")
    assert "bf16_compress_hook" in of_ddp and hasattr(default_hooks, "bf16_compress_hook")


def test_arguments_of_transformers_and_the_keys_that_accelerate_gets():
    transformers = pytest.importorskip("transformers")
    from accelerate import FullyShardedDataParallelPlugin

    words = all_words_of("Trainer")
    assert unknown(words, {"TrainingArguments": transformers.TrainingArguments}) == []
    keys = {key for text in words.values() for key in re.findall(r'fsdp_config=\{"(\w+)"', text)}
    assert keys and keys <= {field.name for field in fields(FullyShardedDataParallelPlugin)}


def test_an_option_of_accelerate_launch():
    launch = pytest.importorskip("accelerate.commands.launch")
    (command,) = _BY_TRAINER["accelerate"].values()
    options = command.removeprefix("accelerate launch ").split()
    assert launch.launch_command_parser().parse_args([*options, "train.py"]).mixed_precision == "bf16"


@pytest.mark.peers
def test_arguments_of_lightning():
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

    engines = torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel
    of = {"Trainer": lightning.Trainer, "DDPStrategy": engines[0], "FSDPStrategy": FSDPStrategy}
    of["ModelCheckpoint"] = lightning.pytorch.callbacks.ModelCheckpoint
    assert unknown(all_words_of("Lightning"), of) == []
    assert "kwargs" in inspect.signature(DDPStrategy).parameters  # which are DistributedDataParallel's


@pytest.mark.peers
def test_keys_of_deepspeed():
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import constants
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    models = DeepSpeedZeroConfig, DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedBF16Config
    known = {field.alias or name for model in models for name, field in model.model_fields.items()}
    known |= {value for value in vars(constants).values() if isinstance(value, str)} | {"zero_optimization"}
    for name, text in _DEEPSPEED.items():
        keys = re.findall(r'"(\w+)"', "" if text == _TORCH.get(name) else re.sub(r': "\w+"', "", text))
        assert {*keys} <= known, text


@pytest.mark.peers
def test_fields_of_torchtitan():
    """Its settings have the same names in 0.2 and 0.3; the classes that recompute are there from 0.3 on."""
    config = pytest.importorskip("torchtitan.config")
    text = " ".join(_BY_TRAINER["torchtitan"].values())
    for part, names in (("training", ("TrainingConfig",)), ("parallelism", ("ParallelismConfig",))):
        of = _one_of(config, *names, part.capitalize())
        named = re.findall(rf"\b{part}\.(\w+)", text)
        assert named and {*named} <= {field.name for field in fields(of)}
    if Version(version("torchtitan")) >= Version("0.3"):
        recomputes = inspect.getsource(importlib.import_module("torchtitan.distributed.activation_checkpoint"))
        named = re.findall(r"(\w+)\.Config\(\)", text)
        assert named and all(f"class {name}(" in recomputes for name in named)


def _one_of(package, *names):
    """The first of these names that some module of a package has."""
    modules = [importlib.import_module(f"{package.__name__}.{each.name}") for each in iter_modules(package.__path__)]
    return next(getattr(module, name) for name in names for module in modules if hasattr(module, name))


def test_every_trainer_and_engine_is_checked_here():
    assert {*_BY_TRAINER} == {"Trainer", "Lightning", "torchtitan", "accelerate"}
    assert all(each in (_TORCH, _DDP, _FSDP1, _FSDP2, _DEEPSPEED) for each in _BY_ENGINE.values())
