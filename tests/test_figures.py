"""Figures: what they draw is what the records say, their colours can be told apart, and the page stands alone."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fsdplab import figures
from fsdplab.common.places import how_to_install
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import plural
from fsdplab.figures import style
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.conclusion import conclusion
from fsdplab.figures.fastest import fastest_words, step_words
from fsdplab.figures.plotly_go import go
from fsdplab.figures.plots.steps import steady_steps
from fsdplab.figures.report.parts import page_of
from fsdplab.figures.table import SPLIT, brief, cells, told
from fsdplab.figures.view import RunView, view, views
from fsdplab.profiling.findings import findings
from fsdplab.records import CATEGORIES, RunRecord, Spread, Summary, comparison_json
from fsdplab.records.summary import Change, Peak, Predicted, Steady
from tests.browser import patient
from tests.pictures import svg_of

MB = 1_000_000
SPLITS = {  # a model of 20 MB of parameters on two ranks, rounded
    "no_shard": dict(
        sharded_parameters=20,
        unsharded_gradients=20,
        optimizer_state=40,
        activations=7,
        communication_buffers=2,
        other=1,
    ),
    "zero1": dict(
        sharded_parameters=20,
        unsharded_gradients=20,
        optimizer_state=20,
        activations=7,
        communication_buffers=4,
        other=1,
    ),
    "full_shard": dict(
        sharded_parameters=10,
        unsharded_parameters=6,
        sharded_gradients=10,
        unsharded_gradients=3,
        optimizer_state=20,
        activations=7,
        communication_buffers=4,
        other=1,
    ),
}
CARD = 80 * MB


def record(
    tmp_path: Path,
    strategy: str,
    engine: str = "lab",
    median: float | None = 0.5,
    status: str = "finished",
    card: int | None = CARD,
) -> RunRecord:
    """A complete small record as a run would leave it."""
    split = {name: SPLITS[strategy].get(name, 0) * MB for name in CATEGORIES}
    steps = [] if median is None else [0.9 * median, median, median, 1.05 * median]
    summary = {
        "step_time_s": asdict(Spread.of(steps)),
        "tokens_per_s": median and 256 / median,
        "peak_memory_bytes": {"total": sum(split.values()), "by_category": split},
        "peak_by_rank": [sum(split.values())] * 2,
        "comm": {"bytes_per_step": 20 * MB, "collectives_per_step": 12, "exposed_s": None, "overlap": None},
        "formula_bytes_per_step": 20 * MB,
        "losses": [5.5, 5.25],
        "card": {"bytes": card, "exceeded": status == "out_of_memory"},
    }
    return RunRecord(
        tmp_path / f"{engine}-{strategy}",
        spec=dict(
            strategy=strategy,
            engine=engine,
            world_size=2,
            model="gpt-tiny",
            card=card,
            precision="fp32",
            steps=2,
            text=None,
        ),
        environment={"torch": "2.13.0", "nested": {"cores": 2}},
        status=status,
        summary=Summary.from_dict(summary),
        provenance={"step_time_s": "measured", "card": "emulated"},
        tables={"memory": memory_rows(), "ledger": ledger_rows()},
    )


def memory_rows() -> list[dict]:
    """Five instants of two ranks; the peak of rank 0 is 72 MB at 2 ms."""
    levels = [40, 55, 65, 50, 45]
    rows = []
    for rank, (index, level) in itertools.product((0, 1), enumerate(levels)):
        row = dict.fromkeys(CATEGORIES, 0) | {"optimizer_state": level * MB, "activations": 7 * MB}
        rows.append({"rank": rank, "step": 1, "time_ns": index * MB, **row, "is_peak": level == 65})
    return rows


def ledger_rows() -> list[dict]:
    """Two units' collectives of two steps: 20 MB a step and rank."""
    travel = [("forward", "all_gather", 4), ("backward", "all_gather", 2), ("backward", "reduce_scatter", 4)]
    return [
        {
            "rank": rank, "step": step, "unit": unit, "phase": phase, "kind": kind, "logical_bytes": 2 * sent * MB,
            "wire_bytes": sent * MB,
            "padding_bytes": 0, "dtype": "float32", "start_ns": 0, "end_ns": 1, "emulated": False,
        }
        for rank, step, unit, (phase, kind, sent) in itertools.product((0, 1), (0, 1), ("a", "b"), travel)
    ]  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    return [
        record(tmp_path, "no_shard", median=None, status="out_of_memory"),
        record(tmp_path, "zero1"),
        record(tmp_path, "full_shard", median=0.6),
    ]


