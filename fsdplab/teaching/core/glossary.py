"""The course's terms, as `notebooks/GLOSSARY.md` has them: a heading each, one or two sentences, perhaps a reference.

`teaching.glossary("busbw")` shows an entry, and a notebook links a term's first use to its entry in the page.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache

from fsdplab.common.places import shared_folder

from .display import Note, present

_ENTRY = re.compile(r"^## (.+)\n\n(.+?)(?: \(\[([^]]+)\]\((\S+)\)\))?$", re.MULTILINE)


@dataclass(frozen=True)
class Term:
    """One entry: the word as the course writes it, its meaning, and where to read more (title, address)."""

    word: str
    meaning: str
    reference: tuple[str, str] | None = None

    @property
    def anchor(self) -> str:
        """The entry's place on the page: `"emulated card"` is at `#emulated-card`."""
        return "".join(letter for letter in self.word.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


@cache
def terms() -> tuple[Term, ...]:
    """All entries, in the page's order."""
    page = (shared_folder("notebooks") / "GLOSSARY.md").read_text(encoding="utf-8")
    return tuple(
        Term(word, meaning, (title, address) if title else None)
        for word, meaning, title, address in _ENTRY.findall(page)
    )


def glossary(*words: str) -> None:
    """Show the entries of some terms, `glossary("busbw", "unit")`, or all of them."""
    chosen = [find(word) for word in words] if words else terms()
    present(Note(tuple(f"`{term.word}`: {term.meaning}{_read(term)}" for term in chosen)))


def _read(term: Term) -> str:
    return f" Read: {term.reference[0]}, {term.reference[1]}" if term.reference else ""


def find(word: str) -> Term:
    """The entry of a word, however it is written; LookupError with the near ones."""
    known = {_key(term.word): term for term in terms()}
    key = _key(word)
    if key not in known:
        near = [known[each].word for each in difflib.get_close_matches(key, known, n=3, cutoff=0.5)]
        raise LookupError(
            f"the glossary has no {word!r}" + (f"; near: {', '.join(near)}" if near else "; glossary() shows all terms")
        )
    return known[key]


def _key(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "").replace(" ", "")
