"""The last cell of every notebook: what was measured, computed, emulated, simulated.

Records have the origin of each quantity; this collects them for a lesson.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from .display import present, table

_ORIGINS = ("measured", "computed", "emulated", "simulated")
# arithmetic: not an origin of records, but a reader must not take it for a simulation
_COMPUTED = ("formula_bytes_per_step",)
_WORDS = {
    "step_time_s": "step time",
    "steady": "step on the steady card",
    "peak_memory_bytes": "peak memory",
    "ledger": "bytes sent",
    "formula_bytes_per_step": "the formula's bytes",
    "exposed_s": "exposed time",
    "comm": "communication",
}


class HasProvenance(Protocol):
    """A record, or anything else with the origin of its quantities."""

    @property
    def provenance(self) -> Mapping[str, str]: ...


def what_was_real(*records: HasProvenance, **others: str) -> None:
    """Show each quantity with its origin, from records and from `name="measured"` pairs: `what_was_real(*runs,
    busbw="measured")`.
    """
    present(table(["origin", "what"], origins(records, others)))


def origins(records: Iterable[HasProvenance], others: dict[str, str]) -> list[tuple[str, str]]:
    """Return (origin, quantities) rows in the order measured, computed, emulated, simulated.

    An unknown origin is a ValueError.
    """
    quantities: dict[str, list[str]] = {origin: [] for origin in _ORIGINS}
    for source in (*(record.provenance for record in records), others):
        for quantity, origin in source.items():
            if origin not in quantities:
                raise ValueError(f"{quantity} is {origin!r}; expected one of: {', '.join(_ORIGINS)}")
            names = quantities["computed" if quantity in _COMPUTED else origin]
            name = _WORDS.get(quantity, quantity.replace("_", " "))
            # several records of one lesson measure the same
            if name not in names:
                names.append(name)
    return [(origin, ", ".join(names) or "nothing") for origin, names in quantities.items()]
