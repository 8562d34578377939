"""The strategy lab: choose, run, look. State is in plain objects; widgets only show it.

The names load when first used, so that choices, state and runner work (and are tested) where ipywidgets is not
installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fsdplab.common.places import how_to_install

if TYPE_CHECKING:
    from .choices import Choices as Choices
    from .choices import Request as Request
    from .choices import check as check
    from .lab_state import Batch as Batch
    from .lab_state import LabState as LabState
    from .running import Runner as Runner
    from .strategy_lab import StrategyLab as StrategyLab

_MODULES = {
    "Choices": "choices",
    "Request": "choices",
    "check": "choices",
    "LabState": "lab_state",
    "Batch": "lab_state",
    "Runner": "running",
    "StrategyLab": "strategy_lab",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    """Load the module of a public name when the name is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fsdplab.widgets' has no attribute {name!r}; public names: {', '.join(_MODULES)}")
    try:
        return getattr(import_module(f"fsdplab.widgets.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anywidget", "ipywidgets", "plotly", "traitlets", "IPython"):
            raise
        raise ModuleNotFoundError(
            f"the strategy lab needs anywidget, ipywidgets and plotly: {how_to_install('lab')}", name=error.name
        ) from error
