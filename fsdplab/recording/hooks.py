"""Wraps the functions of torch and DeepSpeed that end a recorded job's step, when they are imported.

A step ends when the outermost of them returns: `Optimizer.step`, `GradScaler.step` (which may skip the optimizer's), a
DeepSpeed engine's `step`, or the `backward` in which optimizers stepped. Wrapped is `Optimizer.profile_hook_step`,
through which every optimizer's class passes its `step` when the first of it is made: what is done at the end of a step
starts and stops a profiler, and inside the range that torch opens there a profiler must do neither.

While a step runs the hooks note the losses whose `backward` was called and how long data loaders took. Once the
recording has ended they pass everything on.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fsdplab.profiling.core_waits import thread_waited_ns
from fsdplab.recording.activities import (
    watch,
    watch_compilations,
    watch_fsdp1,
    watch_recomputation,
    watch_state_dicts,
    watch_tensors,
)
from fsdplab.recording.rank import RankRecorder
from fsdplab.recording.settings import Settings

_recorder: RankRecorder | None = None


def hook(module: ModuleType) -> None:
    """Wrap what takes steps in a module that was just imported: torch.optim.optimizer, or one of `_OF_A_MODULE`."""
    global _recorder
    settings = Settings.of_environment()
    if settings is None:
        return
    # one recorder for all modules that are hooked
    _recorder = _recorder or RankRecorder(settings)
    _OF_A_MODULE[module.__name__](module, _recorder)


def _hook_optimizers(module: ModuleType, recorder: RankRecorder) -> None:
    profiled = module.Optimizer.profile_hook_step

    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        return ends_a_step(profiled(step), recorder, lambda optimizer, *_: recorder.stepping(optimizer))

    module.Optimizer.profile_hook_step = staticmethod(profile_hook_step)
    hook_losses(recorder)
    _hook_scalers(recorder)
    _hook_loaders(recorder)
    watch(recorder)
    _hook_profilers(recorder)


def ends_a_step(
    function: Callable[..., Any], recorder: RankRecorder, stepped: Callable[..., Any]
) -> Callable[..., Any]:
    """`function`, a method after which a step may have ended: that of what `stepped(*args)` returns, None for none."""
    # what runs as it is calls the recorder itself, which takes a tenth of the time
    eager = (recorder.enter, recorder.leave)
    compiled = (_uncompiled(recorder.enter), _uncompiled(recorder.leave))

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if recorder.done:
            return function(*args, **kwargs)
        # inside a compiled step the recorder itself must not be traced
        enter, leave = compiled if torch.compiler.is_compiling() else eager
        enter()
        ended = None
        try:
            # asked before the call: the step may change what the answer depends on
            ended = stepped(*args)
            result = function(*args, **kwargs)
        except BaseException:
            ended = None
            raise
        finally:
            leave(ended)
        return result

    return wrapper


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as torch.compile leaves it alone: what is around it is compiled in two parts."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(lambda *args: function(*args))  # which keeps what it makes as an attribute of a function


def hook_losses(recorder: RankRecorder) -> None:
    """Note every scalar whose `backward` is called; optimizers may step inside it, as hooks of its parameters."""
    from torch import Tensor

    backward = Tensor.backward

    @functools.wraps(backward)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or recorder.done:
            return backward(*args, **kwargs)
        began, recorder.is_in_backward = time.perf_counter_ns(), True
        try:
            return backward(*args, **kwargs)
        finally:
            recorder.is_in_backward = False
            recorder.taken.note("backward", time.perf_counter_ns() - began)
            if kwargs.get("retain_graph") and not kwargs.get("create_graph"):
                recorder.taken.note("retained graph", 0)
            recorder.loop_goes_on()

    Tensor.backward = ends_a_step(noting, recorder, lambda loss, *_: recorder.note_loss(loss))


def _hook_scalers(recorder: RankRecorder) -> None:
    """Count a step that a GradScaler skips as a step, and note the loss that it has scaled as it was."""
    from torch.amp.grad_scaler import GradScaler

    scale = GradScaler.scale

    @functools.wraps(scale)
    def noting(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if not recorder.done:
            # backward gets the scaled loss; the record has the one before
            recorder.taken.scaled = (scaled, outputs)
            recorder.taken.scaler = self if self.is_enabled() else None
        return scaled

    GradScaler.scale = noting
    GradScaler.step = ends_a_step(GradScaler.step, recorder, lambda scaler, optimizer, *_: optimizer)


def _hook_loaders(recorder: RankRecorder) -> None:
    """Note how long data loaders took for their next batch."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    following = _BaseDataLoaderIter.__next__

    @functools.wraps(following)
    def timed(self: Any) -> Any:
        # a batch is asked for: the evaluation is over if the model trains again
        recorder.taken.end_evaluation()
        began, waited = time.perf_counter(), thread_waited_ns()
        try:
            return following(self)
        finally:
            if recorder.taken.evaluates_since is None:  # else it is a part of the evaluation
                loading_s = time.perf_counter() - began
                recorder.taken.loading_s += loading_s
                # a wait for a core is no fault of the loader
                recorder.taken.note("loading", int(1e9 * loading_s) - (thread_waited_ns() - waited))
                recorder.loop_goes_on()

    _BaseDataLoaderIter.__next__ = timed
    _hook_beginnings(recorder)
    _hook_samplers(recorder)


