"""Takes a user's own model as a value: `fsdplab.Workload(model=..., batch=..., loss=...)`, of functions and classes.

What a run needs beside them is done here: seeds that make ranks and the twin draw equal numbers, one scalar of several
losses, units where none are named, and errors that say what a function returned and what is expected.
"""

from __future__ import annotations

import random
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdplab.common.words import plural
from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.units import Units, count_words, of_classes, repeated_block
from fsdplab.workloads.workload import At, Drawn, Task

_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parents[2])  # frames of torch and of this package


class Workload(Task):
    """A model of one's own and what it learns: `Workload(model=make, batch=draw, loss=loss_of)`.

    `model()` returns an nn.Module, built on the device that is current; `batch(at)` one rank's micro-batch, of anything
    that `loss` takes, from `at.generator` (or `at.step`, `at.rank`, `at.world_size`, `at.micro_batch`, `at.seed`),
    moved to `at.device`; `loss(model, batch)` a scalar, or several of which the sum is trained. `units` are the
    classes to shard; None: the repeated blocks are found. `optimizer(parameters)` returns an optimizer; None: AdamW.
    ModelError says what is of the wrong kind.
    """

    draws = True

    def __init__(
        self,
        model: Callable[[], nn.Module],
        batch: Callable[[At], Any],
        loss: Callable[[Any, Any], Any],
        units: Sequence[type[nn.Module]] | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        name: str | None = None,
    ) -> None:
        given: dict[str, Callable[..., Any]] = {"model": model, "batch": batch, "loss": loss}
        if optimizer is not None:
            given["optimizer"] = optimizer
        for what, function in given.items():
            if not callable(function) or isinstance(function, nn.Module):
                raise ModelError(f"{what} is {_kind(function)}; expected a function{_HINTS.get(what, '')}")
        if not name:
            name = getattr(model, "__name__", type(model).__name__)
            # names that would say nothing in a table
            if name in ("model", "<lambda>"):
                name = "own model"
        self.name: str = name
        self.given_units = _checked_units(units)
        self._functions = given

    def __repr__(self) -> str:
        return f"Workload({self.name})"

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that were given, by name."""
        return dict(self._functions)

    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        """Call `model()` from one seed on `device`, in the mode of training; torch's generators stay as they were."""
        with _seeded(seed), torch.device(device):
            built = self._functions["model"]()
        if not isinstance(built, nn.Module):
            raise ModelError(f"model() returned {_kind(built)}; expected an nn.Module")
        if not any(parameter.requires_grad for parameter in built.parameters()):
            raise ModelError("model() has no parameter that requires a gradient; expected at least one to train")
        if torch.device(device).type != "meta":
            # what model() has put on another device than the current one
            built = built.to(device)
        return _without_whole_compile(built).train()

    def batch(self, at: At) -> Any:
        """Call `batch(at)`; what it draws without `at.generator` is the same on a rank and in the twin, too."""
        with _seeded_on_cpu(zlib.crc32(f"batch/{at.place}".encode())):
            return self._functions["batch"](at)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return one_scalar(self._functions["loss"](model, batch))

    def seeded_loss(self, model: nn.Module, drawn: Drawn) -> Tensor:
        try:
            return super().seeded_loss(model, drawn)
        except RuntimeError as error:
            complaint = _on_another_device(drawn, str(error)) or _changed_in_place(error)
            if complaint:
                raise ModelError(complaint) from error
            raise

    def found_units(self, model: nn.Module) -> Units:
        if self.given_units is None:
            return repeated_block(model)
        return of_classes(model, self.given_units)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        """Make the user's own optimizer; None where none was given."""
        make = self._functions.get("optimizer")
        if make is None:
            return None
        optimizer = make(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ModelError(
                f"optimizer(parameters) returned {_kind(optimizer)}; expected one torch.optim.Optimizer: a step of"
                " several is none that the lab trains or predicts"
            )
        return optimizer

    def samples(self, drawn: Drawn) -> int | None:
        """Return the first size of the first tensor in a batch; None where it has none."""
        for tensor in _tensors(drawn.content):
            # a scalar, such as a weight of the loss, counts no samples
            if tensor.dim():
                return len(tensor)
        return None

    def notes(self, model: nn.Module) -> list[str]:
        """Say what there is to say of a model beside its units."""
        notes = [f"{self.name} has {count_words(model)}."]
        norms = [module for module in model.modules() if isinstance(module, _BATCH_NORM) and module.track_running_stats]
        if norms:
            notes.append(
                f"Running statistics of {plural(len(norms), 'batch norm')} are each rank's own, as in training without"
                " SyncBatchNorm; the twin keeps a set for each rank."
            )
        if getattr(model, "_fsdplab_was_compiled", False):
            notes.append("torch.compile of the whole model was left out: with --compile blocks each unit is compiled.")
        return notes


_HINTS = {
    "model": " that returns an nn.Module, such as a class or lambda: Net(64); a module itself would be trained by all"
    " runs one after the other",
    "batch": " of at, which has a generator, a step and a rank",
    "loss": " of the model and a batch",
    "optimizer": " of a list of parameters",
}
_BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)


