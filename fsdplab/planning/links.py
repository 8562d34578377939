"""Links as bandwidth and latency: presets of real ones, and a parser for typed ones.

Bandwidths are the data sheets' nominal bytes per second in one direction (shared with hardware.py's table). Latencies
are seconds per step of a ring collective. For NVLink, PCIe and InfiniBand they are the constants of NCCL's own cost
model (tuning.cc, `hwLat`, Ring, Simple: NVLINK 3.4, PCI 5.7, NET 14.0 us). For Ethernet they are assumptions, not
measured here: TCP without RDMA costs some ten microseconds a message in each host's kernel, more at slower rates, where
a packet itself takes longer (1,500 bytes at 1 Gb/s: 12 us).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from fsdplab.common.errors import UserError
from fsdplab.common.words import did_you_mean

_NVLINK_S, _PCIE_S, NETWORK_S = 3.4e-6, 5.7e-6, 14.0e-6


class LinkError(UserError, ValueError):
    """An invalid link; the message is one line: what happened, got, expected, what to do."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class LinkSpec:
    """A link as one rank sees it: bytes per second in one direction, and seconds of latency per step of a collective.

    >>> LinkSpec("200mbit", 25e6, 0.0).words
    '25 MB/s'
    """

    name: str
    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not _is_number(self.bytes_per_s) or self.bytes_per_s <= 0:
            raise LinkError(f"link {self.name} has {self.bytes_per_s!r} bytes per second; expected a number above 0")
        if not _is_number(self.latency_s) or self.latency_s < 0:
            raise LinkError(f"link {self.name} has a latency of {self.latency_s!r} s; expected 0 or more")

    @property
    def words(self) -> str:
        """Bandwidth and latency, to be read: `450 GB/s, 3.4 us a step`."""
        symbol, size = "B/s", 1.0
        for larger in (("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9)):
            if self.bytes_per_s >= larger[1]:
                symbol, size = larger
        bandwidth = f"{self.bytes_per_s / size:.4g} {symbol}"
        if not self.latency_s:
            return bandwidth
        return f"{bandwidth}, {self.latency_s * 1e6:.4g} us a step"


PRESETS: dict[str, LinkSpec] = {
    link.name: link
    for link in (
        LinkSpec("nvlink3", 300e9, _NVLINK_S),
        LinkSpec("nvlink4", 450e9, _NVLINK_S),
        LinkSpec("nvlink5", 900e9, _NVLINK_S),
        LinkSpec("pcie3", 15.75e9, _PCIE_S),
        LinkSpec("pcie4", 31e9, _PCIE_S),
        LinkSpec("pcie5", 63e9, _PCIE_S),
        LinkSpec("ib800", 100e9, NETWORK_S),
        LinkSpec("ib400", 50e9, NETWORK_S),
        LinkSpec("ib200", 25e9, NETWORK_S),
        LinkSpec("ib100", 12.5e9, NETWORK_S),
        LinkSpec("roce400", 50e9, NETWORK_S),
        LinkSpec("roce200", 25e9, NETWORK_S),
        LinkSpec("roce100", 12.5e9, NETWORK_S),
        LinkSpec("eth100", 12.5e9, 20e-6),
        LinkSpec("eth25", 3.125e9, 20e-6),
        LinkSpec("eth10", 1.25e9, 30e-6),
        LinkSpec("eth1", 0.125e9, 50e-6),
    )
}

HOST_LINK = PRESETS["pcie4"]  # of a GPU to its host: an assumption where its row says nothing

# The usual spellings, squeezed: lower case, no blanks, dashes, underscores or dots; `{}` is the figure.
_ALIASES = (
    (r"nvlink([345])(?:0)?", "nvlink{}"),
    (r"pcie(?:gen)?([345])(?:0)?(?:x16)?", "pcie{}"),
    (r"(?:ib|infiniband)(100|200|400|800)(?:g|gb/?s|gbps|gbit)?", "ib{}"),
    (r"(100|200|400|800)(?:g|gb/?s|gbps|gbit)?(?:ib|infiniband)", "ib{}"),
    (r"roce(?:v2)?(100|200|400)(?:g|gb/?s|gbps|gbit)?", "roce{}"),
    (r"(?:eth|ethernet)(1|10|25|100)(?:g|gb/?s|gbps|gbit)?", "eth{}"),
    (r"(1|10|25|100)(?:gbe|gige|g?ethernet)", "eth{}"),
)
# InfiniBand's own names for its rates
_GENERATIONS = {"xdr": "ib800", "ndr": "ib400", "hdr": "ib200", "edr": "ib100", "ibndr": "ib400", "ibhdr": "ib200"}
_RATE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(bits?/s|bits?|bytes?/s|b/s|bps)", re.IGNORECASE)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_LATENCY = re.compile(r"([0-9.]+(?:e-?[0-9]+)?)\s*(ns|us|µs|ms|s)?", re.IGNORECASE)
_PER_SECOND = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}
_EXPECTED = (
    f"one of {', '.join(PRESETS)}, or a rate like 200mbit, 1.5gbit or 800MB/s, with a latency if wanted: 10gbit,50us"
)


def parse_link(text: str) -> LinkSpec:
    """Return the link that `text` names: a preset, or a rate, either with a latency behind a comma; raises LinkError.

    A rate without a latency has none. Bits are written bit, Bytes B: `800mb/s` could be either and is an error.

    >>> parse_link("NVLink 4").bytes_per_s
    450000000000.0
    >>> parse_link("200mbit,1ms")
    LinkSpec(name='200mbit,1ms', bytes_per_s=25000000.0, latency_s=0.001)
    """
    if not isinstance(text, str) or not text.strip():
        raise LinkError(f"a link is {text!r}; expected {_EXPECTED}")
    first, comma, behind = (part.strip() for part in text.partition(","))
    link = _preset(first) or _rate(first)
    if link is None:
        raise LinkError(f"unknown link {text!r}{did_you_mean(first, PRESETS)}; expected {_EXPECTED}")
    if not comma:
        return link
    return replace(link, name=f"{link.name},{behind}", latency_s=_latency(text, behind))


def ring_steps(kind: str, ranks: int) -> int:
    """Return the steps of a ring collective: `ranks - 1` to gather or reduce-scatter, twice that to all-reduce.

    >>> ring_steps("all_gather", 8), ring_steps("all_reduce", 8), ring_steps("all_gather", 1)
    (7, 14, 0)
    """
    if kind not in _ROUNDS:
        raise LinkError(f"no ring is known for {kind!r}; expected one of {', '.join(_ROUNDS)}")
    return _ROUNDS[kind] * (ranks - 1)


# how often bytes pass round the ring; "ring" is ring attention's
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "ring": 1, "send": 1, "all_reduce": 2}


