"""Records by hand: two lines of a training loop, where the job's start is not yours or its step is unusual; and as
a callback, for loops that are somebody else's: transformers' Trainer, and Lightning.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.common.errors import UserError
from fsdplab.recording.hooks import hook_losses, watch_all
from fsdplab.recording.launch import prepare
from fsdplab.recording.rank import RankRecorder
from fsdplab.recording.settings import Settings, steps_of
from fsdplab.records.folder import release_folder


class Recorder:
    """Records some steps of a training loop into `folder`, on every rank; `fsdplab report` opens it.

    `model` and `optimizer` are those of the loop, wrapped or sharded already; several optimizers are given as a list.
    `steps`: those that are profiled, FIRST:END counted from 0; memory is that of two steps before (a GPU: three). A
    recording that cannot be made (a folder that holds a record, a full disk) says so on stderr, and the loop goes on.

    >>> recorder = Recorder("out", model, optimizer)                          # doctest: +SKIP
    >>> for batch in loader:                                                  # doctest: +SKIP
    ...     loss = train(batch)
    ...     recorder.step(loss=loss, tokens=batch.numel())
    """

    def __init__(
        self,
        folder: str | Path,
        model: torch.nn.Module | None,
        optimizer: Any,
        *,
        steps: str = "8:16",
        ranks: tuple[int, ...] | None = None,
        job: str | None = None,
    ) -> None:
        # the job may change its working folder later
        place = Path(folder).absolute()
        settings = Settings(str(place), *steps_of(steps), ranks=ranks, job=job or Path(sys.argv[0]).name)
        self._optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._recorder = RankRecorder(settings, model)
        self._claimed: Path | None = None
        # one rank claims the folder for all
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._claim(place, settings)

    def _claim(self, place: Path, settings: Settings) -> None:
        try:
            prepare(settings)
        except (UserError, OSError) as error:
            # the loop goes on without a recording
            self._recorder.give_up(str(error))
        else:
            self._claimed = place

    def step(self, *, loss: torch.Tensor | float | None = None, tokens: int | None = None) -> None:
        """End a step: call it last in the loop, on every rank. `loss` is the step's, `tokens` those that this rank read
        in it.
        """
        recorder = self._recorder
        if recorder.done:
            return
        recorder.end_by_hand(self._optimizers, loss, tokens)
        if recorder.done:
            self.close()

    def note_losses(self) -> None:
        """From now on note every loss whose `backward` is called, for a loop that does not say it in `step`; and what
        the loop does besides.
        """
        hook_losses(self._recorder)
        watch_all(self._recorder)

    def close(self) -> None:
        """End the recording, which ends by itself some steps after the profiled ones."""
        self._recorder.end()
        if self._claimed is not None:
            release_folder(self._claimed)
        self._claimed, self._optimizers = None, []


def trainer_callback(folder: str | Path, *, steps: str = "8:16") -> Any:
    """Return a callback of transformers' Trainer that records some of its steps into `folder`, as `Recorder` does.

    `Trainer(..., callbacks=[fsdplab.trainer_callback("out")])`. A step's loss is what its backward was called of.
    """
    from transformers import TrainerCallback

    class RecordSteps(TrainerCallback):
        """Makes the recorder when the first step begins, and tells it of each step's end."""

        recorder: Recorder | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            if self.recorder is None:
                self.recorder = Recorder(folder, None, optimizer, steps=steps)
                self.recorder.note_losses()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.recorder is not None:
                self.recorder.step()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.recorder is not None:
                self.recorder.close()

    return RecordSteps()


def lightning_callback(folder: str | Path, *, steps: str = "8:16") -> Any:
    """Return a callback of Lightning's Trainer that records some of its steps into `folder`, as `Recorder` does.

    `Trainer(..., callbacks=[fsdplab.lightning_callback("out")])`. A step's loss is what its backward was called of.
    """
    if importlib.util.find_spec("lightning") is not None:
        from lightning.pytorch import Callback
    else:
        from pytorch_lightning import Callback

    class RecordSteps(Callback):  # type: ignore[misc, valid-type, unused-ignore]
        """Makes the recorder when the training begins; a step has ended where the trainer has counted one."""

        recorder: Recorder | None = None
        counted = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.counted = trainer.global_step
            self.recorder = Recorder(folder, None, trainer.optimizers, steps=steps)
            self.recorder.note_losses()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            # with accumulation several batches make one step
            if self.recorder is not None and trainer.global_step != self.counted:
                self.counted = trainer.global_step
                self.recorder.step()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.recorder is not None:
                self.recorder.close()

    return RecordSteps()
