"""Records one rank of a job: notes each step, and measures a few in the middle of the job.

A process becomes a rank when an optimizer steps in it, so agents, data loader workers and subprocesses are none. Its
steps have the job's own numbers, from 0; a step lasts from the end of the one before to its own end, less what data
loaders took. Rows are appended to the rank's file as they come, so that a rank which is killed leaves what it did.

An error of the recording is printed, noted, and ends the recording: the job goes on without it.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec

import torch
import torch.distributed as dist

from fsdplab.recording.garbage import Collections
from fsdplab.recording.rows import Place, StepRows, Taken, is_main_thread, resident_bytes
from fsdplab.recording.scales import are_scaled
from fsdplab.recording.settings import Settings
from fsdplab.recording.subject import has_no_learning_rate, parameters_of

if TYPE_CHECKING:
    from fsdplab.profiling import TagLog
    from fsdplab.recording.window import Window

_Args = ParamSpec("_Args")


def _or_gives_up(
    told: Callable[Concatenate[RankRecorder, _Args], None],
) -> Callable[Concatenate[RankRecorder, _Args], None]:
    """Return a method of the recorder whose error ends the recording, and not the job that called it."""

    @functools.wraps(told)
    def guarded(self: RankRecorder, *args: _Args.args, **kwargs: _Args.kwargs) -> None:
        try:
            told(self, *args, **kwargs)
        except Exception as error:  # whatever it is: a recording may fail, its job may not
            self.give_up(f"{type(error).__name__}: {error}")

    return guarded


class RankRecorder:
    """Told by hooks (hooks.py), or by hand, when optimizers step; `done` when nothing is to be told any more.

    `model`: where it is known; else it is looked for before the first step that is measured. `tags`: what the lab's
    engine has said of its long-lived buffers, which it says only when it makes them; None where no job imports it.
    """

    tags: ClassVar[TagLog | None] = None

    def __init__(self, settings: Settings, model: torch.nn.Module | None = None) -> None:
        self.settings, self.model = settings, model
        self.done = False
        self.taken = Taken()  # by the step that runs
        self.autocast = ""  # the type in which autocast computed last
        self.is_in_backward = False
        self._depth, self._inner = 0, None
        self._stepping_since: int | None = None  # while an optimizer steps
        self._has_stepped = True  # an optimizer, since the last backward began
        self._round = Round()
        self._optimizers: Sequence[Any] = ()  # that stepped last
        self._rows: StepRows | None = None
        self._window: Window | None = None
        self._collections = Collections(self._collected)
        self._step = 0
        self._epochs = weakref.WeakKeyDictionary[Any, tuple[int, int]]()  # the last one of each sampler, and its step
        self._began: float | None = None
        self._cpu_began = time.process_time()
        os.register_at_fork(after_in_child=self._forked)

    # ---- told by hooks

    def enter(self) -> None:
        """Note that a function begins after which a step may have ended."""
        # nested functions that end a step, such as GradScaler.step around Optimizer.step, end one
        self._depth += 1

    def leave(self, stepped: Any) -> None:
        """It has ended, and `stepped` is the optimizer that it stepped or skipped, None for none."""
        self._depth -= 1
        if stepped is not None and self._stepping_since is not None:
            self.taken.note("optimizer", time.perf_counter_ns() - self._stepping_since)
        self._stepping_since = None
        if stepped is not None:
            self.has_stepped()
        self._inner = stepped if stepped is not None else self._inner
        # the outermost has returned, and something stepped inside of it
        if self._depth == 0 and self._inner is not None:
            stepped, self._inner = self._inner, None
            self.stepped(stepped)

    @_or_gives_up
    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped, and its range in a trace is closed."""
        if self.done:
            return
        if self._round.is_remade(optimizer):
            self.taken.note("optimizer made", 0)
        # in the first step it is not known yet which optimizer is the last
        if self._round.is_first_of(optimizer):
            self._end_first_step()
            return
        self.taken.first_losses = []
        if optimizer is self._round.optimizers[-1]:
            self.end_step(self._round.optimizers)

    def stepping(self, optimizer: Any) -> Any:
        """Note that an optimizer is about to step, and return it."""
        if not torch.compiler.is_compiling():
            self._before_update(optimizer)
        self._stepping_since = time.perf_counter_ns()
        return optimizer

    @_or_gives_up
    def _before_update(self, optimizer: Any) -> None:
        if self._window is not None:
            self._window.before_update(optimizer)

    def has_stepped(self) -> None:
        """Note that an optimizer has stepped, one of several perhaps: the next backward begins a turn."""
        self._has_stepped = True

    @_or_gives_up
    def note_loss(self, loss: torch.Tensor) -> None:
        """`backward` is called of this tensor."""
        self.taken.note_loss(loss)
        if self._has_stepped:
            self.taken.note("turn", 0)
            self._has_stepped = False
        self.taken.end_evaluation(trains=True)
        if self._window is not None:
            self._window.before_backward()

    @_or_gives_up
    def loop_goes_on(self) -> None:
        """Note that a step, a backward or the loading of a batch has ended, and that the loop's own code runs again."""
        if self._window is not None and is_main_thread():
            self._window.loop_goes_on(self.taken)

    @_or_gives_up
    def mode_is_set(self, module: torch.nn.Module, trains: bool) -> None:
        """Note that a module was set to train or to evaluate; the model's evaluation lasts until it trains again."""
        if not _trains(module, self._optimizers):
            return
        if trains:
            self.taken.end_evaluation(trains=True)
        elif self.taken.evaluates_since is None:
            self.taken.evaluated, self.taken.evaluates_since = module, time.perf_counter_ns()

    def _collected(self, took_ns: int) -> None:
        """Note a full collection of the garbage collector."""
        if not self.done and self.taken.may_begin():
            self.taken.note("garbage_collection", took_ns)

    @_or_gives_up
    def epoch_begins(self, sampler: Any, epoch: int) -> None:
        """Note that a sampler which shuffles begins this epoch, and whether it is the one before once more."""
        last_epoch, last_step = self._epochs.get(sampler, (None, self._step))
        self._epochs[sampler] = epoch, self._step
        # a batch that is looked at before the loop is no epoch
        if last_step == self._step:
            return
        self.taken.note("epoch begun", 0)
        if last_epoch == epoch:
            self.taken.note("same order", 0)

    @_or_gives_up
    def clips(self, max_norm: Any) -> None:
        """Note that gradients of a scaled loss are clipped to this norm, if they still are scaled."""
        if are_scaled(self.taken.scaler, max_norm):
            self.taken.note("clipped scaled", 0)

    @_or_gives_up
    def profiler_starts(self) -> None:
        """Note that the job starts a profiler of its own, beside which no other one sees anything."""
        if self._window is not None:
            self._window.drop("the job's own profiler began in step {step}, so this recording has no trace")

    # ---- one step after the other

    @_or_gives_up
    def end_by_hand(self, optimizers: Sequence[Any], loss: torch.Tensor | float | None, tokens: int | None) -> None:
        """End a step, as the loop itself says."""
        if loss is not None:
            self.taken.note_loss(torch.as_tensor(loss))
        self.taken.tokens = tokens
        self.end_step(optimizers)

    def end_step(self, optimizers: Sequence[Any]) -> None:
        """End a step, in which these optimizers stepped; what follows is the next one's."""
        now = time.perf_counter()
        self.has_stepped()
        self._optimizers = optimizers
        if self._rows is None:
            self._become_a_rank(optimizers)
        if self._rows is None:
            return
        # the time between two ends, less what loaders took
        seconds = None if self._began is None else now - self._began - self.taken.loading_s
        if seconds is not None:
            self.taken.cpu_s = time.process_time() - self._cpu_began
        self.taken.note("resident", 0, resident_bytes(self._rows.place.device))
        if has_no_learning_rate(optimizers):
            self.taken.note("learning rate 0", 0)
        evaluated = self.taken.evaluated is not None
        # an evaluation that still goes on belongs to the next step too
        is_timed = seconds is not None and self.taken.evaluates_since is None
        _, evaluation_ns, _ = self.taken.activities.get("evaluation", (0, 0, 0))
        self._rows.add(self._step, seconds - evaluation_ns / 1e9 if seconds and is_timed else None, self.taken)
        if self._window is not None:
            self._window.autocast = self.autocast
            self._window.scales.scaler = self.taken.scaler
            self._window.between(self._step, (seconds or 0.0) + self.taken.loading_s, evaluated)
        self._step += 1
        if self._step > self.settings.last_timed:
            self.end()
        self._begin()

    def _end_first_step(self) -> None:
        """End the first step, unless an optimizer that has not stepped yet does so before one steps again."""
        # step 0 is ended anew with each optimizer, and its row replaces the one before
        losses, self._step = [*self.taken.first_losses, *self.taken.losses], 0
        self._began = None
        self.end_step(self._round.optimizers)
        self.taken.first_losses = losses

    def _begin(self) -> None:
        self.taken, self._began, self._cpu_began = Taken(), time.perf_counter(), time.process_time()
        self.loop_goes_on()

    def _become_a_rank(self, optimizers: Sequence[Any]) -> None:
        """Claim this rank's files; the recording has ended where another process has them."""
        place = _place(optimizers)
        self._rows = StepRows.claimed(self.settings, place)
        if self._rows is None:
            self.done = True
            return
        self._collections.begin()
        atexit.register(self.end)  # torch crashes at the end of a process in which a profiler still runs
        if self.settings.measures(place.rank, place.world_size, place.of_a_node):
            from fsdplab.recording.window import Window

            self._window = Window(
                self.settings, place, self._rows, optimizers, self.model, self.tags, give_up=self.give_up
            )

    def give_up(self, why: str) -> None:
        """End the recording for this reason, which is printed and noted."""
        print(f"fsdplab: the recording has ended, the job goes on: {why}", file=sys.stderr)
        self.done = True
        try:
            if self._rows is not None:
                self._rows.note(f"the recording ended in step {self._step}: {why}")
            self.end()
        except Exception as error:  # such as a full disk, of which the note tells nobody
            print(f"fsdplab: {type(error).__name__}: {error}", file=sys.stderr)

    def end(self) -> None:
        """Nothing more is recorded."""
        self.done = True
        self._collections.end()
        atexit.unregister(self.end)
        window, rows, self._window, self._rows = self._window, self._rows, None, None
        self.model, self._round, self.taken, self._optimizers = None, Round(), Taken(), ()
        if window is not None:
            window.close()
        if rows is not None:
            rows.close()

    def _forked(self) -> None:
        """In a forked process: one whose parent is a rank is none itself, and leaves the parent's profile alone."""
        self.done = self.done or self._rows is not None
        atexit.unregister(self.end)