def transfer_s(spec: LinkSpec, wire_bytes: float, steps: int) -> float:
    """Return the seconds of a collective on the link: latency x steps + the bytes that one rank sends / bandwidth.

    50 MB over 8 ranks of 10 GbE, gathered in 7 steps: 7 x 30 us + 50e6 / 1.25e9 = 0.21 + 40 ms.

    >>> round(transfer_s(PRESETS["eth10"], 50e6, 7), 5)
    0.04021
    """
    return spec.latency_s * steps + wire_bytes / spec.bytes_per_s


def _preset(text: str) -> LinkSpec | None:
    squeezed = re.sub(r"[\s_.-]", "", text.lower())
    for form, name in _ALIASES:
        if match := re.fullmatch(form, squeezed):
            return PRESETS.get(name.format(match[1]))
    return PRESETS.get(_GENERATIONS.get(squeezed, squeezed))


def _rate(text: str) -> LinkSpec | None:
    match = _RATE.fullmatch(text)
    if match is None:
        return None
    value, prefix, unit = _number(match[1]), match[2], match[3]
    if value is None:
        return None
    if unit.lower().startswith("bit"):
        bits = 8.0
    elif unit.lower().startswith("byte") or unit.startswith("B"):
        bits = 1.0
    elif prefix.isupper() or unit.lower() == "bps":
        bits = 8.0  # Gb/s, Mbps: where the prefix is a capital, the small b was meant
    else:
        raise LinkError(
            f"link {text!r} could mean bits or bytes; write {match[1]}{prefix}bit or {match[1]}{prefix.upper()}B/s"
        )
    return LinkSpec(text, value * _PREFIX[prefix.lower()] / bits, 0.0)


def _latency(text: str, behind: str) -> float:
    match = _LATENCY.fullmatch(behind)
    value = _number(match[1]) if match else None
    if match is None or value is None or value and match[2] is None:  # 0 needs no unit
        raise LinkError(
            f"link {text!r} has the latency {behind!r}; expected a number with ns, us, ms or s, such as 50us"
        )
    return value / _PER_SECOND[(match[2] or "s").lower()]


def _number(digits: str) -> float | None:
    try:
        value = float(digits)
    except ValueError:  # 1.2.3
        return None
    return value if math.isfinite(value) else None
