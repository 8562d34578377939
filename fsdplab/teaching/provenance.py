"""The last cell of every notebook: what was measured, what was emulated, what was simulated.

Records carry the origin of each quantity; this collects them, so that no lesson can forget to say it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .display import present, table

_ORIGINS = ("measured", "emulated", "simulated")


def what_was_real(*records: Any, **others: str) -> None:
    """Show each quantity with its origin, from records and from `name="measured"` pairs: `what_was_real(*runs, busbw="measured")`."""
    present(table(["origin", "what"], origins(records, others)))


def origins(records: Iterable[Any], others: dict[str, str]) -> list[tuple[str, str]]:
    """(origin, quantities) rows in the order measured, emulated, simulated; an unknown origin is a ValueError."""
    found: dict[str, dict[str, None]] = {origin: {} for origin in _ORIGINS}
    for source in (*(record.provenance for record in records), others):
        for quantity, origin in source.items():
            if origin not in found:
                raise ValueError(f"{quantity} is {origin!r}; expected one of: {', '.join(_ORIGINS)}")
            found[origin][quantity.replace("_", " ")] = None
    return [(origin, ", ".join(names) or "nothing") for origin, names in found.items()]