def words(figure) -> str:
    """All text of a figure: title, subtitle, annotations."""
    title, notes = figure.layout.title, figure.layout.annotations
    return " ".join([title.text, title.subtitle.text, *(note.text for note in notes)]).replace("<br>", " ")


def test_quantities_read_well():
    assert [size(n) for n in (0, 999, 1536, 300 * MB, 999_960_000, 1.5e9, None)] == [
        "0 B",
        "999 B",
        "1.54 kB",
        "300 MB",
        "1.00 GB",
        "1.50 GB",
        "–",
    ]
    assert [seconds(t) for t in (1.4, 0.0153, 0.9999, 2e-5, 63, None)] == [
        "1.40 s",
        "15.3 ms",
        "1.00 s",
        "20.0 µs",
        "63.0 s",
        "–",
    ]
    assert (three_digits(1234), three_digits(9.999), plural(1, "rank"), plural(2, "rank")) == (
        "1,234",
        "10.0",
        "1 rank",
        "2 ranks",
    )


def test_memory_stacks_to_the_measured_peak(runs):
    figure = figures.memory_by_category(runs)
    for index, run in enumerate(runs):
        assert sum(bar.x[index] for bar in figure.data) * MB == pytest.approx(run.summary.peak_memory_bytes.total)
    assert {bar.name for bar in figure.data} == {name.replace("_", " ") for name in CATEGORIES}
    assert [bar.marker.color for bar in figure.data] == [style.CATEGORY_COLOURS[name] for name in CATEGORIES]
    assert "out of memory" in words(figure) and "card 80.0 MB (emulated)" in words(figure)
    assert "Measured on 2 CPU ranks" in words(figure) and "the card is emulated" in words(figure)
    assert figure.layout.title.text == "<b>no_shard is over the card; full_shard peaks at 61.0 MB</b>"
    assert figure.layout.xaxis.title.text.endswith("(MB)")


def test_long_names_of_runs_leave_the_legend_a_further_row(tmp_path):
    """The card's label stands right below the legend."""
    known = view(record(tmp_path, "full_shard"))
    short, long = (
        figures.memory_by_category([known]),
        figures.memory_by_category([replace(known, note="bf16, eth10, prefetch 2, batch 8")]),
    )
    assert len(long.data[0].y[0]) > 16 >= len(short.data[0].y[0])
    assert long.layout.margin.t - short.layout.margin.t == long.layout.height - short.layout.height == 21


def test_a_card_far_beyond_the_bars_is_said_not_drawn(tmp_path):
    figure = figures.memory_by_category(record(tmp_path, "zero1", card=1_000 * MB))
    assert not figure.layout.shapes and "holds 1.00 GB, beyond this axis" in words(figure)
    assert figure.layout.xaxis.range[1] < 100


def test_a_long_name_is_broken_into_two_lines_of_about_one_length():
    from fsdplab.figures.bars import _broken

    assert _broken("full_shard") == "full_shard" and _broken("full_shard, prefetch 0") == "full_shard,<br>prefetch 0"
    long = _broken("full_shard, gpt-tiny, link 150mbit, prefetch 0, batch 16")
    assert long == "full_shard, gpt-tiny,<br>link 150mbit, prefetch 0, batch 16"


def test_memory_that_cannot_be_told_apart_is_shown_as_such(tmp_path):
    peer = record(tmp_path, "full_shard", engine="torch-fsdp2", card=None)
    known = {"optimizer_state": 20 * MB, "activations": None}
    peer.summary = replace(peer.summary, peak_memory_bytes=replace(peer.summary.peak_memory_bytes, by_category=known))
    figure = figures.memory_by_category(peer)
    assert {bar.name: bar.x[0] for bar in figure.data} == {"optimizer state": 20, "no category": 41}
    assert "emulated" not in words(figure)
    assert cells(view(peer), [SPLIT]) == ("– + – + 20 + – + 41",)


