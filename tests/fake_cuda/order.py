"""The order of the engine's streams in real steps: the program of `test_order.py`, which runs under the stand-in.

    python -m tests.fake_cuda.order RANKS [NAME ...]     one line of JSON for each case of that name, or for all

Streams, events, the allocator and the process groups are torch's own. Its trace of CUDA calls says when memory comes
and goes, what waits for what, and when the host waits; a dispatch mode says what each operator touches. Page-locked
host memory is followed too, and what the host does with it.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.cuda._gpu_trace as gpu_trace
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdplab.engine import MixedPrecisionPolicy, NVMeOffloadPolicy, clip_grad_norm_, fully_shard, shard_model
from fsdplab.engine.emulation.link import Link, behind
from fsdplab.engine.features.offloaded_optimizer import offload_optimizer
from fsdplab.engine.shard import units_of
from tests.stream_order import HOST, Order, tensors_of, touched

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_ENGINE = str(Path(clip_grad_norm_.__code__.co_filename).parents[1])


class Watch(TorchDispatchMode):
    """Tells an `Order` what happens with memory of the device and page-locked memory; lists where the host waited."""

    def __init__(self) -> None:
        super().__init__()
        self.order, self.phase = Order(), ""
        self.host_waits: list[str] = []

    def __enter__(self) -> Watch:
        syncs = self.order.syncs
        for registry, callback in (
            (gpu_trace.EventCreationCallbacks, syncs.create_event),
            (gpu_trace.EventDeletionCallbacks, syncs.delete_event),
            (gpu_trace.EventRecordCallbacks, syncs.record_state),
            (gpu_trace.EventWaitCallbacks, lambda event, stream: syncs.stream_wait_for_event(stream, event)),
            (gpu_trace.MemoryAllocationCallbacks, self._allocated),
            (gpu_trace.MemoryDeallocationCallbacks, self.order.freed),
            (gpu_trace.StreamCreationCallbacks, syncs.create_stream),
            (gpu_trace.DeviceSynchronizationCallbacks, self._waited(lambda: syncs.sync_all_streams())),
            (gpu_trace.StreamSynchronizationCallbacks, self._waited(syncs.all_streams_wait_for_stream)),
            (gpu_trace.EventSynchronizationCallbacks, self._waited(syncs.all_streams_wait_for_event)),
        ):
            registry.callback_list[:] = [callback]  # in the place of the sanitizer's own
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for each in vars(gpu_trace).values():
            if isinstance(each, gpu_trace.CallbackRegistry):
                each.callback_list.clear()

    def _allocated(self, start: int) -> None:
        self.order.allocated(start, torch.cuda.current_stream().cuda_stream, start + 1)

    def _waited(self, then: Callable[..., object]) -> Callable[..., None]:
        def waited(*args: int) -> None:
            then(*args)
            self.host_waits.append(f"{self.phase}: {_place()}")

        return waited

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        before = tensors_of((args, kwargs))
        output = operator(*args, **kwargs)
        seen = [each for each in (*before, *tensors_of(output)) if each.is_cuda or each.is_pinned()]
        for tensor in seen:
            self._note(tensor)
        reads, writes = (
            [each for each in some if each.is_cuda or each.is_pinned()]
            for some in touched(operator, args, kwargs, output)
        )
        on_device = any(each.is_cuda for each in seen)
        self.order.access(torch.cuda.current_stream().cuda_stream if on_device else HOST, reads, writes, str(operator))
        return output

    def _note(self, tensor: torch.Tensor) -> None:
        """Learn how far memory reaches; that of the host is followed from here on, unless it is a part of what is."""
        storage = tensor.untyped_storage()
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if tensor.is_cuda:
            self.order.reaches(start, stop)
        elif not self.order.holds(start):
            self.order.allocated(start, HOST, stop)
            weakref.finalize(storage, self.order.forget, start)  # the allocator waits for copies before it reuses it


def _place() -> str:
    """The innermost line of the engine's, or else of this program's, that led here."""
    frames = [
        each for each in traceback.extract_stack() if each.filename.startswith(_ENGINE) or each.filename == __file__
    ]
    engine = [each for each in frames if each.filename != __file__]
    frame = (engine or frames)[-1]
    return f"{Path(frame.filename).name} {frame.name}"


@contextmanager
def one_wait_less(number: int | None) -> Iterator[list[str]]:
    """Waits of the engine's are listed; the one of that number is not done."""
    seen: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any) -> Any:
            caller = sys._getframe(1)
            if not caller.f_code.co_filename.startswith(_ENGINE):
                return real(*args)
            seen.append(f"{Path(caller.f_code.co_filename).name} {caller.f_code.co_name} {name}")
            return None if len(seen) - 1 == number else real(*args)

        return wait

    places = [(torch.cuda.Stream, "wait_stream"), (torch.cuda.Stream, "wait_event"), (torch.cuda.Event, "synchronize")]
    kept = [(kind, name, getattr(kind, name)) for kind, name in places]
    for kind, name, real in kept:
        setattr(kind, name, counted(name, real))
    try:
        yield seen
    finally:
        for kind, name, real in kept:
            setattr(kind, name, real)


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@dataclass(frozen=True)
class Case:
    """What is trained; by default one batch a step, all in memory.

    `by_columns` cuts along the last dimension and has parameters of two dtypes, `optimizer` offloads the optimizer's
    state, `hook` has gradients changed on a stream of its own, `own_stream` trains on a stream of the user's, `link` is
    an emulated one, `partly` keeps slices over half of the ranks from forward to backward, and after `evaluate`, a
    forward alone at the end of a step, the host writes to parameters.
    """

    strategy: str = "full_shard"
    prefetch: int = 1
    batches: int = 1
    checkpoint: str = "none"
    low: bool = False
    offload: str = "none"
    separate: bool = False
    clip: bool = False
    by_columns: bool = False
    optimizer: bool = False
    hook: bool = False
    own_stream: bool = False
    link: bool = False
    partly: bool = False
    evaluate: bool = False

    @property
    def name(self) -> str:
        """What differs from the defaults."""
        plain = Case()
        parts = [f"{key}={value}" for key, value in vars(self).items() if value != getattr(plain, key)]
        return " ".join(parts) or "plain"


