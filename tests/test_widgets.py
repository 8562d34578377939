"""The strategy lab without a browser: choices and their errors, the state's life, and batches on real ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plotly.graph_objects import Figure

from fsdplab.common.sizes import parse_card
from fsdplab.figures.lab.choices import MODELS, TARGETS, Choices, check
from fsdplab.figures.view import view
from fsdplab.records import RunRecord, Summary
from fsdplab.sessions import RunSpec
from fsdplab.widgets.lab_state import Batch, LabState
from fsdplab.widgets.running import Runner
from fsdplab.widgets.strategy_lab import StrategyLab
from fsdplab.widgets.tabs import EMPTY, FAULT, TABS, kept, pieces, still
from tests.leftovers import processes_of

FIXED = {"device": "cpu", "sequence_length": 32}
TINY = {"model": "gpt-tiny", "steps": 2, "strategies": ("full_shard",)}
TWO = ("no_shard", "full_shard")
PATIENCE_S = 120.0

linux = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc to look for processes")


# ---- choices


def test_choices_become_one_run_for_each_pair_that_exists() -> None:
    choices = Choices(
        model="gpt-tiny", strategies=("zero2", "full_shard"), engines=("lab", "torch-fsdp2"), card="300MB", steps=3
    )
    request = check(choices, FIXED)
    assert [(spec.strategy, spec.engine) for spec in request.specs] == [
        ("zero2", "lab"),
        ("full_shard", "lab"),
        ("full_shard", "torch-fsdp2"),
    ]
    assert {(spec.model, spec.steps, spec.card, spec.sequence_length) for spec in request.specs} == {
        ("gpt-tiny", 3, 300_000_000, 32)
    }
    assert request.left_out == "left out: torch-fsdp2 does not do zero2" and not request.errors


def test_the_twin_runs_once_and_last_with_no_card_and_no_memory() -> None:
    request = check(
        Choices("laptop", "gpt-tiny", 2, TWO, ("twin", "lab"), card="1GB", prefetch=3, checkpoint="full"), FIXED
    )
    assert [spec.engine for spec in request.specs] == ["lab", "lab", "twin"]
    twin = request.specs[-1]
    assert (twin.card, twin.memory, twin.prefetch, twin.checkpoint) == (None, False, 1, "none")


def test_lab_models_are_those_that_read_bytes() -> None:
    assert (
        "gpt-20m" in MODELS and "llama-20m" in MODELS and "llama-3.1-8b" in TARGETS and not set(MODELS) & set(TARGETS)
    )


@pytest.mark.parametrize(
    "control,value,words",
    [
        ("model", "gpt-20", "did you mean gpt-20m"),
        ("model", "llama-3.1-8b", "expected one of gpt-tiny"),
        ("ranks", 5, "expected one of 1, 2, 3, 4"),
        ("ranks", True, "ranks is True"),
        ("strategies", (), "at least one of no_shard"),
        ("strategies", ("fullshard",), "did you mean full_shard"),
        ("engines", (), "at least one of lab"),
        ("engines", ("torch-fsdp3",), "did you mean torch-fsdp"),
        ("engines", ("torch-ddp",), "torch-ddp does no_shard, none of the chosen strategies"),
        ("engines", ("twin",), "choose another engine too"),
        ("units", "layers", "expected one of auto, block"),
        ("precision", "fp8", "expected one of fp32, bf16"),
        ("checkpoint", "some", "expected one of none, selective, full"),
        ("prefetch", 5, "expected one of 0, 1, 2, 3, 4"),
        ("prefetch", "1", "prefetch is '1'"),
        ("prefetch", (1,), "prefetch is (1,)"),
        ("strategies", "full_shard", "strategies is 'f'"),
        ("link", "eth3", "did you mean eth"),
        ("card", "a lot", "expected a size such as 300MB"),
        ("card", "-3", "expected a size such as 300MB"),
        ("link", "fast", "unknown link 'fast'"),
        ("link", "800mb/s", "bits or bytes"),
        ("preset", "cluster", "expected one of laptop, 8 x H100, two nodes"),
        ("tokens", 0, "whole number from 1 to 1048576"),
        ("tokens", 40, "expected a multiple of 32"),
        ("steps", 0, "whole number from 1 to 200"),
        ("steps", 2.5, "whole number from 1 to 200"),
        ("steps", 2.0, "whole number from 1 to 200"),
        ("tokens", 64.0, "whole number from 1 to 1048576"),
    ],
)
def test_a_wrong_choice_is_answered_in_one_line_beside_its_control(control: str, value: Any, words: str) -> None:
    request = check(Choices(**{**TINY, control: value}), FIXED)
    assert (
        list(request.errors) == [control] and words in request.errors[control] and "\n" not in request.errors[control]
    )
    assert request.specs == ()


@pytest.mark.parametrize(
    "changes,control,words",
    [
        ({"link": "wind tunnel", "tunnel": "H100"}, "tunnel", "such as 8xH100"),
        ({"link": "wind tunnel", "as_model": "gpt-20m"}, "as_model", "expected one of llama-0.3b"),
    ],
)
def test_what_is_typed_for_a_wind_tunnel_is_judged_where_it_is_used(
    changes: dict[str, str], control: str, words: str
) -> None:
    request = check(Choices(**TINY, **changes), FIXED)
    assert list(request.errors) == [control] and words in request.errors[control]
    unused = check(Choices(**TINY, **{**changes, "link": "none"}), FIXED)
    assert len(unused.specs) == 1


@pytest.mark.parametrize("changes,control", [({"checkpoint": "full"}, "checkpoint"), ({"prefetch": 3}, "prefetch")])
def test_what_only_the_lab_does_is_blamed_on_the_control_that_was_moved(changes: dict[str, Any], control: str) -> None:
    request = check(Choices(**TINY, engines=("lab", "torch-fsdp2"), **changes), FIXED)
    assert list(request.errors) == [control] and "engine='lab'" in request.errors[control]


def test_what_no_control_can_mend_is_said_beside_the_engines() -> None:
    request = check(Choices(**TINY, tokens=4096), {**FIXED, "sequence_length": 4096})
    assert list(request.errors) == ["engines"] and "4096" in request.errors["engines"]


@pytest.mark.parametrize(
    "text,nbytes",
    [
        ("", None),
        ("none", None),
        ("300MB", 300_000_000),
        ("1.5 GB", 1_500_000_000),
        ("2GiB", 2**31),
        ("4000000", 4_000_000),
        ("64 kB", 64_000),
    ],
)
def test_a_card_is_read_as_it_is_written(text: str, nbytes: int | None) -> None:
    assert parse_card(text) == nbytes


# ---- the state's life


def a_state(**choices: Any) -> LabState:
    return LabState(FIXED, **{**TINY, **choices})


def a_record(status: str = "finished", engine: str = "lab", message: str = "Rank 1 died.\nmore") -> RunRecord:
    spec = RunSpec(engine=engine, model="gpt-tiny", **FIXED).as_dict()
    return RunRecord(
        Path("nowhere"), spec=spec, status=status, failure={"message": message} if status == "failed" else None
    )


def test_a_batch_from_begin_to_done() -> None:
    state, told = a_state(strategies=("no_shard", "full_shard")), []
    state.subscribe(lambda: told.append((state.status, state.message)))
    specs = state.begin()
    assert len(specs) == 2 and state.busy and state.begin() == ()
    state.stepped(specs[0])
    assert state.message == "run 1 of 2, no_shard: its ranks are starting"
    state.stepped(specs[0], 1, 5, 5.5)
    assert state.message == "run 1 of 2, no_shard: warm-up step 1 of 2, rank 0's loss 5.5000" and state.share == 0.1
    state.recorded(a_record())
    state.stepped(specs[1])
    state.recorded(a_record())
    state.ended()
    assert (state.status, state.message) == ("done", "done: 2 records of 2 runs kept")
    assert told[-1] == ("done", state.message) and len(told) == 8


def test_wrong_choices_start_nothing_and_say_why() -> None:
    state = a_state(ranks=9)
    assert state.begin() == () and state.status == "idle" and not state.batches
    assert state.message == "nothing was started: ranks is 9; expected one of 1, 2, 3, 4"
    state.choose(ranks=2)
    assert state.message == "ready to measure 1 run" and len(state.begin()) == 1


def test_a_cancelled_batch_keeps_its_records_and_the_lab_can_run_again() -> None:
    state = a_state(strategies=("no_shard", "full_shard"))
    assert state.cancel() is False
    state.begin()
    state.recorded(a_record())
    assert state.cancel() is True and state.status == "cancelling" and state.cancel() is False
    state.ended()
    assert re.findall(r"\d+", state.message) == ["1", "2"] and "cancelled" in state.message, "kept, of so many"
    assert len(state.begin()) == 2 and state.status == "running" and state.last_error is None
    assert state.batch.number == 1, "a batch without records is not shown in the place of one that has some"


def test_a_failed_run_is_named_and_its_batch_goes_on() -> None:
    state = a_state()
    state.begin()
    state.recorded(a_record("failed"))
    assert state.busy
    state.ended()
    assert state.status == "failed" and state.message.startswith(
        "failed: full_shard: Rank 1 died; 1 record of 1 run kept"
    )


def test_an_error_of_the_runner_itself_is_said() -> None:
    state = a_state()
    state.begin()
    state.ended("the disk is full")
    assert state.status == "failed" and "the disk is full" in state.message


def test_an_unknown_choice_is_an_error_of_the_caller() -> None:
    with pytest.raises(TypeError, match="world_size"):
        a_state().choose(world_size=2)


def test_the_share_that_is_done_counts_the_steps_of_runs_that_take_turns() -> None:
    state = a_state(strategies=("no_shard", "full_shard"))
    whole, sharded = state.begin()
    for run in (whole, sharded):
        state.stepped(run)
        state.stepped(run, 1, 5, 5.5)
    state.stepped(whole, 2, 5, 5.4)
    assert (
        state.message == "run 1 of 2, no_shard: warm-up step 2 of 2, rank 0's loss 5.4000"
        and state.share == pytest.approx(0.3)
    )
    state.stepped(sharded, 2, 5, 5.4)
    state.recorded(a_record())
    assert state.share == pytest.approx(0.7), "of full_shard, which has ended, nothing is left to do"
    no_shard = a_record()
    no_shard.spec["strategy"] = "no_shard"
    state.recorded(no_shard)
    assert state.share == 1.0 and state.batches[-1].records[0] is no_shard, "in the order of the runs"


def test_a_drift_of_runs_that_took_no_turns_is_said_at_the_end() -> None:
    state, record = a_state(), a_record()
    state.begin()
    record.summary = Summary.from_dict({"step_time_s": {"median": 0.1, "min": 0.1}, "again_s": 0.12})
    state.recorded(record)
    state.ended()
    assert state.message.startswith(
        "done: 1 record of 1 run kept. The machine's speed drifted: full_shard was run again"
    )


def test_the_twin_is_the_reference_and_no_row_unless_it_is_alone() -> None:
    lab, twin = a_record(), a_record(engine="twin")
    batch = Batch(1, check(Choices(**TINY), FIXED).specs, [lab, twin])
    assert (batch.rows, batch.reference) == (
        [lab],
        twin,
    ) and batch.title == "1: gpt-tiny, 2 ranks, fp32, prefetch 1, link 150MB/s, 1 run"
    assert Batch(1, batch.specs, [twin]).rows == [twin]


def test_state_and_runner_need_no_widget_library() -> None:
    code = (
        "import sys, fsdplab.widgets.running; print({'ipywidgets', 'plotly', 'IPython'} & {name.split('.')[0] for name"
        " in sys.modules})"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        ).stdout.strip()
        == "set()"
    )


# ---- on real ranks


def when(state: LabState, true: Any, act: Any) -> None:
    """Call `act()` from a thread of its own as soon as `true(state)`, as a press of a button would."""
    reached = threading.Event()
    state.subscribe(lambda: true(state) and reached.set())
    threading.Thread(target=lambda: reached.wait(PATIENCE_S) and act(), daemon=True).start()


_WITH_LOSS = re.compile(r", (rank 0's )?loss .*")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> StrategyLab:
    """The lab after one batch: full_shard and the twin, on real ranks."""
    folder = tmp_path_factory.mktemp("lab")
    lab = StrategyLab(FIXED, directory=folder, export_to=folder, engines=("lab", "twin"), **TINY)
    lab.seen = []
    lab.state.subscribe(
        lambda: lab.seen.append((_WITH_LOSS.sub("", lab.state.message), lab.instrument.progress["share"]))
    )
    assert lab.records == [] and lab.details.export() is None
    lab.run(PATIENCE_S)
    return lab


def test_a_batch_on_real_ranks_ends_with_its_records(lab: StrategyLab) -> None:
    assert lab.state.message.startswith("done: 2 records of 2 runs kept")
    steps = ["warm-up step 1 of 2", "warm-up step 2 of 2", "timed step 1 of 2", "timed step 2 of 2"]
    steps.append("profiled step 1 of 1")
    said, bar = zip(*lab.seen)
    first = [words for words in said if words.startswith("run 1 of 2, full_shard: ") and " step " in words]
    assert first[: len(steps)] == [f"run 1 of 2, full_shard: {step}" for step in steps]
    assert "run 2 of 2, twin: profiled step 1 of 1" in said
    bar = [*bar]
    assert bar == sorted(bar) and bar[-1] == 1.0
    batch = lab.state.batch
    assert [record.status for record in batch.records] == ["finished", "finished"] and [
        row.matches for row in batch.views
    ] == [True]
    assert RunRecord.load(batch.records[0].path) == lab.records[0] and batch.records[0].path.parent.name == "batch-1"


@pytest.mark.parametrize("tab", TABS)
def test_every_tab_shows_the_batch(lab: StrategyLab, tab: str) -> None:
    shown = pieces(tab, lab.state.batch)
    assert not [piece for piece in shown if isinstance(piece, str) and FAULT in piece]
    assert tab == "Findings" or any(isinstance(piece, Figure) for piece in shown), shown
    lab.details.widget.selected_index = 0
    lab.details.tabs.selected_index = TABS.index(tab)
    html = [output["data"]["text/html"] for output in lab.details.outputs[tab].outputs]
    assert (
        html
        and "drawing" not in html[0]
        and pieces(tab, None) == [pieces(tab, Batch(1, ()))[0]]
        and EMPTY in pieces(tab, None)[0]
    )


def test_the_table_has_the_verdict_of_the_twin(lab: StrategyLab) -> None:
    table = pieces("Table", lab.state.batch)[0]
    assert ">full_shard<" in table and ">agree<" in table and "<b>measured</b>" in table and ">twin<" not in table


def test_a_figure_with_a_fault_leaves_the_tab_alive(lab: StrategyLab, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdplab import figures

    monkeypatch.setattr(figures, "pareto", lambda runs: 1 / 0, raising=False)
    assert FAULT in pieces("Pareto", lab.state.batch)[0]


def test_the_saved_notebook_keeps_a_folded_table_with_the_figures_words(lab: StrategyLab) -> None:
    bundle = still(kept(lab.state.batch), {})
    html = bundle["text/html"]
    assert html.startswith("<details>") and "<table" in html and html.count("<p>Bars of") == 2 and len(html) < 50_000
    assert "Bars of peak memory per rank: full_shard" in bundle["text/plain"]
    assert "to come" in still(kept(None), {})["text/plain"]


def test_what_is_saved_follows_the_labs_state(lab: StrategyLab, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    place = SimpleNamespace(update=lambda bundle, raw: shown.append(bundle["text/plain"]))
    monkeypatch.setattr(lab, "_stills", [place])
    lab._keep(lab.state.batch)
    lab.state.choose(strategies=("zero1", "full_shard"))
    title = str(lab.instrument.answer["memory_title"])
    assert shown and title in shown[-1] and lab.state.batch.title in shown[-1]


def test_export_writes_the_comparison_and_says_where(lab: StrategyLab, tmp_path: Path) -> None:
    path = lab.details.export()
    assert "full_shard" in path.read_text(encoding="utf-8")
    said = lab.details.exported.outputs[0]["data"]["text/html"]
    assert str(path.resolve()) in said and "href" in said
    lab.details._export_to = tmp_path / "nowhere"
    assert (
        lab.details.export() is None
        and "could not be written (No such file or directory)" in lab.details.exported.outputs[0]["data"]["text/html"]
    )


def test_all_batches_together_is_offered_from_the_second_on(lab: StrategyLab) -> None:
    state = a_state()
    first = Batch(1, lab.state.batch.specs, lab.state.batch.records)
    state.batches = [first]
    assert state.offered == [first]
    state.batches = [first, Batch(2, first.specs), Batch(3, first.specs, first.records)]
    assert [batch.number for batch in state.offered] == [1, 3, 0]
    together = state.offered[-1]
    assert (
        together.title == "all batches: 2 runs"
        and together.reference is None
        and len({run.label for run in together.views}) == 2
    )


# ---- the view, without a browser


def test_a_lab_of_wrong_choices_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 9; expected one of 1, 2, 3, 4"):
        StrategyLab(ranks=9)


# ---- batches that end badly


@linux
@pytest.mark.parametrize("moment", ["start", "step"])
def test_cancel_ends_the_ranks_and_the_next_batch_runs(tmp_path: Path, moment: str) -> None:
    runner = Runner(a_state(steps=200 if moment == "step" else 2), tmp_path)
    when(runner.state, lambda state: (" step " if moment == "step" else "run 1") in state.message, runner.state.cancel)
    assert runner.start() and runner.wait(PATIENCE_S)
    assert runner.state.status == "cancelled" and re.findall(r"\d+", runner.state.message) == ["0", "1"]
    assert processes_of(tmp_path) == [] and runner.state.share < 1
    if moment == "start":
        runner.state.choose(card="1MB")
        assert runner.start() and runner.wait(PATIENCE_S) and runner.state.status == "done", runner.state.message
        assert [view(record).over_card for record in runner.state.batch.records] == [True]


@linux
def test_a_run_that_fails_says_why_and_the_next_batch_runs(tmp_path: Path) -> None:
    runner = Runner(LabState({**FIXED, "time_limit": 0.2, "start": "torchrun"}, **TINY), tmp_path)
    assert runner.start() and runner.wait(PATIENCE_S)
    assert runner.state.status == "failed" and "did not start within the time limit of 0.2 s" in runner.state.message
    assert [record.status for record in runner.state.batch.records] == ["failed"] and processes_of(tmp_path) == []
    assert runner.start() and runner.wait(PATIENCE_S) and runner.state.status == "failed"


def test_a_folder_that_cannot_be_written_fails_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    runner = Runner(a_state(), tmp_path / "file")
    assert runner.start() and runner.wait(PATIENCE_S)
    assert runner.state.status == "failed" and "(it is a file); give StrategyLab(directory=...)" in runner.state.message