def test_step_time_names_the_fastest_and_those_that_did_not_train(runs):
    figure = figures.step_time(runs)
    assert list(figure.data[0].x) == pytest.approx([0, 500, 600])
    assert list(figure.data[0].marker.color) == [style.STRATEGY_COLOURS[name] for name in SPLITS]
    assert list(figure.data[1].x) == pytest.approx([450, 540])
    assert figure.layout.title.text == "<b>zero1 is fastest, 500 ms a step; full_shard takes 600 ms</b>"
    assert "512 tokens/s" in words(figure) and "out of memory" in words(figure)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (([0.40, 0.41, 0.42, 0.43], [0.41, 0.42, 0.43, 0.44]),
         "no difference between run0 and run1 is seen in 4 steps (their medians would have to differ by 10 %)"),
        (([0.4, 0.5], [0.8, 0.9]), "no run is called fastest, as too few steps were timed (4 are needed)"),
        (([0.5], [0.4], [0.4]), "no run is called fastest, as too few steps were timed (4 are needed)"),
        (([0.5] * 4, [0.4] * 4, [0.9] * 4), "run1 is fastest, 400 ms a step; run2 takes 900 ms"),
        (([0.5, 0.1, 0.9, 2.0], [0.4, 0.2, 0.9, 3.0]),
         "no difference between run1 and run0 is seen in 4 steps (their medians would have to differ by 454 %)"),
        (([0.5] * 4, [0.5] * 4, [0.9] * 4),
         "no difference between run0 and run1 is seen in 4 steps (their medians would have to differ by 2 %); run2"
         " takes 900 ms"),
        (([0.4] * 4,), "run0: 400 ms a step"),
    ],
)  # fmt: skip
def test_a_winner_is_named_beyond_the_spread_of_the_steps(steps, words):
    runs = [RunView(f"run{i}", "lab", 2, Summary(step_time_s=Spread.of(each))) for i, each in enumerate(steps)]
    assert step_words(runs) == words
    assert figures.step_time(runs).layout.title.text.replace("<br>", " ") == f"<b>{words}</b>"


def test_a_run_over_the_card_is_said_to_be_left_out_of_the_race():
    ones = [RunView(f"run{i}", "lab", 2, Summary(Spread.of([each] * 4))) for i, each in enumerate((0.4, 0.5, 0.9))]
    over = replace(ones[0], status="out_of_memory")
    assert fastest_words([over, *ones[1:]]) == ("run1 is fastest, 500 ms a step; run0 is over the card and not ranked")
    assert step_words([over, *ones[1:]]).endswith("run2 takes 900 ms; run0 is over the card and not ranked")


def test_among_simulated_steps_the_shortest_wins():
    runs = [
        RunView(f"run{i}", "lab", 2, Summary(step_time_s=Spread.of([step])), provenance={"step_time_s": "simulated"})
        for i, step in enumerate((0.5, 0.4, 0.4))
    ]
    assert step_words(runs[:2]) == "run1 is fastest, 400 ms a step; run0 takes 500 ms"
    assert fastest_words(runs) == "run1 and run2 are fastest, 400 ms a step"


def test_timeline_finds_the_peak_of_the_rank(runs):
    figure = figures.memory_timeline(runs[2], rank=1)
    assert figure.layout.title.text == "<b>full_shard: rank 1 peaks at 72.0 MB after 2.00 ms</b>"
    assert [trace.name for trace in figure.data] == ["optimizer state", "activations", "peak"]
    assert (figure.data[-1].x[0], figure.data[-1].y[0]) == (2, 72)
    card = next(note for note in figure.layout.annotations if note.text.startswith("card "))
    assert card.bgcolor, "the name of the card's line lies on the bands"
    with pytest.raises(ValueError, match=r"no memory timeline of rank 2; the record has ranks \[0, 1\]"):
        figures.memory_timeline(runs[2], rank=2)


def test_ledger_beside_the_formula(runs):
    figure = figures.ledger_against_formula(runs[2])
    assert {trace.name: max(trace.x) for trace in figure.data} == {
        "all_gather in forward": 8,
        "all_gather in backward": 4,
        "reduce_scatter in backward": 8,
        "formula": 20,
    }
    assert "the ledger equals the formula, 20.0 MB a step" in words(figure)
    runs[2].summary = replace(runs[2].summary, formula_bytes_per_step=20 * MB + 3)
    assert "differs from the formula by -3 bytes" in words(figures.ledger_against_formula(runs[2]))
    runs[2].tables["ledger"] = []
    with pytest.raises(ValueError, match="recorded no collective"):
        figures.ledger_against_formula(runs[2])


