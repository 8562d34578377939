"""One parameter in its two forms, and which of them the modules show.

At rest it is what the optimizer updates: a DTensor slice (or, where the strategy keeps it whole for the optimizer, the
plain parameter). Gathered it is what a forward reads: one `nn.Parameter` for the whole life of the model, over storage
that comes and goes, because autograd saves aliases of it that must be valid again in the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from . import compat


class ShardedParam:
    """A parameter that a unit owns.

    `sites` are the (module, attribute) pairs that show it: more than one where it is tied. `spec` describes the DTensor
    at rest; None means that the parameter at rest is whole and plain.
    """

    def __init__(self, name: str, sites: list[tuple[nn.Module, str]], original: nn.Parameter, spec: DTensorSpec | None):
        self.name = name
        self.shape = original.shape
        self.dtype = original.dtype
        self.spec = spec
        self.at_rest = original
        self.gathered: nn.Parameter | None = None
        self.whole_gradient: torch.Tensor | None = None
        self._sites = [(weakref.ref(module), attribute) for module, attribute in sites]
        self._home = 0  # address of the slice inside its unit's buffer; 0: not there yet, or nothing to hold

    def cut(self, start: int, stop: int) -> None:
        """Leave only rows [start, stop) at rest, as a DTensor, and show it."""
        original = self.at_rest
        local = original.detach()[start:stop]
        self.at_rest = nn.Parameter(compat.dtensor_of(local, self.spec), requires_grad=original.requires_grad)
        self.at_rest.__dict__.update(original.__dict__)
        self.show(self.at_rest)

    @property
    def local(self) -> torch.Tensor:
        """The rows that this rank holds at rest, as a plain tensor that shares their storage."""
        return self.at_rest._local_tensor if isinstance(self.at_rest, DTensor) else self.at_rest.data

    def show(self, parameter: nn.Parameter) -> None:
        """Make every site show `parameter`."""
        for module, attribute in self._places():
            module._parameters[attribute] = parameter

    def find(self) -> None:
        """Take over the parameter that the sites show now: `to_empty`, `to` and assigned state dicts replace it."""
        for module, attribute in self._places():
            self.at_rest = module._parameters[attribute]
            self.dtype, self.spec = self.at_rest.dtype, getattr(self.at_rest, "_spec", None)
            return

    def settled(self) -> bool:
        """Whether the slice at rest is where its unit expects it."""
        local = self.local
        return self._home == local.data_ptr() if local.numel() else True

    def settle(self, home: torch.Tensor) -> None:
        """Move the slice at rest into `home`, a view of the unit's buffer, keeping the parameter object."""
        local = self.local
        if local.data_ptr() != home.data_ptr() or local.device != home.device:
            home.copy_(local)
        if isinstance(self.at_rest, DTensor):
            self.at_rest._local_tensor = home
        else:
            self.at_rest.data = home
        self._home = home.data_ptr() if home.numel() else 0

    def back(self, storage: torch.UntypedStorage, offset: int, dtype: torch.dtype) -> None:
        """Put the gathered form over `storage`, `offset` bytes from its start."""
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        contiguous = torch.empty(self.shape, device="meta").stride()
        value = empty.set_(storage, offset // dtype.itemsize, self.shape, contiguous)
        self.gathered = nn.Parameter(value, requires_grad=self.at_rest.requires_grad)

    def take_gradient(self, accumulate_in: torch.dtype | None) -> None:
        """Move the gradient that autograd left on the gathered form to `whole_gradient`, adding to what is there."""
        gradient = None if self.gathered is None else self.gathered.grad
        if gradient is None:
            return
        self.gathered.grad = None
        if self.whole_gradient is None:
            self.whole_gradient = gradient if accumulate_in is None else gradient.to(accumulate_in)
        else:
            self.whole_gradient.add_(gradient)

    def give_gradient(self, local: torch.Tensor) -> None:
        """Add `local`, this rank's rows of the reduced gradient, to what the optimizer will read."""
        local = local.to(self.dtype)
        if self.at_rest.grad is not None:
            held = self.at_rest.grad
            (held._local_tensor if isinstance(held, DTensor) else held).add_(local)
        else:
            self.at_rest.grad = local if self.spec is None else compat.dtensor_of(local, self.spec)
        for hook in (getattr(self.at_rest, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.at_rest)

    def _places(self) -> Iterator[tuple[nn.Module, str]]:
        for reference, attribute in self._sites:
            module = reference()
            if module is not None:
                yield module, attribute
