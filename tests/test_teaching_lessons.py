"""What the lessons 00 to 06 show besides exercises: diagrams, the schedule puzzle, sliders that draw, the glossary, and
the line under a cell that takes longer.
"""

from __future__ import annotations

import json
import math
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from fsdplab import RunSpec, teaching
from fsdplab.figures import alt_text
from fsdplab.sessions import run_and_record
from fsdplab.teaching import collectives, composing, matrices, one_unit, overlapping_axes, tour, whole_model
from fsdplab.teaching.core import diagrams, display, exploring, glossary, registry, waiting
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.lessons.nb01_collectives.lesson import arriving_cells, ring_cells
from fsdplab.teaching.lessons.nb06_whole_model.engine import MiniUnit
from fsdplab.teaching.lessons.nb06_whole_model.schedules import MEMORY_TARGET, ScheduleError, play, shortest, waits
from fsdplab.teaching.lessons.nb16_composition import lesson as pipelines

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("[0-9][0-9]_*.ipynb"))
OWN = [path for path in NOTEBOOKS if path.name[:2] in ("00", "01", "03", "04", "05", "06")]


def cells_of(path: Path) -> list[tuple[str, str]]:
    """(kind, text) of every cell of a source."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]


# --- diagrams


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rings_picture_follows_the_rule(ranks):
    """After step s a rank holds s + 2 blocks, and what is new came from the left neighbour, who had it before."""
    cells = ring_cells(ranks)
    held = {(cell.row, cell.moment) for cell in cells}
    for rank in range(ranks):
        counts = [sum((f"rank {rank}: block {b}", moment) in held for b in range(ranks)) for moment in range(ranks)]
        assert counts == list(range(1, ranks + 1))
    for cell in cells:
        if cell.label.startswith("from"):
            left, block = cell.label.removeprefix("from "), cell.row.partition(": ")[2]
            assert (f"{left}: {block}", cell.moment - 1) in held and (cell.row, cell.moment - 1) not in held


DIAGRAMS = [
    collectives.ring_figure, one_unit.life_diagram, overlapping_axes.gradient_diagram, composing.token_diagram,
    composing.pipeline_diagram, matrices.exchange_diagram,
]  # fmt: skip


@pytest.mark.parametrize("draw", DIAGRAMS)
def test_an_animation_is_complete_on_paper_and_plays_moment_by_moment(draw):
    figure = draw()
    whole = [len(trace.x) for trace in figure.data]
    shown = [sum(len(trace.x) for trace in frame.data) for frame in figure.frames]
    assert shown == sorted(shown) and shown[0] < shown[-1] == sum(whole), "each frame adds what comes next"
    taken = [sum(sum(trace.x) for trace in frame.data) for frame in figure.frames]
    assert all(before < after for before, after in zip(taken, taken[1:])), "something comes at every moment"
    assert len({frame.name for frame in figure.frames}) == len(figure.frames), "a player finds frames by name"
    play = figure.layout.updatemenus[0].buttons[0]
    assert play.label == "▶ Play" and play.args[1]["frame"]["duration"] * len(figure.frames) <= 12_000
    assert len(alt_text(figure)) > 100


MORE_RANKS = ("00", "01", "02", "05", "07", "11", "12", "13", "21")  # lessons with a formula that two ranks hide


@pytest.mark.parametrize("notebook", MORE_RANKS)
def test_a_figure_of_each_lesson_with_a_formula_of_n_can_be_switched_to_more_ranks(notebook):
    """Two ranks hide n - 1 and n/2: a slider offers 4, and 8 where a picture of 8 ranks fits."""
    path = next(path for path in NOTEBOOKS if path.name.startswith(notebook))
    code = "\n".join(text for kind, text in cells_of(path) if kind == "code" and "explore(" in text)
    offered = re.findall(r"\b(?:ranks|world_size|shard_group)=\[([^]]+)\]", code)
    assert any({"4", "8"} <= set(values.split(", ")) for values in offered)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("draw", [collectives.ring_figure, one_unit.life_diagram])
def test_the_pictures_of_ring_and_unit_are_drawn_for_more_ranks(draw, ranks):
    figure = draw(ranks)
    assert f"{ranks} ranks" in figure.layout.title.text and f"of {ranks} ranks" in alt_text(figure)
    assert 200 < figure.layout.height < 760, "as tall as a page shows at once"


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_a_ring_of_many_ranks_shows_what_arrives(ranks):
    newest = {(cell.row, cell.moment): cell.kind for cell in arriving_cells(ranks)}
    for rank in range(ranks):
        assert {newest[f"rank {rank}", moment] for moment in range(ranks)} == {f"block {b}" for b in range(ranks)}
        for moment in range(1, ranks):
            left = f"rank {(rank - 1) % ranks}"
            assert newest[f"rank {rank}", moment] == newest[left, moment - 1], "passed on by the left neighbour"


@pytest.mark.parametrize("notebook", ["00", "07", "11", "12", "19"])
def test_the_lab_stands_in_the_lessons_that_choose(notebook):
    path = next(path for path in NOTEBOOKS if path.name.startswith(notebook))
    assert [text for kind, text in cells_of(path) if kind == "code" and "StrategyLab(" in text]


def test_a_cell_that_lasts_grows_while_it_is_played():
    cell = diagrams.HeldCell("stage 0", 1, "backward", "0", lasts=2)
    figure = diagrams.cells_in_time([cell], ["stage 0"], ["0", "1", "2"], {"backward": "#8a4a9e"}, "t", "s", "a")
    assert [[round(x, 2) for x in frame.data[0].x] for frame in figure.frames] == [[], [0.94], [1.94]]
    assert figure.data[0].x == figure.frames[-1].data[0].x


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda: collectives.ring_figure(1), "a ring of 1 ranks cannot be drawn; expected 2 to 8"),
        (lambda: collectives.ring_figure(9), "a ring of 9 ranks cannot be drawn; expected 2 to 8"),
        (lambda: overlapping_axes.gradient_diagram(1, 4), "1 replicas x .* of 4 .* expected at least 2 of each"),
        (lambda: overlapping_axes.gradient_diagram(2, 1), "one alone has nothing to reduce"),
        (lambda: overlapping_axes.gradient_diagram(2, 4), "at most 16 rows"),
        (lambda: composing.token_diagram([(0, 1), (1, 2), (2, 3)]), "3 tokens cannot be spread evenly over 2 ranks"),
        (lambda: composing.token_diagram(ranks=1), "expected 2 ranks or more"),
        (lambda: composing.token_diagram(experts=3), "3 experts cannot be spread evenly over 2 ranks"),
        (lambda: composing.token_diagram([(0, 4), (1, 2)]), r"token 0 goes to experts \[0, 4\]; .* of 0 to 3"),
        (lambda: composing.token_diagram([(0, 1), (2, 2)]), r"token 1 goes to experts \[2, 2\]; expected different"),
        (lambda: composing.token_diagram([(0,), ()]), r"token 1 goes to experts \[\]"),
        (lambda: composing.token_diagram(experts=16), "take 20 rows; expected at most 16"),
        (lambda: composing.pipeline_diagram(1, 4), "1 stages and 4 .* expected 2 to 4 stages"),
        (lambda: composing.pipeline_diagram(3, 0), "3 stages and 0 micro-batches cannot be drawn"),
        (lambda: composing.pipeline_diagram(4, 10), r"3 \(m \+ p - 1\) is at most 36"),
        (lambda: pipelines.schedule(2, 2, "GPIPE"), "no schedule 'GPIPE' .* expected GPipe or 1F1B"),
        (lambda: pipelines.bubble(0, 2), "at least one stage"),
        (lambda: held(row="other"), r"in a row that the figure does not have; expected one of \['here'\]"),
        (lambda: held(kind="other"), "in a kind that the figure does not have"),
        (lambda: held(moment=1, lasts=2), "at a moment that the figure does not have; it has moments 0 to 1"),
        (lambda: held(lasts=0), "at a moment that the figure does not have"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(draw, says):
    with pytest.raises(ValueError, match=says):
        draw()


def held(row: str = "here", moment: int = 0, kind: str = "shard", lasts: int = 1) -> object:
    """A figure of one row, two moments and one kind, with one cell."""
    cell = diagrams.HeldCell(row, moment, kind, lasts=lasts)
    return diagrams.cells_in_time([cell], ["here"], ["0", "1"], {"shard": "#0064c8"}, "t", "s", "a")


def test_sliders_draw_a_figure(capsys):
    explorer = exploring.Explorer(tour.state_figure, {"million_parameters": [1000], "ranks": [1, 4]})
    before, _ = explorer.render(), explorer.set("ranks", 4)
    assert "full_shard 16.0 GB" in before.alt and "full_shard 4.00 GB" in explorer.render().alt
    assert {"application/vnd.plotly.v1+json", "text/plain"} <= set(before._repr_mimebundle_())
    teaching.explore(tour.state_figure, million_parameters=[1000], ranks=[2])
    assert "[figure] Stacked bars" in capsys.readouterr().out


# --- the schedule puzzle


def schedule_of(source: str) -> list[tuple[str, int]]:
    names: dict = {}
    exec(source, names)
    return names["schedule"](4)


PUZZLE = registry.find("06.schedule", Exercise)


def test_the_clock_of_the_puzzle():
    engine, best = (play(schedule_of(source), 4) for source in (PUZZLE.stub, PUZZLE.reference))
    assert (engine.milliseconds, engine.peak) == (48, 2), "the order of the learner's own engine"
    assert (best.milliseconds, best.peak) == (shortest(4), MEMORY_TARGET) == (28, 3)
    assert [(span.start, span.end) for span in waits(best)] == [(0, 2)], "only the first gather is waited for"
    both = play([(action, 0) for action in ("unshard", "forward", "backward", "reshard", "reduce")], 1)
    assert (both.milliseconds, both.peak) == (2 + 2 + 4 + 2, 2)


def test_a_schedule_is_drawn_and_one_that_cannot_run_says_why():
    figure = whole_model.schedule_figure(schedule_of(PUZZLE.stub))
    assert "48 ms (target 28)" in figure.layout.title.text and "waits" in [trace.name for trace in figure.data]
    assert "reduce 0 from 46 to 48" in alt_text(figure)
    with pytest.raises(ScheduleError, match="entry 0, forward 0: its parameters are not unsharded"):
        play([("forward", 0)], 4)
    assert "its parameters are not unsharded" in alt_text(whole_model.schedule_figure([("forward", 0)]))


def test_the_engine_runs_the_schedule(tmp_path):
    """On two real ranks, with the references: the twin's gradients in every bit, the memory of the puzzle."""
    from fsdplab.teaching.core import course_state

    course_state.open_course("learner", tmp_path / "my_fsdp")
    try:
        rows = whole_model.run_schedule(blocks=3, width=8).rows
    finally:
        course_state._open.clear()
    assert [row[1:] for row in rows] == [("0 of 108", "3.00", "3")] * 2