class Round:
    """The optimizers of a step, in the order in which they first stepped; all are known once one of them steps again.

    The last of them ends a step. Where a third one for the same parameters steps, the loop makes it anew in each step,
    and it takes the place of those before.
    """

    def __init__(self) -> None:
        self.optimizers: list[Any] = []
        self._is_known = False
        self._seen = weakref.WeakSet[Any]()  # all that have stepped and still live

    def is_remade(self, optimizer: Any) -> bool:
        """Return whether this optimizer was made in place of those that stepped before, whose place it has then."""
        if any(optimizer is each for each in self.optimizers):
            return False
        is_new = optimizer not in self._seen
        self._seen.add(optimizer)
        first = _first_parameter(optimizer)
        before = [each for each in self.optimizers if first is not None and _first_parameter(each) is first]
        if len(before) < (1 if self._is_known else 2):
            return False
        # in place: whoever measures a step has this list
        self.optimizers[:] = [each for each in self.optimizers if not any(each is old for old in before)]
        self.optimizers.append(optimizer)
        self._is_known = True
        return is_new

    def is_first_of(self, optimizer: Any) -> bool:
        """Return whether this optimizer has not stepped before, and no other one has stepped twice."""
        if self._is_known:
            return False
        self._is_known = any(optimizer is each for each in self.optimizers)
        if not self._is_known:
            self.optimizers.append(optimizer)
        return not self._is_known


def _first_parameter(optimizer: Any) -> torch.Tensor | None:
    """The first parameter that an optimizer steps."""
    return next(iter(parameters_of([optimizer])), None)


def _trains(module: torch.nn.Module, optimizers: Sequence[Any]) -> bool:
    """Return whether a module holds most of what these optimizers step: its evaluation is one of the model."""
    # elements, so that a small head beside the model does not count for as much
    stepped = {id(each): each.numel() for each in parameters_of(optimizers)}
    held = sum(stepped.get(id(each), 0) for each in module.parameters())
    return 2 * held > sum(stepped.values())


def _place(optimizers: Sequence[Any]) -> Place:
    """This process's place in the job: by its process group, else by what its launcher said."""
    device = next((each.device for each in parameters_of(optimizers)), torch.device("cpu"))
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    # without a launcher's word all ranks are taken to be on one node
    of_a_node = next((os.environ[name] for name in _OF_A_NODE if os.environ.get(name, "").isdecimal()), world_size)
    return Place(rank, world_size, int(of_a_node), device)


_OF_A_NODE = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")  # torchrun's word, and Slurm's
