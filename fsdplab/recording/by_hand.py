"""The recorder by hand: two lines of a training loop, where the job's start is not yours or its step is unusual."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.common.errors import UserError
from fsdplab.recording.hooks import hook_losses
from fsdplab.recording.launch import prepare
from fsdplab.recording.rank import RankRecorder
from fsdplab.recording.settings import Settings, steps_of
from fsdplab.records.folder import release_folder


class Recorder:
    """Records some steps of a training loop into `folder`, on every rank; `fsdplab report` opens it.

    `model` and `optimizer` are those of the loop, wrapped or sharded already; several optimizers are given as a list.
    `steps`: those that are profiled, FIRST:END counted from 0; memory is measured two steps before. A recording
    that cannot be made (a folder that holds a record, a full disk) says so on stderr, and the loop goes on.

    >>> recorder = Recorder("out", model, optimizer)                          # doctest: +SKIP
    >>> for batch in loader:                                                  # doctest: +SKIP
    ...     loss = train(batch)
    ...     recorder.step(loss=loss, tokens=batch.numel())
    """

    def __init__(
        self, folder: str | Path, model: torch.nn.Module | None, optimizer: Any, *, steps: str = "10:13",
        ranks: tuple[int, ...] | None = None, job: str | None = None,
    ) -> None:  # fmt: skip
        place = Path(folder).absolute()
        settings = Settings(str(place), *steps_of(steps), ranks=ranks, job=job or Path(sys.argv[0]).name)
        self._optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._recorder = RankRecorder(settings, model)
        self._claimed: Path | None = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._claim(place, settings)

    def _claim(self, place: Path, settings: Settings) -> None:
        try:
            prepare(settings)
        except (UserError, OSError) as error:
            self._recorder.give_up(str(error))
        else:
            self._claimed = place

    def step(self, *, loss: torch.Tensor | float | None = None, tokens: int | None = None) -> None:
        """The end of a step: call it last in the loop, on every rank. `loss` is the step's, `tokens` those that this
        rank read in it.
        """
        recorder = self._recorder
        if recorder.done:
            return
        recorder.end_by_hand(self._optimizers, loss, tokens)
        if recorder.done:
            self.close()

    def note_losses(self) -> None:
        """From now on note every loss whose `backward` is called, for a loop that does not say it in `step`."""
        hook_losses(self._recorder)

    def close(self) -> None:
        """End the recording, which ends by itself some steps after the profiled ones."""
        self._recorder.end()
        if self._claimed is not None:
            release_folder(self._claimed)
        self._claimed, self._optimizers = None, []
