"""Record -> figure: pure functions that return a plotly Figure and never show it.

The names load when first used, and plotly when a figure is first drawn, so that everything else works where plotly is
not installed.
"""

from fsdplab.common.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
