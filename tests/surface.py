"""The same program on two engines with one import changed: PyTorch's `torch.distributed.fsdp`, then the lab's.

A program is a module-level function `program(fsdp)` that takes everything from the engine it is given and returns what
can be observed: losses, gradients, placements, class names, collectives in their order, types of errors. `on_both` runs
it on real ranks with torch's engine, whose answers are the reference, then with the lab's, over gloo and over shared
memory, whose answers must be equal. On a torch other than the one whose surface is the reference, only the lab's engine
runs: a program's own assertions hold. With SURFACE_ENGINE=torch in the environment torch's engine stands in for the
lab's: what fails then is a wrong program.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_engine
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdplab.engine as lab_engine
from tests.ranks import transports

AT_MOST = 4  # lines about one program
REFERENCE = (2, 13)
Program = Callable[[Any], Any]
_SHORT = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "reduce"}


def reference_is_here() -> bool:
    """Whether the installed torch is the one whose surface is the reference."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) == REFERENCE


def lab_over(transport: str) -> Any:
    """The lab's engine as a program sees it, with its collectives over one transport."""

    def fully_shard(module: Any, **options: Any) -> Any:
        return lab_engine.fully_shard(module, **{"transport": transport} | options)

    fully_shard.state = lab_engine.fully_shard.state
    return SimpleNamespace(
        **{name: getattr(lab_engine, name) for name in dir(lab_engine)} | {"fully_shard": fully_shard}
    )


def engines_under_test() -> dict[str, Any]:
    """Name -> engine."""
    if os.environ.get("SURFACE_ENGINE") == "torch":
        return {"torch again": torch_engine}
    return {f"lab over {transport}": lab_over(transport) for transport in reversed(transports())}


def on_both(ranks: Callable[..., list[Any]], world_size: int, *programs: Program) -> None:
    """Run `programs` on `world_size` ranks with both engines; raises with the name of the program that differs."""
    failures: dict[str, str] = {}
    for rank, lines in enumerate(ranks(world_size, _run_both, programs)):
        for line in lines:
            failures.setdefault(line, f"{line}  [rank {rank}]")
    assert not failures, "\n".join(failures.values())


def _run_both(programs: tuple[Program, ...]) -> list[str]:
    return [line for program in programs for line in _compare(program)]


def _compare(program: Program) -> Iterator[str]:
    expected = _answer(program, torch_engine) if reference_is_here() else None
    if isinstance(expected, Exception):
        yield f"{program.__name__}: torch raised {text_of(expected)}"
    for name, engine in engines_under_test().items():
        got = _answer(program, engine)
        lines = []
        if isinstance(got, Exception):
            lines = [f"raised {text_of(got)}"]
        elif reference_is_here() and not isinstance(expected, Exception):
            lines = list(differences(expected, got))
        if len(lines) > AT_MOST:
            lines[AT_MOST:] = [f"... and {len(lines) - AT_MOST} more"]
        yield from (f"{program.__name__}: {name}: {line}" for line in lines)


def _answer(program: Program, engine: Any) -> Any:
    """What the program returns, or what it raises, so that the next program still runs (all ranks raise alike, or
    hang).
    """
    try:
        return program(engine)
    except Exception as error:
        return error


def text_of(error: BaseException) -> str:
    """The type, the message, and the last line of the program that was running."""
    frame, where = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        where = f"{file.rsplit('/', 1)[-1]}:{frame.tb_lineno}" if "test_surface" in file or "engine" in file else where
        frame = frame.tb_next
    return f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:400]}"


