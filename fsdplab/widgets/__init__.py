"""The strategy lab: choose, run, look. State is in plain objects; widgets only show it.

The names load when first used, so that choices, state and runner work (and are tested) where ipywidgets is not
installed.
"""

from __future__ import annotations

from fsdplab.common.lazy import names_of_stub
from fsdplab.common.places import how_to_install

__all__, _loaded, __dir__ = names_of_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Load the module of a public name when the name is first used."""
    try:
        return _loaded(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anywidget", "ipywidgets", "plotly", "traitlets", "IPython"):
            raise
        raise ModuleNotFoundError(
            f"the strategy lab needs anywidget, ipywidgets and plotly: {how_to_install('lab')}", name=error.name
        ) from error
