"""What a trace says of where it was made: device, backend, PyTorch, and whether its link was emulated.

The lab's own traces hold a mark, so that one that is opened without its record still says what in it was real.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MARK = "fsdplab"  # the key in a trace's metadata
_UNNAMED_LINK = "a link"


@dataclass(frozen=True)
class Origin:
    """A trace's own words; "" for what it does not say. `link`: the emulated one, None where nothing tells of it."""

    device_name: str = ""
    backend: str = ""
    torch: str = ""
    link: str | None = None


def origin_of(metadata: Mapping[str, Any], waits_for_link: bool) -> Origin:
    """Read a trace's metadata; `waits_for_link`: it has ranges in which its host waited for an emulated link.

    >>> origin_of({"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}]}, False).device_name
    'NVIDIA A100-SXM4-80GB'
    """
    devices, job, mark = (metadata.get(key) for key in ("deviceProperties", "distributedInfo", MARK))
    first = devices[0] if isinstance(devices, list) and devices else None
    link = _text(mark, "link") or (_UNNAMED_LINK if waits_for_link else None)
    torch = _text(metadata, "pytorch_version") or _text(mark, "torch")
    return Origin(_text(first, "name"), _text(job, "backend"), torch, link)


def _text(found: Any, key: str) -> str:
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, str) else ""