def test_figures_refuse_what_they_cannot_draw(tmp_path, runs):
    empty = record(tmp_path, "zero1", median=None)
    empty.summary = replace(empty.summary, peak_memory_bytes=Peak())
    with pytest.raises(ValueError, match="no run has a memory measurement"):
        figures.memory_by_category(empty)
    with pytest.raises(ValueError, match="no run has a timed step"):
        figures.step_time(runs[:1])
    with pytest.raises(TypeError, match="got int"):
        figures.step_time(3)
    with pytest.raises(AttributeError, match="memory_by_category"):
        figures.no_such_figure


def test_without_plotly_the_remedy_is_named():
    code = "import sys; sys.modules['plotly'] = None; from fsdplab.figures.plotly_go import go; go.Figure()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].endswith(f"figures need plotly: {how_to_install('lab')}")


def test_records_and_their_comparison_draw_the_same(runs):
    comparison = comparison_json(runs)
    for draw in (figures.memory_by_category, figures.step_time):
        assert draw(runs).to_json() == draw(comparison).to_json()
    assert [run.status for run in views(comparison)] == ["out_of_memory", "finished", "finished"]


def test_every_figure_says_what_it_shows_in_words(runs):
    drawn = [
        figures.memory_by_category(runs),
        figures.step_time(runs),
        figures.memory_timeline(runs[1]),
        figures.ledger_against_formula(runs[1]),
    ]
    for figure in drawn:
        assert len(figures.alt_text(figure)) > 40 and figure.layout.title.text and figure.layout.title.subtitle.text
    assert "full_shard 61.0 MB, mostly optimizer state (20.0 MB)" in figures.alt_text(drawn[0])
    assert "no_shard out of memory" in figures.alt_text(drawn[1])


def test_every_bar_has_its_words_at_its_end_and_a_line_leaves_them_free(runs):
    figure = figures.memory_by_category(runs)
    lengths = {row: sum(trace.x[place] for trace in figure.data) for place, row in enumerate(figure.data[0].y)}
    ends = {note.y: note for note in figure.layout.annotations if note.y in lengths}
    assert lengths == {"no_shard": 90, "zero1": 72, "full_shard": 60} or lengths.keys() == ends.keys()
    assert ends["no_shard"].text == "<b>90.0 MB</b> · out of memory" and ends["no_shard"].font.color == style.ALARM
    assert {row: note.x for row, note in ends.items()} == lengths
    below, above = figure.layout.shapes
    assert {shape.x0 for shape in (below, above)} == {80} and (below.y0, above.y1) == (0, 1)
    assert below.y1 < 1 / 2 < above.y0, "the line at 80 leaves the words of 72 MB free, in the middle of three rows"
    assert "card 80.0 MB (emulated)" in [note.text for note in figure.layout.annotations]


def test_numbers_stand_in_parts_that_have_room_for_them():
    figure = stacked_bars(
        {"a": "10"}, [Part("wide", "#0064c8", [9.0]), Part("thin", "#cc7fa8", [0.1])], "ms", number=str
    )
    assert [trace.text for trace in figure.data] == [("9.0",), ("",)]
    assert figure.data[0].textfont.color == "#ffffff" and 9.1 < figure.layout.xaxis.range[1] < 15


def test_step_times_have_whiskers_where_quartiles_are_known(tmp_path):
    timed = record(tmp_path, "zero1", median=0.4)
    without = replace(timed.summary, step_time_s=Spread(median=0.4))
    assert figures.step_time([replace(timed, summary=without)]).data[0].error_x.array is None
    spread = replace(timed.summary.step_time_s, median=0.4, min=0.2, q1=0.3, q3=0.6)
    failed = replace(record(tmp_path, "full_shard"), summary=Summary(), status="failed")
    runs = [replace(timed, summary=replace(timed.summary, step_time_s=spread)), failed]
    figure = figures.step_time(runs)
    assert figure.data[0].error_x.array == pytest.approx((200, 0))
    assert "whiskers: quartiles" in figure.layout.title.subtitle.text
    assert figure.data[0].error_x.arrayminus == pytest.approx((100, 0))
    assert figure.layout.annotations[0].x == pytest.approx(600), "the words begin behind the whisker"
    pareto = figures.pareto(runs)
    assert pareto.data[1].error_y.array == pytest.approx((200,)) and "whiskers" in pareto.layout.title.subtitle.text