def one_scalar(value: Any) -> Tensor:
    """Return the scalar to differentiate: the loss itself, what is called `loss` in a dict or an output, or else the
    sum of several.
    """
    if isinstance(value, Mapping):
        named = value.get("loss")
        value = tuple(value.values())
    else:
        # an output of transformers, for example
        named = getattr(value, "loss", None)
    if isinstance(named, Tensor):
        return _scalar(named)
    if isinstance(value, (tuple, list)) and value:
        scalars = [_scalar(part) for part in value]
        # begins with a tensor: 0 + tensor would be one more operator
        return sum(scalars[1:], scalars[0])
    return _scalar(value)


def _on_another_device(drawn: Drawn, error: str) -> str:
    """Say what to do about a batch that was not moved to the model's device; "" where `error` is not about that."""
    if not ("device" in error or "Input type" in error):  # the second: of convolutions
        return ""
    device = drawn.at.device
    for tensor in _tensors(drawn.content):
        if tensor.device.type != device.type:
            return (
                f"batch(at) returned {_kind(tensor)} on {tensor.device}, but at.device is {device}; expected tensors"
                " moved with .to(at.device)"
            )
    return ""


def _changed_in_place(error: RuntimeError) -> str:
    """Say what to do about a unit that changes its input in place; "" where `error` is not about that.

    Engines pass a unit's inputs through an identity of autograd, whose backward ends the unit's own; what it returns
    may not be changed in place.
    """
    if "is a view and is being modified inplace" not in str(error):
        return ""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _NOT_THE_USERS):
            where = f" ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
    return (
        f"a unit changes its input in place{where}, which the lab's engine and FSDP2 cannot run; expected a unit"
        " that makes a new tensor (x = x + y in place of x += y, nn.ReLU() in place of nn.ReLU(inplace=True)), or other"
        " units, which do not begin with it"
    )


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        raise ModelError(
            f"loss(model, batch) returned {_kind(value)}; expected a scalar tensor, such as .mean(), or a dict or tuple"
            " of them"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ModelError(
            "loss(model, batch) returned a tensor without a gradient (requires_grad is False); expected one that is"
            " computed by model(...), without .item(), .detach() or torch.no_grad()"
        )
    return value.reshape(())


def _kind(value: Any) -> str:
    """Name the kind of a value: `a tensor of shape [4, 2]`, `None`, `an int` or `a Net`."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return f"{article} {name}"


def _checked_units(units: Any) -> tuple[type[nn.Module], ...] | None:
    if units is None:
        return None
    if isinstance(units, type):
        units = [units]
    if isinstance(units, (str, Mapping)) or not isinstance(units, (Sequence, set, frozenset)):
        raise ModelError(f"units is {_kind(units)}; expected a list of module classes, such as units = [Block]")
    for kind in units:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ModelError(f"units has {_kind(kind)}; expected classes of modules, such as units = [Block]")
    return tuple(units)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's random numbers inside; afterwards they are as they were."""
    with _others_seeded(seed), torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def _seeded_on_cpu(seed: int) -> Iterator[None]:
    """Do the same but for the generators of GPUs, whose states take a context of CUDA to be kept."""
    with _others_seeded(seed), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def _others_seeded(seed: int) -> Iterator[None]:
    """Seed Python's and numpy's random numbers inside."""
    numpy = sys.modules.get("numpy")  # where nobody has imported it, nobody draws from it
    # what a caller has drawn so far goes on afterwards as if nothing had been drawn here
    of_python = random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    random.seed(seed)
    if numpy is not None:
        # numpy takes 32 bits, torch 64
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _without_whole_compile(model: nn.Module) -> nn.Module:
    """Return the model without torch.compile around all of it: an engine's hooks lie between its units."""
    # torch.compile(model) is a module around the model, which it holds as `_orig_mod`
    plain = getattr(model, "_orig_mod", model)
    compiled = plain is not model
    for module in plain.modules():
        # module.compile() leaves the module as it is, with another call
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._compiled_call_impl = None
            compiled = True
    if compiled:
        plain._fsdplab_was_compiled = True
    return plain


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
