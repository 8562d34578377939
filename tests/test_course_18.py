"""Notebook 18: verdicts follow from figures, and a figure that changes is seen here."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from fsdplab.common.places import shared_folder
from fsdplab.figures import alt_text
from fsdplab.teaching import judging
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.lessons.nb18_claims import lesson
from fsdplab.teaching.lessons.nb18_claims.claims import CLAIMS, CONDITIONAL, CONFIRMED, REFUTED, claim_of
from tests.claims import measuring
from tests.lesson_cells import run_cell
from tests.solutions import function_of

# statement -> verdict, and figures of its sentence
EXPECTED = {
    "C1": (CONFIRMED, "1,120 GB", "16 bytes"),
    "C2": (CONFIRMED, "1,129 GB a GPU on 16"),
    "C3": (REFUTED, "70.6 GB of states", "does not fit"),
    "C4": (CONFIRMED, "273 MB"),
    "C5": (CONDITIONAL, "1.69 MB on 1, 0.85 MB on 2, 0.42 MB on 4"),
    "C6": (CONDITIONAL, "1.35 times", "1.43 with one dtype", "0.97", "1.93"),
    "C7": (REFUTED, "of DDP's"),
    "C8": (REFUTED, "0.76 MB", "0.56 MB"),
    "C9": (REFUTED, "5 all_gathers and 3 reduce_scatters"),
    "C10": (REFUTED, "2 all_gathers", "3 reduce_scatters"),
    "C11": (CONDITIONAL, "0.28 MB, where ZeRO-2 keeps 0.56 MB"),
    "C12": (CONFIRMED, "zero1 1.13 MB", "full_shard 0.85 MB"),
    "C13": (CONFIRMED, "at most 0,", "0.56 MB"),
    "C14": (CONFIRMED, "7.03 GB a step instead of 61.2 GB"),
    "C15": (CONFIRMED, "model 346 MB and 2", "linear 183 MB and 221"),
    "C16": (REFUTED, "46% under DDP", "48% under full sharding"),
    "C17": (CONFIRMED, "2.5 times", "1.0 times"),
    "C18": (CONFIRMED, "2.12 MB instead of 2.97 MB", "11.5 GB a step"),
    "C19": (CONFIRMED, "fp32 3.775", "masters 3.773", "alone 4.000"),
    "C20": (CONFIRMED, "0.56 MB", "0.14 MB", "280 GB and 70.0 GB"),
    "C21": (CONFIRMED, "loaded on 2, 1, 3"),
    "C22": (REFUTED, "35.3 GB"),
    "C23": (CONDITIONAL, "pcie4"),
    "C24": (CONDITIONAL, "gpt-tiny +"),
    "C25": (CONDITIONAL, "91%", "95%"),
    "C26": (CONFIRMED, "no_shard 1.0", "full_shard 8.0"),
    "C27": (CONFIRMED, "a pipeline equal"),
    "C28": (CONDITIONAL, "6 steps with LoRA have the same losses"),
    "C29": (CONFIRMED, "0.85 MB", "equal bits"),
    "C30": (CONDITIONAL, "of DDP's on 8 H100"),
    "C31": (REFUTED, "pcie4, 31 GB/s"),
    "C32": (CONDITIONAL, "refused (aten.mm", "norm.running_mean differs"),
    "C33": (CONDITIONAL, "7 of 9 faults", "wrong divisor"),
    "C34": (REFUTED, "the same bytes"),
    "C35": (CONDITIONAL, "0.28 MB of 0.56 MB"),
    "C36": (CONDITIONAL, "does not fit", "fits"),
    "C37": (CONDITIONAL, "182 collectives, and 2"),
}


@pytest.mark.parametrize("number", EXPECTED)
def test_each_verdict_and_its_figures(number: str) -> None:
    verdict, *figures = EXPECTED[number]
    found = judging.finding(number)
    assert found.verdict == verdict, found.text
    assert all(figure in found.text for figure in figures), found.text


def test_every_statement_is_judged_once_and_its_notebook_exists() -> None:
    assert sorted(each.id for each in CLAIMS) == sorted(EXPECTED)
    notebooks = {path.stem for path in shared_folder("notebooks").glob("*.ipynb")}
    assert {each.seen_in for each in CLAIMS} <= notebooks


def _full_sends_less(measured: dict[str, Any]) -> None:
    measured["strategies"]["full_shard"]["bytes"] = 1


def _an_all_reduce(measured: dict[str, Any]) -> None:
    measured["strategies"]["full_shard"]["collectives"]["backward all_reduce"] = 3


def _other_losses(measured: dict[str, Any]) -> None:
    measured["torch_ddp"]["losses"][0] += 0.1


def _masters_do_not_help(measured: dict[str, Any]) -> None:
    measured["curves"]["bf16, fp32 masters"] = measured["curves"]["bf16 alone"]


def _a_bit_is_lost(measured: dict[str, Any]) -> None:
    measured["checkpoints"]["on 3"][1]["equal"] = False


def _states_do_not_fall(measured: dict[str, Any]) -> None:
    measured["ranks"]["4"] = measured["ranks"]["1"]


@pytest.mark.parametrize(
    "number,change,verdict",
    [
        ("C8", _full_sends_less, CONFIRMED), ("C9", _an_all_reduce, CONFIRMED), ("C10", _an_all_reduce, CONFIRMED),
        ("C13", _other_losses, REFUTED), ("C19", _masters_do_not_help, REFUTED), ("C21", _a_bit_is_lost, REFUTED),
        ("C5", _states_do_not_fall, REFUTED),
    ],
)  # fmt: skip
def test_a_verdict_changes_with_its_figures(
    number: str, change: Callable[[dict[str, Any]], None], verdict: str
) -> None:
    measured = copy.deepcopy(judging.measured())
    change(measured)
    assert claim_of(number).find(measured).verdict == verdict


def test_the_record_says_how_it_was_made_and_is_whole() -> None:
    record = json.loads((shared_folder("data") / "claims.json").read_text())
    assert set(record) == {"made_by", *measuring.MEASUREMENTS}
    assert record["made_by"]["command"].startswith("python -m tests.claims") and record["made_by"]["torch"]


def test_the_record_can_be_made_again() -> None:
    """Bytes and collectives of two strategies, on real ranks."""
    found = judging.again()
    assert [row[-1] for row in found.rows] == ["the same", "the same"]


def test_the_formula_is_that_of_the_record() -> None:
    ratio = function_of(registry.find("18.ratio", Exercise))
    told = judging.measured()["strategies"]
    assert ratio(4, 4, 4) == 1.5 and ratio(2, 4, 4) == 1.0 and ratio(2, 4, 2) == 2.0
    small = ratio(4, 4, 4, judging.root_part("gpt-tiny"))
    assert small == pytest.approx(told["full_shard"]["bytes"] / told["no_shard"]["bytes"], rel=1e-6)
    assert judging.ratio(2, 4, 2, 0.25) == ratio(2, 4, 2, 0.25)


def test_the_figures_say_what_they_show() -> None:
    figure = judging.verdicts_figure()
    assert f"Of {len(CLAIMS)} statements" in figure.layout.title.text and "memory" in alt_text(figure)
    titles = {judging.ratio_figure("fp32", "fp32", "fp32", root).layout.title.text for root in (0, 10, 50)}
    assert len(titles) == 3 and any("1.50 times" in title for title in titles)


def test_tables_name_figures_and_notebooks() -> None:
    judged = run_cell("18", "memory")["judged"]
    for subject in ("memory", "traffic", "speed", "practice"):
        for row in judged(subject).rows:
            assert row[2] in (CONFIRMED, CONDITIONAL, REFUTED) and row[-1].isdigit() and row[4]


def test_the_hint_names_the_notebooks_of_the_ten_statements() -> None:
    hint = registry.find("18.verdicts", Exercise).hints[0]
    named = {each for part in hint.split("? ")[1].rstrip(".").split("; ") for each in re.findall(r"C\d+", part)}
    assert named <= set(lesson.ASKED)
    for part in hint.split("? ")[1].rstrip(".").split("; "):
        statements, notebooks = part.split(": ")
        seen = {claim_of(each).seen_in[:2] for each in re.findall(r"C\d+", statements)}
        assert seen <= set(re.findall(r"\b\d\d\b", notebooks))


@pytest.mark.parametrize("said", ["Under conditions", " under  conditions", "UNDER CONDITIONS"])
def test_a_verdict_may_be_written_otherwise(said: str) -> None:
    function = function_of(registry.find("18.verdicts", Exercise))
    assert lesson.complaint(function() | {"C6": said}) == lesson.AS_FIGURES_SAY
    assert "C6 is 'conditional'" in lesson.complaint(function() | {"C6": "conditional"})
