"""GPUs with the figures of their data sheets, clusters of them, and the networks between nodes.

The figures are data sheets' (dense, without sparsity); `source` says which. Two habits of data sheets to know: the
memory on the label is in GiB (an "80 GB" H100 has 80 x 2^30 bytes, a little less of it usable), and a GPU whose sheet
prints 1,979 TFLOP/s reaches half of that without sparsity. A missing figure is None, and its users raise an error
instead of guessing.

A GPU of one's own is a JSON file with the figures of its data sheet:
`{"name": "B300", "memory_gib": 268, "bf16_tflops": 2250, "hbm_tb_per_s": 8.0, "link": "nvlink5", "nic_gbit": 800}`;
`nic_gbit` is what the network cards of a node give each GPU. Only the name, the memory, its rate and the link are
needed: without `bf16_tflops` no time is predicted, without `nic_gbit` a plan is for one node, and without `host_link`
(`"pcie5"`) PCIe 4 is assumed where states rest in host memory. `"peer_access": false` is of cards whose collectives go
through host memory, such as GeForce's.

Of networks data sheets give a rate a card. Collectives reach a part of it, and less the more nodes a ring passes: their
bytes meet on the links of switches, and each step waits for the slowest. `SPREAD` is fitted to MosaicML's 18 runs on
128, 256 and 512 H100 and its 24 multi-node runs on A100 (docs/planning.md has the published falls beside the predicted
ones); the square root of the nodes fits these better than their logarithm, and as well as their number, which would
leave nothing of a network on 2,048 GPUs.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.common.errors import UserError
from fsdplab.common.files import read_file
from fsdplab.common.sizes import size
from fsdplab.common.words import did_you_mean, near

from .links import NETWORK_S, PRESETS, LinkError, LinkSpec, parse_link

_GIB = 2**30
_NODE = 8  # GPUs of a node unless the text says otherwise: HGX, DGX and the clouds' machines


class HardwareError(UserError, ValueError):
    """An invalid cluster; the message is one line: what happened, got, expected, what to do."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU: memory in bytes, dense bf16 FLOP/s, memory traffic and links in bytes per second in one
    direction.

    `nic_bytes_per_s` is what the node's network cards give to each GPU of it, typically. `die`: the chip that computes,
    where several cards have it. `product_flops`: what large matrix products alone were measured to reach. `host_link`:
    the PCIe to its host, as its data sheet says; None where that is not known. `peer_access`: whether one GPU reads
    another's memory; where not, collectives go through host memory.
    """

    name: str
    memory_bytes: int
    bf16_flops: float | None
    hbm_bytes_per_s: float
    link: LinkSpec
    nic_bytes_per_s: float | None
    source: str
    die: str = ""
    product_flops: float | None = None
    host_link: LinkSpec | None = None
    peer_access: bool = True

    @property
    def memory_words(self) -> str:
        """`85.9 GB: the 80 GiB (2^30 bytes each) of the H100 SXM 80GB; sizes here are in GB of 10^9 bytes`."""
        return (
            f"{size(self.memory_bytes)}: the {self.memory_bytes / _GIB:.4g} GiB (2^30 bytes each) of the {self.name};"
            " sizes here are in GB of 10^9 bytes"
        )

    @property
    def peaks(self) -> dict[str, float]:
        """Dense operations a second by number format, as far as its data sheet says: {"bf16": 989e12, ...}."""
        peaks = {} if self.bf16_flops is None else {"bf16": self.bf16_flops}
        for format_, tflops in _OTHER_FORMATS.get(self.name, {}).items():
            peaks[format_] = tflops * 1e12
        return peaks


# seven links of 64 GB/s: one peer alone sees one; latency assumed NVLink's
_LINKS = PRESETS | {"xgmi": LinkSpec("xgmi", 448e9, PRESETS["nvlink4"].latency_s)}

_SHARED_PCIE = LinkSpec("pcie4 shared by two", PRESETS["pcie4"].bytes_per_s / 2, PRESETS["pcie4"].latency_s)


def _gpu(
    name: str,
    *,
    memory_gib: float,
    tflops: float | None,
    hbm_tb: float,
    link: str | LinkSpec,
    nic_gbit: float | None,
    source: str,
    die: str = "",
    product_tflops: float | None = None,
    host_link: str | None = None,
    peers: bool = True,
) -> Gpu:
    """Make a row of the table, or of a file, from the units of data sheets.

    What joins GPUs by PCIe joins them to their host.
    """
    joined = _LINKS[link] if isinstance(link, str) else link
    host = None
    if host_link:
        host = parse_link(host_link)
    elif joined.name.startswith("pcie"):
        host = joined
    return Gpu(
        name,
        memory_bytes=int(memory_gib * _GIB),
        bf16_flops=tflops and tflops * 1e12,
        hbm_bytes_per_s=hbm_tb * 1e12,
        link=joined,
        nic_bytes_per_s=nic_gbit and nic_gbit * 1e9 / 8,
        source=source,
        die=die,
        product_flops=product_tflops and product_tflops * 1e12,
        host_link=host,
        peer_access=peers,
    )


_QUOTED = "stas00/ml-engineering, compute/accelerator and network, quoting the vendor's page"
# Rates of products alone: the same source's measurements of its own (mamf-finder).

# Memory: as seen by a program where that is known (MI300X, H200, H100 96GB), else the label.
# The host's link: PCIe of 16 lanes, as data sheets say; the H100 96GB, which has none, has the H100 80GB's.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "H100 SXM 80GB",
            memory_gib=80,
            tflops=989,
            hbm_tb=3.35,
            link="nvlink4",
            nic_gbit=400,
            source="nvidia.com/data-center/h100 (prints 1979 with sparsity); DGX H100 user guide",
            die="GH100",
            product_tflops=794.5,
            host_link="pcie5",
        ),
        _gpu(
            "H100 SXM 96GB",
            memory_gib=95.04,
            tflops=None,
            hbm_tb=2.4,
            link="nvlink4",
            nic_gbit=400,
            source="torchtitan's benchmarks; no public data sheet",
            die="GH100",
            host_link="pcie5",
        ),
        _gpu(
            "H200 SXM 141GB",
            memory_gib=139,
            tflops=989,
            hbm_tb=4.8,
            link="nvlink4",
            nic_gbit=400,
            source=f"nvidia.com/data-center/h200; {_QUOTED}",
            die="GH100",
            host_link="pcie5",
        ),
        _gpu(
            "A100 SXM 40GB",
            memory_gib=40,
            tflops=312,
            hbm_tb=1.555,
            link="nvlink3",
            nic_gbit=50,
            source="NVIDIA A100 whitepaper; network of an AWS p4d: 4 x 100 Gb/s for 8 GPUs",
            die="GA100",
            host_link="pcie4",
        ),
        _gpu(
            "A100 SXM 80GB",
            memory_gib=80,
            tflops=312,
            hbm_tb=2.0,
            link="nvlink3",
            nic_gbit=200,
            source="nvidia.com/data-center/a100; network of HDR class, varies from 50 to 200 Gb/s",
            die="GA100",
            product_tflops=271.2,
            host_link="pcie4",
        ),
        _gpu(
            "B200 SXM",
            memory_gib=180,
            tflops=2250,
            hbm_tb=8.0,
            link="nvlink5",
            nic_gbit=400,
            source=f"NVIDIA DGX B200 data sheet; {_QUOTED}",
            die="GB100",
            product_tflops=1745,
            host_link="pcie5",
        ),
        _gpu(
            "RTX 4090",
            memory_gib=24,
            tflops=165.2,
            hbm_tb=1.008,
            link="pcie4",
            nic_gbit=None,
            source="NVIDIA Ada whitepaper v2.1, appendix A (BF16 with FP32 accumulate)",
            peers=False,
        ),
        _gpu(
            "RTX 4090 shared",
            memory_gib=24,
            tflops=165.2,
            hbm_tb=1.008,
            link=_SHARED_PCIE,
            nic_gbit=None,
            source="as RTX 4090, two on the uplink of one PCIe switch: half of its rate each",
            peers=False,
        ),
        _gpu(
            "RTX 3090",
            memory_gib=24,
            tflops=71,
            hbm_tb=0.936,
            link="pcie4",
            nic_gbit=None,
            source="NVIDIA GA102 whitepaper v2, half of the FP16 rate; NVLink joins two only",
            peers=False,
        ),
        _gpu(
            "L40S",
            memory_gib=48,
            tflops=362,
            hbm_tb=0.864,
            link="pcie4",
            nic_gbit=None,
            source="nvidia.com/data-center/l40s (362 dense)",
        ),
        _gpu(
            "A10G",
            memory_gib=24,
            tflops=None,
            hbm_tb=0.6,
            link="pcie4",
            nic_gbit=None,
            source="AWS G5; sources for bf16 disagree (62.5 to 125): measure it",
        ),
        _gpu(
            "T4",
            memory_gib=16,
            tflops=None,
            hbm_tb=0.32,
            link="pcie3",
            nic_gbit=None,
            source="NVIDIA T4 data sheet: no bf16, 65 TFLOP/s in fp16",
        ),
        _gpu(
            "MI300X",
            memory_gib=191.98,
            tflops=1307.4,
            hbm_tb=5.3,
            link="xgmi",
            nic_gbit=400,
            source=f"amd.com/instinct/mi300x; {_QUOTED}",
            product_tflops=668.4,
            host_link="pcie5",
        ),
    )
}
# TFLOP/s of other number formats, dense, from the same data sheets and whitepapers; TF32 and fp8 of tensor cores, with
# accumulation in fp32.
_HOPPER = {"fp64": 67, "fp32": 67, "tf32": 494.5, "fp16": 989, "fp8": 1979}
_AMPERE = {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "fp16": 312}
_OTHER_FORMATS: dict[str, dict[str, float]] = {
    "H100 SXM 80GB": _HOPPER,
    "H200 SXM 141GB": _HOPPER,
    "A100 SXM 40GB": _AMPERE,
    "A100 SXM 80GB": _AMPERE,
    "B200 SXM": {"fp16": 2250, "fp8": 4500},
    "RTX 4090": {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "fp8": 330.3},
    "RTX 3090": {"fp32": 35.6, "tf32": 35.6, "fp16": 71},
    "L40S": {"fp32": 91.6, "tf32": 183, "fp16": 362, "fp8": 733},
    "T4": {"fp32": 8.1, "fp16": 65},
    "MI300X": {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "fp8": 2614.9},
}
# Usual short names, squeezed, and their rows.
_SHORT = {
    "h100": "H100 SXM 80GB",
    "h100sxm": "H100 SXM 80GB",
    "h10080gb": "H100 SXM 80GB",
    "h10096gb": "H100 SXM 96GB",
    "h200": "H200 SXM 141GB",
    "h200sxm": "H200 SXM 141GB",
    "h200141gb": "H200 SXM 141GB",
    "a100": "A100 SXM 80GB",
    "a100sxm": "A100 SXM 80GB",
    "a10080gb": "A100 SXM 80GB",
    "a10040gb": "A100 SXM 40GB",
    "b200": "B200 SXM",
    "4090": "RTX 4090",
    "4090shared": "RTX 4090 shared",
    "3090": "RTX 3090",
}


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs of one kind, `gpus_per_node` to a node."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int

    @property
    def name(self) -> str:
        """`8xH100 SXM 80GB`, or `8x8xH100 SXM 80GB` for eight nodes."""
        if self.nodes == 1:
            return f"{self.gpus}x{self.gpu.name}"
        return f"{self.nodes}x{self.gpus_per_node}x{self.gpu.name}"

    @property
    def nodes(self) -> int:
        """Machines that the GPUs are in."""
        return self.gpus // self.gpus_per_node

    @property
    def network(self) -> LinkSpec | None:
        """The link of one GPU to those in other nodes: its share of the node's network cards; None on one node."""
        return None if self.nodes == 1 else self._ring(1)

    @property
    def link(self) -> LinkSpec:
        """The link of a ring over all GPUs, as one GPU sees it: the slow axis."""
        return self.gpu.link if self.nodes == 1 else self._ring(self.gpus_per_node)

    def _ring(self, members: int) -> LinkSpec:
        """Over nodes, by data sheets."""
        assert self.gpu.nic_bytes_per_s is not None, "a cluster without a known network is refused"
        return Fabric("network", self.gpu.nic_bytes_per_s, NETWORK_S, 1.0, "").ring(self.gpu, members, 1, 1.0)


