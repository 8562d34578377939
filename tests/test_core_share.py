"""Whether ranks had a core: the least wait that the counters of their threads allow, and what is said of it."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab.figures.fastest import core_words, fastest_words, step_words
from fsdplab.figures.view import RunView, provenance
from fsdplab.records import RunRecord, Spread, Summary, core_sentence
from fsdplab.sessions.summary import cpu_share
from fsdplab.sessions.worker.core_share import CoreTime, _threads, core_time, waited_s

pytestmark = pytest.mark.quick

MS = 1_000_000
counted = pytest.mark.skipif(core_time().threads is None, reason="this system does not count waits for a core")


def after(**threads: tuple[int, int]) -> CoreTime:
    """Threads that ran and waited for so many ms since they began, of which a reading at 0 knew none."""
    return CoreTime(0.0, {name: (ran * MS, waited * MS) for name, (ran, waited) in threads.items()})


@pytest.mark.parametrize(
    ("used", "pool", "seconds"),
    [
        (after(main=(100, 0)), 1, 0.0),
        (after(main=(30, 70)), 1, 0.070),
        (after(main=(30, 0), gloo=(1, 5)), 1, 0.0),
        (after(main=(70, 30), gloo=(30, 60)), 1, 0.0),
        (after(main=(30, 65), gloo=(5, 30)), 1, 0.060),
        (after(main=(40, 60), second=(40, 60)), 2, 0.060),
        (after(main=(0, 0), second=(20, 50)), 1, 0.050),
    ],
    ids=["never waits", "waits", "its helper waits", "its helper has the core", "helper has it shortly", "a pool waits",
         "another thread works"],
)  # fmt: skip
def test_a_rank_lacks_a_core_while_a_thread_waits_and_none_runs(used: CoreTime, pool: int, seconds: float) -> None:
    assert waited_s(CoreTime(0.0, {}), used, pool) == pytest.approx(seconds)


def test_only_what_was_used_between_two_readings_counts() -> None:
    first, second = after(main=(500, 400), ended=(9, 90)), after(main=(530, 470), new=(5, 0))
    assert waited_s(first, second) == pytest.approx(0.065), "a thread that has ended meanwhile tells nothing"


def test_a_system_that_does_not_count_gives_none(tmp_path: Path) -> None:
    assert _threads(str(tmp_path / "nowhere")) is None
    (tmp_path / "17").mkdir()
    assert _threads(str(tmp_path)) is None, "a kernel without the file"
    (tmp_path / "17" / "schedstat").write_text("0 0 0\n")
    assert _threads(str(tmp_path)) is None, "a kernel in which counting is off"
    (tmp_path / "17" / "schedstat").write_text("damaged\n")
    assert _threads(str(tmp_path)) is None
    (tmp_path / "17" / "schedstat").write_text("12 34 5\n")
    assert _threads(str(tmp_path)) == {"17": (12, 34)}
    assert (
        waited_s(CoreTime(0.0, None), after(main=(1, 1))) is None is waited_s(after(main=(1, 1)), CoreTime(0.0, None))
    )


def _spin(core: int, ready: threading.Event) -> None:
    os.sched_setaffinity(0, {core})
    ready.set()
    while True:
        pass


def _starved(core: int, sent: multiprocessing.connection.Connection) -> None:
    os.sched_setaffinity(0, {core})
    before, end = core_time(), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    now = core_time()
    sent.send((now.cpu_s - before.cpu_s, waited_s(before, now)))


@counted
def test_a_process_that_shares_a_core_waits_for_it() -> None:
    context, core = multiprocessing.get_context("fork"), min(os.sched_getaffinity(0))
    ready, (received, sent) = context.Event(), context.Pipe(duplex=False)
    others = [context.Process(target=_spin, args=(core, ready), daemon=True) for _ in range(2)]
    starved = context.Process(target=_starved, args=(core, sent))
    try:
        for each in others:
            each.start()
        assert ready.wait(60)
        starved.start()
        assert received.poll(60)
        cpu_s, wait_s = received.recv()
    finally:
        for each in (*others, starved):
            if each.pid is not None:
                each.terminate()
                each.join()
    assert cpu_s >= 0.3 and wait_s > 0.3, "two others compute on its core: it has a third of it, or less"


def rows(*waits: float | None, seconds: float = 1.0) -> list[dict]:
    """A timed step of each rank, beside one that is not timed."""
    timed = [{"rank": rank, "step": 1, "step_time_s": seconds, "core_wait_s": wait} for rank, wait in enumerate(waits)]
    return [{"rank": 0, "step": 0, "step_time_s": None, "core_wait_s": 9.0}, *timed]


def test_the_share_is_that_of_the_rank_that_lacked_a_core_longest() -> None:
    assert cpu_share(rows(0.05, 0.6)) == pytest.approx(0.4)
    assert cpu_share(rows(7.0)) == 0.0, "counters of threads may overlap by a tick"
    assert cpu_share(rows(0.1, None)) is None and cpu_share(rows()) is None
    assert cpu_share([{"rank": 0, "step": 0, "step_time_s": 1.0}]) is None, "a record of before"


def seen(name: str, share: float | None, step: float = 0.5) -> RunView:
    return RunView(name, "lab", 2, Summary(step_time_s=Spread.of([step, step, step, 1.01 * step]), cpu_share=share))


def test_a_run_that_is_short_of_cores_says_so_first_and_names_no_winner(capsys, tmp_path: Path) -> None:
    said = "Ranks had a core for 31 % of their step: the measured times are the machine's, not the strategy's."
    assert core_sentence(0.31) == said
    busy = [seen("zero1", 0.31), seen("full_shard", 0.5, step=0.9)]
    both = said.replace("31 %", "31 % to 50 %")
    assert core_words(busy) == both and step_words(busy) == both[:-1]
    assert fastest_words(busy) == "no run is called fastest, as ranks were short of cores"
    quiet = [seen("zero1", 0.99), seen("full_shard", None, step=0.9)]
    assert core_words(quiet) == "" and step_words(quiet).startswith("zero1 is fastest, 500 ms a step; full_shard takes")
    assert core_words([busy[0], quiet[0]]).startswith("Ranks of zero1 had a core for 31 %")
    assert [Summary(cpu_share=share).short_of_cores for share in (None, 0.79, 0.8, 1.0)] == [False, True, False, False]


def test_a_share_is_told_where_it_is_below_95_percent() -> None:
    assert "cores" not in dict(provenance([seen("zero1", 0.96), seen("zero2", None)]))
    assert dict(provenance([seen("zero1", 0.88), seen("zero2", 0.99)]))["cores"].endswith(": zero1 88 %")


def test_terminal_and_page_begin_with_the_sentence(capsys, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from fsdplab.figures import comparison_page
    from fsdplab.records import comparison_json
    from tests.test_cli import ended

    spec = {"strategy": "full_shard", "engine": "lab", "world_size": 2}
    record = RunRecord(tmp_path / "busy", spec=spec, summary=seen("", 0.31).summary).save()
    code, out, _ = ended(["report", str(record.path), "--quiet"], capsys)
    assert code == 0 and out.startswith(core_sentence(0.31))
    page = comparison_page(comparison_json([record]), [record])
    sentence = page.index("Ranks had a core for 31 % of their step")
    assert sentence < page.index('role="tablist"') and comparison_json([record])["runs"][0]["cpu_share"] == 0.31
    other = RunRecord(tmp_path / "quiet", spec={**spec, "strategy": "zero1"}, summary=seen("", 0.99, step=0.4).summary)
    told = [ended(["report", str(each.path), str(other.save().path)], capsys)[1] for each in (record, other)]
    assert told[0].startswith("Ranks of full_shard had a core for 31 %") and "fastest" not in told[0]
    assert "Measured: no difference between zero1, run 1 and zero1, run 2 is seen in 4 steps" in told[1].replace(
        "\n", " "
    )
    record.summary = replace(record.summary, cpu_share=0.97)
    assert "Ranks had a core" not in comparison_page(comparison_json([record]), [record])
