"""The whole table of a comparison's page: every column is seen in a window of 1,280 pixels, and amounts stay whole."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab import figures
from fsdplab.figures.table import COLUMNS, unbroken
from fsdplab.records import RunRecord, Spread, comparison_json
from fsdplab.records.summary import Comm, Peak, Predicted, Profile, Steady
from tests.browser import CHROMIUM, needs_chromium, patient
from tests.test_figures import SPLITS, record


def with_every_column(run: RunRecord) -> RunRecord:
    """The record with a value in every column, in words as long as they usually get."""
    predicted = Peak(run.summary.peak_memory_bytes.total, run.summary.peak_memory_bytes.by_category)
    summary = replace(
        run.summary,
        step_time_s=Spread.of([1.54, 1.55, 1.74, 1.74, 1.93, 1.94]),
        tokens_per_s=1148.0,
        predicted=Predicted(predicted, 1.69, step_scatter=0.04),
        steady=Steady(0.919, 0.3, 0.65),
        comm=Comm(129_000_000, 30, 0.378, overlap=0.43),
        formula_bytes_per_step=129_000_000,
        profile=Profile(2, 0.32, optimizer_s=0.085, exchange_s=0.03),
    )
    return replace(run, summary=summary)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runs = [with_every_column(record(folder, strategy)) for strategy in SPLITS]
    comparison = comparison_json(runs)
    comparison["runs"] = [entry | {"matches_reference": True} for entry in comparison["runs"]]
    target = folder / "page.html"
    target.write_text(figures.comparison_page(comparison, runs), encoding="utf-8")
    return target


@needs_chromium
def test_every_column_is_seen_at_1280_pixels_beside_a_scroll_bar(page_file):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], ignore_default_args=["--hide-scrollbars"]
        )
        page = patient(browser.new_page(viewport={"width": 1280, "height": 800}))
        page.goto(page_file.as_uri())
        page.wait_for_selector("#answer .main-svg")
        page.click("[role=tab]:has-text('Compare')")
        table = page.locator(".wide").first
        assert table.locator("th").all_inner_texts() == list(COLUMNS)
        assert table.evaluate("box => box.scrollWidth <= box.clientWidth"), "columns are cut"
        browser.close()


def test_a_number_and_its_unit_stay_on_one_line(page_file):
    text = page_file.read_text(encoding="utf-8")
    assert re.search(">1.74\u00a0s ±[0-9]+\u00a0%<", text)
    assert unbroken("378 ms of 2.30 s") == "378\u00a0ms of 2.30\u00a0s"
    assert unbroken("115 MB equal, 812 samples/s, 2 steps") == "115\u00a0MB equal, 812 samples/s, 2 steps"


@pytest.mark.parametrize("kind,is_said", [("file", False), ("value", False), ("hugging face", True), (None, True)])
def test_a_page_names_no_tokens_of_a_model_whose_batches_are_its_own(kind, is_said, tmp_path):
    """The settings' defaults, 2 sequences of 128 tokens, were written of an image model with batches of 16."""
    comparison = comparison_json([record(tmp_path, "full_shard")])
    comparison["spec"] = {"model": "vit.py", "world_size": 2, "batch_size": 2, "sequence_length": 128}
    if kind is not None:
        comparison["environment"] = {"workload": {"name": "vit.py", "kind": kind}}
    page = figures.comparison_page(comparison)
    assert ("batch 2 a rank" in page) == is_said
    assert ("sequence length" in page) == is_said