def find_gpu(name: str) -> Gpu:
    """Return the row of the table that `name` means, by its name or a short form of it; raises HardwareError with near
    matches.

    >>> find_gpu("a100-40gb").memory_bytes == 40 * 2**30
    True
    """
    known = {_squeezed(full): full for full in GPUS} | _SHORT
    full = known.get(_squeezed(name))
    if full is not None:
        return GPUS[full]
    meant = ""
    matches = dict.fromkeys(known[short] for short in near(name, known, 3))
    if matches:
        meant = f" (did you mean {' or '.join(matches)}?)"
    raise HardwareError(f"unknown GPU {name.strip()!r}{meant}; expected one of {', '.join(GPUS)}")


def gpu_of(device_name: str) -> Gpu | None:
    """Return the row of the table for the name that CUDA gives a device; None where it has no certain answer.

    >>> gpu_of("NVIDIA H200").name, gpu_of("NVIDIA H100 PCIe")
    ('H200 SXM 141GB', None)
    """
    makers = {"NVIDIA", "GeForce", "Tesla", "AMD", "Instinct"}
    words = [word for word in device_name.replace("-", " ").split() if word not in makers]
    if not words or {"PCIe", "NVL", "PCIE"} & set(words):  # other cards, other peaks
        return None
    for name in (" ".join(words), " ".join(words[:2]), words[0]):
        try:
            return find_gpu(name)
        except HardwareError:
            continue
    return None


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that `text` names: GPUs x kind, or nodes x GPUs of a node x kind; raises HardwareError.

    More than eight GPUs without nodes are nodes of eight.

    >>> parse_cluster("64xH100").nodes, parse_cluster("4xRTX 4090").gpus_per_node
    (8, 4)
    """
    match = _CLUSTER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise HardwareError(
            f"a cluster is {text!r}; expected a number of GPUs and their name, such as 8xH100, 64xH100 or 2x8xA100-80GB"
        )
    gpu = find_gpu(match[3])
    gpus = int(match[1])
    per_node = min(gpus, _NODE)
    if match[2]:  # the first number was that of nodes
        per_node = int(match[2])
        gpus *= per_node
    if not gpus:
        raise HardwareError(f"the cluster {text!r} has no GPUs; expected at least 1, such as 8xH100")
    if gpus % per_node:
        raise HardwareError(
            f"{gpus} GPUs do not fill nodes of {_NODE}; give a multiple of {_NODE}, or name the nodes: 2x4x{gpu.name}"
        )
    if gpus > per_node and gpu.nic_bytes_per_s is None:
        raise HardwareError(f"no network between nodes is known for {gpu.name}; give one node: {per_node}x{gpu.name}")
    return Cluster(gpu, gpus, per_node)


# a number of GPUs, or of nodes and of GPUs of a node, and the name of a kind
_CLUSTER = re.compile(r"\s*(\d+)\s*[x*×]\s*(?:(\d+)\s*[x*×]\s*)?(\S.*?)\s*", re.IGNORECASE)


def _squeezed(name: str) -> str:
    return re.sub(r"[\s_.-]", "", name.lower())


# ---- a GPU of one's own


_NEEDED = ("name", "memory_gib", "hbm_tb_per_s", "link")
_KNOWN = (*_NEEDED, "bf16_tflops", "nic_gbit", "die", "measured_bf16_tflops", "host_link", "peer_access")
_LARGEST_FILE = 10**5


def gpu_named(name: str) -> Gpu:
    """Return the GPU that a file describes whose name ends in `.json`, or else that of the table; HardwareError."""
    return _read(Path(name)) if name.endswith(".json") else find_gpu(name)


def _read(path: Path) -> Gpu:
    try:
        row = json.loads(read_file(path, _LARGEST_FILE))
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror or error}; give a JSON file with a GPU's figures") from None
    except (ValueError, RecursionError) as error:
        raise HardwareError(f"{path} is no JSON ({str(error)[:60]}); expected a GPU's figures") from None
    keys = set(row) if isinstance(row, dict) else set()
    missing = [key for key in _NEEDED if key not in keys]
    unknown = sorted(map(str, keys - set(_KNOWN)))
    if missing or unknown:
        wrong = ", ".join([*missing, *unknown])[:80]
        raise HardwareError(f"{path}: missing or unknown: {wrong}; expected {', '.join(_KNOWN)}")
    try:
        link = parse_link(row["link"])
        host = parse_link(row["host_link"]).name if row.get("host_link") is not None else None
    except LinkError as error:
        raise HardwareError(f"{path}: {error}") from None
    memory_gib, hbm_tb = _number(path, row, "memory_gib"), _number(path, row, "hbm_tb_per_s")
    tflops, nic_gbit = _number(path, row, "bf16_tflops"), _number(path, row, "nic_gbit")
    product_tflops = _number(path, row, "measured_bf16_tflops")
    peers = row.get("peer_access", True)
    if not isinstance(peers, bool):
        raise HardwareError(f"{path}: peer_access is {str(peers)[:30]!r}; expected true or false")
    return _gpu(
        str(row["name"])[:40],
        memory_gib=memory_gib or 0.0,
        tflops=tflops,
        hbm_tb=hbm_tb or 0.0,
        link=link,
        nic_gbit=nic_gbit,
        source=str(path),
        die=str(row.get("die", "")),
        product_tflops=product_tflops,
        host_link=host,
        peers=peers,
    )


def _number(path: Path, row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    if value is None and key not in _NEEDED:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
        raise HardwareError(f"{path}: {key} is {str(value)[:30]!r}; expected a number above 0")
    return float(value)


# ---- networks


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


_MEASURED = "stas00/ml-engineering: network/benchmarks; 46 to 48 of 50 GB/s a card expected in NVIDIA/nccl-tests #290"
_ROCE = "rate of the card; latency and part assumed InfiniBand's without its measurement"
_TCP = "rate of the card; TCP's latency (links.py) and part are assumed"
NETWORKS: dict[str, Network] = {
    name: Network(name, PRESETS[name].bytes_per_s, PRESETS[name].latency_s, reached, source)
    for name, reached, source in (
        ("ib800", _INFINIBAND, f"XDR; part assumed that of NDR: {_MEASURED}"),
        ("ib400", _INFINIBAND, f"NDR; {_MEASURED}"),
        ("ib200", _INFINIBAND, f"HDR; part assumed that of NDR: {_MEASURED}"),
        ("ib100", _INFINIBAND, f"EDR; part assumed that of NDR: {_MEASURED}"),
        ("roce400", _ASSUMED, _ROCE),
        ("roce200", _ASSUMED, _ROCE),
        ("roce100", _ASSUMED, _ROCE),
        *((name, 0.7, _TCP) for name in ("eth100", "eth25", "eth10", "eth1")),
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
        """Make the named network, or what the table has for the GPU; None where neither is known.

        `nics`: cards of a node, one a GPU by default; `oversubscription`: bytes that its leaf switch takes in over
        those that it passes on.
        """
        slower = f", {oversubscription:g}:1 oversubscribed" if oversubscription > 1 else ""
        if name is not None:
            row, cards = parse_network(name), nics or per_node
            rate = row.bytes_per_s * cards / per_node / oversubscription
            words = f"{row.name}, {cards} x {_gbit(row.bytes_per_s)} a node of {per_node} GPUs{slower}"
            return cls(row.name, rate, row.latency_s, row.efficiency, words)
        if gpu.nic_bytes_per_s is None:
            return None
        rate = gpu.nic_bytes_per_s / oversubscription
        words = f"{_gbit(gpu.nic_bytes_per_s)} a GPU, typical of {gpu.name}, is assumed{slower}"
        return cls("network", rate, NETWORK_S, _INFINIBAND, words, assumed=True)

    def part(self, nodes: float) -> float:
        """Return the part of the data sheet's rate that collectives of rings over so many nodes reach.

        >>> [round(Fabric("ib400", 50e9, 0.0, 0.94, "").part(nodes), 2) for nodes in (1, 4, 64)]
        [0.94, 0.85, 0.55]
        """
        known = min(max(1.0, nodes), MOST_NODES)
        return self.efficiency / (1 + SPREAD * (math.sqrt(known) - 1))

    def ring(self, gpu: Gpu, members: int, nodes: float, inside_part: float) -> LinkSpec:
        """Return the link of a ring over nodes with so many members in each, at what collectives reach of it.

        The ring enters a node once, and the network cards of all its members there carry their part of its bytes (NCCL
        runs one ring a card): 8 GPUs with 50 GB/s each give a rank 400 GB/s, not 50, and at most what their own link
        reaches. Latency is the mean over the ring's hops, of which one in `members` leaves its node: (7 x 3.4 + 14) / 8
        = 4.7 us.
        """
        rate = members * self.bytes_per_s * self.part(nodes)
        if members > 1:
            rate = min(rate, inside_part * gpu.link.bytes_per_s)
        latency_s = ((members - 1) * gpu.link.latency_s + self.latency_s) / members
        return LinkSpec("network", rate, latency_s)


def sheet_rate(reached: float, nodes: float) -> float:
    """Return the rate of an assumed network's data sheet of which rings over so many nodes reach `reached`.

    >>> round(sheet_rate(47e9, 1) / 1e9, 3)
    50.0
    """
    return reached / Fabric("network", 1.0, 0.0, _INFINIBAND, "").part(nodes)


def parse_network(text: str) -> Network:
    """Return the network that `text` names: a row of the table, or a card's rate such as 100gbit; raises LinkError.

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
