"""Trains a causal language model of transformers, from a folder or a config.json alone, on the lab's text.

No rank ever holds all of it under an engine that shards: parameters are built on the meta device (buffers have values
from the start), sharded, and filled one after the other. A module's parameters are made whole, with random values of
the model's own rule or from safetensors of the folder, and each rank copies its slices. What a parameter gets depends
on the seed and its name alone, so the unsharded twin holds the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.models import WithoutValues, fill_parameter
from fsdplab.workloads.shapes import BYTE_VOCABULARY
from fsdplab.workloads.units import Units, count_words, repeated_block
from fsdplab.workloads.workload import ReadsText

Weights = Callable[[str], "Tensor | None"]  # the value of a parameter by its name, where the folder has one


@dataclass(frozen=True)
class CausalLM(ReadsText):
    """`AutoModelForCausalLM` of a configuration on bytes of a text; nothing is downloaded.

    `config` is the file; weights are random unless its folder has safetensors.
    """

    config: Path
    draws = True
    built_on_meta = True

    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        """Return the model with values on `device`; on the meta device its parameters alone are there, for `fill`."""
        transformers = _transformers()
        with torch.random.fork_rng(), _parameters_on_meta(), WithoutValues(), _plainly():
            where = self.config
            if where.name == "config.json":
                # transformers takes the folder of a config.json
                where = where.parent
            config = transformers.AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
            self._check(config)
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.train()
        if torch.device(device).type == "meta":
            return model
        return self.fill(model, device, seed)

    def fill(self, model: nn.Module, device: torch.device | str, seed: int) -> nn.Module:
        """Give every parameter memory on `device` and its value, whole or sharded, one module after the other."""
        # `to_empty` loses the values of buffers, and makes several parameters of a shared one: both are restored
        buffers = []
        for module in model.modules():
            for name, value in module._buffers.items():
                buffers.append((module, name, value))
        shared = _shared_names(model)
        model.to_empty(device=device)
        for module, name, value in buffers:
            module._buffers[name] = None if value is None else value.to(device)
        second_names: set[str] = set()
        for first, others in shared:
            _share(model, first, others)
            second_names.update(others)
        with _weights_in(self.config.parent) as weights:
            _fill(model, seed, weights, second_names)
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        # no cache of keys and values: that is for generating
        logits = model(input_ids=batch[0], use_cache=False).logits  # (B, T, V)
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())

    def found_units(self, model: nn.Module) -> Units:
        """Return the blocks that transformers itself keeps whole (`_no_split_modules`), else the repeated ones."""
        names = set(getattr(model, "_no_split_modules", None) or ())
        inner = [module for module in model.modules() if module is not model]
        modules = [module for module in inner if type(module).__name__ in names]
        if not modules:
            return repeated_block(model)
        kinds = " and ".join(sorted({type(module).__name__ for module in modules}))
        return Units(modules, f"The units are the blocks that transformers keeps whole: {len(modules)} x {kinds}.")

    def notes(self, model: nn.Module) -> list[str]:
        files = _weight_files(self.config.parent)
        values = "weights of its folder" if files else "random weights"
        return [f"{self.name} has {count_words(model)}, {values}; its tokens are bytes of the text."]

    def _check(self, config: Any) -> None:
        """Raise ModelError where the model cannot take the text's tokens, or so many of them."""
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        vocabulary = getattr(config, "vocab_size", None)
        longest = getattr(config, "max_position_embeddings", None)
        if vocabulary is not None and vocabulary < BYTE_VOCABULARY:
            raise ModelError(
                f"{self.name} has a vocabulary of {vocabulary}, and the text's tokens are the {BYTE_VOCABULARY} bytes;"
                " give a Python file with a batch of your own"
            )
        if longest is not None and self.sequence_length > longest:
            raise ModelError(
                f"{self.name} takes at most {longest} tokens, got sequence_length={self.sequence_length}; give fewer"
            )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError(
            "a Hugging Face model needs transformers, which is not installed; run: pip install transformers"
        ) from None
    return transformers


@contextmanager
def _plainly() -> Iterator[None]:
    """Raise errors of transformers about a configuration as a ModelError of one line."""
    try:
        yield
    except (ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            "transformers cannot build a causal language model of this configuration:"
            f" {type(error).__name__}: {first_line}"
        ) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules made inside on the meta device; buffers keep the values that modules give them."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            # keeps shape and dtype, and gives its memory back at once
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _shared_names(model: nn.Module) -> list[tuple[str, list[str]]]:
    """Return the names of each parameter that has several: the first, and the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # a tied head: lm_head.weight and embed_tokens.weight are one parameter
        names.setdefault(id(parameter), []).append(name)
    return [(first, others) for first, *others in names.values() if others]


def _share(model: nn.Module, first: str, others: list[str]) -> None:
    """Make the parameters of these names one again."""
    parameter = model.get_parameter(first)
    for name in others:
        module_name, _, attribute = name.rpartition(".")
        model.get_submodule(module_name)._parameters[attribute] = parameter


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@contextmanager
def _weights_in(folder: Path) -> Iterator[Weights | None]:
    """Yield a function that reads a parameter of the folder's safetensors; None where the folder has no such files."""
    files = _weight_files(folder)
    if not files:
        yield None
        return
    from safetensors import safe_open  # which transformers needs itself

    with ExitStack() as stack:
        file_of = {}
        for path in files:
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  # no dict
                file_of[name] = file
        # a tensor at a time is read, though the files are gigabytes
        yield lambda name: file_of[name].get_tensor(name) if name in file_of else None


@torch.no_grad()
def _fill(model: nn.Module, seed: int, weights: Weights | None, second_names: set[str]) -> None:
    """Give all parameters their values; those called `second_names` are others' under a second name."""
    missing = []
    for place, module in model.named_modules():
        parameters: dict[str, nn.Parameter] = {}
        for name, parameter in module._parameters.items():
            if parameter is not None and _joined(place, name) not in second_names:
                parameters[name] = parameter
        if not parameters:
            continue
        # drawn also where the folder has weights: a module at a time needs little memory
        for name, value in _initial(model, module, parameters, f"{seed}/{place}").items():
            if weights:
                stored = weights(_joined(place, name))
                if stored is None:
                    missing.append(_joined(place, name))
                else:
                    value = stored
            # of a sharded parameter each rank keeps its slice of the value
            fill_parameter(parameters[name], value)
    if missing:
        raise ModelError(
            f"the safetensors of the folder have no {missing[0]} and {len(missing) - 1} others that the model has;"
            " save the model with save_pretrained of this version of transformers, or give its config.json without them"
        )


def _joined(module_name: str, name: str) -> str:
    """Return the name of a parameter in the whole model; the root's name is empty."""
    return f"{module_name}.{name}".removeprefix(".")


def _initial(model: Any, module: nn.Module, parameters: dict[str, nn.Parameter], stream: str) -> dict[str, Tensor]:
    """Draw whole values of a module's parameters by the model's rule, from a random stream that its name seeds."""
    before = dict(module._parameters)
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(zlib.crc32(stream.encode()))
        for name, parameter in parameters.items():
            # whole and on the CPU, so that every rank and the twin draw the same numbers
            module._parameters[name] = nn.Parameter(torch.zeros(parameter.shape))
        try:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            model._init_weights(module)
            return {name: module._parameters[name].detach() for name in parameters}
        finally:
            module._parameters.update(before)
