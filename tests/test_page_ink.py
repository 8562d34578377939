"""Text of a figure follows the page's theme: spans with the page's variables around what stands on the ground."""

from __future__ import annotations

import re
from typing import Any

import pytest
from plotly import graph_objects

from fsdplab.figures import step_time
from fsdplab.figures.notebook_figure import Figure, bundle
from fsdplab.figures.page_ink import GROUND, INK, following, in_ink
from fsdplab.figures.plotly_go import PLOTLY, go
from fsdplab.figures.style import ALARM, contrast
from fsdplab.teaching import collectives, recorded, show
from fsdplab.teaching.core.verdicts import Feedback, Verdict
from fsdplab.teaching.site.live import _rendered

pytestmark = pytest.mark.quick


def figure(**layout: Any) -> dict[str, Any]:
    return {"data": [], "layout": layout}


def test_words_on_the_ground_are_in_the_ink_of_the_page():
    made = following(figure(title={"text": "A", "subtitle": {"text": "B"}}, xaxis={"title": {"text": "ms"}}))["layout"]
    for words in (made["title"]["text"], made["title"]["subtitle"]["text"], made["xaxis"]["title"]["text"]):
        assert words.startswith(f"<span style='fill:{INK};") and words.endswith("</span>")


GROUNDS = {"#ffffff": "#000000", "#111111": "#ffffff"}  # of a light and a dark page, with their ink


def mixed(style: str, ink: str) -> str:
    """The colour that a browser makes of `color-mix(in srgb, #2a9d5c 60%, var(...))`."""
    colour, percent = re.match(r"color-mix\(in srgb, (#\w{6}) (\d+)%", style).groups()
    share = int(percent) / 100
    parts = zip(bytes.fromhex(colour[1:]), bytes.fromhex(ink[1:]))
    return "#" + bytes(round(share * one + (1 - share) * other) for one, other in parts).hex()


@pytest.mark.parametrize("feedback", [None, *(Feedback("", "", "", "", untouched=tried) for tried in (True, False))])
@pytest.mark.parametrize("ground", GROUNDS)
def test_the_words_of_a_verdict_have_contrast_on_a_light_and_on_a_dark_page(feedback, ground):
    shown = Verdict("00.hello", feedback)._repr_html_()
    style = re.search(r"<b style='color:([^']+)'", shown)[1]
    assert contrast(mixed(style, GROUNDS[ground]), ground) >= 4.5


def test_the_planners_drawings_have_their_red_words_in_the_pages_red():
    """On white the alarm's own red has a contrast of 4.2, and on a dark page of 4.3."""
    assert f'.drawing svg text[fill="{ALARM}"] {{ fill: var(--bad); }}' in _rendered("planner.css")


def test_numbers_of_an_axis_stand_between_the_ends_of_a_span_and_its_words_are_in_one_each():
    made = following(figure(xaxis={"ticksuffix": " ms"}, yaxis2={"ticktext": ["zero1", "zero2"]}))["layout"]
    assert made["xaxis"]["tickprefix"].startswith("<span") and made["xaxis"]["ticksuffix"] == " ms</span>"
    assert made["yaxis"]["tickprefix"] == made["xaxis"]["tickprefix"], "an axis that the description leaves out"
    assert made["yaxis2"]["ticktext"] == [in_ink("zero1"), in_ink("zero2")] and "tickprefix" not in made["yaxis2"]


def test_a_coloured_text_keeps_its_colour_in_part_and_one_with_a_ground_of_its_own_is_left():
    alarm = {"text": "card", "font": {"color": "#e5383b"}}
    notes = following(figure(annotations=[alarm, {**alarm, "bgcolor": "white"}]))["layout"]["annotations"]
    assert "color-mix(in srgb, #e5383b 60%" in notes[0]["text"] and notes[1]["text"] == "card"


def test_text_in_a_bar_stays_and_numbers_beside_it_follow():
    bars = [{"type": "bar", "name": "x", "text": ["1", ""], "textposition": place} for place in ("inside", "outside")]
    inside, outside = following({"data": bars, "frames": [{"data": [{"name": "x"}]}]})["data"]
    assert inside["text"] == ["1", ""] and outside["text"] == [in_ink("1"), ""]
    assert inside["name"] == in_ink("x"), "the legend"
    assert following({"frames": [{"data": [{"name": "x"}]}]})["frames"][0]["data"][0]["name"] == in_ink("x")


def test_a_card_of_the_grounds_colour_lies_below_everything():
    line = {"type": "line", "x0": 1, "layer": "below"}
    card, *others = following(figure(shapes=[line]))["layout"]["shapes"]
    assert others == [line] and card["layer"] == "below" and (card["xref"], card["yref"]) == ("paper", "paper")
    assert f"fill:{GROUND};stroke:{GROUND};" in card["label"]["text"], "white where no page says what its ground is"
    assert len(following(figure())["layout"]["shapes"]) == 1


def test_the_given_description_is_not_changed():
    given = figure(title={"text": "A"}, annotations=[{"text": "B"}])
    following(given)
    assert given == figure(title={"text": "A"}, annotations=[{"text": "B"}])


def test_a_figure_shows_itself_without_a_network_and_with_its_alternative_text(capsys):
    drawn = step_time([recorded("lesson-07/early")])
    assert isinstance(drawn, Figure) and isinstance(go.Figure(), Figure) and isinstance(drawn, graph_objects.Figure)
    forms = drawn._repr_mimebundle_()
    assert set(forms) == {PLOTLY, "text/plain"} and INK in forms[PLOTLY]["layout"]["title"]["text"]
    assert forms["text/plain"] == "[figure] Bars of the median step time: full_shard 416 ms."
    assert INK not in drawn.layout.title.text, "the figure itself has plain words"
    show(collectives.ring_figure(4))
    assert capsys.readouterr().out.startswith("[figure] ")


def test_colab_which_draws_no_plotly_of_its_own_gets_html(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "google.colab", object())
    forms = bundle(step_time([recorded("lesson-07/early")]), "bars")
    assert "cdn.plot.ly" in forms["text/html"] and "--colab-primary-text-color" in forms["text/html"]