def test_steps_of_a_second_and_more_are_on_axes_of_seconds(tmp_path):
    long, short = record(tmp_path, "zero1", median=12.4), record(tmp_path, "full_shard", median=0.3)
    quartiles = replace(long.summary.step_time_s, median=12.4, min=12, q1=12.2, q3=13)
    steady = replace(long.summary.steady, step_time_s=11.0, exposed_s=2.0, hidden_s=3.0, overlap=0.6)
    long = replace(long, summary=replace(long.summary, step_time_s=quartiles, steady=steady))
    times = figures.step_time([long, short])
    assert times.layout.xaxis.title.text == "one step (s)" and list(times.data[0].x) == pytest.approx([12.4, 0.3])
    assert times.data[0].error_x.array[0] == pytest.approx(0.6) and times.data[1].x[0] == pytest.approx(12)
    assert "{x:.3r} s" in times.data[0].hovertemplate
    simulated = figures.steady_steps([long])
    assert simulated.layout.xaxis.title.text == "one step (s)"
    assert [bar.x[0] for bar in simulated.data[:3]] == pytest.approx([6, 3, 2])
    assert simulated.data[3].x == pytest.approx((12.4,)) and simulated.data[3].error_x.array == pytest.approx((0.6,))
    bubbles = figures.pareto([long, short])
    assert bubbles.layout.yaxis.title.text == "median step (s)" and bubbles.data[1].y == pytest.approx((12.4,))


def test_a_figure_is_as_tall_as_its_title_legend_and_words_need():
    bars = [go.Bar(name=f"a part with a long name, {place}", x=[1], y=["a"], orientation="h") for place in range(9)]
    few, many = (style.titled(go.Figure(found), "title", "Measured", "alt") for found in (bars[:2], bars))
    assert (
        many.layout.margin.t - few.layout.margin.t == many.layout.height - few.layout.height == 2 * style._LEGEND_LINE
    )
    marked = go.Figure(bars[:2])
    style.mark_level(marked, 1, "card")
    assert style.titled(marked, "title", "Measured", "alt").layout.margin.t == few.layout.margin.t + style._ABOVE
    with style.on_page(style.PAGE / 2):
        narrow = style.titled(go.Figure(bars[:2]), "many words " * 6, "Measured", "alt")
    assert narrow.layout.title.text.count("<br>") == 2


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Tags(HTMLParser):
    """A page as a browser reads it: its tags, and the text of every script by its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data):
        if self.cdata_elem == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data


def page_without_plotly(*given, **named) -> str:
    from plotly.offline import get_plotlyjs

    return figures.comparison_page(*given, **named).replace(get_plotlyjs(), "")


@pytest.mark.quick
def test_no_text_of_a_run_becomes_a_tag_or_ends_a_script(tmp_path):
    evil, usual = record(tmp_path, "zero1", engine=HOSTILE), record(tmp_path, "zero1", engine="peer")
    for run in (evil, usual):
        name = run.spec["model"] = run.environment["torch"] = run.spec["engine"]
        where, step = dict(rank=0, step=1), dict(step_ns=100, compute_ns=60, compute_only_ns=60, overlapped_ns=0)
        run.tables["breakdown"] = [{**where, **step, "exposed_ns": 40, "other_ns": 0}]
        spent = dict(communication_ns=40, exposed_ns=40, cause="nothing_to_hide_behind")
        run.tables["exposed"] = [{**where, "unit": name, "phase": "forward", "kind": "all_gather", **spent}]
        assert any(name in found.title for found in findings(run))
    seen, expected = (Tags(page_without_plotly(comparison_json([run]), [run])) for run in (evil, usual))
    assert seen.tags == expected.tags
    data = [json.loads(text) for attributes, text in seen.scripts if attributes.get("type") == "application/json"]
    assert data[-1] == comparison_json([evil]) and len(data) == len(expected.scripts) - 2
    assert HOSTILE in data[1]["data"][0]["y"][0], "a figure's data arrive as they are"


def test_page_and_lab_show_one_table(runs):
    """The lab has less room, and some columns less."""
    from fsdplab.widgets.tabs import table

    page, lab = page_without_plotly(comparison_json(runs), runs), table(views(runs))
    wide = list(told(views(runs)))
    narrow = [name for name in wide if name in (*brief(views(runs)), "engine", "tokens/s")]
    for found, columns in ((page, wide), (lab, narrow)):
        assert re.findall(r"<th(?: [^>]*)?>(.*?)</th>", found)[: len(columns)] == columns
        held = re.findall(r"<td(?: [^>]*)?>(.*?)</td>", found)[: len(columns)]
        assert [text.replace("\u00a0", " ") for text in held] == list(cells(view(runs[0]), columns))
    assert lab.count("color:var(--fsdplab-bad, #c01f25)") == page.count('class="bad') == 2


def test_columns_without_any_value_are_left_out(runs):
    """Of a recorded job nothing is predicted or simulated, and its tokens may be unknown."""
    empty = {"step, simulated", "hidden, simulated", "tokens/s", "predicted", "formula", "losses"}
    summary = Summary(step_time_s=Spread(median=0.2), losses=(5.0,))
    columns = told(views([replace(runs[0], summary=summary)]))
    assert {"strategy", "engine", "step, measured", "loss"} <= set(columns) and not empty & set(columns)
    figure = figures.step_time([replace(runs[0], summary=summary)])
    assert figure.layout.annotations[0].text == "<b>200 ms</b>", "no throughput is not said"


def test_page_carries_table_figures_data_and_what_was_real(runs):
    from plotly.offline import get_plotlyjs

    comparison = comparison_json(runs)
    page = figures.comparison_page(comparison, runs)
    assert len(page.encode()) - len(get_plotlyjs().encode()) < 1_000_000
    assert page.count(get_plotlyjs()[:2000]) == 1
    body = page.replace(get_plotlyjs(), "")
    assert all(f"<th>{column}</th>" in body for column in told(views(runs)))
    assert all(
        text in body
        for text in ("out of memory", "measured", "emulated", "simulated", "gpt-tiny", "nested cores", "80.0 MB")
    )
    assert not re.search(r"""(src|href)=["']""", body), "the page must not load anything"
    data = re.search(r'<script type="application/json" id="comparison">(.*?)</script>', body)[1]
    assert json.loads(data) == comparison