def _hook_beginnings(recorder: RankRecorder) -> None:
    """Note that a data loader is begun, which starts its workers: a part of the time that loading takes."""
    from torch.utils.data import DataLoader

    begin = DataLoader.__iter__

    @functools.wraps(begin)
    def timed(self: Any) -> Any:
        if recorder.done or not recorder.taken.may_begin():
            return begin(self)
        began = time.perf_counter_ns()
        try:
            return begin(self)
        finally:
            took_ns = time.perf_counter_ns() - began
            recorder.taken.loading_s += took_ns / 1e9
            recorder.taken.note("loader begun", took_ns)

    DataLoader.__iter__ = timed


def _hook_samplers(recorder: RankRecorder) -> None:
    """Note the epochs that a DistributedSampler which shuffles begins, and those in the order of the one before."""
    from torch.utils.data.distributed import DistributedSampler

    begin = DistributedSampler.__iter__

    @functools.wraps(begin)
    def noting(self: Any) -> Any:
        if not recorder.done and self.shuffle and recorder.taken.may_begin():
            recorder.epoch_begins(self, self.epoch)
        return begin(self)

    DistributedSampler.__iter__ = noting


def _hook_profilers(recorder: RankRecorder) -> None:
    """Notice a profiler that the job starts: the one before it gets no more events, and nothing says so."""
    from torch.autograd.profiler import profile

    profile._prepare_trace = _after(lambda _: recorder.profiler_starts(), profile._prepare_trace, recorder)


def _after(note: Callable[[Any], None], function: Callable[..., Any], recorder: RankRecorder) -> Callable[..., Any]:
    """`function`, a method without arguments, after `note` of its object."""

    @functools.wraps(function)
    def wrapper(self: Any) -> Any:
        if not recorder.done:
            note(self)
        return function(self)

    return wrapper


def _hook_deepspeed(module: ModuleType, recorder: RankRecorder) -> None:
    """Count a step of DeepSpeed's engine as one of the job's after the last of its micro-batches, however many
    optimizers it steps.
    """

    def stepped(engine: Any, *_: Any) -> Any:
        return engine if engine.is_gradient_accumulation_boundary() else None

    module.DeepSpeedEngine.step = ends_a_step(module.DeepSpeedEngine.step, recorder, stepped)


def _hook_the_labs_engine(module: ModuleType, recorder: RankRecorder) -> None:
    from fsdplab.profiling import TagLog

    # the engine tags its buffers once, when it makes them, long before a step is measured
    RankRecorder.tags = RankRecorder.tags or TagLog()


def watch_all(recorder: RankRecorder) -> None:
    """Count what the loop does besides training, for a recorder that was made after torch was imported."""
    watch(recorder)
    _notice_steps(recorder)
    for name, count in _COUNTED_IN.items():
        if name in sys.modules:
            # what is imported later has no hook then: by hand nothing waits for imports
            count(sys.modules[name], recorder)


def _notice_steps(recorder: RankRecorder) -> None:
    """Tell the recorder of each optimizer that steps, where the loop says itself when its step has ended."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(*_: Any) -> None:
        recorder.has_stepped()

    register_optimizer_step_post_hook(stepped)


_COUNTED_IN: dict[str, Callable[[ModuleType, RankRecorder], None]] = {
    "torch.utils.checkpoint": watch_recomputation,
    "torch.distributed.checkpoint.state_dict": watch_state_dicts,
    "torch.distributed.tensor._api": watch_tensors,
    "torch.distributed.fsdp.fully_sharded_data_parallel": watch_fsdp1,
    "torch._dynamo.callback": watch_compilations,
}
_OF_A_MODULE: dict[str, Callable[[ModuleType, RankRecorder], None]] = {
    **_COUNTED_IN,
    "torch.optim.optimizer": _hook_optimizers,
    "deepspeed.runtime.engine": _hook_deepspeed,
    "fsdplab.engine.events": _hook_the_labs_engine,
}
