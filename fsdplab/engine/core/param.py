"""One parameter in its two forms, and which of them the modules show.

At rest it is what the optimizer updates: a DTensor shard (or, where the strategy keeps it whole for the optimizer, the
parameter itself). Unsharded it is what a forward reads: one `nn.Parameter` for the whole life of the model, over
storage that comes and goes, because autograd saves aliases of it that must be valid again in the backward.

Anybody may put another parameter, or other memory, in place of what rests (`load_state_dict(assign=True)`,
`functional_call`, `swap_tensors`). What was replaced belongs to whoever holds it: its memory is not written to again.
What came in its place stays in its own memory while others hold that too (`settle`, `stay`).

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
        self._shown = original  # by the sites, where nobody has put another parameter there
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
        self._held: torch.Tensor | None = None  # the local tensor of a DTensor, since `settle` or `stay`
        self._wrapper = 0  # the storage of that DTensor itself, which `.data =` replaces
        self._address = 0  # address of the shard at rest; 0: not known yet, or nothing to hold
        self._home = 0  # address of its place in the buffer of its unit; 0: it was never there
        self._given: compat.StorageWeakRef | None = None  # the storage of what was put there last

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

    def show(self, parameter: nn.Parameter) -> None:
        """Make every site show `parameter`, through `__setattr__` where the class has its own: it may keep it twice. A
        site into which somebody else has put a parameter keeps that one, until `find` takes it over.
        """
        for parameters, attribute in self._entries:
            if parameters.get(attribute) is self._shown:
                parameters[attribute] = parameter  # none of the checks of `nn.Module`
        for reference, attribute in self._setters:
            module = reference()
            if module is not None and module._parameters.get(attribute) is self._shown:
                setattr(module, attribute, parameter)
        self._shown = parameter

    @property
    def is_shown(self) -> bool:
        """Whether every site shows what it was made to show last: nobody has put another parameter there."""
        return all(module._parameters.get(attribute) is self._shown for module, attribute in self.sites())

    @property
    def unsharded(self) -> nn.Parameter:
        """The gathered form, once there has been a gather."""
        assert self.gathered is not None, f"{self.name} was not gathered"
        return self.gathered

    def check_memory(self, storage: int) -> None:
        """Raise where the gathered form no longer lies in `storage` (an id), the memory that was gathered into."""
        if compat.storage_id(compat.local_of(self.unsharded)) != storage:
            raise RuntimeError(
                f"the memory of the unsharded parameter {self.name!r} was replaced (by .data = or swap_tensors), so it"
                " would not be gathered any more; reshard the module and write to its sharded parameter with copy_"
            )

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
        # the methods may be given to it at any time
        return self.keeps_shard() and not hasattr(self._held, "fsdp_pre_all_gather")

    def keeps_shard(self) -> bool:
        """Whether the parameter at rest holds the same memory as when its unit took it over."""
        if not isinstance(self.at_rest, DTensor):
            return self.settled()
        local = self.at_rest._local_tensor
        if local is not self._held or compat.address_of(local) != self._address:
            return False
        return compat.storage_id(self.at_rest) == self._wrapper

    def differs(self, start: int, stop: int) -> bool | torch.Tensor:
        """Whether rows [start, stop), which this rank has at rest, have other values there than in the gathered form;
        a tensor where only the device knows.
        """
        gathered = local_part(self.unsharded).narrow(self.dim, start, stop - start)
        return compat.differ(gathered, self.local.to(gathered.device, gathered.dtype))

    def find(self) -> None:
        """Take over the parameter that the sites show now: `to_empty`, `to` and assigned state dicts replace it."""
        places = list(self.sites())
        shown = [self._shown_at(module, attribute) for module, attribute in places]
        if not shown:
            return
        found = shown[0]
        if any(other is not found for other in shown):
            self._tie_again(places, shown)
        if found is not self.at_rest:
            self._check_replacement(found, *places[0])
            self._note_replacement_by(found)
            self.at_rest = compat.keep_gradient_dtype(self.at_rest, found)
        elif isinstance(found, DTensor) and found._local_tensor is self._held:
            self._check_wrapper(found)
        self._shown = found
        self.dtype, self.spec = self.at_rest.dtype, getattr(self.at_rest, "_spec", None)

    def _shown_at(self, module: nn.Module, attribute: str) -> nn.Parameter:
        """The parameter in one place, as it is at rest."""
        if attribute not in module._parameters:
            raise RuntimeError(
                f"{type(module).__name__} has no parameter {attribute!r} any more, which was sharded;"
                " parametrize it (or remove its weight norm, or its parametrization) first, then shard"
            )
        return module._parameters[attribute]

    def _tie_again(self, places: Sequence[tuple[nn.Module, str]], shown: Sequence[nn.Parameter]) -> None:
        """Show one parameter in all places again where each got one of its own with the same values, as from a state
        dict that has all names; raise where the values differ.
        """
        found = shown[0]
        for (module, attribute), other in zip(places, shown):
            if not _are_alike(other, found):
                raise RuntimeError(
                    f"parameter {attribute!r} of {type(module).__name__} is tied to {places[0][1]!r} of"
                    f" {type(places[0][0]).__name__}, and one of the two was replaced by other values; put the same"
                    " parameter into both places, or untie them before fully_shard"
                )
        for module, attribute in places:
            module._parameters[attribute] = found

    def _check_replacement(self, found: torch.Tensor, module: nn.Module, attribute: str) -> None:
        """Raise where `found`, which was put in place of the shards, cannot be trained in their place."""
        what = f"parameter {attribute!r} of {type(module).__name__}, which was sharded, was replaced by"
        if self.spec is not None and not isinstance(found, DTensor):
            raise RuntimeError(
                f"{what} a plain tensor; replace it before fully_shard, or by a DTensor with its mesh and placements"
            )
        if self.spec is not None and not _same_cut(found._spec, self.spec):
            raise RuntimeError(
                f"{what} a DTensor of shape {tuple(found.shape)} and placements {found._spec.placements} on"
                f" {found._spec.mesh}; expected shape {tuple(self.spec.shape)} and {self.spec.placements} on"
                f" {self.spec.mesh}: make it from the parameter that it replaces"
            )
        if found.shape != self.at_rest.shape:
            raise RuntimeError(
                f"{what} one of shape {tuple(found.shape)}; expected {tuple(self.at_rest.shape)}, as it was sharded"
            )
        if not found.is_leaf:
            raise RuntimeError(
                f"{what} the result of a computation that autograd has recorded, into which no gradient would flow:"
                " detach it (and require its gradient, if that is wanted)"
            )

    def _check_wrapper(self, found: torch.Tensor) -> None:
        """Raise where `.data` of a DTensor was set, which leaves its local tensor, the values, as it was."""
        if compat.storage_id(found) != self._wrapper:
            raise RuntimeError(
                f"the .data of parameter {self.name!r} was set, which changes nothing in a sharded parameter (a DTensor"
                " keeps its local tensor); write with parameter.copy_(value) under torch.no_grad()"
            )

    def _note_replacement_by(self, new: torch.Tensor) -> None:
        """Mark the parameter at rest with its gradient, for an optimizer that still holds it; `new` is no such one."""
        ShardedParam.replacements += 1
        self.at_rest._replaced_at_rest = self.at_rest.grad
        new.__dict__.pop("_replaced_at_rest", None)

    def settled(self) -> bool:
        """Whether the shard at rest is where its unit expects it."""
        local = self.local
        return self._address == compat.address_of(local) if local.numel() else True

    # ---- where the shard at rest lies

    def may_move(self) -> bool:
        """Whether nobody else holds the memory of the shard at rest, so that it may be moved into a buffer."""
        self._held = None  # of those who hold it, this one does not count
        if self.local.numel() == 0 or compat.is_fake(self.local):
            return True
        return compat.is_held_once(self.at_rest)

    def has_place(self) -> bool:
        """Whether the shard at rest lies in the buffer of its unit, or may be moved there: nobody holds what was there
        before.
        """
        self._held = None  # else what it was given last would never expire
        if self._home and compat.address_of(self.local) == self._home:
            return True
        return (self._given is None or self._given.expired()) and self.may_move()

    def forget_place(self) -> None:
        """Its unit has another buffer now, or none yet."""
        self._home, self._given = 0, None

    def settle(self, place: torch.Tensor) -> None:
        """Move the shard at rest into `place`, a view of the unit's buffer, keeping the parameter object."""
        place = place.view(self._own_order(place.shape))
        local = self.local
        if compat.address_of(local) != compat.address_of(place) or local.device != place.device:
            place.copy_(local)
            local = compat.own_storage(place)
        self._hold(local)
        self._home = self._address
        self._given = None if compat.is_fake(local) else compat.StorageWeakRef(local.untyped_storage())

    def stay(self, device: torch.device) -> None:
        """Leave the shard at rest in its own memory, which others hold too; copy it if that is not on `device`."""
        self._hold(self.local.to(device))

    def _hold(self, local: torch.Tensor) -> None:
        """Have the parameter at rest hold `local`."""
        if isinstance(self.at_rest, DTensor):
            if self.at_rest.device != local.device:  # a DTensor has a device too, which must be that of its gradient
                self.at_rest.data = compat.dtensor_of(local, self.at_rest._spec)
            self.at_rest._local_tensor = self._held = local
            self._wrapper = compat.storage_id(self.at_rest)
        elif compat.address_of(self.at_rest) != compat.address_of(local) or self.at_rest.device != local.device:
            self.at_rest.data = local
        self._address = compat.address_of(local) if local.numel() else 0

    def back(self, whole: torch.Tensor, offset: int, dtype: torch.dtype) -> None:
        """Put the gathered form over the memory of `whole` (bytes), `offset` from its start. The parameter object stays
        where its dtype does: autograd may have recorded it, and will leave a gradient on it.
        """
        value = _alias(whole, offset // dtype.itemsize, self._own_order(self.shape), dtype)
        if self.gathered is not None and self.gathered.dtype == dtype and self.whole_spec is None:
            self.gathered.data = value
            return
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
        if gathered.requires_grad is not self.at_rest.requires_grad:  # functorch allows no call of requires_grad_
            gathered.requires_grad_(self.at_rest.requires_grad)
        return gathered

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


def _same_cut(spec: DTensorSpec, expected: DTensorSpec) -> bool:
    """Whether two DTensors have the same shape, and are cut alike over the same ranks."""
    return (spec.shape, spec.placements, spec.mesh) == (expected.shape, expected.placements, expected.mesh)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two parameters hold the same values, on this rank."""
    first, second = compat.local_of(one), compat.local_of(other)
    if one is other or first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return one is other
    return compat.address_of(first) == compat.address_of(second) or torch.equal(first, second)


def _tell_of_gradient(param: ShardedParam | None) -> None:
    if param is not None and param.on_gradient is not None:
        param.on_gradient()


def _alias(like: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Elements of the storage of `like`, from `offset` on, with a version counter of their own."""
    empty = torch.empty(0, dtype=dtype or like.dtype, device=like.device)
    return empty.set_(like.untyped_storage(), offset, tuple(shape))