def test_page_says_why_a_figure_is_missing(runs):
    page = figures.comparison_page(comparison_json(runs[:1]), runs[:1])
    assert "no run has a timed step to draw" in page


def test_titles_name_the_fully_sharded_run_and_not_the_odd_row():
    rows = (("no_shard", 400, 0.3), ("zero1", 300, 0.35), ("full_shard", 210, 0.45), ("zero2", 200, 0.3))
    shown = []
    for strategy, megabytes, step in rows:
        peak = Peak(megabytes * 10**6)
        summary = Summary(Spread(step), peak_memory_bytes=peak, steady=Steady(step, 0.1, 0.5))
        shown.append(RunView(strategy, "lab", 2, summary))
    memory, steps = figures.memory_by_category(shown), steady_steps(shown)
    assert memory.layout.title.text == "<b>full_shard peaks at 210 MB, no_shard at 400 MB</b>"
    assert steps.layout.title.text.replace("<br>", " ") == (
        "<b>full_shard takes 450 ms a step, 50 % longer than no_shard</b>"
    )
    assert "<b>450 ms</b>, 50 % hidden" in str(steps)
    assert figures.memory_by_category(shown[:2]).layout.title.text == "<b>zero1 peaks at 300 MB, no_shard at 400 MB</b>"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a chromium on the path")