# --- what the notebooks say


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_prediction_is_made_before_its_run(path):
    """The field has no default, and the cell that scores it is the next one that runs: nothing is shown in between."""
    code = [text for kind, text in cells_of(path) if kind == "code"]
    for number, text in enumerate(code):
        for name in re.findall(r"^(\w+) = predict\(", text, re.MULTILINE):
            assert "default=" not in text and f"{name}.score(" in code[number + 1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_caption_says_whose_function_it_shows(path):
    """`owner(...)` is "your" only where the check has passed; a caption that says so itself is wrong before."""
    code = "\n".join(text for kind, text in cells_of(path) if kind == "code")
    assert re.findall(r"\byour (?:own )?(?:function|rule|order|tokens|largest)\b", code) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_links_to_the_glossary_show_the_entry(path):
    text = "\n".join(text for kind, text in cells_of(path) if kind == "markdown")
    links = re.findall(r'\(GLOSSARY\.md#([\w-]+) "([^"]*)"\)', text)
    assert links and text.count("GLOSSARY.md#") == len(links)
    entries = {term.anchor: term.meaning for term in glossary.terms()}
    assert [(anchor, meaning) for anchor, meaning in links if entries.get(anchor) != meaning] == []


def test_the_glossary_is_a_page_and_a_function(capsys):
    page = (NOTEBOOKS[0].parent / "GLOSSARY.md").read_text(encoding="utf-8")
    assert len(glossary.terms()) == page.count("\n## ") > 40 and all(term.meaning for term in glossary.terms())
    assert len({term.anchor for term in glossary.terms()}) == len(glossary.terms())
    teaching.glossary("All gather", "busbw")
    said = capsys.readouterr().out
    assert "every rank gets all blocks" in said and "nccl-tests" in said
    with pytest.raises(LookupError, match="near: busbw"):
        teaching.glossary("buswb")


# --- the line under a cell


def test_the_line_names_what_is_under_way():
    assert str(waiting.state(5)) == "running: 5 s"
    with waiting.doing("checking 05.shard"):
        with waiting.doing("training"):
            assert str(waiting.state(5)) == "training: 5 s"
        assert str(waiting.state(5)) == "checking 05.shard: 5 s"
        waiting.follow(tour_spec(), 3, 5, 4.5)
        assert str(waiting.state(5)) == "full_shard on 2 ranks: timed step 1 of 4, loss 4.50: 5 s"
        assert "<progress value='0.600'" in waiting.state(5)._repr_html_()
        waiting.follow(replace(tour_spec(), prefetch=0, world_size=1), 0, 5, math.nan)
        assert str(waiting.state(5)) == "full_shard, prefetch 0 on 1 rank: its ranks start: 5 s"
        waiting.Waiting().begin()
        assert str(waiting.state(5)) == "checking 05.shard: 5 s", "a new cell follows its own runs"
    assert str(waiting.state(65, over=True)) == "done in 65 s"


def tour_spec():
    return RunSpec(strategy="full_shard")


def test_every_recorded_run_is_followed_step_by_step(monkeypatch):
    told: list[tuple[str, int, int]] = []
    follow = lambda spec, step, steps, loss: told.append((spec.strategy, step, steps))  # noqa: E731
    monkeypatch.setattr(run_and_record, "followers", [follow])
    spec = RunSpec(strategy="zero1", model="gpt-tiny", sequence_length=16, warmup=0, steps=2, memory=False)
    run_and_record.run(spec)
    assert told == [("zero1", step, spec.total_steps) for step in range(spec.total_steps + 1)]


class Line:
    """A display that keeps what is shown, and says when it is shown again."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.updated = threading.Event()

    def __call__(self, thing: object, display_id: bool) -> Line:
        self.shown.append(str(thing))
        return self

    def update(self, thing: object) -> None:
        self.shown.append(str(thing))
        self.updated.set()


@pytest.mark.parametrize("kernel,registered", [(object(), ["pre_run_cell", "post_run_cell"]), (None, [])])
def test_cells_of_a_notebook_have_the_line(kernel, registered):
    noted: list[str] = []
    events = SimpleNamespace(register=lambda event, call: noted.append(event))
    shell = SimpleNamespace(kernel=kernel, events=events)
    waiting.watch_cells(shell)
    waiting.watch_cells(shell)
    assert noted == registered, "once, and not in a terminal"


def test_a_long_cell_has_a_line_and_a_short_one_has_none(monkeypatch):
    line = Line()
    monkeypatch.setattr(waiting, "notebook_display", lambda: line)
    short = waiting.Waiting(quiet=3600.0)
    short.begin()
    short.end()
    assert line.shown == []
    long = waiting.Waiting(quiet=0.0, every=0.001)
    long.begin()
    assert line.updated.wait(60)
    long.end()
    assert line.shown[0].startswith("running: ") and line.shown[-1].startswith("done in ")


def test_the_line_of_an_interrupted_cell_never_says_done(monkeypatch):
    line = Line()
    monkeypatch.setattr(waiting, "notebook_display", lambda: line)
    long = waiting.Waiting(quiet=0.0, every=0.01)
    long.begin()
    while not line.shown:
        pass
    long.end(SimpleNamespace(error_in_exec=KeyboardInterrupt()))
    assert line.shown[-1] == "" and not any("done" in words for words in line.shown)


def test_voila_gets_a_live_output_as_a_widget(monkeypatch):
    """Voila shows the output of a cell once: only a widget's outputs change on its page."""
    InteractiveShell.instance()
    monkeypatch.setenv("SERVER_SOFTWARE", "voila/0.5.13")
    seen = []
    monkeypatch.setattr("fsdplab.teaching.core.display.notebook_display", lambda: lambda thing: seen.append(thing))
    try:
        update = display.present_live(display.table(["rank"], [["0"]]))
        (place,) = seen
        first = place.outputs[0]["data"]["text/html"]
        update(display.table(["rank"], [["1"]]))
        assert len(place.outputs) == 1 and place.outputs[0]["data"]["text/html"] != first
    finally:
        InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    "rows,says",
    [
        ([[99.0], [500.0]], "some rows are still those from before the step"),
        ([[100.0], [500.0]], "no row has changed"),
        ([[98.0], [498.0]], "one `optimizer.step()` updates the rows of all pairs"),
        ([[498.0], [99.0]], "another rank's rows"),
        ([[1.0], [1.0]], "what is to travel are the new rows"),
    ],
)
def test_rows_after_a_wrong_step_are_told_apart(rows, says):
    """Rank 0 lowers its row of 100 by one, and rank 1 its row of 500 by two."""
    fact = "step 0, parameter 0"
    right = {fact: torch.tensor([[99.0], [498.0]]), f"_{fact}": torch.tensor([[100.0], [500.0]])}
    assert says in registry.find("04.step_and_gather", Exercise).says(fact, {fact: torch.tensor(rows)}, right)


@pytest.mark.parametrize("there,counted", [(0, 0), (20, 20), (24, 20)])
def test_padding_behind_an_unsharded_tensor_is_none_of_the_model(there, counted):
    """05.unshard may leave its zero rows there; 06.hooks took 8 bytes of them for units that stay unsharded."""
    whole = torch.zeros(5)
    whole.untyped_storage().resize_(there)
    assert MiniUnit.gathered_bytes.fget(SimpleNamespace(whole=whole)) == counted
