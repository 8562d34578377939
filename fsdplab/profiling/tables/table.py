"""A table as a value: what its columns mean, its rows, and the one sentence that a reader should take from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdplab.common.places import how_to_install

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column: its key in the rows, its heading, and its unit: "ns", "bytes", "bytes/s", "FLOP", "FLOP/s", "share",
    "count" or "" for text.
    """

    key: str
    heading: str
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """`rows` with one value a column (None: the trace does not say), the weightiest first, and what they say together.

    `notes` say where the definition differs from other tools', or what the trace lacks.
    """

    name: str
    title: str
    sentence: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def frame(self) -> pandas.DataFrame:
        """The rows as a pandas DataFrame, times in ns; ImportError with the install command where pandas is missing."""
        try:
            import pandas
        except ImportError:
            raise ImportError(
                f"table.frame() needs pandas, which is not installed. Run: {how_to_install('lab')}"
            ) from None
        return pandas.DataFrame(list(self.rows), columns=[column.key for column in self.columns])