def test_page_opens_offline_in_a_browser(runs, tmp_path):
    from playwright.sync_api import sync_playwright

    target = tmp_path / "page.html"
    target.write_text(figures.comparison_page(comparison_json(runs), runs), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = patient(browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="dark"))
        asked, problems = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(target.as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg")
        assert page.evaluate("document.documentElement.classList.contains('dark')")
        alarm = page.locator(".plot text[style*='fill: rgb(229, 56, 59)']").first
        assert alarm.evaluate("text => getComputedStyle(text).fill") == "rgb(255, 106, 106)", "lighter in the dark"
        page.click("#switch")
        assert alarm.evaluate("text => getComputedStyle(text).fill") == "rgb(192, 31, 37)"
        assert page.evaluate("document.documentElement.classList.contains('dark')") is False
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than 1280 px"
        assert page.locator(".js-plotly-plot").count() == 2
        assert not page.locator("p.cut").first.is_visible()
        page.set_viewport_size({"width": 480, "height": 800})
        page.locator("p.cut").first.wait_for()
        assert page.locator("p.cut").first.inner_text() == "More columns stand to the right: scroll the table."
        browser.close()
    assert (asked, problems) == ([target.as_uri()], [])


def test_a_page_of_one_figure_needs_no_network():
    """Its title is text that wraps on a phone; the button saves the whole figure, with the title in the picture."""
    page = page_of(style.titled(go.Figure(), "A finding", "conditions", "alt"))
    assert "<figcaption><b>A finding</b><span>conditions</span></figcaption>" in page and "<!doctype html>" in page[:16]
    assert '"text":"\\u003cb\\u003eA finding' in page and 'id="save"' in page
    assert not re.search(r"<(script|link)[^>]* (src|href)=", page)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a chromium on the path")
def test_a_page_of_a_figure_becomes_the_picture_that_readmes_show(runs):
    figure = figures.memory_by_category(runs)
    picture = ET.fromstring(svg_of(figure.to_html(include_plotlyjs="cdn")))
    said = " ".join(picture.itertext())
    assert picture[0].tag.endswith("title") and picture[0].text == figures.alt_text(figure)
    assert picture.tag.endswith("svg") and "card 80.0 MB (emulated)" in said and "optimizer state" in said


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a chromium on the path")
def test_a_wide_table_and_its_legend_fit_a_small_window(tmp_path):
    """Long names, sums and verdicts at 1280x800 beside a scroll bar: nothing is cut off, nothing scrolls sideways."""
    from playwright.sync_api import sync_playwright

    target = tmp_path / "page.html"
    target.write_text(figures.comparison_page(comparison_json(wide := widest(tmp_path)), wide), encoding="utf-8")
    right = "[...document.querySelectorAll('{}')].map(node => node.getBoundingClientRect().right)"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu"],
            ignore_default_args=["--hide-scrollbars"],
        )
        page = patient(browser.new_page(viewport={"width": 1280, "height": 800}))
        page.goto(target.as_uri())
        page.wait_for_selector("#answer .main-svg")
        page.locator(".panel.open summary").first.wait_for()
        for folded in page.locator(".panel.open summary:visible").all():
            folded.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        for box in page.locator(".panel.open .wide").all():
            edge = box.evaluate("box => box.getBoundingClientRect().right")
            assert edge <= 1280 and box.evaluate("box => getComputedStyle(box).overflowX") in ("auto", "scroll")
        keys, plots = (page.evaluate(right.format(f"#answer {each}")) for each in (".keys button", ".js-plotly-plot"))
        assert len(keys) >= len(CATEGORIES) - 1 and max(keys) <= max(plots) <= 1280
        page.set_viewport_size({"width": 1000, "height": 800})
        page.wait_for_function(f"(plots => Math.max(...plots) <= 1000)({right.format('.main-svg')})")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1000
        browser.close()


def default_scenario(tmp_path: Path) -> list[RunRecord]:
    """Six runs as the default comparison leaves them: over the card, with steady times and a change."""
    clock = {"no_shard": (0.855, 0.63), "zero1": (0.765, 0.76), "full_shard": (0.919, 0.65)}
    made = []
    for place, (name, prefetch) in enumerate([("no_shard", 1), ("zero1", 1), ("full_shard", 1), ("full_shard", 0)]):
        run = record(tmp_path / str(place), name, median=0.9)
        step, overlap = clock[name] if prefetch else (1.479, 0.0)
        run.spec |= {"prefetch": prefetch, "link": "150MB/s", "model": "gpt-20m", "batch_size": 2}
        change = Change("compute and send in bf16, with fp32 masters", 0.51, 30 * MB)
        run.summary = replace(run.summary, steady=Steady(step, step * (1 - overlap) / 2, overlap), change=change)
        run.provenance["steady"] = "simulated"
        made.append(run)
    return made