def policy_of(case: Case, folder: str) -> OffloadPolicy:
    return {
        "none": OffloadPolicy(),
        "pinned": CPUOffloadPolicy(),
        "pageable": CPUOffloadPolicy(pin_memory=False),
        "nvme": NVMeOffloadPolicy(folder),
    }[case.offload]


def sharded(case: Case, policy: OffloadPolicy) -> nn.Module:
    model, ranks = Net().cuda(), dist.get_world_size()
    if case.by_columns or case.partly:
        place = by_columns if case.by_columns else None
        for module in (*model.blocks, model):
            if case.by_columns and module is not model:
                module.scale = nn.Parameter(module.scale.detach().to(torch.bfloat16))
            after = ranks // 2 if case.partly else None
            fully_shard(module, shard_placement_fn=place, offload_policy=policy, reshard_after_forward=after)
        return model
    shape = (2, ranks // 2) if case.strategy == "hybrid_shard" else (ranks,)
    model = shard_model(
        model, case.strategy, mesh=init_device_mesh("cuda", shape, mesh_dim_names=("r", "s")[-len(shape) :]),
        prefetch=case.prefetch, checkpoint=case.checkpoint, mp_policy=BF16 if case.low else MixedPrecisionPolicy(),
        offload_policy=policy,
    )  # fmt: skip
    if case.separate:
        model.set_separate_reduce_scatter_group()
    if case.hook:
        # hybrid_shard all-reduces by itself, and runs the hook on the stream where it does
        stream = None if case.strategy == "hybrid_shard" else torch.cuda.Stream()
        for module in (*model.blocks, model):
            module.set_all_reduce_hook(lambda reduced: reduced.mul_(2.0), stream=stream)
    for unit in units_of(model) if case.link else ():
        unit.memory.config = replace(unit.memory.config, shard=behind(unit.memory.config.shard, Link(1e9, 1e-6), ranks))
    return model


def by_columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


@contextmanager
def on_a_stream(case: Case) -> Iterator[None]:
    """The stream that the user trains on."""
    before, own = torch.cuda.current_stream(), torch.cuda.Stream()
    if not case.own_stream:
        yield
        return
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


def one_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, watch: Watch) -> None:
    for batch in range(case.batches):
        last = batch == case.batches - 1
        model.set_is_last_backward(last)
        if case.strategy in ("no_shard", "zero1"):
            model.set_requires_gradient_sync(last)
        watch.phase = f"forward {batch}"
        loss = model(torch.empty(4, 32, device="cuda")).float().square().mean()
        watch.phase = f"backward {batch}"
        loss.backward()
    watch.phase = "clipping"
    if case.clip:
        clip_grad_norm_(model.parameters(), 1.0)
    watch.phase = "optimizer"
    optimizer.step()
    optimizer.zero_grad()
    if case.evaluate:
        watch.phase = "evaluating"
        with torch.no_grad():
            model(torch.empty(4, 32, device="cuda"))
            for parameter in model.parameters():
                parameter.mul_(0.5)


