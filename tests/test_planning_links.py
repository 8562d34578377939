"""Links, hardware and the wind tunnel: every figure against arithmetic done by hand,
every reader against wrong input.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab import cli
from fsdplab.planning.hardware import GPUS, HardwareError, gpu_named, parse_cluster
from fsdplab.planning.links import PRESETS, LinkError, LinkSpec, parse_link, ring_steps, transfer_s
from fsdplab.planning.peers import BETWEEN_SOCKETS, peerless_band
from fsdplab.planning.planner import plan_spec
from fsdplab.planning.step_time import step_time
from fsdplab.planning.windtunnel import Target, WindTunnelError, card_for, link_for, wind_tunnel

pytestmark = pytest.mark.quick

TABLE = Path(__file__).resolve().parents[1] / "data" / "hardware.csv"
LLAMA = {"target_parameters": 8_030_261_248, "target_layers": 32, "tokens_per_gpu": 8192}


@pytest.mark.parametrize(
    "text,bytes_per_s",
    [
        ("nvlink4", 450e9), ("NVLink 4", 450e9), ("NVLink-3", 300e9), ("nvlink5", 900e9), ("PCIe 4.0 x16", 31e9),
        ("pcie5", 63e9),
        ("ib400", 50e9), ("400 Gb/s InfiniBand", 50e9), ("HDR", 25e9), ("IB 200", 25e9), ("100GbE", 12.5e9),
        ("eth25", 3.125e9),
        ("10GbE", 1.25e9), ("1 GbE", 0.125e9),
        ("200mbit", 25e6), ("200 Mbit/s", 25e6), ("1.5gbit", 187.5e6), ("800MB/s", 800e6), ("1GB/s", 1e9),
        ("10Gb/s", 1.25e9), ("100 Mbps", 12.5e6),
        ("500 kbytes/s", 5e5),
    ],
)  # fmt: skip
def test_links_are_read_as_people_write_them(text, bytes_per_s):
    assert parse_link(text).bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    "text,latency_s",
    [
        ("10gbit,50us", 50e-6),
        ("10gbit, 1ms", 1e-3),
        ("eth10,2us", 2e-6),
        ("1GB/s,800ns", 800e-9),
        ("ib400,0", 0.0),
        ("200mbit", 0.0),
    ],
)
def test_a_latency_stands_behind_a_comma(text, latency_s):
    assert parse_link(text).latency_s == latency_s


@pytest.mark.parametrize(
    "text,said",
    [
        ("nvlnk4", "did you mean nvlink4"), ("pcie6", "did you mean pcie5"), ("fast", "expected one of nvlink3"),
        ("", "a link is ''"),
        (None, "a link is None"), (200, "a link is 200"), ("800mb/s", "write 800mbit or 800MB/s"),
        ("0mbit", "expected a number above 0"),
        ("1.2.3gbit", "unknown link"), ("-5mbit", "unknown link"), ("infmbit", "unknown link"),
        ("1e999gbit", "unknown link"),
        ("10gbit,50", "such as 50us"), ("10gbit,", "such as 50us"), ("10gbit,-1ms", "such as 50us"),
        ("10gbit,1us,2us", "such as 50us"),
    ],
)  # fmt: skip
def test_what_is_no_link_is_refused_in_one_line(text, said):
    with pytest.raises(LinkError) as refused:
        parse_link(text)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 0),
        (-1, 0),
        (float("nan"), 0),
        (float("inf"), 0),
        (True, 0),
        ("1", 0),
        (1, -1e-9),
        (1, float("inf")),
        (1, None),
    ],
)
def test_a_link_has_a_bandwidth_and_no_negative_latency(numbers):
    with pytest.raises(LinkError):
        LinkSpec("mine", *numbers)


def test_presets_are_named_as_they_are_called_and_are_worded():
    assert all(parse_link(name) == link and link.name == name for name, link in PRESETS.items())
    assert PRESETS["nvlink4"].words == "450 GB/s, 3.4 us a step"
    assert LinkSpec("slow", 500.0, 0.0).words == "500 B/s"


def test_a_transfer_is_latency_and_bytes():
    link = LinkSpec("mine", 1e6, 1e-3)
    assert transfer_s(link, 500_000, ring_steps("all_reduce", 4)) == pytest.approx(0.5 + 6e-3)
    with pytest.raises(LinkError, match="no ring is known for 'broadcast'"):
        ring_steps("broadcast", 4)


def test_the_gpus_are_the_tables():
    rows = {row["gpu"].replace(" HBM2e (Meta Grand Teton)", ""): row for row in csv.DictReader(TABLE.open())}
    assert set(rows) == set(GPUS)
    for name, gpu in GPUS.items():
        row = rows[name]
        assert gpu.memory_bytes == int(float(row["usable_GiB_seen"].lstrip("~") or row["memory_label_GB"]) * 2**30)
        assert gpu.bf16_flops == (float(row["dense_bf16_TFLOPs"]) * 1e12 if row["dense_bf16_TFLOPs"] else None)
        assert gpu.hbm_bytes_per_s == float(row["mem_TBps"]) * 1e12
        alone = row["measured_max_bf16_matmul_TFLOPs"]
        assert gpu.product_flops == (float(alone) * 1e12 if alone[:1].isdigit() else None)
        nic = row["typical_nic_Gbps_per_gpu"].split(" ")[0]
        assert gpu.nic_bytes_per_s == (float(nic) * 1e9 / 8 if nic else None)
        links_there = {
            float(row[column]) * 1e9 for column in ("gpu_link_GBps_per_dir", "pcie_GBps_per_dir") if row[column]
        }
        # whose link the table only names: NVLink 4
        assert gpu.link.bytes_per_s in links_there or name == "H100 SXM 96GB"


@pytest.mark.parametrize(
    "text,name,nodes,per_node,gb_per_s",
    [
        ("8xH100", "8xH100 SXM 80GB", 1, 8, 450), ("64xH100", "8x8xH100 SXM 80GB", 8, 8, 400),
        ("4xRTX 4090", "4xRTX 4090", 1, 4, 31),
        ("2x8xA100-80GB", "2x8xA100 SXM 80GB", 2, 8, 200), ("2 x 1 x h200", "2x1xH200 SXM 141GB", 2, 1, 50),
        ("1xT4", "1xT4", 1, 1, 15.75),
    ],
)  # fmt: skip
def test_clusters_are_read(text, name, nodes, per_node, gb_per_s):
    cluster = parse_cluster(text)
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == (name, nodes, per_node)
    assert cluster.link.bytes_per_s == gb_per_s * 1e9
    assert parse_cluster(cluster.name) == cluster


@pytest.mark.parametrize(
    "text,said",
    [
        ("H100", "a cluster is 'H100'"), ("", "a cluster is ''"), (None, "a cluster is None"),
        ("8xH10", "did you mean H100 SXM 80GB"),
        ("8xabacus", "expected one of H100"), ("12xH100", "do not fill nodes of 8"), ("0xH100", "no GPUs"),
        ("2x0xH100", "no GPUs"),
        ("16xRTX 4090", "no network between nodes is known"), ("-8xH100", "a cluster is"),
    ],
)  # fmt: skip
def test_what_is_no_cluster_is_refused_in_one_line(text, said):
    with pytest.raises(HardwareError) as refused:
        parse_cluster(text)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_llama_on_eight_h100_by_hand():
    target = wind_tunnel(parse_cluster("8xH100"), **LLAMA)
    assert target.compute_s == pytest.approx(6 * 8.030261248e9 * 8192 / (0.4 * 989e12), rel=1e-9)
    wire = 8.030261248e9 * (2 * 2 + 4) * 7 / 8 / 450e9
    assert target.latency_s == pytest.approx(32 * 3 * 7 * 3.4e-6)
    assert target.communication_s == pytest.approx(wire + target.latency_s, rel=1e-6)
    assert target.ratio == pytest.approx(target.communication_s / target.compute_s)
    assert target.memory_bytes == 80 * 2**30


def test_several_nodes_share_their_network():
    full = wind_tunnel(parse_cluster("64xH100"), **LLAMA)
    assert full.communication_s - full.latency_s == pytest.approx(8.030261248e9 * 8 * 63 / 64 / 400e9, rel=1e-6)
    assert full.shards == 64


def test_the_link_gives_the_targets_ratio_here():
    target = wind_tunnel(parse_cluster("4xRTX 4090"), **LLAMA)
    link = link_for(target, compute_s=0.2, wire_bytes=30_000_000, collectives=26, ranks=2)
    here = transfer_s(link, 30_000_000, 26 * (2 - 1))
    assert here / 0.2 == pytest.approx(target.ratio)
    assert 26 * link.latency_s / here == pytest.approx(target.latency_s / target.communication_s)


def test_the_card_is_as_full_as_the_targets():
    target = wind_tunnel(parse_cluster("8xH100"), **LLAMA)
    card = card_for(target, parameters_here=25_000_000, target_parameters=LLAMA["target_parameters"], ranks=2)
    there = 16 * LLAMA["target_parameters"] / 8 / target.memory_bytes
    assert 16 * 25_000_000 / 2 / card == pytest.approx(there, rel=1e-6)


@pytest.mark.parametrize(
    "cluster,changed,said",
    [
        ("1xH100", {}, "give at least 2 GPUs"),
        ("8xA10G", {}, "no bf16 FLOP/s are known for A10G"),
        ("8xH100", {"target_parameters": 0}, "target_parameters is 0"),
        ("8xH100", {"target_layers": -1}, "target_layers is -1"),
        ("8xH100", {"tokens_per_gpu": float("nan")}, "tokens_per_gpu is nan"),
    ],
)  # fmt: skip
def test_a_wind_tunnel_that_cannot_be_is_refused(cluster, changed, said):
    with pytest.raises(WindTunnelError, match=said):
        wind_tunnel(parse_cluster(cluster), **{**LLAMA, **changed})


@pytest.mark.parametrize(
    "changed", [{"compute_s": 0}, {"wire_bytes": -1}, {"collectives": 0}, {"ranks": 1}, {"compute_s": float("inf")}]
)
def test_a_run_that_gives_no_link_is_refused(changed):
    run = {"compute_s": 0.5, "wire_bytes": 10**6, "collectives": 10, "ranks": 2, **changed}
    with pytest.raises(WindTunnelError):
        link_for(Target(1.0, 0.1, 0.1, 10**9), **run)


@pytest.mark.parametrize("changed", [{"parameters_here": 0}, {"target_parameters": None}, {"ranks": 0}])
def test_a_card_of_nothing_is_refused(changed):
    with pytest.raises(WindTunnelError):
        card_for(
            Target(1.0, 0.1, 0.1, 10**9), **{"parameters_here": 10, "target_parameters": 100, "ranks": 2, **changed}
        )


# ---- cards without peer access


def test_cards_without_peer_access_have_a_band_of_exposed_time(capsys):
    """Llama 3.1 8B in bf16 on four RTX 4090: 3/4 of 16 GB twice and of 32 GB once over 26 GB/s, or over 10."""
    spec = plan_spec("llama-3.1-8b", "4090", gpus=4, checkpointing="full", master_dtype="bf16")
    band = peerless_band(spec)
    assert (band.assumed, band.least) == (0.84 * 31e9, BETWEEN_SOCKETS)
    fast, slow = band.times
    assert fast == step_time(spec) and slow.communication_s == pytest.approx(2.6 * fast.communication_s, rel=0.01)
    assert band.exposed_s[0] < band.exposed_s[1] and band.tokens_per_s[0] < band.tokens_per_s[1]
    told = ["plan", "--model", "llama-3.1-8b", "--gpu", "4090", "--world-size", "4", "--checkpoint", "full"]
    with pytest.raises(SystemExit):
        cli.main([*told, "--master-dtype", "bf16"])
    assert "has no peer access, so collectives go through host memory" in " ".join(capsys.readouterr().out.split())
    assert peerless_band(replace(spec, gpus=1)) is None
    assert peerless_band(plan_spec("llama-3.1-8b", "h100", gpus=8)) is None


def test_two_cards_on_one_uplink_have_half_of_its_rate_each():
    alone, shared = GPUS["RTX 4090"], GPUS["RTX 4090 shared"]
    assert shared.link.bytes_per_s == alone.link.bytes_per_s / 2 == shared.host_link.bytes_per_s
    assert replace(shared, name="", source="", link=alone.link, host_link=alone.host_link) == replace(
        alone, name="", source=""
    )
    assert [name for name, gpu in GPUS.items() if not gpu.peer_access] == ["RTX 4090", "RTX 4090 shared", "RTX 3090"]


@pytest.mark.parametrize("given, words", [(False, ""), ("no", "peer_access is 'no'; expected true or false")])
def test_a_gpu_of_ones_own_says_whether_it_has_peer_access(given, words, tmp_path):
    path = tmp_path / "own.json"
    own = {"name": "own", "memory_gib": 32, "hbm_tb_per_s": 1.8, "link": "pcie5", "bf16_tflops": 210}
    path.write_text(json.dumps(own | {"peer_access": given}))
    if words:
        with pytest.raises(HardwareError, match=re.escape(words)):
            gpu_named(str(path))
        return
    assert peerless_band(plan_spec("llama-3.2-1b", str(path), gpus=2)).least == BETWEEN_SOCKETS
