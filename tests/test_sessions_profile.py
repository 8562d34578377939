"""Profiled and linked runs through the real sessions: tables that add up, one clock, every engine; the wind tunnel;
refusals.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab.planning.links import parse_link
from fsdplab.profiling.profiler import save_trace
from fsdplab.profiling.step_summary import exposure, step_summary
from fsdplab.profiling.tables.of_record import tables_of_record
from fsdplab.records import CAUSES, LANES, PARTS_OF_EXPOSED, RunRecord
from fsdplab.sessions import RunSpec, SpecError, compare, run
from fsdplab.sessions.compare_runs import link_text
from fsdplab.sessions.summary import blocked, overhead

TINY = RunSpec(model="gpt-tiny", steps=2, profile=2, device="cpu", batch_size=2, sequence_length=32)
PARTS = ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")


def others(engine: str, strategy: str, **more: object) -> RunSpec:
    return replace(TINY, engine=engine, strategy=strategy, memory=False, **more)


SPECS = {
    "lab": TINY,
    "linked": replace(TINY, link="100MB/s,20us"),
    "hybrid": replace(
        TINY, strategy="hybrid_shard", shard_size=2, world_size=4, link="1GB/s", link_across="20MB/s", memory=False
    ),
    "ddp": others("torch-ddp", "no_shard"),
    "fsdp2": others("torch-fsdp2", "full_shard"),
    "ddp linked": others("torch-ddp", "no_shard", link="100MB/s"),
    "fsdp2 linked": others("torch-fsdp2", "full_shard", link="100MB/s"),
}


@pytest.fixture(scope="module")
def records() -> dict[str, RunRecord]:
    return {name: run(spec) for name, spec in SPECS.items()}


@pytest.mark.parametrize("name", SPECS)
def test_every_profiled_step_of_every_rank_adds_up(records: dict[str, RunRecord], name: str) -> None:
    record, spec = records[name], SPECS[name]
    rows = record.table("breakdown")
    first = spec.untimed + spec.steps + spec.profiler_warmup
    assert sorted({(row["rank"], row["step"]) for row in rows}) == [
        (rank, first + k) for rank in range(spec.world_size) for k in range(2)
    ]
    for row in rows:
        assert sum(row[part] for part in PARTS) == row["step_ns"] and min(row[part] for part in PARTS) >= 0
        exposed = [
            each["exposed_ns"]
            for each in record.table("exposed")
            if (each["rank"], each["step"]) == (row["rank"], row["step"])
        ]
        assert sum(exposed) == row["exposed_ns"] == sum(row[part] for part in PARTS_OF_EXPOSED)
    assert {row["cause"] for row in record.table("exposed")} <= set(CAUSES)
    assert {row["lane"] for row in record.table("timeline")} <= set(LANES)


@pytest.mark.parametrize("name", SPECS)
def test_a_record_says_how_much_was_exposed_and_who_says_so(records: dict[str, RunRecord], name: str) -> None:
    record, linked = records[name], SPECS[name].linked
    comm, profile = record.summary.comm, record.summary.profile
    assert comm.exposed_s > 0 and 0 <= comm.overlap <= 1
    assert comm.exposed_s == step_summary(record.table("breakdown")).exposed_ns / 1e9, "one number"
    assert comm.on_link_s + comm.copying_s + comm.waiting_s + comm.no_core_s == pytest.approx(comm.exposed_s)
    assert (comm.blocked_s is not None) == (SPECS[name].engine == "lab")
    assert profile.steps == 2 and isinstance(profile.overhead, float)
    assert profile.source == "trace"
    assert record.provenance["exposed_s"] == ("emulated" if linked else "measured")
    assert (record.summary.link is None) is not linked
    assert sorted(path.name for path in (record.path / "traces").iterdir()) == [
        f"rank{rank}.pt.trace.json.gz" for rank in range(SPECS[name].world_size)
    ]


def test_the_critical_path_holds_no_more_of_collectives_than_was_exposed(records: dict[str, RunRecord]) -> None:
    """A rank issues its collectives before it computes, and copies after: no computing is called a collective."""
    path = next(table for table in tables_of_record(records["lab"]) if table.name == "critical_path")
    step = int(path.title.rsplit(" ", 1)[1])
    row = next(row for row in path.rows if row["what"] not in ("idle", "compute", "before its step"))
    on_path = sum(row["ns"] for row in path.rows if row["what"] in LANES[2:5])
    exposed = [row["exposed_ns"] for row in records["lab"].table("breakdown") if row["step"] == step]
    assert row["ns"] > 0 and on_path <= sum(exposed)


def test_a_record_with_all_its_tables_reads_back(records: dict[str, RunRecord]) -> None:
    assert RunRecord.load(records["linked"].path) == records["linked"]


def test_the_lab_names_units_phases_and_lives(records: dict[str, RunRecord]) -> None:
    record = records["lab"]
    assert {row["unit"] for row in record.table("exposed")} == {"root", "blocks.0", "blocks.1"}
    assert {row["phase"] for row in record.table("exposed")} == {"forward", "backward"}
    life = [row for row in record.table("life") if row["rank"] == 0 and row["step"] == 1 and row["unit"] == "blocks.0"]
    assert [row["state"] for row in life] == ["unsharding", "unsharded", "sharded"] * 2, (
        "gathered for the forward and for the backward"
    )
    assert any(row["step"] == 1 for row in record.table("timeline")), "the step whose memory is measured is drawn too"


def test_all_ranks_are_on_one_clock(records: dict[str, RunRecord]) -> None:
    steps = {
        (row["rank"], row["step"]): (row["start_ns"], row["end_ns"])
        for row in records["lab"].table("timeline")
        if row["lane"] == "step"
    }
    for step in {step for _, step in steps}:
        (start, end), (other_start, other_end) = steps[0, step], steps[1, step]
        assert max(start, other_start) < min(end, other_end), "the same step of two ranks overlaps in time"


def test_a_link_takes_the_time_it_should(records: dict[str, RunRecord]) -> None:
    link = parse_link("100MB/s,20us")
    rows = [row for row in records["linked"].table("ledger") if row["emulated"]]
    assert len(rows) == len(records["linked"].table("ledger"))
    for row in rows:
        assert row["end_ns"] - row["start_ns"] == pytest.approx(
            1e9 * (row["wire_bytes"] / link.bytes_per_s + link.latency_s), abs=1
        )


def test_only_the_all_reduce_of_hybrid_sharding_crosses(records: dict[str, RunRecord]) -> None:
    rows = [row for row in records["hybrid"].table("ledger") if row["wire_bytes"]]
    speeds = {
        kind: {
            round(row["wire_bytes"] * 1e3 / (row["end_ns"] - row["start_ns"])) for row in rows if row["kind"] == kind
        }
        for kind in ("all_reduce", "all_gather")
    }
    assert speeds == {"all_reduce": {20}, "all_gather": {1000}}  # MB/s
    assert records["hybrid"].summary.comm.bytes_per_step == records["hybrid"].summary.formula_bytes_per_step


def test_torchs_engines_meet_the_same_link(records: dict[str, RunRecord]) -> None:
    rows = records["ddp linked"].table("ledger")
    assert rows and all(row["emulated"] and row["kind"] == "all_reduce" for row in rows if row["phase"] == "backward")
    assert records["ddp linked"].summary.losses == records["ddp"].summary.losses


def test_a_wind_tunnel_gives_all_runs_one_link_and_the_twin_as_many_steps() -> None:
    common = dict(model="gpt-tiny", steps=1, memory=False, device="cpu", emulate="8xH100", as_model="llama-3.1-8b")
    specs = [RunSpec(**common), RunSpec(strategy="zero2", **common), RunSpec(engine="twin", **common)]
    one, two, twin = compare(specs)
    assert one.summary.link.bytes_per_s == two.summary.link.bytes_per_s > 0
    assert one.summary.link.as_ == "llama-3.1-8b on 8xH100" and one.summary.link.name.startswith("wind tunnel")
    assert len(one.summary.losses) == len(two.summary.losses) == len(twin.summary.losses) == 3
    assert parse_link(link_text(one.summary.link)).bytes_per_s == pytest.approx(one.summary.link.bytes_per_s, rel=1e-6)


def test_the_card_of_a_wind_tunnel_is_as_full() -> None:
    spec = RunSpec(model="gpt-20m", emulate="8xH100", as_model="llama-3.1-8b", device="cpu")
    state = 16 * 21_600_000 / 2  # of full sharding, a rank of two
    there = 16 * 8_030_000_000 / 8 / 80e9
    assert spec.scaled_card(spec, spec.world_size) == pytest.approx(state / there, rel=0.15)


@pytest.mark.parametrize(
    "wrong,why",
    [
        (dict(link="fast"), "fast"),
        (dict(link="-1MB/s"), "MB/s"),
        (dict(emulate="8xH100"), "give both"),
        (dict(emulate="8xH1000", as_model="llama-3.1-8b"), "H100"),
        (dict(emulate="8xH100", as_model="llama"), "unknown model"),
        (dict(link="eth10", engine="deepspeed-1", strategy="zero1"), "deepspeed"),
        (dict(link_across="eth10"), "link_across is between the shard groups"),
        (dict(link_queues=3), "link_queues"),
        (dict(strategy="hybrid_shard"), "needs shard_size"),
        (dict(strategy="hybrid_shard", shard_size=3, world_size=4), "does not divide"),
        (dict(shard_size=2), "shard_size is for hybrid_shard"),
        (dict(units="tiny"), "unknown units"),
        (dict(units="linear", engine="torch-ddp", strategy="no_shard"), "units is linear"),
        (dict(profile=-1), "profile"),
        (dict(prefetch=2, engine="torch-fsdp2"), "prefetch"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(wrong: dict, why: str) -> None:
    with pytest.raises(SpecError, match=why) as refused:
        RunSpec(**{"device": "cpu", **wrong})
    assert "\n" not in str(refused.value)


def test_exposure_is_of_the_rank_that_exposes_most() -> None:
    rows = [
        {
            "rank": rank, "exposed_ns": exposed, "overlapped_ns": hidden, "step_ns": 200, "compute_ns": hidden,
            "compute_only_ns": 0, "other_ns": 100,
        }
        for rank, exposed, hidden in ((0, 10, 90), (0, 12, 88), (1, 40, 60), (1, 40, 60))
    ]  # fmt: skip
    found = exposure(rows)
    assert (found["exposed_s"], found["overlap"]) == (40 / 1e9, 0.6)
    assert set(exposure([]).values()) == {None}


def test_being_blocked_is_read_off_the_ledger() -> None:
    rows = [
        {"rank": 0, "step": step, "waited_ns": waited_ns, "start_ns": 0, "end_ns": 100}
        for step, waited_ns in ((2, 20), (2, 30), (3, 50), (9, 99))
    ]
    assert blocked(rows, 2, 4) == 50 / 1e9
    assert blocked(rows, 4, 6) is None
    assert blocked([*rows, {"rank": 0, "step": 2, "waited_ns": None, "start_ns": 0, "end_ns": 1}], 2, 4) is None


def test_overhead_is_the_slowest_rank_against_the_timed_steps() -> None:
    assert overhead([[1.0, 1.2], [1.5, 1.5]], 1.0) == pytest.approx(0.5)
    assert overhead([], 1.0) is None and overhead([[1.0]], None) is None


class Exports:
    """In place of torch's profiler: a trace is saved by `how(path)`."""

    def __init__(self, how: Callable[[Path], object]) -> None:
        self._how = how

    def export_chrome_trace(self, name: str) -> None:
        self._how(Path(name))


