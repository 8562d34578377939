"""Ending a step's backwards by hand, as PyTorch's pipelining does from torch 2.15 on: many backwards, then one
reduction.
"""

from __future__ import annotations

from typing import Any

from fsdplab.engine.core.hooks import UnitHooks, bind_root


class GradientReductionHandle:
    """A reduction that `finalize_backward(async_op=True)` has done already."""

    def wait(self) -> None:
        """Return: the gradients are there."""


class ManualFinalization:
    """The methods of a sharded module about when a step's backwards are over."""

    _unit_hooks: UnitHooks

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Announce that `finalize_backward` will end the step's backwards. Accepted on the root only.

        A backward that synchronises gradients still ends by itself, and what is left to finalise is then nothing.
        """
        hooks = self._unit_hooks
        if hooks.runtime is not None and hooks.runtime.root is not hooks.unit:
            raise RuntimeError("set_manual_backward_finalization must be called on the root module")

    def finalize_backward(self, *, async_op: bool = False) -> Any:
        """Reduce what the backwards since the last reduction have accumulated, and drop what is gathered, as the
        settings now say.

        With `async_op` a handle to wait on. Nothing happens before the first forward.
        """
        runtime = self._unit_hooks.runtime or bind_root(self)
        if runtime.passes:
            for unit in reversed(runtime.units.values()):
                runtime.after_backward(unit)
            runtime.end_backward()
        return GradientReductionHandle() if async_op else None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Gathered parameters give their memory back when they are dropped: keeping it (for CUDA graphs) is not
        offered.
        """
        if keep:
            raise NotImplementedError(
                "this engine frees gathered parameters when it drops them; set_keep_unsharded_storage takes False only"
            )
