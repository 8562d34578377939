"""Holds one parameter in its two forms, and makes the modules show one of them.

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
from typing import Any

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
        self.name = name
        self.axes = axes
        self.dim = dim or 0
        self._whole_at_rest = dim is None
        # What it is: whole and at rest, as DTensors (None: plain), and the local part of the whole.
        self.whole_spec: DTensorSpec | None = getattr(original, "_spec", None)
        self.spec = self.whole_spec if dim is None else spec_at_rest(name, original, axes, dim)
        self.shape = self.rows_first(local_part(original)).shape  # [rows, *others] of the local part, rows first
        self.dtype = original.dtype
        # The two forms, and their gradients.
        self.at_rest = original
        self.gathered: nn.Parameter | None = None
        self._shown = original  # by the sites, where nobody has put another parameter there
        self.unsharded_gradient: torch.Tensor | None = None  # [rows, *others], rows first
        self.to_reduce = False  # whether it was trained when gradients were collected: then it is on all ranks
        self.on_gradient: Callable[[], None] | None = None  # called when autograd leaves a gradient on `gathered`
        self._hooks_of_whole = HooksOfWhole.of(original, move=self._whole_at_rest)
        # Where it is shown: by modules that store it as `nn.Module` does, and by those with their own `__setattr__`.
        self._sites = [(weakref.ref(module), attribute) for module, attribute in sites]
        self._entries: list[tuple[dict[str, Any], str]] = []
        self._setters: list[tuple[weakref.ref[nn.Module], str]] = []
        for module, attribute in sites:
            if type(module).__setattr__ is nn.Module.__setattr__:
                self._entries.append((module._parameters, attribute))
            else:
                self._setters.append((weakref.ref(module), attribute))
        # Where its shard lies, and whether that is where its unit left it.
        self._held: torch.Tensor | None = None  # the local tensor of a DTensor, since `settle` or `stay`
        self._wrapper = 0  # the storage of that DTensor itself, which `.data =` replaces
        self._address = 0  # address of the shard at rest; 0: not known yet, or nothing to hold
        self._home = 0  # address of its place in the buffer of its unit; 0: it was never there
        self._given: compat.StorageWeakRef | None = None  # the storage of what was put there last

    def rows_first(
        self,
        tensor: torch.Tensor,  # any shape, in the parameter's own order
    ) -> torch.Tensor:
        """Return `tensor`, in the parameter's own order, with the dimension that is cut first."""
        if self.dim == 0:
            return tensor
        return tensor.movedim(self.dim, 0)

    def natural(
        self,
        rows: torch.Tensor,  # [rows, *others], the dimension that is cut first
    ) -> torch.Tensor:
        """Return `rows`, [rows, *others], with their dimensions in the parameter's own order."""
        if self.dim == 0:
            return rows
        return rows.movedim(0, self.dim)

    def cut(self, start: int, stop: int) -> None:
        """Leave only rows [start, stop) at rest, as a DTensor, and show it."""
        if self._whole_at_rest:
            return
        original = self.at_rest
        local = self._rows_of(local_part(original), start, stop)
        self.at_rest = nn.Parameter(compat.dtensor_of(local, self.spec), requires_grad=original.requires_grad)
        # What users have put on the parameter goes with it: attributes, hooks.
        compat.keep_gradient_dtype(original, self.at_rest).__dict__.update(original.__dict__)
        self.at_rest._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
        original._replaced_by_shard = original.grad  # for those who still hold it, with the gradient that it had
        self.show(self.at_rest)

    def _rows_of(
        self,
        original: torch.Tensor,  # any shape, in the parameter's own order: the local part before sharding
        start: int,
        stop: int,
    ) -> torch.Tensor:
        """Return rows [start, stop) of `original` as the shard at rest."""
        return compat.own_storage(original.narrow(self.dim, start, stop - start))

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds at rest, as a plain tensor that shares its storage."""
        if isinstance(self.at_rest, DTensor):
            return self.at_rest._local_tensor
        return self.at_rest.data

    def show(self, parameter: nn.Parameter) -> None:
        """Make every site show `parameter`.

        A module with a `__setattr__` of its own is asked, since it may keep the parameter twice. A site into which
        somebody else has put a parameter keeps that one, until `find` takes it over.
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
        if self._held is None or self._setters:  # a module with its own `__setattr__` may keep it elsewhere too
            return False
        for parameters, attribute in self._entries:
            if parameters.get(attribute) is not self.at_rest:
                return False
        # Somebody may give these methods to the shard at any time; it is then sent in another form.
        return self.keeps_shard() and not hasattr(self._held, "fsdp_pre_all_gather")

    def keeps_shard(self) -> bool:
        """Whether the parameter at rest holds the same memory as when its unit took it over."""
        if not isinstance(self.at_rest, DTensor):
            return self.settled()
        # Three ways to put other values there: another local tensor, other memory under it, another `.data`.
        local = self.at_rest._local_tensor
        if local is not self._held or compat.address_of(local) != self._address:
            return False
        return compat.storage_id(self.at_rest) == self._wrapper

    def differs(self, start: int, stop: int) -> bool | torch.Tensor:
        """Compare rows [start, stop), which this rank has at rest, with the same rows of the gathered form.

        Returns a tensor where only the device knows the result.
        """
        gathered = local_part(self.unsharded).narrow(self.dim, start, stop - start)
        # Cast as a gather casts: what bfloat16 does not show makes no difference to a forward.
        at_rest = self.local.to(gathered.device, gathered.dtype)
        return compat.differ(gathered, at_rest)

    def find(self) -> None:
        """Take over the parameter that the sites show now: `to_empty`, `to` and assigned state dicts replace it."""
        places = list(self.sites())
        shown = [self._shown_at(module, attribute) for module, attribute in places]
        if not shown:  # all modules that showed it are gone
            return
        current = shown[0]
        if any(other is not current for other in shown):
            self._tie_again(places, shown)
        if current is not self.at_rest:
            self._check_replacement(current, *places[0])
            self._note_replacement_by(current)
            self.at_rest = compat.keep_gradient_dtype(self.at_rest, current)
        # The same parameter with the same local tensor: all that may have been set is its `.data`.
        elif isinstance(current, DTensor) and current._local_tensor is self._held:
            self._check_wrapper(current)
        self._shown = current
        self.dtype = self.at_rest.dtype
        self.spec = getattr(self.at_rest, "_spec", None)

    def _shown_at(self, module: nn.Module, attribute: str) -> nn.Parameter:
        """Return the parameter that one site shows; raise where the site has none any more."""
        if attribute not in module._parameters:
            raise RuntimeError(
                f"{type(module).__name__} has no parameter {attribute!r} any more, which was sharded;"
                " parametrize it (or remove its weight norm, or its parametrization) first, then shard"
            )
        return module._parameters[attribute]

    def _tie_again(self, places: Sequence[tuple[nn.Module, str]], shown: Sequence[nn.Parameter]) -> None:
        """Show one parameter in all places again; raise where the places show different values.

        A state dict that has all names gives each place a parameter of its own, with the same values.
        """
        first_module, first_attribute = places[0]
        for (module, attribute), other in zip(places, shown):
            if not _are_alike(other, shown[0]):
                raise RuntimeError(
                    f"parameter {attribute!r} of {type(module).__name__} is tied to {first_attribute!r} of"
                    f" {type(first_module).__name__}, and one of the two was replaced by other values; put the same"
                    " parameter into both places, or untie them before fully_shard"
                )
        for module, attribute in places:
            module._parameters[attribute] = shown[0]

    def _check_replacement(
        self,
        new: torch.Tensor,  # any shape: what `module` shows now
        module: nn.Module,
        attribute: str,
    ) -> None:
        """Raise where `new`, which was put in place of the shards, cannot be trained in their place."""
        what = f"parameter {attribute!r} of {type(module).__name__}, which was sharded, was replaced by"
        if self.spec is not None and not isinstance(new, DTensor):
            raise RuntimeError(
                f"{what} a plain tensor; replace it before fully_shard, or by a DTensor with its mesh and placements"
            )
        if self.spec is not None and not _same_cut(new._spec, self.spec):
            raise RuntimeError(
                f"{what} a DTensor of shape {tuple(new.shape)} and placements {new._spec.placements} on"
                f" {new._spec.mesh}; expected shape {tuple(self.spec.shape)} and {self.spec.placements} on"
                f" {self.spec.mesh}: make it from the parameter that it replaces"
            )
        if new.shape != self.at_rest.shape:
            raise RuntimeError(
                f"{what} one of shape {tuple(new.shape)}; expected {tuple(self.at_rest.shape)}, as it was sharded"
            )
        if not new.is_leaf:
            raise RuntimeError(
                f"{what} the result of a computation that autograd has recorded, into which no gradient would flow:"
                " detach it (and require its gradient, if that is wanted)"
            )

    def _check_wrapper(
        self,
        at_rest: torch.Tensor,  # any shape, a DTensor
    ) -> None:
        """Raise where `.data` of a DTensor was set, which leaves its local tensor, the values, as it was."""
        if compat.storage_id(at_rest) != self._wrapper:
            raise RuntimeError(
                f"the .data of parameter {self.name!r} was set, which changes nothing in a sharded parameter (a DTensor"
                " keeps its local tensor); write with parameter.copy_(value) under torch.no_grad()"
            )

    def _note_replacement_by(
        self,
        new: torch.Tensor,  # any shape: what the sites show now
    ) -> None:
        """Mark the parameter that `new` replaces, with its gradient, for an optimizer that still holds it."""
        ShardedParam.replacements += 1
        self.at_rest._replaced_at_rest = self.at_rest.grad
        new.__dict__.pop("_replaced_at_rest", None)

    def settled(self) -> bool:
        """Whether the shard at rest is where its unit expects it."""
        local = self.local
        if local.numel() == 0:
            return True
        return self._address == compat.address_of(local)

    # ---- where the shard at rest lies

    def may_move(self) -> bool:
        """Whether nobody else holds the memory of the shard at rest, so that it may be moved into a buffer."""
        self._held = None  # of those who hold it, this one does not count
        if self.local.numel() == 0 or compat.is_fake(self.local):
            return True
        return compat.is_held_once(self.at_rest)

    def has_place(self) -> bool:
        """Whether the shard at rest lies in the buffer of its unit, or may be moved there.

        It may be moved where nobody else holds it, and nobody holds what was in that place before.
        """
        self._held = None  # else what it was given last would never expire
        if self._home and compat.address_of(self.local) == self._home:
            return True
        return (self._given is None or self._given.expired()) and self.may_move()

    def forget_place(self) -> None:
        """Forget where the shard lay: its unit has another buffer now, or none yet."""
        self._home, self._given = 0, None

    def settle(
        self,
        place: torch.Tensor,  # [rows of this rank, *others], rows first: a view of the unit's buffer
    ) -> None:
        """Move the shard at rest into `place`, a view of the unit's buffer, keeping the parameter object."""
        place = place.view(self._own_order(place.shape))
        local = self.local
        if compat.address_of(local) != compat.address_of(place) or local.device != place.device:
            place.copy_(local)
            local = compat.own_storage(place)
        self._hold(local)
        self._home = self._address
        self._given = None
        if not compat.is_fake(local):
            self._given = compat.StorageWeakRef(local.untyped_storage())

    def stay(self, device: torch.device) -> None:
        """Leave the shard at rest in its own memory, which others hold too; copy it if that is not on `device`."""
        self._hold(self.local.to(device))

    def _hold(
        self,
        local: torch.Tensor,  # any shape, in the parameter's own order: this rank's rows
    ) -> None:
        """Have the parameter at rest hold `local`, and note where that lies."""
        at_rest = self.at_rest
        moved = at_rest.device != local.device
        if isinstance(at_rest, DTensor):
            if moved:  # a DTensor has a device too, which must be that of its gradient
                at_rest.data = compat.dtensor_of(local, at_rest._spec)
            at_rest._local_tensor = self._held = local
            self._wrapper = compat.storage_id(at_rest)
        elif moved or compat.address_of(at_rest) != compat.address_of(local):
            at_rest.data = local
        self._address = 0
        if local.numel():
            self._address = compat.address_of(local)

    # ---- the gathered form

    def back(
        self,
        whole: torch.Tensor,  # [whole_bytes] (uint8), all rows of every parameter
        offset: int,  # bytes from the start of `whole`
        dtype: torch.dtype,
    ) -> None:
        """Put the gathered form over the memory of `whole`, [bytes], `offset` from its start.

        The parameter object stays while its dtype does: autograd may have recorded it, and will leave a gradient on it.
        """
        own_shape = self._own_order(self.shape)
        value = _alias(whole, offset // dtype.itemsize, own_shape, dtype)
        if self.gathered is not None and self.gathered.dtype == dtype and self.whole_spec is None:
            self.gathered.data = value
            return
        gathered = self.as_gathered(wrapped(value, self.whole_spec))
        self.gathered = compat.keep_gradient_dtype(self.at_rest, gathered)

    def as_gathered(
        self,
        value: torch.Tensor,  # any shape, in the parameter's own order: the whole, or its DTensor
    ) -> nn.Parameter:
        """Return the parameter that modules show while `value`, the whole, is there, with its hooks."""
        trains = value.is_floating_point() or value.is_complex()
        gathered = nn.Parameter(value, requires_grad=trains)
        if trains:  # hooks stay, also where the parameter is frozen now and trained later
            self._hooks_of_whole.put_on(gathered, self.dtype)
            reference = weakref.ref(self)  # the hooks belong to autograd, where no collector sees a cycle
            gathered.register_post_accumulate_grad_hook(lambda _: _report_gradient(reference()))
        gathered._shown_during_step = True  # for optimizers that are given it by mistake
        if gathered.requires_grad is not self.at_rest.requires_grad:  # functorch allows no call of requires_grad_
            gathered.requires_grad_(self.at_rest.requires_grad)
        return gathered

    def join(self) -> None:
        """Put the shards of all ranks, which a gather left end to end, in the parameter's own order.

        A parameter that is cut along its first dimension is in that order already.
        """
        ranks = self.axes.shard_ranks
        if self.dim == 0 or ranks == 1:
            return
        value = local_part(self.unsharded)
        rows, *others = self.shape
        chunk = -(-rows // ranks)  # rows that a shard reserves; the last ranks may hold fewer, or none
        chunk_elements = chunk * self.shape[1:].numel()
        # In `value` each rank's part is contiguous in the parameter's own order: (6, 8) that is cut along dimension 1
        # over 2 ranks is two pieces of shape (6, 4).
        parts = []
        for rank in range(ranks):
            held = min(chunk, rows - rank * chunk)
            if held > 0:
                offset = value.storage_offset() + rank * chunk_elements
                parts.append(_alias(value, offset, self._own_order((held, *others))))
        self.write(torch.cat(parts, self.dim))

    def write(
        self,
        whole: torch.Tensor,  # any shape, in the parameter's own order
    ) -> None:
        """Give the gathered form the values of `whole`, in the parameter's own order.

        It writes through an alias: autograd may have saved the gathered form, whose version must not change.
        """
        value = local_part(self.unsharded)
        _alias(value, value.storage_offset(), value.shape).copy_(whole)

    def _own_order(self, rows_first: Sequence[int]) -> tuple[int, ...]:
        """Put a shape with the dimension that is cut first into the parameter's own order."""
        # (rows, a, b) of a parameter that is cut along dimension 1 is (a, rows, b) in its own order.
        first, *others = rows_first
        return (*others[: self.dim], first, *others[self.dim :])

    # ---- gradients

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of the gradient that a backward leaves, or would leave."""
        if self.unsharded_gradient is not None:
            return self.unsharded_gradient.dtype
        if self.gathered is not None:
            return self.gathered.dtype
        return self.dtype

    @property
    def is_trained(self) -> bool:
        """Whether a backward may leave a gradient. A user sets `requires_grad` of the form that the modules show, and
        may hold the other one: what either of them asks for is reduced.
        """
        if self.at_rest.requires_grad:
            return True
        return self.gathered is not None and self.gathered.requires_grad

    def take_gradient(self, accumulate_in: torch.dtype | None) -> None:
        """Move the gradient that autograd left on the gathered form to `unsharded_gradient`, or add it to that."""
        gathered = self.gathered
        if gathered is None or gathered.grad is None:
            return
        gradient = gathered.grad
        gathered.grad = None
        if gradient.layout is not torch.strided:  # of an embedding with `sparse=True`: other ranks have other rows
            gradient = gradient.to_dense()
        gradient = self.rows_first(local_gradient(gradient, self.whole_spec, self.axes))
        if self.unsharded_gradient is not None:
            # An earlier micro-batch has left one, in the dtype in which they are added up.
            self.unsharded_gradient.add_(gradient)
            return
        if accumulate_in is not None and not gradient.is_complex():
            gradient = gradient.to(accumulate_in)
        self.unsharded_gradient = gradient

    @property
    def reads_gradient_at_once(self) -> bool:
        """Whether `give_gradient` adds to a gradient that is there, or calls hooks."""
        at_rest = self.at_rest
        return at_rest.grad is not None or bool(at_rest._backward_hooks or at_rest._post_accumulate_grad_hooks)

    def give_gradient(
        self,
        local: torch.Tensor,  # any shape, in the parameter's own order: this rank's rows
    ) -> None:
        """Add `local`, this rank's part of the reduced gradient, to what the optimizer will read.

        Hooks on the parameter at rest are called as autograd would call them.
        """
        at_rest = self.at_rest
        if at_rest._backward_hooks:
            changed = apply_hooks(at_rest._backward_hooks, self._as_at_rest(local))
            local = compat.local_of(changed)
        held = at_rest.grad  # of an earlier step that was not zeroed, or of an earlier reduction of this one
        if held is not None:
            compat.local_of(held).add_(local)
        else:
            at_rest.grad = self._as_at_rest(local)
        if at_rest._post_accumulate_grad_hooks:
            for hook in list(at_rest._post_accumulate_grad_hooks.values()):
                hook(at_rest)

    def _as_at_rest(
        self,
        local: torch.Tensor,  # any shape, in the parameter's own order: this rank's rows
    ) -> torch.Tensor:
        """Return a part of the gradient as the parameter at rest has it: a DTensor, where that is one."""
        if self.spec is None:
            return local
        return compat.dtensor_of(local, self.spec)

    def zero_gradient(self, set_to_none: bool) -> None:
        """Reset the gradient that the optimizer would read."""
        if set_to_none:
            self.at_rest.grad = None
        elif self.at_rest.grad is not None:
            with torch.no_grad():
                self.at_rest.grad.zero_()

    def sites(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the (module, attribute) pairs that show it, of modules that are alive."""
        for reference, attribute in self._sites:
            module = reference()
            if module is not None:
                yield module, attribute


def _same_cut(
    spec: DTensorSpec,  # of what was put in place of the shards
    expected: DTensorSpec,  # of the shards
) -> bool:
    """Whether two DTensors have the same shape, and are cut alike over the same ranks."""
    return (spec.shape, spec.placements, spec.mesh) == (expected.shape, expected.placements, expected.mesh)


def _are_alike(
    one: torch.Tensor,  # any shape
    other: torch.Tensor,  # any shape
) -> bool:
    """Whether two parameters hold the same values, on this rank."""
    if one is other:
        return True
    first, second = compat.local_of(one), compat.local_of(other)
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    return compat.address_of(first) == compat.address_of(second) or torch.equal(first, second)


def _report_gradient(param: ShardedParam | None) -> None:
    """Call whoever waits for the gradient of `param`, if it still exists."""
    if param is not None and param.on_gradient is not None:
        param.on_gradient()


def _alias(
    like: torch.Tensor,  # any shape: its storage is what counts
    offset: int,  # elements of `dtype` before the alias
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return elements of the storage of `like`, from `offset` on, with a version counter of their own."""
    empty = torch.empty(0, dtype=dtype or like.dtype, device=like.device)
    return empty.set_(like.untyped_storage(), offset, tuple(shape))  # a view would share the version counter
