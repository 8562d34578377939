"""The page of a recorded job: nothing on it is about a lab's run, and no figure contradicts another."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from fsdplab.figures import alt_text, comparison_page, ledger_against_formula
from fsdplab.figures.conclusion import conclusion
from fsdplab.figures.table import cells
from fsdplab.figures.view import view
from fsdplab.profiling.vocabulary import words_of
from fsdplab.records import TABLES, RunRecord, Spread, Summary, comparison_json
from fsdplab.records.summary import Comm, Peak, Profile
from tests.browser import CHROMIUM, needs_chromium, patient

pytestmark = pytest.mark.quick

SPEC = {
    "job": "fsdp2_loop.py", "engine": "torch-fsdp2", "strategy": "full_shard", "model": "Network", "trainer": "",
    "precision": "fp32", "world_size": 2,
}  # fmt: skip
SUMMARY = Summary(
    step_time_s=Spread.of([0.37] * 5), cpu_share=0.95, peak_memory_bytes=Peak(24_100_000, {"activations": 24_100_000}),
    comm=Comm(12_000_000, 3, exposed_s=0.378, overlap=0.0), profile=Profile(3, 0.42, "trace", 0.05, 0.0),
)  # fmt: skip


def collective(kind: str, phase: str, nbytes: int | None = 8_000_000, **other: Any) -> dict[str, Any]:
    row = {"rank": 0, "step": 11, "unit": "root", "phase": phase, "kind": kind, "logical_bytes": nbytes}
    return {**row, "group_size": None, **other}


COLLECTIVES = [
    collective("all_gather", "forward"), collective("all_gather", "backward"),
    collective("reduce_scatter", "backward"), collective("all_gather", "forward", step=10),
]  # fmt: skip


def job(path: Path, collectives: list[dict[str, Any]] = COLLECTIVES, **summary: Any) -> RunRecord:
    tables = {"collectives": collectives}
    return RunRecord(path, dict(SPEC), status="finished", summary=replace(SUMMARY, **summary), tables=tables)


def page_of(record: RunRecord) -> str:
    return comparison_page(comparison_json([record]), [record]).replace(get_plotlyjs(), "")


def test_what_a_job_sends_is_drawn_from_its_trace(tmp_path: Path) -> None:
    """Half of what is gathered or reduced over two ranks; the last profiled step alone."""
    figure = ledger_against_formula(job(tmp_path))
    assert figure.layout.title.text.startswith("<b>fsdp2_loop.py sends 12.0 MB a step")
    assert (
        "by the collectives in its trace" in figure.layout.title.subtitle.text
        and "formula" not in alt_text(figure).lower()
    )
    assert [bar.name for bar in figure.data] == [
        "all_gather in forward", "all_gather in backward", "reduce_scatter in backward",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="recorded no collective with its bytes: profile some steps"):
        ledger_against_formula(job(tmp_path, [collective("all_gather", "forward", None)]))


def test_a_page_of_one_job_advises_no_run_of_the_lab_and_compares_it_with_nothing(tmp_path: Path) -> None:
    page = page_of(job(tmp_path))
    assert "--engines lab" not in page and "world_size=2" not in page
    assert "Which runs are worth choosing" not in page and "Difference to" not in page
    assert "sends 12.0 MB a step" in page


def test_a_job_that_shards_no_parameters_has_no_sharded_ones(tmp_path: Path) -> None:
    """DDP's parameters were called sharded; FSDP2's are."""
    peak = Peak(24_100_000, {"sharded_parameters": 24_100_000})
    for strategy, there in (("no_shard", False), ("full_shard", True)):
        record = job(tmp_path, peak_memory_bytes=peak)
        record.spec["strategy"] = strategy
        assert bool(re.search("(?<!un)sharded parameters", page_of(record))) == there, strategy


@needs_chromium
def test_a_long_argument_in_a_remedy_is_broken_on_a_phone(tmp_path: Path) -> None:
    """`TrainingArguments(per_device_train_batch_size=` made the page 439 px wide at 390."""
    from playwright.sync_api import sync_playwright

    record = job(tmp_path, cpu_share=0.5)  # of which memory alone is found
    record.spec["trainer"] = "Trainer"
    record.tables["breakdown"] = [{**dict.fromkeys(TABLES["breakdown"], 0), "step_ns": 10**6, "other_ns": 10**6}]
    page_file = tmp_path / "page.html"
    page_file.write_text(comparison_page(comparison_json([record]), [record]), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        phone = patient(browser.new_page(viewport={"width": 390, "height": 800}))
        phone.goto(page_file.as_uri())
        phone.click("[data-panel=panel-Diagnosis]")
        assert "TrainingArguments(" in phone.locator(".finding").last.inner_text()
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()


def test_exposed_time_is_not_set_beside_a_step_that_is_shorter(tmp_path: Path) -> None:
    """Of profiled steps, which were 42 % longer: 378 ms of a step of 370 ms is no sentence."""
    assert cells(view(job(tmp_path)), ["exposed"]) == ("378 ms of 525 ms",)
    usual = replace(SUMMARY.profile, overhead=0.05)
    assert cells(view(job(tmp_path, profile=usual)), ["exposed"]) == ("378 ms",)


def test_the_headline_has_no_times_where_ranks_were_short_of_cores(tmp_path: Path) -> None:
    assert conclusion([view(job(tmp_path, cpu_share=0.6))]) == (
        "fsdp2_loop.py needs 24.1 MB a rank, and sends 12.0 MB a step."
    )
    assert "and hides 0 % of it, and its step takes 370 ms" in conclusion([view(job(tmp_path))])


def test_a_remedy_is_no_setting_that_only_the_labs_engine_has() -> None:
    """`deepspeed_loop.py` was told to "allow fewer reductions in flight", which no key of its JSON is called."""
    lab = words_of({})["fewer_in_flight"]
    for engine in ("plain", "torch-ddp", "torch-fsdp1", "torch-fsdp2", "deepspeed-2", "deepspeed-3"):
        assert words_of({"job": "train.py", "engine": engine})["fewer_in_flight"] != lab
    assert "overlap_comm" in words_of({"job": "train.py", "engine": "deepspeed-3"})["fewer_in_flight"]


def test_a_remedy_names_no_optimizer_that_the_job_may_not_have() -> None:
    """`ddp_loop.py` trains with SGD, and was told of AdamW."""
    for engine in ("torch-ddp", "torch-fsdp2", "deepspeed-2"):
        assert "AdamW" not in words_of({"job": "ddp_loop.py", "engine": engine})["other"]
