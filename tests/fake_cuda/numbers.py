"""Computes on the host what the stand-in's kernels leave undone, so that losses can be compared with the CPU twin's.

The stand-in's device memory is the host's memory. `HostNumbers` lets each operator run as always (torch's allocator,
streams and launches are real), and then puts the same operator on the current stream as a call of the host, with CPU
tensors over the same addresses. The call runs on the stream's thread, in the stream's order: an operator that should
have waited for another stream reads what is there at that moment, as a GPU would.

    with HostNumbers():
        loss = model(batch)  # on cuda

It holds addresses, not tensors: memory that was freed too early is overwritten, as on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

aten = torch.ops.aten
# They make or name memory and compute nothing; resizing changes a tensor's description, which is not the memory's.
_COMPUTE_NOTHING = (
    "aten::empty", "aten::new_empty", "aten::resize_", "aten::_resize", "aten::set_", "aten::record_stream",
    "aten::is_pinned", "aten::_pin_memory", "aten::_local_scalar_dense",
)  # fmt: skip


@dataclass(frozen=True)
class Address:
    """A tensor's place in memory: what a kernel is given."""

    pointer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Address:
        return Address(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def tensor(self) -> torch.Tensor:
        """A CPU tensor over this memory."""
        if 0 in self.size or not self.pointer:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        count = 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride))
        memory = (ctypes.c_char * (count * self.dtype.itemsize)).from_address(self.pointer)
        return torch.frombuffer(memory, dtype=self.dtype, count=count).as_strided(self.size, self.stride)


@dataclass(frozen=True)
class _Signature:
    """Which arguments an operator writes, and which of its results are new memory."""

    written: frozenset[str]
    new: tuple[bool, ...]
    decomposes: bool
    draws: bool

    @staticmethod
    @functools.cache
    def of(func: Any) -> _Signature:
        schema = func._schema
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        return _Signature(
            frozenset(written),
            tuple(r.alias_info is None for r in schema.returns),
            torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
            any(a.name == "generator" for a in schema.arguments),
        )


class HostNumbers(TorchDispatchMode):
    """Operators on CUDA tensors also compute, on the host and in their stream's order.

    Random operators draw from a generator of the host (`seed`), so they differ from both a GPU's and the CPU's.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.queue = _HostCalls()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for kind in types):
            return NotImplemented  # DTensor and the like come back with plain tensors
        if func.namespace != "aten" and func.namespace != "fsdp":
            return func(*args, **kwargs)
        signature = _Signature.of(func)
        if signature.decomposes:
            with self:
                answer = func.decompose(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        return self._run(func, signature, args, kwargs)

    def _run(self, func: Any, signature: _Signature, args: Any, kwargs: Any) -> Any:
        self.queue.raise_failure()
        given = _given(func, signature, args, kwargs)
        result = func(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        written = [value for name, value in _named(func, args, kwargs) if name in signature.written]
        fresh = [one for new, one in zip(_for_each(signature.new, results), results) if new]
        changed = [t for t in tree_iter((written, fresh)) if isinstance(t, torch.Tensor)]
        on_gpu = any(t.is_cuda for t in tree_iter((args, kwargs, results)) if isinstance(t, torch.Tensor))
        if not on_gpu or not changed or func.name().startswith(_COMPUTE_NOTHING):
            return result
        self._compute(func, signature, given, tree_map(_address, tuple(fresh)))
        if any(not t.is_cuda and not (t.is_pinned() and _asynchronous(func, args, kwargs)) for t in changed):
            torch.cuda.current_stream().synchronize()
        return result

    def _compute(self, func: Any, signature: _Signature, given: Any, fresh: Any) -> None:
        args, kwargs = given
        if signature.draws:
            kwargs = kwargs | {"generator": self.generator}
        body = _ON_CPU.get(func.name(), func)

        def call() -> None:
            computed = body(*tree_map(_tensor, args), **tree_map(_tensor, kwargs))
            results = computed if isinstance(computed, (tuple, list)) else (computed,)
            new = [one for new, one in zip(_for_each(signature.new, results), results) if new]
            for target, value in zip(tree_iter(fresh), tree_iter(new)):
                if isinstance(target, Address) and isinstance(value, torch.Tensor):
                    target.tensor().copy_(value)

        self.queue.put(torch.cuda.current_stream().cuda_stream, func.name(), call)


def _named(func: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    return [(a.name, value) for a, value in zip(func._schema.arguments, args)] + list(kwargs.items())


def _given(func: Any, signature: _Signature, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments as a kernel gets them: addresses of GPU and pinned memory, values of other memory."""

    def of(name: str, value: Any) -> Any:
        return tree_map(lambda x: _taken(x, name in signature.written), value)

    names = [a.name for a in func._schema.arguments]
    return [of(name, value) for name, value in zip(names, args)], {
        name: of(name, value) for name, value in kwargs.items() if name not in ("pin_memory", "layout")
    }


