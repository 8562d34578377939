"""Each lesson has one picture for a slide: static SVG with alternative text, in the notebook and on its static page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fsdplab.teaching import picture
from fsdplab.teaching.site.foreign_html import without_scripts
from fsdplab.teaching.slides import FOLDER, HEIGHT, WIDTH, picture_of

pytestmark = pytest.mark.quick

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("[0-9][0-9]_*.ipynb"))
PICTURES = sorted(path.stem for path in FOLDER.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("notebook", PICTURES)
def test_a_lesson_shows_its_picture_before_the_recap(notebook):
    path = next(path for path in NOTEBOOKS if path.name.startswith(notebook))
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    shows = cells.index(f'teaching.picture("{notebook}")')
    assert "## Recap" in cells[shows + 1], "it gives no answer away"


@pytest.mark.parametrize("notebook", PICTURES)
def test_a_picture_is_a_sound_svg_that_a_page_keeps_with_its_words(notebook):
    made = picture_of(notebook)
    root = ElementTree.fromstring(made.svg)
    assert root.get("viewBox") == f"0 0 {WIDTH} {HEIGHT}" and root.get("role") == "img"
    assert root.find(f"{SVG}title").text in made.alt and len(root.find(f"{SVG}desc").text) >= 60
    assert len(made.svg) < 21_000
    page = str(without_scripts(made.image))
    assert "data:image/svg+xml;base64," in page and 'alt="' in page, "the page's cleaner keeps picture and words"
    assert str(made).startswith("[picture] ")


@pytest.mark.parametrize("notebook", PICTURES)
def test_words_are_large_enough_for_a_slide_and_stand_on_it(notebook):
    for text in ElementTree.fromstring(picture_of(notebook).svg).iter(f"{SVG}text"):
        size, x, long = float(text.get("font-size")), float(text.get("x")), len(text.text or "")
        assert size >= 15
        wide = 0.58 * size * long  # of a letter in the mean
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[text.get("text-anchor")]
        assert left > 0 and left + wide < WIDTH, text.text


def test_figures_in_pictures_are_those_of_the_texts():
    words = re.sub("<[^>]+>", " ", picture_of("02").svg)
    assert "4 + 4 + 8" in words and "4/n + 4/n + 8/n" in words, "16 bytes a parameter"


def test_every_lesson_has_a_picture():
    assert [path.name[:2] for path in NOTEBOOKS] == PICTURES


def test_a_picture_of_no_lesson_is_refused(capsys):
    with pytest.raises(ValueError, match="no picture of '99'; expected one of 00, 01"):
        picture("99")
    picture("05")
    assert capsys.readouterr().out.startswith("[picture] A unit is whole only while it computes.")
