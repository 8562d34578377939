"""Tensor subclasses that say themselves how they are gathered (`fsdp_pre_all_gather`, `fsdp_post_all_gather`), on both
engines.

Four kinds: a pair of tensors that trains, a tensor that is gathered in bfloat16, and two frozen quantised bases under
fp32 adapters: int8 with a scale a row, and four bits, two to a byte, with a scale a block of columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from fsdplab import engine
from tests.surface import Collectives, close, data, gradients, mesh_of, on_both, wholes

aten = torch.ops.aten


class Parts(torch.Tensor):
    """A tensor of [rows, ...] made of plain tensors with as many rows;
    what cuts or copies rows does so to every part.
    """

    parts: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, parts: tuple[torch.Tensor, ...], columns: int) -> Parts:
        shape = (parts[0].shape[0], columns)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=parts[0].device)
        self.parts = parts
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({tuple(self.shape)})"

    def like(self, parts: Any) -> Parts:
        """The same kind of tensor on other parts."""
        return type(self)(tuple(parts), self.shape[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self, rest, kwargs = args[0], args[1:], kwargs or {}
        if func is aten.copy_.default:
            [mine.copy_(other) for mine, other in zip(self.parts, rest[0].parts)]
            return self
        if func in (aten.view.default, aten.as_strided.default, aten.detach.default, aten.alias.default):
            return self.like(part.detach() for part in self.parts)
        if func is aten.new_zeros.default:
            return self.like(part.new_zeros(rest[0][0], *part.shape[1:]) for part in self.parts)
        if func is aten.split.Tensor:
            return [self.like(pieces) for pieces in zip(*(part.split(*rest, **kwargs) for part in self.parts))]
        if func in (aten.slice.Tensor, aten.clone.default, aten._to_copy.default):
            return self.like(func(part, *rest, **kwargs) for part in self.parts)
        return cls.compute(func, args, kwargs)

    @classmethod
    def compute(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        raise NotImplementedError(f"{cls.__name__} cannot {func}")

    def value(self) -> torch.Tensor:
        """What it stands for, in float32."""
        raise NotImplementedError

    def padded(self, mesh: Any, outer_size: torch.Size) -> list[torch.Tensor]:
        """The parts with as many rows as the largest slice has: every rank sends as much."""
        rows = math.ceil(outer_size[0] / mesh.size())
        return [F.pad(part, (0, 0) * (part.ndim - 1) + (0, rows - part.shape[0])) for part in self.parts]

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert isinstance(module, nn.Module) and hasattr(mp_policy, "param_dtype") and len(outer_stride) == 2
        return tuple(self.padded(mesh, outer_size)), tuple(outer_size)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        """A plain tensor; the second time into the same one."""
        value = self.like(outputs).value()[: metadata[0]]
        if out is None:
            return value, (value,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(value)


class Pair(Parts):
    """Two tensors that stand for their mean; arithmetic is done to both, so they train."""

    @classmethod
    def compute(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        first = next(each for each in args if isinstance(each, Pair))
        results = [func(*(a.parts[i] if isinstance(a, Pair) else a for a in args), **kwargs) for i in range(2)]
        return first if func._schema.name.endswith("_") else first.like(results)

    def value(self) -> torch.Tensor:
        return (self.parts[0] + self.parts[1]) / 2


class Rounded(Pair):
    """Gathered in `param_dtype`, in place: the gathered tensor is the collective's own output."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self.padded(mesh, outer_size)[0].to(mp_policy.param_dtype),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        (gathered,) = outputs
        assert gathered.dtype == param_dtype
        if out is None:
            return gathered, (gathered,)
        assert out.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()


class Int8(Parts):
    """Parts: int8 [rows, columns] and a float32 scale [rows, 1]."""

    @classmethod
    def of(cls, value: torch.Tensor) -> Int8:
        scale = value.abs().amax(1, keepdim=True) / 127
        return cls(((value / scale).round().to(torch.int8), scale), value.shape[1])

    def value(self) -> torch.Tensor:
        return self.parts[0].float() * self.parts[1]


