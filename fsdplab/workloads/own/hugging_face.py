"""A causal language model of transformers, from a folder or a config.json alone, that learns the lab's text.

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
        """The model with values on `device`; on the meta device its parameters alone are there, for `fill`."""
        transformers = _transformers()
        with torch.random.fork_rng(), _parameters_on_meta(), WithoutValues(), _plainly():
            where = self.config.parent if self.config.name == "config.json" else self.config
            found = transformers.AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
            self._check(found)
            model = transformers.AutoModelForCausalLM.from_config(found, trust_remote_code=False)
        model.train()
        return model if torch.device(device).type == "meta" else self.fill(model, device, seed)

    def fill(self, model: nn.Module, device: torch.device | str, seed: int) -> nn.Module:
        """Give every parameter memory on `device` and its value, whole or sharded, one module after the other."""
        buffers = {(module, name): each for module in model.modules() for name, each in module._buffers.items()}
        shared = _shared_names(model)
        model.to_empty(device=device)
        for (module, name), value in buffers.items():
            module._buffers[name] = None if value is None else value.to(device)
        for first, others in shared:
            _share(model, first, others)
        with _weights_in(self.config.parent) as weights:
            _fill(model, seed, weights, {name for _, others in shared for name in others})
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(input_ids=batch[0], use_cache=False).logits  # (B, T, V)
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())

    def found_units(self, model: nn.Module) -> Units:
        """The blocks that transformers itself keeps whole (`_no_split_modules`), else the repeated ones."""
        names = set(getattr(model, "_no_split_modules", None) or ())
        modules = [module for module in model.modules() if type(module).__name__ in names and module is not model]
        if not modules:
            return repeated_block(model)
        kinds = " and ".join(sorted({type(module).__name__ for module in modules}))
        return Units(modules, f"The units are the blocks that transformers keeps whole: {len(modules)} x {kinds}.")

    def notes(self, model: nn.Module) -> list[str]:
        files = _weight_files(self.config.parent)
        values = "weights of its folder" if files else "random weights"
        return [f"{self.name} has {count_words(model)}, {values}; its tokens are bytes of the text."]

    def _check(self, config: Any) -> None:
        """ModelError where the text's tokens are none of the model's."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary, longest = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
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
    """Errors of transformers about a configuration, in one line."""
    try:
        yield
    except (ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        said = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"transformers cannot build a causal language model of this configuration: {type(error).__name__}: {said}"
        ) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters of modules made inside are on the meta device; buffers have their values, which no rule fills in."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _shared_names(model: nn.Module) -> list[tuple[str, list[str]]]:
    """The names of each parameter that has several: the first, and the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [(each[0], each[1:]) for each in names.values() if len(each) > 1]


def _share(model: nn.Module, first: str, others: list[str]) -> None:
    """`to_empty` makes several of a shared parameter: make it one again."""
    parameter = model.get_parameter(first)
    for name in others:
        place, _, own = name.rpartition(".")
        model.get_submodule(place)._parameters[own] = parameter


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@contextmanager
def _weights_in(folder: Path) -> Iterator[Weights | None]:
    """Reads a parameter of the folder's safetensors by its name; None where the folder has no such files."""
    files = _weight_files(folder)
    if not files:
        yield None
        return
    from safetensors import safe_open  # which transformers needs itself

    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # no dict
        yield lambda name: places[name].get_tensor(name) if name in places else None


@torch.no_grad()
def _fill(model: nn.Module, seed: int, weights: Weights | None, known: set[str]) -> None:
    """The values of all parameters; those called `known` are others' under a second name."""
    missing = []
    for place, module in model.named_modules():
        names = {
            name: f"{place}.{name}".removeprefix(".") for name, each in module._parameters.items() if each is not None
        }
        own = {name: module._parameters[name] for name, whole in names.items() if whole not in known}
        values = _initial(model, module, own, f"{seed}/{place}") if own else {}
        for name, value in values.items():
            stored = weights(names[name]) if weights else None
            if weights and stored is None:
                missing.append(names[name])
            fill_parameter(own[name], value if stored is None else stored)
    if missing:
        raise ModelError(
            f"the safetensors of the folder have no {missing[0]} and {len(missing) - 1} others that the model has;"
            " save the model with save_pretrained of this version of transformers, or give its config.json without them"
        )


def _initial(model: Any, module: nn.Module, own: dict[str, nn.Parameter], stream: str) -> dict[str, Tensor]:
    """Whole values of a module's own parameters by the model's rule, from a random stream that its name seeds."""
    kept = dict(module._parameters)
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(zlib.crc32(stream.encode()))
        module._parameters.update({name: nn.Parameter(torch.zeros(each.shape)) for name, each in own.items()})
        try:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            model._init_weights(module)
            return {name: module._parameters[name].detach() for name in own}
        finally:
            module._parameters.update(kept)
