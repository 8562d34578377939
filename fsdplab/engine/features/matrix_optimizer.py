"""Steps sharded matrices by optimizers whose update needs a whole matrix: Muon, and others of its kind.

Muon orthogonalises the momentum of a whole matrix, of which sharding leaves a rank some rows. On DTensors PyTorch's
own optimizer gathers every product again, and all ranks compute the same. Here the element-wise parts of an update stay
on the shards, and each matrix has one owner that computes with the whole (`core/owners.py`):

    for each bucket of matrices:
        momentum on the shards -> all-to-all to the owners -> Newton-Schulz -> all-to-all back -> step on the shards

The next bucket is on its way to its owners while this one is computed. Owners as in ByteDance-Seed/VeOmni#973 and
microsoft/dion; sharding then divides the optimizer's work by the number of ranks instead of repeating it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import _muon
from torch.optim.optimizer import Optimizer

from fsdplab.engine import compat
from fsdplab.engine.core.owners import BUCKET_BYTES, Matrix, buckets_of, newton_schulz_flops
from fsdplab.engine.core.transport import Link
from fsdplab.engine.features.matrix_exchange import Arriving, Exchange

LinkOf = Callable[[dist.ProcessGroup, torch.device], Link]


@dataclass(frozen=True)
class _Place:
    """A matrix, or that of one expert of a stack."""

    parameter: nn.Parameter
    group: int  # the number of its group of parameters
    matrix: Matrix
    index: int | None = None  # the expert's place in what this rank holds of the stack; None for a plain matrix

    def of(
        self,
        tensor: torch.Tensor,  # of the parameter's shape, plain or a DTensor
    ) -> torch.Tensor:
        """Return this rank's part of the matrix in a tensor like the parameter; empty where it holds none."""
        local = compat.local_of(tensor)
        if self.index is None:
            return local
        # Of 4 experts on 2 ranks rank 1 holds the last two, with the indices 0 and 1; there expert 0 has the index -2.
        if 0 <= self.index < local.size(0):
            return local[self.index]
        return local.new_empty(0, self.matrix.shape[1])


@dataclass(frozen=True)
class _Bucket:
    """Matrices that travel together."""

    exchange: Exchange
    places: tuple[_Place, ...]