class FourBits(Parts):
    """Parts: uint8 [rows, columns/2], two values a byte; bfloat16 scales [rows, columns/4]. It stays packed when
    gathered.
    """

    @classmethod
    def of(cls, value: torch.Tensor) -> FourBits:
        blocks = value.view(value.shape[0], -1, 4)  # [rows, blocks, 4]
        scale = (blocks.abs().amax(2) / 7).bfloat16()
        steps = (blocks / scale.float()[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8).view(value.shape[0], -1)
        return cls((steps[:, ::2] * 16 + steps[:, 1::2], scale), value.shape[1])

    def value(self) -> torch.Tensor:
        packed, scale = self.parts
        steps = torch.stack([packed // 16, packed % 16], -1).view(packed.shape[0], -1, 4).float() - 8
        return (steps * scale.float()[..., None]).view(packed.shape[0], -1)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            return self.like(outputs), outputs
        held = (out._local_tensor if isinstance(out, DTensor) else out).parts
        assert [h.untyped_storage().data_ptr() for h in held] == [o.untyped_storage().data_ptr() for o in outputs]


class Adapted(nn.Module):
    """A frozen base of some kind, and a trainable low-rank update in float32."""

    def __init__(self, kind: Any, rows: int = 8, columns: int = 8) -> None:
        super().__init__()
        weight = torch.randn(rows, columns) / 3
        self.weight = nn.Parameter(kind.of(weight), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, columns) / 3), nn.Parameter(torch.randn(rows, 2) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.weight.value() if isinstance(self.weight, Parts) else self.weight
        return x + F.linear(x, base) + x @ self.a.t() @ self.b.t()


class Plain(nn.Module):
    """A trainable matrix, of a subclass or not."""

    def __init__(self, kind: Any, rows: int = 8, columns: int = 8) -> None:
        super().__init__()
        weight, self.bias = torch.randn(rows, columns) / 3, nn.Parameter(torch.zeros(rows))
        self.weight = nn.Parameter(weight if kind is None else kind((weight.clone(), weight.clone()), columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def stack(layer: Any, kind: Any, sizes: tuple[int, ...] = (8, 8, 8)) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer(kind, rows, columns) for columns, rows in zip((8, *sizes), sizes)))


def unit_by_unit(fsdp: Any, model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh_of(), **options)
    return fsdp.fully_shard(model, mesh=mesh_of(), **options)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(data(step)).float().square().mean()


def own_rows(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
    return local.value() if isinstance(local, Parts) else local.detach()


def train(fsdp: Any, model: nn.Module, twin: nn.Module, steps: int = 3) -> Any:
    """Steps of plain SGD on both; afterwards every slice is the twin's rows."""
    answers = []
    trainable = [[p for p in each.parameters() if p.requires_grad] for each in (model, twin)]
    optimizers = [torch.optim.SGD(parameters, lr=0.1, foreach=False) for parameters in trainable]
    for step in range(steps):
        with Collectives() as seen:
            loss = loss_of(model, step)
            loss.backward()
        answers.append((loss.detach(), seen.kinds))
        loss_of(twin, step).backward()
        for parameter in twin.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        close(gradients(model), {n: p.grad for n, p in twin.named_parameters()})
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        rows = own_rows(other).chunk(dist.get_world_size())[dist.get_rank()]
        torch.testing.assert_close(own_rows(mine), rows, msg=lambda text, n=name: f"{n}: {text}")
    return answers


def a_pair_trains(fsdp: Any) -> Any:
    models = [unit_by_unit(fsdp, stack(Plain, Pair), reshard_after_forward=choice) for choice in (None, False)]
    return [train(fsdp, model, stack(Plain, None)) for model in models]


def a_pair_with_uneven_rows(fsdp: Any) -> Any:
    return train(fsdp, unit_by_unit(fsdp, stack(Plain, Pair, (5, 7, 3))), stack(Plain, None, (5, 7, 3)))


def gathered_in_bfloat16(fsdp: Any) -> Any:
    """The same as a plain matrix under the same policy."""
    policy, answers = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32), []
    for kind in (Rounded, None):
        model = unit_by_unit(fsdp, stack(Plain, kind), mp_policy=policy)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, 1).backward()
        answers.append(wholes([p.grad for p in model.parameters()]))
    torch.testing.assert_close(*answers)
    return answers[0]


def an_int8_base(fsdp: Any) -> Any:
    return train(fsdp, unit_by_unit(fsdp, stack(Adapted, Int8)), stack(Adapted, Int8))


def a_four_bit_base(fsdp: Any) -> Any:
    model = unit_by_unit(fsdp, stack(Adapted, FourBits))
    answer = train(fsdp, model, stack(Adapted, FourBits))
    with torch.no_grad():
        assert model(data()).shape == (4, 8)
    packed = model[0].weight._local_tensor
    assert isinstance(packed, FourBits) and packed.parts[0].shape == (4, 4) and packed.parts[0].dtype == torch.uint8
    return answer


def test_subclasses_that_train(ranks) -> None:
    on_both(ranks, 2, a_pair_trains, a_pair_with_uneven_rows, gathered_in_bfloat16)


def test_frozen_quantised_bases_under_adapters(ranks) -> None:
    on_both(ranks, 2, an_int8_base, a_four_bit_base)


# ---- PyTorch's own subclass of two tensors, and methods given to a local tensor


def two_parts(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    assert mesh.ndim == 1 and tuple(outer_size) == (8, 8) and isinstance(module, nn.Linear)
    return (self.a, self.b), None


def two_parts_of_old(self: Any, mesh: Any) -> Any:
    return (self.a, self.b), None


def both_together(self: Any, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
    a, b = outputs
    if out is None:
        return TwoTensor(a, b).to(param_dtype), (a, b)
    assert isinstance(out, TwoTensor)
    if a.dtype == param_dtype:
        assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
    else:
        out.a.copy_(a), out.b.copy_(b)
    return None


def of_two_tensors(fsdp: Any, ask: Any, on_meta: bool, policy: Any) -> Any:
    TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather = ask, both_together
    try:
        with torch.device("meta" if on_meta else "cpu"):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
            for layer in model:
                layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
        for layer in model:
            fsdp.fully_shard(layer, mp_policy=policy)
        fsdp.fully_shard(model, mp_policy=policy)
        if on_meta:
            model.to_empty(device="cpu")
            for number, parameter in enumerate(model.parameters()):
                torch.manual_seed(number)
                nn.init.trunc_normal_(parameter)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        losses = []
        for step in range(3):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses
    finally:
        del TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather


def two_tensors(fsdp: Any) -> Any:
    """Both signatures; made at once and on the meta device; in float32 and in bfloat16."""
    low = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plain = fsdp.MixedPrecisionPolicy()
    return [
        of_two_tensors(fsdp, ask, on_meta, policy)
        for ask in (two_parts, two_parts_of_old)
        for on_meta, policy in ((False, plain), (True, low))
    ]


def quantised_later(fsdp: Any, after: int = 0) -> Any:
    """Plain parameters whose local tensors are given the methods after sharding, and after some steps: the gather is in
    bfloat16.
    """
    asked = []

    def ask(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        asked.append(tuple(outer_size))
        return (self.to(torch.bfloat16),), None

    def make(self: Any, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        (gathered,) = outputs
        assert gathered.dtype is torch.bfloat16
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered)
            return None
        wide = gathered.to(param_dtype)
        return wide, (gathered, wide)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    losses = []
    for step in range(4):
        if step == after:
            for name, parameter in model.named_parameters():
                if "weight" in name:
                    local = parameter._local_tensor
                    local.fsdp_pre_all_gather = torch.no_grad()(ask).__get__(local)
                    local.fsdp_post_all_gather = torch.no_grad()(make).__get__(local)
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
    assert asked and set(asked) == {(8, 8)}
    return losses


def quantised_after_two_steps() -> None:
    quantised_later(engine, after=2)  # which PyTorch's does not take


def padded_rows(fsdp: Any) -> Any:
    """Rows that no number of ranks divides: parts travel padded, and the parameter has its own rows."""

    def ask(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.zeros(rows, *outer_size[1:])
        padded[: len(self)].copy_(self)
        return (padded,), None

    def make(self: Any, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    torch.manual_seed(0)
    layer = nn.Linear(3, 7)
    fsdp.fully_shard(layer, reshard_after_forward=False)
    local = layer.weight._local_tensor
    local.fsdp_pre_all_gather = torch.no_grad()(ask).__get__(local)
    local.fsdp_post_all_gather = torch.no_grad()(make).__get__(local)
    output = layer(torch.ones(2, 3))
    output.sum().backward()
    return output.detach(), layer.weight.grad.full_tensor()


def test_torchs_two_tensors(ranks) -> None:
    on_both(ranks, 2, two_tensors)


def test_methods_given_after_sharding(ranks) -> None:
    on_both(ranks, 2, quantised_later, padded_rows)
    ranks(2, quantised_after_two_steps)
    on_both(ranks, 3, padded_rows)
