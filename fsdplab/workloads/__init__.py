"""Models, their published shapes, and text to train them on.

Names load when first used: shapes need no torch, and only experts and cut models need its DTensor, whose
import takes another second.
"""

from __future__ import annotations

from fsdplab.common.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