class MatrixOptimizer(Optimizer):
    """An optimizer of matrices, or stacks of them, that are sharded over ranks: subclasses say what an update is.

    `prepare` and `apply` are element-wise and see this rank's part of a matrix; `whole` sees all of it, on its owner
    alone. `states` names the element-wise state, zero at first, which is sharded as the parameter is. What `whole`
    returns has the shape and the dtype of what it was given. `rest` is an optimizer of other parameters that steps in
    this one's: one object for schedulers, scalers and checkpoints. `replicas` is the group whose ranks hold equal plain
    parameters (DDP, `no_shard`), which then share the work. Matrices travel together in a bucket, which is full once it
    has `bucket_bytes`, and a matrix for each rank.

    Raises `ValueError` for parameters that are no matrices, or are cut along two dimensions of a mesh.
    """

    states: ClassVar[tuple[str, ...]] = ()
    param_groups: list[dict[str, Any]]
    _rest: Optimizer | None = None
    _replicas: dist.ProcessGroup | None = None
    _bucket_bytes: int = BUCKET_BYTES
    _link_of: LinkOf | None = None
    _plan: tuple[tuple[Any, ...], list[_Bucket]] | None = None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        rest: Optimizer | None = None,
        replicas: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        Optimizer.__init__(self, params, defaults)  # not that of a class of torch's beside this one
        self._begin(rest, replicas, bucket_bytes)

    def _begin(self, rest: Optimizer | None, replicas: dist.ProcessGroup | None, bucket_bytes: int) -> None:
        """Check the parameters, and take over those of `rest`."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be 1 or more, got {bucket_bytes}")
        for group in self.param_groups:
            for parameter in group["params"]:
                _check(parameter)
        self._rest = rest
        self._replicas = replicas
        self._bucket_bytes = bucket_bytes
        if rest is None:
            return
        matrices = set(_parameters_of(self))
        both = [parameter for parameter in _parameters_of(rest) if parameter in matrices]
        if both:
            raise ValueError(f"{len(both)} parameters are in both optimizers; the first has shape {both[0].shape}")
        # The groups themselves, not copies: a scheduler that changes a learning rate changes it for both.
        self.param_groups = [*self.param_groups, *rest.param_groups]
        self.state.update(rest.state)

    # ---- what subclasses say

    @abstractmethod
    def prepare(
        self,
        gradient: torch.Tensor,  # [rows, columns] of this rank's part
        state: dict[str, torch.Tensor],  # [rows, columns] of this rank's part each
        group: dict[str, Any],
    ) -> torch.Tensor:
        """Return what to send to the owner, [rows, columns] of this rank's part; updates its state in place."""

    @abstractmethod
    def whole(
        self,
        matrix: torch.Tensor,  # [rows, columns] of the whole of what was prepared
        group: dict[str, Any],
    ) -> torch.Tensor:
        """Return the update of the whole matrix, of the shape and dtype of `matrix`; called on the owner alone."""

    @abstractmethod
    def apply(
        self,
        parameter: torch.Tensor,  # [rows, columns] of this rank's part
        update: torch.Tensor,  # [rows, columns] of this rank's part
        shape: tuple[int, int],  # (rows, columns) of the whole
        group: dict[str, Any],
    ) -> None:
        """Step on this rank's part of a parameter, in place."""

    def sent_dtype(
        self,
        gradient: torch.Tensor,  # any shape: what this rank has of a gradient
    ) -> torch.dtype:
        """Return the dtype of what `prepare` returns."""
        return gradient.dtype

    def cost(self, shape: tuple[int, int], group: dict[str, Any]) -> float:
        """Return what `whole` costs for a matrix of this shape, in any unit: owners are balanced by it."""
        return newton_schulz_flops(shape)

    # ---- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of all parameters with a gradient, on every rank; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices()
        if self._rest is not None:
            # Since the last step a state dict may have been loaded, which makes new groups and a new state here.
            self._rest.state = self.state
            self._rest.param_groups = [group for group in self.param_groups if self._is_of_rest(group)]
            self._rest.step()
        return loss

    def _step_matrices(self) -> None:
        """Step on the buckets in turn: while one is computed, the next is sent and the last comes back."""
        buckets = self._buckets()
        # Of three buckets: send 1, send 2, compute 1, return 1, send 3, compute 2, apply 1, return 2, and so on.
        to_compute: list[Arriving] = [self._send(bucket) for bucket in buckets[:1]]
        to_apply: list[tuple[_Bucket, Arriving]] = []
        for number, bucket in enumerate(buckets):
            to_compute += [self._send(following) for following in buckets[number + 1 : number + 2]]
            results = self._compute(bucket, to_compute.pop(0))
            self._apply(to_apply)
            to_apply = [(bucket, bucket.exchange.back(results))]
        self._apply(to_apply)

    def _send(self, bucket: _Bucket) -> Arriving:
        """Begin to send this rank's parts of the matrices of `bucket` to their owners."""
        return bucket.exchange.to_owners(self._prepared(place) for place in bucket.places)

    def _prepared(self, place: _Place) -> torch.Tensor:
        """Return what this rank sends of one matrix."""
        gradient = place.of(_gradient(place.parameter))
        state = {name: place.of(self._state(place.parameter, name)) for name in self.states}
        return self.prepare(gradient, state, self.param_groups[place.group])

    def _compute(self, bucket: _Bucket, arriving: Arriving) -> list[torch.Tensor]:
        """Return the updates of the matrices of `bucket` that this rank owns, once their parts are there."""
        exchange = bucket.exchange
        owned = [place for place, owner in zip(bucket.places, exchange.owners) if owner == exchange.rank]
        results = []
        for place, matrix in zip(owned, exchange.assemble(arriving)):
            shape, dtype = matrix.shape, matrix.dtype
            result = self.whole(matrix, self.param_groups[place.group])
            if result.shape != shape or result.dtype != dtype:
                raise RuntimeError(
                    f"{type(self).__name__}.whole returned {list(result.shape)} {result.dtype} for a matrix"
                    f" {list(shape)} {dtype}; return the same shape and dtype"
                )
            results.append(result)
        return results

    def _apply(self, updates: Sequence[tuple[_Bucket, Arriving]]) -> None:
        """Step on this rank's parts of the matrices, once the updates have come back."""
        for bucket, arriving in updates:
            arriving.work.wait()
            for place, update in zip(bucket.places, arriving.pieces):
                # Empty where this rank holds nothing of the matrix: of 5 rows on 4 ranks the last has none.
                if update.numel():
                    part = place.of(place.parameter)
                    group = self.param_groups[place.group]
                    self.apply(part, update.to(part.device), place.matrix.shape, group)

    def _state(self, parameter: nn.Parameter, name: str) -> torch.Tensor:
        """Return one element-wise state of `parameter`, zeros at first."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(_gradient(parameter), memory_format=torch.preserve_format)
        return state[name]

    # ---- who owns what

    def _buckets(self) -> list[_Bucket]:
        """Return the matrices that have a gradient, in buckets: planned once for each set of them."""
        trained: list[tuple[int, nn.Parameter]] = []  # the number of its group, and the parameter
        for number, group in enumerate(self.param_groups):
            if not self._is_of_rest(group):
                trained += [(number, parameter) for parameter in group["params"] if parameter.grad is not None]
        # What a plan depends on: another set of gradients, other dtypes or another link need another one.
        matrices = tuple((number, id(parameter), parameter.grad.dtype) for number, parameter in trained)
        key = (self._link_of, *matrices)
        if self._plan is None or self._plan[0] != key:
            self._plan = key, [*self._planned(trained)]
        return self._plan[1]

    def _is_of_rest(self, group: dict[str, Any]) -> bool:
        """Whether `group` is one of the other optimizer's: both have the same first parameter."""
        if self._rest is None or not group["params"]:
            return False
        firsts = [other["params"][0] for other in self._rest.param_groups if other["params"]]
        return any(first is group["params"][0] for first in firsts)

    def _planned(self, trained: Sequence[tuple[int, nn.Parameter]]) -> Iterator[_Bucket]:
        """Yield buckets of the matrices that go over the same group, in the same dtype and by the same device."""
        # (group, dtype, device, link) -> the matrices that one exchange may carry together
        places_over: dict[tuple[Any, ...], list[_Place]] = {}
        for number, parameter in trained:
            group = self._group_of(parameter)
            gradient = compat.local_of(_gradient(parameter))
            device = gradient.device
            link = None
            if group is not None:
                device = compat.device_for(group, device)  # offloaded gradients are on the host, NCCL is not
                if self._link_of is not None:
                    link = self._link_of(group, device)
            over = (group, self.sent_dtype(gradient), device, link)
            places_over.setdefault(over, []).extend(_places_of(parameter, number, group))

        for over, places in places_over.items():
            group, dtype, _, _ = over
            ranks = 1 if group is None else group.size()
            matrices = [place.matrix for place in places]
            costs = []
            for place in places:
                costs.append(self.cost(place.matrix.shape, self.param_groups[place.group]))
            for bucket in buckets_of(matrices, costs, ranks, self._bucket_bytes // dtype.itemsize):
                places_of_bucket = tuple(places[number] for number in bucket.numbers)
                matrices_of_bucket = tuple(place.matrix for place in places_of_bucket)
                exchange = Exchange(*over, matrices_of_bucket, bucket.owners)
                yield _Bucket(exchange, places_of_bucket)

    def _group_of(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """Return the ranks that hold parts of `parameter`, or equal copies; None where this rank computes alone."""
        if not isinstance(parameter, DTensor):
            return self._replicas
        # The dimension of the mesh that cuts the parameter; where none does, the last.
        axis = parameter.device_mesh.ndim - 1
        for dim, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                axis = dim
                break
        return parameter.device_mesh.get_group(axis)

    def behind(self, link_of: LinkOf | None) -> None:
        """Exchange behind the emulated link that `link_of` gives for a group and a device, or behind none."""
        self._link_of = link_of

    # ---- torch.optim.Optimizer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch's optimizers do; `rest` finds its parameters again at the next step."""
        super().load_state_dict(state_dict)
        self._plan = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_plan": None}


class Muon(MatrixOptimizer, torch.optim.Muon):
    """PyTorch's Muon on sharded matrices: its arithmetic, in its order, with its own Newton-Schulz iteration.

    The momentum is rounded to bfloat16 before it is sent, which is what Newton-Schulz begins with.
    """

    states = ("momentum_buffer",)

    def prepare(
        self,
        gradient: torch.Tensor,  # [rows, columns] of this rank's part
        state: dict[str, torch.Tensor],  # momentum_buffer: [rows, columns] of this rank's part
        group: dict[str, Any],
    ) -> torch.Tensor:
        """Update the momentum of this rank's part; return the update before Newton-Schulz, in bfloat16."""
        # m = beta m + (1 - beta) g; with Nesterov what is sent is (1 - beta) g + beta m.
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        if not group["nesterov"]:
            return momentum.bfloat16()
        return gradient.lerp(momentum, group["momentum"]).bfloat16()

    def sent_dtype(
        self,
        gradient: torch.Tensor,  # any shape
    ) -> torch.dtype:
        """Return bfloat16, with which Newton-Schulz begins."""
        return torch.bfloat16

    def whole(
        self,
        matrix: torch.Tensor,  # [rows, columns] of the whole update before Newton-Schulz (bfloat16)
        group: dict[str, Any],
    ) -> torch.Tensor:
        """Return the matrix orthogonalised by torch's own Newton-Schulz iteration."""
        return _muon._zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def apply(
        self,
        parameter: torch.Tensor,  # [rows, columns] of this rank's part
        update: torch.Tensor,  # [rows, columns] of this rank's part (bfloat16)
        shape: tuple[int, int],  # (rows, columns) of the whole
        group: dict[str, Any],
    ) -> None:
        """Decay the weights of this rank's part and add the update, as torch's Muon does."""
        rate = float(group["lr"])
        parameter.mul_(1 - rate * group["weight_decay"])
        # The rate is adjusted by the shape of the whole matrix, of which this rank may hold one row.
        adjusted_rate = _muon._adjust_lr(rate, group["adjust_lr_fn"], torch.Size(shape))
        parameter.add_(update, alpha=-adjusted_rate)

    def cost(self, shape: tuple[int, int], group: dict[str, Any]) -> float:
        """Return the floating-point operations of the Newton-Schulz steps."""
        return newton_schulz_flops(shape, group["ns_steps"])


def whole_matrices(
    optimizer: Optimizer | type[Optimizer],
    params: Any = None,
    *,
    rest: Optimizer | None = None,
    replicas: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    **options: Any,
) -> Any:
    """Return `torch.optim.Muon`, given as an object or as its class and arguments, for matrices that are sharded.

    An object is changed in place, and stays a `torch.optim.Muon`: schedulers and state dicts see what they know. The
    class takes stacks of matrices [experts, rows, columns] too, each of which is orthogonalised alone. `rest`: an
    optimizer (AdamW) of the other parameters, which steps with it. `replicas`: the group whose ranks hold equal plain
    parameters (DDP, `no_shard`) and share the work. A bucket of matrices that travel together is full once it has
    `bucket_bytes`, and a matrix for each rank. Call it after the model is sharded. On n ranks each sends
    2 P (n-1) / n^2 elements a step of matrices of P elements, in two all-to-alls a bucket; 18 matrices in one bucket
    take 2 collectives, where torch.optim.Muon on DTensors takes 258. Raises `ValueError` for other optimizers: subclass
    `MatrixOptimizer` for those.
    """
    if optimizer is torch.optim.Muon:
        checked = torch.optim.Muon([nn.Parameter(torch.empty(1, 1))], **options)  # torch's own checks, and its defaults
        return Muon(params, checked.defaults, rest=rest, replicas=replicas, bucket_bytes=bucket_bytes)
    if type(optimizer) is not torch.optim.Muon:
        raise ValueError(
            f"whole_matrices takes torch.optim.Muon, as an object or a class, got {optimizer!r}; an update of another"
            " kind is a subclass of fsdplab.engine.MatrixOptimizer"
        )
    if params is not None or options:
        raise ValueError("params and options go with the class torch.optim.Muon; the object has its own already")
    optimizer.__class__ = Muon
    optimizer._begin(rest, replicas, bucket_bytes)
    optimizer._patch_step_function()  # step hooks run as before
    return optimizer


def _check(
    parameter: torch.Tensor,  # [rows, columns] or [experts, rows, columns], if it is valid
) -> None:
    """Raise for a parameter that is no matrix, or of which no group of ranks holds parts."""
    if parameter.ndim not in (2, 3):
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} is no matrix and no stack of matrices; give it to another"
            " optimizer (rest=torch.optim.AdamW(...))"
        )
    if not isinstance(parameter, DTensor):
        return
    cuts = [placement for placement in parameter.placements if not isinstance(placement, Replicate)]
    # The type itself: a strided shard, which tensor parallelism leaves, is refused also where it is a subclass.
    if len(cuts) > 1 or cuts and type(cuts[0]) is not Shard:
        raise ValueError(
            f"a matrix {list(parameter.shape)} is placed as {parameter.placements} on {parameter.device_mesh}: whole"
            " matrices are exchanged along one dimension of a mesh; tensor parallelism cuts along another, so give such"
            " parameters to another optimizer"
        )


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of all groups of `optimizer`."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def _places_of(parameter: nn.Parameter, number: int, group: dist.ProcessGroup | None) -> Iterator[_Place]:
    """Yield the matrices of a parameter, [rows, columns] or [experts, rows, columns], and how `group` holds them."""
    ranks, rank = 1, 0
    if group is not None:
        ranks, rank = group.size(), group.rank()
    *stack, rows, columns = parameter.shape
    dim = None  # the dimension of the parameter that is cut
    if isinstance(parameter, DTensor):
        for placement in parameter.placements:
            if isinstance(placement, Shard):
                dim = placement.dim

    if stack and dim == 0:  # ranks hold whole experts
        experts = stack[0]
        chunk = -(-experts // ranks)  # of 5 experts on 2 ranks the first holds 3
        for expert in range(experts):
            matrix = Matrix.held_by(expert // chunk, (rows, columns), ranks)
            yield _Place(parameter, number, matrix, expert - rank * chunk)
        return
    if dim is None:
        matrix = Matrix.replicated((rows, columns), ranks)
    else:  # ranks hold some rows or columns
        # Dimension 1 of a stack [experts, rows, columns] is dimension 0 of each matrix.
        matrix = Matrix.sharded((rows, columns), dim - len(stack), ranks)
    if not stack:
        yield _Place(parameter, number, matrix)
        return
    for expert in range(stack[0]):
        yield _Place(parameter, number, matrix, expert)