def _taken(value: Any, written: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_cuda or written or value.is_pinned():
            return Address.of(value)
        return value.detach().clone()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _address(value: Any) -> Any:
    return Address.of(value) if isinstance(value, torch.Tensor) else value


def _tensor(value: Any) -> Any:
    return value.tensor() if isinstance(value, Address) else value


def _for_each(new: tuple[bool, ...], results: Any) -> tuple[bool, ...]:
    """One answer a result; an operator that returns a list has one return in its schema."""
    return new if len(new) == len(results) else new[:1] * len(results)


def _asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(dict(_named(func, args, kwargs)).get("non_blocking"))


class _HostCalls:
    """Calls of the host in the order of a stream, and the first that failed."""

    def __init__(self) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_long)
        self._run = ctypes.CDLL(None).fake_cuda_run
        self._run.argtypes = [ctypes.c_void_p, kind, ctypes.c_long]
        self._callback = kind(self._called)
        self._calls: dict[int, tuple[str, Callable[[], None]]] = {}
        self._tokens = itertools.count(1)
        self._failure = ""

    def put(self, stream: int, name: str, call: Callable[[], None]) -> None:
        token = next(self._tokens)
        self._calls[token] = name, call
        self._run(stream, self._callback, token)

    def raise_failure(self) -> None:
        if self._failure:
            raise RuntimeError(f"fake_cuda's numbers: {self._failure}")

    def _called(self, token: int) -> None:
        name, call = self._calls.pop(token)
        try:
            with torch.no_grad():
                call()
        except BaseException:  # on a thread of the driver nobody would see it
            self._failure = self._failure or f"{name} failed on the host:\n{traceback.format_exc()}"


# ---- attention: the GPU's kernels have operators of their own, the CPU's mathematics is one


def _attention(query: Any, key: Any, value: Any, causal: bool, bias: Any = None, scale: float | None = None) -> Any:
    shared = query.shape[-3] != key.shape[-3]  # several heads of queries to one of keys
    return aten._scaled_dot_product_attention_math(
        query, key, value, bias, 0.0, causal, scale=scale, enable_gqa=shared
    )[0]


def _gradients(grad: Any, query: Any, key: Any, value: Any, causal: bool, bias: Any, scale: Any) -> Any:
    with torch.enable_grad():
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
        out = _attention(*leaves, causal, bias, scale)
    return torch.autograd.grad(out, leaves, grad)


def _efficient(query, key, value, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    return (_attention(query, key, value, is_causal, bias, scale),)


def _efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None):
    return _gradients(grad, q, k, v, is_causal, bias, scale)


def _flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return (_attention(query, key, value, is_causal, None, scale),)


def _flash_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, dropout_p, is_causal, seed, offset, *, scale=None):
    return _gradients(grad, q, k, v, is_causal, None, scale)


def _cudnn(query, key, value, bias, compute_lse, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    return (_attention(query, key, value, is_causal, bias, scale),)


def _cudnn_backward(grad, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, dropout_p, is_causal, *, scale=None):
    return _gradients(grad, q, k, v, is_causal, bias, scale)


# ---- norms: the GPU keeps their statistics in float32, and has an operator for the gradients of RMSNorm


def _layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask):
    wide = [None if t is None else t.float() for t in (grad, x, mean, rstd, weight, bias)]
    return aten.native_layer_norm_backward(*wide[:2], shape, *wide[2:], mask)


def _rms_norm_backward(grad, x, shape, rstd, weight, mask):
    normed, gradient = x.float() * rstd.float(), grad.float()
    of_weight = (gradient * normed).flatten(0, -len(shape) - 1).sum(0)
    if weight is not None:
        gradient = gradient * weight.float()
    shared = (gradient * normed).mean(tuple(range(-len(shape), 0)), keepdim=True)  # through rstd, a function of x too
    return rstd.float() * (gradient - normed * shared), of_weight


_ON_CPU: dict[str, Callable[..., Any]] = {
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_cudnn_attention": _cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