_OVERLAPS = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const boxes = [...plot.querySelectorAll('.ytick text, .annotation text, .gtitle, .legendtext')]
    .map(node => [node.textContent, node.getBoundingClientRect()]).filter(([words, box]) => words && box.width);
  return boxes.flatMap(([one, a], place) => boxes.slice(place + 1).filter(([, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2
  ).map(([other]) => `${one} / ${other}`));
})"""


_EDGE_OF_CELLS = """() => {
  const cells = {type: "bar", marker: {color: ["#ffffff", "rgba(0,0,0,0)"], line: {width: 1}}};
  return fitted({data: [cells], layout: {margin: {t: 0}}}, 390).data[0].marker.line.width;
}"""
# of the words of figures that stand on the ground those in light ink; the ground; the buttons besides keys and names
_ON_PAPER = """() => {
  const look = (node, name) => getComputedStyle(node)[name];
  const words = [...document.querySelectorAll(".plot text")];
  const light = words.filter(node => look(node, "fill") === "rgb(236, 239, 243)");
  const buttons = [...document.querySelectorAll("button:not(.keys *, [aria-selected=true], [aria-pressed=true])")];
  const seen = buttons.filter(button => button.offsetParent).map(button => button.textContent);
  return [light.map(node => node.textContent), look(document.body, "backgroundColor"), seen];
}"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a chromium on the path")
def test_the_page_answers_on_its_first_screen_and_fits_a_phone(tmp_path):
    from playwright.sync_api import sync_playwright

    made = default_scenario(tmp_path)
    target = tmp_path / "page.html"
    target.write_text(figures.comparison_page(comparison_json(made), made), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = patient(browser.new_page(viewport={"width": 1280, "height": 800}))
        page.goto(target.as_uri())
        page.wait_for_function("document.querySelectorAll('#answer .main-svg').length >= 2")
        boxes = {name: page.locator(f"#answer {name}").bounding_box() for name in (".sentence", ".pair", ".change")}
        assert all(box["y"] + box["height"] <= 800 for box in boxes.values()), boxes
        assert page.locator("#answer .sentence").inner_text() == conclusion(views(made))
        assert "51 % more tokens/s (simulated)" in page.locator("#answer .change").inner_text()
        left, right = (each.bounding_box() for each in page.locator("#answer .pair > *").all())
        assert left["x"] + left["width"] <= right["x"] and abs(left["y"] - right["y"]) < 1, "side by side"
        assert page.get_by_role("tab").all_inner_texts() == ["Compare", "Timeline", "Memory", "Traffic", "Diagnosis"]
        assert not page.locator("th", has_text="= par").count()
        page.click("#switch")
        page.wait_for_function(f"({_ON_PAPER})()[0].length")  # the ink of a dark page
        page.emulate_media(media="print")
        assert page.evaluate(_ON_PAPER) == [[], "rgb(255, 255, 255)", []], "a dark page is printed in dark ink"
        phone = patient(browser.new_page(viewport={"width": 390, "height": 844}))
        phone.goto(target.as_uri())
        for tab in phone.get_by_role("tab").all():
            tab.click()
            phone.wait_for_function(
                "[...document.querySelectorAll('.plot')].every(each => hidden(each) || each.querySelector('.main-svg'))"
            )
            assert phone.evaluate("document.documentElement.scrollWidth") <= 390, tab.inner_text()
        assert phone.evaluate(_OVERLAPS) == []
        assert phone.evaluate(_EDGE_OF_CELLS) == 1, "a sharded unit is an empty cell: only its edge shows it"
        browser.close()


def widest(tmp_path: Path) -> list[RunRecord]:
    """Five runs with the longest texts that a table meets."""
    made = []
    for place, engine in enumerate(("torch-ddp", "deepspeed-1", "torch-fsdp2", "lab", "lab")):
        run = record(tmp_path / str(place), "full_shard", engine=engine)
        run.spec |= {"link": "eth10", "prefetch": place, "micro_batches": place}
        split = {name: nbytes + 150 * MB for name, nbytes in run.summary.peak_memory_bytes.split.items()}
        peak = Peak(sum(split.values()), split)
        run.summary = replace(
            run.summary,
            peak_memory_bytes=peak,
            comm=replace(run.summary.comm, bytes_per_step=1_234 * MB + 1, exposed_s=0.1234, overlap=0.56),
            formula_bytes_per_step=1_233 * MB,
            predicted=Predicted(peak, step_time_s=0.1234),
        )
        made.append(run)
    return made
