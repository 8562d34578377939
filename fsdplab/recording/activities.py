"""Counts and times what a job does in a step besides forward, backward and update, where it is called.

A trace shows operators and collectives, and not why they ran: a state dict is copies, an evaluation is a forward, and
the garbage collector is nothing at all. So functions of torch are wrapped that a loop calls for such things. Of calls
inside each other the outermost one counts: collectives of an evaluation belong to the evaluation.

| name | what is counted |
| --- | --- |
| `evaluation` | from `eval()` or `train(False)` of the model to its `train()` |
| `garbage_collection` | collections of the oldest generation (garbage.py) |
| `state_dict` | calls of `state_dict`, and of torch.distributed.checkpoint's functions that return one |
| `full_tensor`, `saving` | DTensors that are gathered, calls of `torch.save` |
| `wrapped` | models that are wrapped in DistributedDataParallel |
| `compiled` | compilations of torch.compile |
| `summoned` | entries of FSDP1's `summon_full_params` |
| `clipping` | calls of `clip_grad_norm_` and `clip_grad_value_` |
| `clipped again` | those of them whose parameters were clipped in this step already |
| `clipped scaled` | calls of `clip_grad_norm_` before a GradScaler has unscaled the gradients (scales.py) |
| `deep copy` | modules that `copy.deepcopy` copies |
| `cache emptied` | calls of `torch.cuda.empty_cache` |
| `to numpy` | tensors whose numbers are read by `numpy()` and `tolist()` |
| `loader begun` | iterators of data loaders that are made |
| `epoch begun` | epochs that a DistributedSampler with shuffle=True begins, without the first one (hooks.py) |
| `same order` | those of them that have the order of the one before, since `set_epoch` was not called |
| `group made` | calls of `torch.distributed.new_group` |
| `resident` | bytes that the process holds when a step ends; on a GPU those of its allocator |
| `recomputed` | calls of `torch.utils.checkpoint.checkpoint`; their backward takes as long again |
| `loading` | batches of data loaders, without the time in which their thread waited for a core |
| `preparing` | CPU time of the loop before each forward of the profiled steps, not counted otherwise (batches.py) |
| `backward` | calls of `Tensor.backward` |
| `turn` | backwards that are the first since an optimizer has stepped: two a step where two optimizers take turns |
| `retained graph` | those of them with `retain_graph=True` |
| `optimizer` | the host's time in `Optimizer.step` |
| `learning rate 0` | steps in which each group of the optimizers has a learning rate of 0 (rank.py) |
| `optimizer made` | optimizers that step in the place of earlier ones (rank.py) |
| `own all_reduce`, `own barrier`, ... | collectives that the loop calls itself, and not its engine |

Once the recording has ended the wrappers pass everything on. Under torch.compile they always do.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fsdplab.recording.rows import is_main_thread

if TYPE_CHECKING:
    from fsdplab.recording.rank import RankRecorder

# collectives that a loop may call itself; those without bytes that a rank would know are counted only
OWN = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "gather",
    "gather_object",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
)
# modules whose collectives are an engine's, or of a trainer's loop, which tells all ranks of a signal in each step
_ENGINES = ("torch.", "fsdplab.", "deepspeed.", "lightning.pytorch.loops.", "pytorch_lightning.loops.")


def watch(recorder: RankRecorder) -> None:
    """Wrap what is imported with torch."""
    from torch import serialization
    from torch.nn import Module
    from torch.nn.utils import clip_grad
    from torch.optim.optimizer import Optimizer

    _wrap(Module, "state_dict", "state_dict", recorder)
    _wrap(Optimizer, "state_dict", "state_dict", recorder)
    _wrap_all([serialization, torch], "save", "saving", recorder)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        _wrap_all([clip_grad, torch.nn.utils], name, "clipping", recorder)
    _watch_clipping_again(clip_grad, recorder)
    _wrap(torch.nn.parallel.DistributedDataParallel, "__init__", "wrapped", recorder)
    _wrap(torch.cuda, "empty_cache", "cache emptied", recorder)
    _watch_deep_copies(recorder)
    _watch_numpy(recorder)
    _watch_collectives(recorder)
    _watch_evaluations(recorder)
    _watch_autocast(recorder)


def watch_recomputation(module: Any, recorder: RankRecorder) -> None:
    """Wrap `torch.utils.checkpoint.checkpoint`, which was just imported."""
    _wrap(module, "checkpoint", "recomputed", recorder)


def watch_state_dicts(module: Any, recorder: RankRecorder) -> None:
    """Wrap the functions of torch.distributed.checkpoint.state_dict, which was just imported."""
    for name in ("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"):
        _wrap(module, name, "state_dict", recorder)


def watch_tensors(module: Any, recorder: RankRecorder) -> None:
    """Wrap `DTensor.full_tensor` of torch.distributed.tensor._api, which was just imported."""
    _wrap(module.DTensor, "full_tensor", "full_tensor", recorder)


def watch_fsdp1(module: Any, recorder: RankRecorder) -> None:
    """Count entries of `summon_full_params`, and calls of the class's own `clip_grad_norm_`, of
    torch.distributed.fsdp.fully_sharded_data_parallel, which was just imported.
    """
    _wrap(module.FullyShardedDataParallel, "clip_grad_norm_", "clipping", recorder)
    summon = module.FullyShardedDataParallel.summon_full_params

    @functools.wraps(summon)
    @contextmanager
    def noting(*args: Any, **kwargs: Any) -> Iterator[None]:
        counts = not recorder.done and recorder.taken.may_begin()
        began = time.perf_counter_ns()
        with summon(*args, **kwargs):
            if counts:
                recorder.taken.note("summoned", time.perf_counter_ns() - began)
            yield

    module.FullyShardedDataParallel.summon_full_params = staticmethod(noting)


def watch_compilations(module: Any, recorder: RankRecorder) -> None:
    """Count compilations, by the callbacks of torch._dynamo.callback, which was just imported.

    `torch._dynamo.reset` clears what is registered with it, and not these methods.
    """
    handler = module.CompilationCallbackHandler
    start, end = handler.run_start_callbacks, handler.run_end_callbacks
    began = time.perf_counter_ns()

    @functools.wraps(start)
    def starting(*args: Any) -> None:
        nonlocal began
        began = time.perf_counter_ns()
        start(*args)

    @functools.wraps(end)
    def ending(*args: Any) -> None:
        if not recorder.done:
            recorder.taken.note("compiled", time.perf_counter_ns() - began)
        end(*args)

    handler.run_start_callbacks, handler.run_end_callbacks = starting, ending


def _wrap(owner: Any, attribute: str, name: str, recorder: RankRecorder) -> None:
    setattr(owner, attribute, counted(getattr(owner, attribute), name, recorder))


def _wrap_all(owners: list[Any], attribute: str, name: str, recorder: RankRecorder) -> None:
    """Wrap the same function under several names."""
    wrapper = counted(getattr(owners[0], attribute), name, recorder)
    for owner in owners:
        setattr(owner, attribute, wrapper)


def counted(function: Callable[..., Any], name: str, recorder: RankRecorder) -> Callable[..., Any]:
    """`function`, whose outermost calls are counted in the step that runs, with the bytes of tensors it is given."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or recorder.done or not recorder.taken.may_begin():
            return function(*args, **kwargs)
        began = time.perf_counter_ns()
        recorder.taken.is_busy = True
        try:
            return function(*args, **kwargs)
        finally:
            recorder.taken.is_busy = False
            recorder.taken.note(name, time.perf_counter_ns() - began, _bytes_of(args))

    return wrapper


