"""Networks between nodes: what a card has, what collectives reach of it, and what is left of that on many nodes.

Data sheets give a rate a card. Collectives reach a part of it, and less the more nodes a ring passes: their bytes meet
on the links of switches, and each step waits for the slowest. `SPREAD` is fitted to MosaicML's 18 runs on 128, 256 and
512 H100 and its 24 multi-node runs on A100 (docs/planning.md has the published falls beside the predicted ones); the
square root of the nodes fits these better than their logarithm, and as well as their number, which would leave nothing
of a network on 2,048 GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdplab.common.words import did_you_mean

from .hardware import Gpu
from .links import NETWORK_S, PRESETS, LinkError, LinkSpec, parse_link

MOST_NODES = 256  # that a published fall reaches to (2,048 GPUs); beyond, a network is taken as at these
SPREAD = 0.1  # a ring over n nodes reaches 1 / (1 + 0.1 (sqrt(n) - 1)) of what one over few does
_ASSUMED = 0.84  # where nobody measured: as between two GPUs of a node (NVIDIA/nccl #1264)
_INFINIBAND = 0.94  # all-reduce on 4 nodes of 8 GPUs with 400 Gb/s each: 377 of 400 GB/s (stas00/ml-engineering)


@dataclass(frozen=True)
class Network:
    """A row: bytes per second of one card in one direction, seconds of a ring's step, and the part that collectives
    reach on few nodes. `source` says where rate and part are from.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    efficiency: float
    source: str


def _row(name: str, efficiency: float, source: str) -> Network:
    """A card whose rate and latency are the link's of that name."""
    link = PRESETS[name]
    return Network(name, link.bytes_per_s, link.latency_s, efficiency, source)


_MEASURED = "stas00/ml-engineering: network/benchmarks; 46 to 48 of 50 GB/s a card expected in NVIDIA/nccl-tests #290"
_ROCE = "rate of the card; latency and part assumed InfiniBand's without its measurement"
_TCP = "rate of the card; TCP's latency (links.py) and part are assumed"
NETWORKS: dict[str, Network] = {
    row.name: row
    for row in (
        _row("ib800", _INFINIBAND, f"XDR; part assumed that of NDR: {_MEASURED}"),
        _row("ib400", _INFINIBAND, f"NDR; {_MEASURED}"),
        _row("ib200", _INFINIBAND, f"HDR; part assumed that of NDR: {_MEASURED}"),
        _row("ib100", _INFINIBAND, f"EDR; part assumed that of NDR: {_MEASURED}"),
        _row("roce400", _ASSUMED, _ROCE),
        _row("roce200", _ASSUMED, _ROCE),
        _row("roce100", _ASSUMED, _ROCE),
        *(_row(name, 0.7, _TCP) for name in ("eth100", "eth25", "eth10", "eth1")),
    )
}


@dataclass(frozen=True)
class Fabric:
    """What joins the nodes of a plan, as one GPU sees it: its share of the node's cards, of their data sheets.

    `assumed`: nobody named a network, so it is what nodes of this GPU typically have.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    efficiency: float
    words: str
    assumed: bool = False

    @classmethod
    def of(cls, gpu: Gpu, name: str | None, nics: int | None, oversubscription: float, per_node: int) -> Fabric | None:
        """The named network, or what the table has for the GPU; None where neither is known.

        `nics`: cards of a node, one a GPU by default; `oversubscription`: bytes that its leaf switch takes in over
        those that it passes on.
        """
        slower = f", {oversubscription:g}:1 oversubscribed" if oversubscription > 1 else ""
        if name is None:
            if gpu.nic_bytes_per_s is None:
                return None
            rate = gpu.nic_bytes_per_s / oversubscription
            words = f"{_gbit(gpu.nic_bytes_per_s)} a GPU, typical of {gpu.name}, is assumed{slower}"
            return cls("network", rate, NETWORK_S, _INFINIBAND, words, True)
        row, cards = parse_network(name), nics or per_node
        rate = row.bytes_per_s * cards / per_node / oversubscription
        words = f"{row.name}, {cards} x {_gbit(row.bytes_per_s)} a node of {per_node} GPUs{slower}"
        return cls(row.name, rate, row.latency_s, row.efficiency, words)

    def part(self, nodes: float) -> float:
        """The part of the data sheet's rate that collectives of rings over so many nodes reach.

        >>> [round(Fabric("ib400", 50e9, 0.0, 0.94, "").part(nodes), 2) for nodes in (1, 4, 64)]
        [0.94, 0.85, 0.55]
        """
        known = min(max(1.0, nodes), MOST_NODES)
        return self.efficiency / (1 + SPREAD * (math.sqrt(known) - 1))

    def ring(self, gpu: Gpu, members: int, nodes: float, inside_part: float) -> LinkSpec:
        """The link of a ring over nodes with so many members in each, at what collectives reach of it.

        The ring enters a node once, and the network cards of all its members there carry their part of its bytes (NCCL
        runs one ring a card), at most what their own link reaches. Latency is the mean over the ring's hops.
        """
        joined, inside = members * self.bytes_per_s * self.part(nodes), inside_part * gpu.link.bytes_per_s
        latency_s = ((members - 1) * gpu.link.latency_s + self.latency_s) / members
        return LinkSpec("network", joined if members == 1 else min(joined, inside), latency_s)


def sheet_rate(reached: float, nodes: float) -> float:
    """The rate of an assumed network's data sheet of which rings over so many nodes reach `reached`.

    >>> round(sheet_rate(47e9, 1) / 1e9, 3)
    50.0
    """
    return reached / Fabric("network", 1.0, 0.0, _INFINIBAND, "").part(nodes)


def parse_network(text: str) -> Network:
    """The network that `text` names: a row of the table, or a card's rate such as 100gbit; raises LinkError.

    >>> parse_network("ib400").bytes_per_s, parse_network("NDR").name
    (50000000000.0, 'ib400')
    """
    known = text.strip().lower() if isinstance(text, str) else ""
    if known in NETWORKS:
        return NETWORKS[known]
    try:
        link = parse_link(text)
    except LinkError:
        meant = did_you_mean(known, NETWORKS)
        raise LinkError(
            f"unknown network {text!r}{meant}; expected one of {', '.join(NETWORKS)}, or the rate of a card such as"
            " 100gbit"
        ) from None
    if link.name in NETWORKS:
        return NETWORKS[link.name]
    return Network(link.name, link.bytes_per_s, link.latency_s or NETWORK_S, _ASSUMED, "typed; the part is assumed")


def _gbit(bytes_per_s: float) -> str:
    """`400 Gb/s`."""
    return f"{bytes_per_s * 8 / 1e9:g} Gb/s"
