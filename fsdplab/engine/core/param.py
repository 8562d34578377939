"""One parameter in its two forms, and which of them the modules show.

At rest it is what the optimizer updates: a DTensor shard (or, where the strategy keeps it whole for the optimizer, the
parameter itself). Unsharded it is what a forward reads: one `nn.Parameter` for the whole life of the model, over
storage that comes and goes, because autograd saves aliases of it that must be valid again in the backward.

Layouts and transports know rows only: a parameter cut along another dimension counts with that dimension first
(`rows_first`). What lies in memory is contiguous in the parameter's own order all the same, at rest and unsharded,
because modules and kernels may ask for that; an all-gather of such a parameter ends in `join`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdplab.engine import compat
from fsdplab.engine.core.parameter_hooks import HooksOfWhole, apply_hooks
from fsdplab.engine.core.placement import Axes, local_gradient, local_part, spec_at_rest, wrapped

Sites = list[tuple[nn.Module, str]]


class ShardedParam:
    """A parameter that a unit owns, cut along dimension `dim`; None leaves it whole at rest.

    `sites` are the (module, attribute) pairs that show it: more than one where it is tied. `shape` has the dimension
    that is cut first. `spec` describes the DTensor at rest; None means that it is plain.
    """

    replacements = 0  # how often, in this process, a parameter at rest was found to be replaced

    def __init__(self, name: str, sites: Sites, original: nn.Parameter, axes: Axes, dim: int | None = 0) -> None:
        self.name, self.axes, self.dim = name, axes, dim or 0
        self.whole_spec: DTensorSpec | None = getattr(original, "_spec", None)
        self.spec = self.whole_spec if dim is None else spec_at_rest(name, original, axes, dim)
        self.shape = self.rows_first(local_part(original)).shape
        self.dtype = original.dtype
        self.at_rest = original
        self.gathered: nn.Parameter | None = None
        self.unsharded_gradient: torch.Tensor | None = None  # rows first
        self.to_reduce = False  # whether it was trained when gradients were collected: then it is on all ranks
        self.on_gradient: Callable[[], None] | None = (
            None  # called when autograd leaves a gradient on the gathered form
        )
        self._whole_at_rest = dim is None
        self._hooks_of_whole = HooksOfWhole.of(original, move=self._whole_at_rest)
        self._sites = [(weakref.ref(module), attribute) for module, attribute in sites]
        plain = [type(module).__setattr__ is nn.Module.__setattr__ for module, _ in sites]
        self._entries = [(site[0]._parameters, site[1]) for site, is_plain in zip(sites, plain) if is_plain]
        self._setters = [site for site, is_plain in zip(self._sites, plain) if not is_plain]
        self._held: torch.Tensor | None = None  # the local tensor of a DTensor, since `settle`
        self._address = 0  # address of the shard inside its unit's buffer; 0: not there yet, or nothing to hold

    def rows_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with the dimension that is cut first."""
        return tensor.movedim(self.dim, 0) if self.dim else tensor

    def natural(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` with their dimensions in the parameter's own order."""
        return rows.movedim(0, self.dim) if self.dim else rows

    def cut(self, start: int, stop: int) -> None:
        """Leave only rows [start, stop) at rest, as a DTensor, and show it."""
        if self._whole_at_rest:
            return
        original = self.at_rest
        local = self._rows_of(local_part(original), start, stop)
        self.at_rest = nn.Parameter(compat.dtensor_of(local, self.spec), requires_grad=original.requires_grad)
        compat.keep_gradient_dtype(original, self.at_rest).__dict__.update(original.__dict__)
        self.at_rest._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
        original._replaced_by_shard = original.grad  # for those who still hold it, with the gradient that it had
        self.show(self.at_rest)

    def _rows_of(self, original: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return compat.own_storage(original.narrow(self.dim, start, stop - start))

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds at rest, as a plain tensor that shares its storage."""
        return self.at_rest._local_tensor if isinstance(self.at_rest, DTensor) else self.at_rest.data

    @property
    def version(self) -> int:
        """Changes whenever somebody writes to the parameter at rest, through the DTensor or its local tensor; 0 for
        inference tensors, which do not count.
        """
        try:
            inner = self.at_rest._local_tensor._version if isinstance(self.at_rest, DTensor) else 0
            return self.at_rest._version + inner
        except RuntimeError:  # to ask each beforehand would take ten times as long
            return 0

    def show(self, parameter: nn.Parameter) -> None:
        """Make every site show `parameter`, through `__setattr__` where the class has its own: it may keep it twice."""
        for parameters, attribute in self._entries:
            parameters[attribute] = parameter  # none of the checks of `nn.Module`
        for reference, attribute in self._setters:
            if (module := reference()) is not None:
                setattr(module, attribute, parameter)

    @property
    def unsharded(self) -> nn.Parameter:
        """The gathered form, once there has been a gather."""
        assert self.gathered is not None, f"{self.name} was not gathered"
        return self.gathered

    def show_gathered(self) -> None:
        """Make every site show the gathered form."""
        gathered = self.unsharded
        if gathered.requires_grad != self.at_rest.requires_grad:  # `torch.func` lets nobody set it
            gathered.requires_grad_(self.at_rest.requires_grad)
        self.show(gathered)

    def is_untouched(self) -> bool:
        """Whether nobody has replaced the parameter or its shard since `settle`; False also where nothing tells."""
        shown = not self._setters and all(names.get(attribute) is self.at_rest for names, attribute in self._entries)
        if self._held is None or not shown:
            return False
        local = self.at_rest._local_tensor
        if local is not self._held or compat.address_of(local) != self._address:
            return False
        return not hasattr(local, "fsdp_pre_all_gather")  # which it may be given at any time

    def find(self) -> None:
        """Take over the parameter that the sites show now: `to_empty`, `to` and assigned state dicts replace it."""
        for module, attribute in self.sites():
            if attribute not in module._parameters:
                raise RuntimeError(
                    f"{type(module).__name__} has no parameter {attribute!r} any more, which was sharded;"
                    " parametrize it (or remove its weight norm, or its parametrization) first, then shard"
                )
            if (found := module._parameters[attribute]) is not self.at_rest:
                if self.spec is not None and not isinstance(found, DTensor):
                    raise RuntimeError(
                        f"parameter {attribute!r} of {type(module).__name__}, which was sharded, was replaced by a"
                        " plain tensor; replace it before fully_shard, or by a DTensor with its mesh and placements"
                    )
                self._note_replacement_by(found)
                self.at_rest = compat.keep_gradient_dtype(self.at_rest, found)
            self.dtype, self.spec = self.at_rest.dtype, getattr(self.at_rest, "_spec", None)
            break

    def _note_replacement_by(self, new: torch.Tensor) -> None:
        """Mark the parameter at rest with its gradient, for an optimizer that still holds it; `new` is no such one."""
        ShardedParam.replacements += 1
        self.at_rest._replaced_at_rest = self.at_rest.grad
        new.__dict__.pop("_replaced_at_rest", None)

    def settled(self) -> bool:
        """Whether the shard at rest is where its unit expects it."""
        local = self.local
        return self._address == compat.address_of(local) if local.numel() else True

    def settle(self, place: torch.Tensor) -> None:
        """Move the shard at rest into `place`, a view of the unit's buffer, keeping the parameter object."""
        local, place = self.local, place.view(self._own_order(place.shape))
        if compat.address_of(local) != compat.address_of(place) or local.device != place.device:
            place.copy_(local)
        held = compat.own_storage(place)
        if isinstance(self.at_rest, DTensor):
            if self.at_rest.device != held.device:  # a DTensor has a device too, which must be that of its gradient
                self.at_rest.data = compat.dtensor_of(held, self.at_rest._spec)
            self.at_rest._local_tensor = self._held = held
        else:
            self.at_rest.data = held
        self._address = compat.address_of(place) if place.numel() else 0

    def back(self, whole: torch.Tensor, offset: int, dtype: torch.dtype) -> None:
        """Put the gathered form over the memory of `whole` (bytes), `offset` from its start."""
        value = _alias(whole, offset // dtype.itemsize, self._own_order(self.shape), dtype)
        gathered = self.as_gathered(wrapped(value, self.whole_spec))
        self.gathered = compat.keep_gradient_dtype(self.at_rest, gathered)

    def as_gathered(self, value: torch.Tensor) -> nn.Parameter:
        """The parameter that modules show while `value`, its whole, is there; with the hooks that autograd calls."""
        trains = value.is_floating_point() or value.is_complex()
        gathered = nn.Parameter(value, requires_grad=trains)
        if trains:  # hooks stay, also where the parameter is frozen now and trained later
            self._hooks_of_whole.put_on(gathered, self.dtype)
            told = weakref.ref(self)  # the hooks belong to autograd, where no collector sees a cycle
            gathered.register_post_accumulate_grad_hook(lambda _: _tell_of_gradient(told()))
        gathered._shown_during_step = True  # for optimizers that are given it by mistake
        return gathered.requires_grad_(self.at_rest.requires_grad)

    def join(self) -> None:
        """Put the shards of all ranks, which a gather left end to end, in the parameter's own order; rows are already.

        It writes through an alias: autograd may have saved the gathered form, whose version must not change.
        """
        if not self.dim or (ranks := self.axes.shard_ranks) == 1:
            return
        value, rows, chunk = local_part(self.unsharded), self.shape[0], -(-self.shape[0] // ranks)
        each, begin = chunk * self.shape[1:].numel(), value.storage_offset()
        parts = [
            _alias(value, begin + rank * each, self._own_order((stop - start, *self.shape[1:])))
            for rank in range(ranks)
            if (start := min(rank * chunk, rows)) < (stop := min(rank * chunk + chunk, rows))
        ]
        self.write(torch.cat(parts, self.dim))

    def write(self, whole: torch.Tensor) -> None:
        """Give the gathered form the values of `whole`."""
        value = local_part(self.unsharded)
        _alias(value, value.storage_offset(), value.shape).copy_(whole)

    def _own_order(self, rows_first: Sequence[int]) -> tuple[int, ...]:
        """A shape with the dimension that is cut first, in the parameter's own order."""
        first, *others = rows_first
        return (*others[: self.dim], first, *others[self.dim :])

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of the gradient that a backward leaves, or would leave."""
        held = self.gathered if self.unsharded_gradient is None else self.unsharded_gradient
        return self.dtype if held is None else held.dtype

    def take_gradient(self, accumulate_in: torch.dtype | None) -> None:
        """Move the gradient that autograd left on the gathered form to `unsharded_gradient`, or add it to that."""
        gathered = self.gathered
        if gathered is None or (gradient := gathered.grad) is None:
            return
        gathered.grad = None
        if gradient.layout is not torch.strided:  # of an embedding with `sparse=True`: other ranks have other rows
            gradient = gradient.to_dense()
        gradient = self.rows_first(local_gradient(gradient, self.whole_spec, self.axes))
        if self.unsharded_gradient is None:
            as_it_is = accumulate_in is None or gradient.is_complex()
            self.unsharded_gradient = gradient if as_it_is else gradient.to(accumulate_in)
        else:
            self.unsharded_gradient.add_(gradient)

    @property
    def reads_gradient_at_once(self) -> bool:
        """Whether `give_gradient` adds to a gradient that is there, or calls hooks."""
        at_rest = self.at_rest
        return at_rest.grad is not None or bool(at_rest._backward_hooks or at_rest._post_accumulate_grad_hooks)

    def give_gradient(self, local: torch.Tensor) -> None:
        """Add `local`, this rank's part of the reduced gradient, to what the optimizer will read."""
        if self.at_rest._backward_hooks:
            reduced = local if self.spec is None else compat.dtensor_of(local, self.spec)
            local = compat.local_of(apply_hooks(self.at_rest._backward_hooks, reduced))
        if (held := self.at_rest.grad) is not None:
            compat.local_of(held).add_(local)
        else:
            self.at_rest.grad = local if self.spec is None else compat.dtensor_of(local, self.spec)
        for hook in list((self.at_rest._post_accumulate_grad_hooks or {}).values()):
            hook(self.at_rest)

    def zero_gradient(self, set_to_none: bool) -> None:
        """Reset the gradient that the optimizer would read."""
        if set_to_none:
            self.at_rest.grad = None
        elif self.at_rest.grad is not None:
            with torch.no_grad():
                self.at_rest.grad.zero_()

    def sites(self) -> Iterator[tuple[nn.Module, str]]:
        """The (module, attribute) pairs that show it, of modules that are alive."""
        for reference, attribute in self._sites:
            module = reference()
            if module is not None:
                yield module, attribute


def _tell_of_gradient(param: ShardedParam | None) -> None:
    if param is not None and param.on_gradient is not None:
        param.on_gradient()


def _alias(like: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Elements of the storage of `like`, from `offset` on, with a version counter of their own."""
    empty = torch.empty(0, dtype=dtype or like.dtype, device=like.device)
    return empty.set_(like.untyped_storage(), offset, tuple(shape))