# ---- copies and reads of whole tensors, parameters that are clipped twice


def _watch_deep_copies(recorder: RankRecorder) -> None:
    """Count the modules that are copied whole, as an average of the weights may be."""
    deepcopy = copy.deepcopy
    counts = counted(deepcopy, "deep copy", recorder)

    @functools.wraps(deepcopy)
    def of_modules(x: Any, *args: Any, **kwargs: Any) -> Any:
        # configurations and small objects are copied all the time
        function = counts if isinstance(x, torch.nn.Module) else deepcopy
        return function(x, *args, **kwargs)

    copy.deepcopy = of_modules


def _watch_numpy(recorder: RankRecorder) -> None:
    """Count what is read out of tensors without an operator that a trace would show."""
    for name in ("numpy", "tolist"):
        setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name), "to numpy", recorder))


def _watch_clipping_again(module: Any, recorder: RankRecorder) -> None:
    """Count the calls that take the norm of gradients of which it was taken in the same step."""
    taken_of = module.clip_grad_norm_

    @functools.wraps(taken_of)
    def noting(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.done or torch.compiler.is_compiling():
            return taken_of(parameters, *args, **kwargs)
        max_norm = args[0] if args else kwargs.get("max_norm")
        if recorder.taken.scaler is not None:
            recorder.clips(max_norm)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # the same parameters in the same order are the same call
        began, key = time.perf_counter_ns(), tuple(map(id, listed))
        try:
            # the list, since a generator of parameters is used up by now
            return taken_of(listed, *args, **kwargs)
        finally:
            if key in recorder.taken.clipped:
                recorder.taken.note("clipped again", time.perf_counter_ns() - began)
            recorder.taken.clipped.add(key)

    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = noting


# ---- collectives of the loop's own


def _watch_collectives(recorder: RankRecorder) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    _wrap_all([distributed_c10d, dist], "new_group", "group made", recorder)
    for name in OWN:
        if hasattr(distributed_c10d, name):
            wrapper = _of_the_loop(getattr(distributed_c10d, name), f"own {name}", recorder)
            setattr(distributed_c10d, name, wrapper)
            setattr(dist, name, wrapper)


def _of_the_loop(function: Callable[..., Any], name: str, recorder: RankRecorder) -> Callable[..., Any]:
    """`function`, a collective, whose calls are counted with their bytes unless an engine or the model makes them.

    In a backward all but a barrier is an engine's or the model's: hooks of gradients and of buckets call it, and
    backwards of operators that communicate.
    """
    is_barrier = "barrier" in name

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or recorder.done or not recorder.taken.may_begin():
            return function(*args, **kwargs)
        # the module of the line that calls the collective
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        is_of_engine = caller.startswith(_ENGINES) or (recorder.is_in_backward and not is_barrier)
        if is_of_engine or _is_of_model(args):
            return function(*args, **kwargs)
        began = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            recorder.taken.note(name, time.perf_counter_ns() - began, _bytes_of(args))

    return wrapper


def _is_of_model(args: tuple[Any, ...]) -> bool:
    """Return whether a collective moves activations: the features of a contrastive loss, a mixture of experts' tokens,
    parts of a product. A figure that is logged is a scalar, or has no graph.
    """
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    return any(each.requires_grad and not each.is_leaf and each.numel() > 1 for each in tensors)


def _bytes_of(args: tuple[Any, ...]) -> int:
    """Return bytes of the largest tensor that a collective was given."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    # of an all-gather the output, of a reduce-scatter the input
    return max((each.numel() * each.element_size() for each in tensors), default=0)


# ---- evaluations, autocast


def _watch_evaluations(recorder: RankRecorder) -> None:
    """Note the module that is last set to evaluate, and how long until it is set to train again.

    Both `eval` and what other libraries call instead of it end in `Module.train`, which calls itself for each child.
    """
    from torch.nn import Module

    train, is_inside = Module.train, False

    @functools.wraps(train)
    def noting(self: Module, mode: bool = True) -> Module:
        nonlocal is_inside
        # `train` calls itself for each child: only the outermost call counts
        if is_inside or torch.compiler.is_compiling() or recorder.done or not is_main_thread():
            return train(self, mode)
        is_inside = True
        try:
            return train(self, mode)
        finally:
            is_inside = False
            recorder.mode_is_set(self, mode)

    Module.train = noting


def _watch_autocast(recorder: RankRecorder) -> None:
    """Note in which type autocast computes."""
    from torch.amp.autocast_mode import autocast

    enter = autocast.__enter__

    @functools.wraps(enter)
    def noting(self: Any) -> Any:
        if not torch.compiler.is_compiling() and not recorder.done and self._enabled:
            recorder.autocast = str(self.fast_dtype).removeprefix("torch.")
        return enter(self)

    autocast.__enter__ = noting