def differences(expected: Any, got: Any, path: str = "answer") -> Iterator[str]:
    """One line for each place where two answers differ; tensors to the last bits of their dtype."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        try:
            torch.testing.assert_close(got, expected)
        except AssertionError as error:
            yield f"{path}: {str(error).splitlines()[0]} {got.flatten()[:4]} instead of {expected.flatten()[:4]}"
    elif isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        for key in expected:
            yield from differences(expected[key], got[key], f"{path}[{key!r}]")
    elif isinstance(expected, Seen) or isinstance(got, Seen):
        if expected != got:
            yield f"{path}: torch's engine gives {expected}, the lab's {got}"
    elif isinstance(expected, list | tuple) and type(expected) is type(got) and len(expected) == len(got):
        for index, pair in enumerate(zip(expected, got)):
            yield from differences(*pair, f"{path}[{index}]")
    elif expected != got:
        yield f"{path}: torch's engine gives {expected!r}, the lab's {got!r}"


class Seen(NamedTuple):
    """One collective: the elements of the whole (a gather's output, a reduce-scatter's input), the ranks of its group.

    Collectives through shared memory are shown without their tensors: they have no size, and equal any of their kind.
    """

    kind: str
    elements: int
    ranks: int

    def __eq__(self, other: object) -> bool:
        sized = isinstance(other, Seen) and self.elements and other.elements
        return tuple(self) == tuple(other) if sized else isinstance(other, Seen) and self.kind == other.kind

    def __ne__(self, other: object) -> bool:
        return not self == other


class Collectives(TorchDispatchMode):
    """The collectives that pass the dispatcher, where CommDebugMode sees them, in their order: `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kind = _SHORT.get(func._schema.name.split("::")[-1]) if func.namespace == "c10d" else None
        if kind:
            tensors = [
                t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, torch.Tensor)
            ]
            sizes = [tensor.numel() for tensor in tensors]
            self.seen.append(Seen(kind, max(sizes), max(sizes) // max(min(sizes), 1)))
        return func(*args, **(kwargs or {}))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.seen]

    def take(self) -> list[Seen]:
        """What was seen since the last call."""
        seen, self.seen = self.seen, []
        return seen


class Block(nn.Module):
    """Two linear layers around `hidden` features;
    every block of a `Net` has its own size, so collectives tell who ran.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks between two layers of the root; all sizes divide by 4."""

    def __init__(self, width: int = 8, hidden: tuple[int, ...] = (4, 8, 16), seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, each) for each in hidden)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A CPU mesh; without a shape, all ranks in one dimension."""
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def sharded(fsdp: Any, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """`model` (a `Net`) with every block and the root a unit of the engine `fsdp`."""
    model, options = Net() if model is None else model, {"mesh": mesh_of()} | options
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def data(seed: int = 0, width: int = 8, everywhere: bool = False) -> torch.Tensor:
    """Four rows of input, other ones on each rank."""
    seed = 100 * seed + (0 if everywhere else 1 + dist.get_rank())
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """The mean square of the model's output on this rank's data."""
    return model(data(seed)).float().square().mean()


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The full value of a parameter or gradient, detached."""
    return wholes([tensor])[0]


def wholes(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The full values, detached; slices over all ranks come in one collective for all of them."""
    local = {
        i: t._local_tensor.detach() for i, t in enumerate(tensors) if isinstance(t, DTensor) and t.device_mesh.ndim == 1
    }
    parts: list[Any] = [None] * dist.get_world_size()
    if local:
        dist.all_gather_object(parts, local)
    return [_whole(i, tensor, parts) for i, tensor in enumerate(tensors)]


def _whole(index: int, tensor: torch.Tensor | None, parts: list[Any]) -> torch.Tensor | None:
    if not isinstance(tensor, DTensor):
        return None if tensor is None else tensor.detach().clone()
    if tensor.device_mesh.ndim > 1:
        return tensor.full_tensor().detach()
    (placement,) = tensor.placements
    return torch.cat([part[index] for part in parts], placement.dim) if placement.is_shard() else parts[0][index]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Name -> full gradient."""
    names, parameters = zip(*model.named_parameters())
    return dict(zip(names, wholes([parameter.grad for parameter in parameters])))


def twin_gradients(
    twin: nn.Module, *seeds: int, loss: Callable[[nn.Module], torch.Tensor] | None = None
) -> dict[str, torch.Tensor | None]:
    """The gradients of the unsharded model, averaged over the ranks."""
    for seed in seeds or (0,):
        (loss(twin) if loss else loss_of(twin, seed)).backward()
    held = [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.double().flatten() for gradient in held])
    dist.all_reduce(flat)
    for gradient, mean in zip(held, flat.split([each.numel() for each in held])):
        gradient.copy_((mean / dist.get_world_size()).view_as(gradient))
    return gradients(twin)


def close(got: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None], **tolerance: float) -> None:
    """Equal gradients by name; one that is missing equals nothing but a missing one."""
    assert got.keys() == expected.keys()
    for name, other in expected.items():
        mine = got[name]
        assert (mine is None) == (other is None), f"{name}: got {mine}, expected {other}"
        if mine is not None:
            torch.testing.assert_close(mine, other, msg=lambda text, n=name: f"{n}: {text}", **tolerance)


def shown(model: nn.Module) -> dict[str, tuple]:
    """What the modules show now: placements (None if plain), whole shape, local shape and dtype of every parameter."""
    return {name: look(parameter) for name, parameter in model.named_parameters()}


def look(tensor: torch.Tensor) -> tuple:
    """Placements (None if plain), whole shape, local shape, dtype, requires_grad."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    placements = str(tensor.placements) if isinstance(tensor, DTensor) else None
    return placements, tuple(tensor.shape), tuple(local.shape), str(tensor.dtype), tensor.requires_grad


def error_of(action: Callable[[], Any]) -> str:
    """The type of error that an action raises, 'none' if it raises none; an error must say something."""
    try:
        action()
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        assert str(error).strip(), f"{type(error).__name__} without a word"
        return type(error).__name__
    return "none"


def no_warnings() -> warnings.catch_warnings:
    """A context without warnings."""
    return warnings.catch_warnings(action="ignore")