@pytest.mark.quick
@pytest.mark.parametrize(
    "how",
    [lambda path: path.write_text(""), lambda path: path.with_name(f"{path.name}.tmp").write_text('{"trace')],
    ids=["an empty file", "a part under another name"],
)
def test_a_trace_that_the_disk_refuses_leaves_no_part_of_it(how, tmp_path, monkeypatch):
    """torch's profiler says nothing where a file may not grow."""
    monkeypatch.setenv("FSDPLAB_TEMPORARY", str(tmp_path))
    with pytest.raises(OSError, match="the profiler did not write its trace"):
        save_trace(Exports(how), tmp_path / "trace.json.gz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick
def test_a_rank_killed_over_its_trace_leaves_it_in_its_callers_temporary_folder(tmp_path, monkeypatch):
    callers, anywhere, out = (tmp_path / name for name in ("callers", "anywhere", "out"))
    for folder in (callers, anywhere, out):
        folder.mkdir()
    monkeypatch.setenv("FSDPLAB_TEMPORARY", str(callers))
    monkeypatch.setattr(tempfile, "tempdir", str(anywhere))

    def killed_half_way(path: Path) -> None:
        path.write_text('{"trace')
        os.kill(os.getpid(), signal.SIGKILL)

    rank = os.fork()
    if rank == 0:
        try:
            save_trace(Exports(killed_half_way), out / "trace.json.gz")
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(rank, 0)[1]) == signal.SIGKILL
    assert [file.name for file in callers.rglob("*.json")] == ["trace.json"]
    assert list(anywhere.iterdir()) == list(out.iterdir()) == []