def run(case: Case, folder: str, steps: int = 2, left_out: int | None = None) -> dict[str, Any]:
    """Train; what is not ordered, where the host waited in the last step, and the waits of the engine's."""
    gc.disable()  # memory goes where the program lets it go
    policy = policy_of(case, folder)
    with Watch() as watch, one_wait_less(left_out) as waits, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sharded(case, policy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if case.optimizer:
            optimizer = offload_optimizer(optimizer, CPUOffloadPolicy(), part_bytes=8192)
        with on_a_stream(case):
            for _ in range(steps):
                first_wait = len(waits)
                watch.host_waits.clear()
                one_step(case, model, optimizer, watch)
        found = {"host_waits": list(watch.host_waits), "waits": waits[first_wait:], "first_wait": first_wait}
        del model, optimizer
    torch.cuda.synchronize()
    gc.enable()
    gc.collect()
    return {"conflicts": watch.order.conflicts, **found}


def mutations(case: Case, folder: str) -> dict[str, Any]:
    """Every wait of the second step, left out in turn: what it is, and the first conflict. Of an optimizer that is
    offloaded also those of the first step, in which its state is made.
    """
    conflicts: list[str] = []
    found = []
    for steps in (1, 2) if case.optimizer else (2,):
        whole = run(case, folder, steps)
        conflicts += whole["conflicts"]
        numbered = enumerate(whole["waits"], whole["first_wait"])
        found += [[what, *run(case, folder, steps, number)["conflicts"][:1]] for number, what in numbered]
    return {"conflicts": conflicts, "left_out": found}


SHARDED = ("zero1", "zero2", "shard_grad_op", "full_shard")
BOTH = (False, True)


def cases_of(**choices: Sequence[Any]) -> list[Case]:
    """Every combination."""
    return [Case(**dict(zip(choices, values))) for values in itertools.product(*choices.values())]


CASES = [
    *cases_of(strategy=("no_shard", *SHARDED), prefetch=(0, 1, 2), batches=(1, 2)),
    *cases_of(strategy=("no_shard", *SHARDED), checkpoint=("full", "selective"), low=BOTH),
    *cases_of(strategy=SHARDED, separate=(True,), batches=(1, 2), low=BOTH),
    *cases_of(
        strategy=("shard_grad_op", "full_shard"), offload=("pinned", "pageable", "nvme"), prefetch=(0, 1, 2),
        batches=(1, 2), low=BOTH,
    ),
    *cases_of(offload=("none", "pinned", "nvme"), checkpoint=("full", "selective"), clip=(True,)),
    *cases_of(offload=("none", "pinned", "pageable", "nvme"), by_columns=(True,), batches=(1, 2)),
    *cases_of(optimizer=(True,), low=BOTH),
    *cases_of(offload=("none", "pinned"), evaluate=(True,), low=BOTH),
    *cases_of(strategy=("no_shard", "full_shard"), hook=(True,), own_stream=BOTH),
    *cases_of(own_stream=(True,), offload=("none", "pinned"), low=BOTH),
    *cases_of(strategy=SHARDED, link=(True,)),
]  # fmt: skip
HYBRID = [
    *cases_of(
        strategy=("hybrid_shard",), prefetch=(0, 1, 2), batches=(1, 2), low=BOTH, offload=("none", "pinned"),
        separate=BOTH,
    ),
    *cases_of(strategy=("hybrid_shard",), hook=(True,), own_stream=BOTH),
    *cases_of(partly=(True,), batches=(1, 2), offload=("none", "pinned")),
]  # fmt: skip
MUTATED = [
    Case(low=True), Case("zero1", batches=2), Case("no_shard"), Case("no_shard", hook=True), Case(offload="pinned"),
    Case(offload="pinned", low=True), Case(offload="pinned", by_columns=True), Case(offload="pinned", evaluate=True),
    Case(optimizer=True),
]  # fmt: skip


def run_on_ranks(ranks: int, call: Callable[[int, str], object]) -> int:
    """`call(rank, folder)` in a forked process for each rank, with a group; the number of ranks that failed. Nothing
    has touched CUDA yet in this one.
    """
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    torch.cuda.set_device(rank % torch.cuda.device_count())
                    dist.init_process_group("nccl", f"file://{folder}/store", rank=rank, world_size=ranks)
                    call(rank, folder)
                    status = 0
                finally:
                    if status:
                        traceback.print_exc()
                    sys.stdout.flush()
                    os._exit(status)
            children.append(pid)
        return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children)


def main(what: str, ranks: int, names: list[str]) -> int:
    """Print what is found in the cases; the status is the number of ranks that failed."""
    call = mutations if what == "mutations" else run
    cases = MUTATED if what == "mutations" else HYBRID if ranks == 4 else CASES
    cases = [case for case in cases if not names or case.name in names]

    def rank_main(rank: int, folder: str) -> None:
        run(Case(), folder)  # communicators, handles, workspaces
        for case in cases:
            found = call(case, folder)
            if rank == 0:
                print(json.dumps({"case": case.name, **found}), flush=True)

    return run_on_ranks(ranks, rank_main)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
