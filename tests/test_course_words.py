"""The course has one vocabulary, PyTorch's: shard, unshard, reshard, and the collectives by their full names.

`gather` and `drop` explain those words where they are introduced; elsewhere two words for one thing make a learner look
for a difference. The sentences that explain stand below, by notebook.
"""

from __future__ import annotations

import json
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEACHING = ROOT / "fsdplab" / "teaching"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
FORBIDDEN = re.compile(
    r"(?<!all-)(?<!all_)(?<!dist\.)(?<!\d\d\.)\b(?:gather(?:s|ed|ing)?|drop(?:s|ped|ping)?)\b", re.IGNORECASE
)
EXPLAINED = {
    "00": ("(their shards are gathered)", "(the whole is dropped)"),
    "01": ("(its shards are gathered, by an all-gather)", "(the whole is dropped)"),
    "05": ("(gather its shards into the whole)", "(drop the whole again)", "is to gather all shards", "is to drop the"),
}
_NO_TEXT = re.compile(r"\(GLOSSARY[^)]*\)|```.*?```|`[^`]*`|\]\([^)]*\)|\{[^{}]*\}", re.DOTALL)
_TEXTS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def found(texts: list[str], explained: tuple[str, ...] = ()) -> list[str]:
    """Each forbidden word with what stands around it, after the sentences that explain are taken out."""
    text = _NO_TEXT.sub(" ", "\n".join(texts))
    for phrase in explained:
        text = text.replace(phrase, " ")
    return [text[max(0, at.start() - 40) : at.end() + 30] for at in FORBIDDEN.finditer(text)]


def texts_of(path: Path) -> list[str]:
    """Strings and comments of a Python file."""
    with path.open("rb") as file:
        return [token.string for token in tokenize.tokenize(file.readline) if token.type in _TEXTS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name[:2])
def test_the_text_of_a_notebook_has_one_vocabulary(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    explained = EXPLAINED.get(path.name[:2], ())
    assert all(phrase in _NO_TEXT.sub("", "\n".join(texts)) for phrase in explained)
    assert not found(texts, explained)


@pytest.mark.parametrize("folder", sorted((TEACHING / "exercises").iterdir()), ids=lambda path: path.name)
def test_exercises_and_questions_have_it_too(folder):
    texts = [text for path in sorted(folder.glob("*.py")) for text in texts_of(path)]
    assert not found([*texts, *(path.read_text(encoding="utf-8") for path in folder.glob("*.md"))])


@pytest.mark.parametrize(
    "folder",
    [*sorted((TEACHING / "lessons").glob("*/")), ROOT / "fsdplab" / "figures" / "plots"],
    ids=lambda path: path.name,
)
def test_so_do_tables_and_figures(folder):
    assert not found([text for path in sorted(folder.glob("*.py")) for text in texts_of(path)])


def test_a_second_word_is_found():
    assert found(["a unit is gathered, then dropped"]) and not found(["an all-gather", "`dist.gather`", "all_gather"])
    assert found(["To unshard is to gather."]) and not found(["To unshard is to gather."], ("is to gather",))
