"""The recorder as a callback, for loops that are somebody else's: transformers' Trainer, and Lightning."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from fsdplab.recording.by_hand import Recorder


def trainer_callback(folder: str | Path, *, steps: str = "10:13") -> Any:
    """A callback of transformers' Trainer that records some of its steps into `folder`, as `Recorder` does.

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


def lightning_callback(folder: str | Path, *, steps: str = "10:13") -> Any:
    """A callback of Lightning's Trainer that records some of its steps into `folder`, as `Recorder` does.

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
            if self.recorder is not None and trainer.global_step != self.counted:
                self.counted = trainer.global_step
                self.recorder.step()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.recorder is not None:
                self.recorder.close()

    return RecordSteps()
