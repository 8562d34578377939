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
        """Return the entry's place on the page: `"emulated card"` is at `#emulated-card`."""
        letters = self.word.lower().replace(" ", "-")
        return "".join(letter for letter in letters if letter.isalnum() or letter in "-_")


@cache
def terms() -> tuple[Term, ...]:
    """Return all entries, in the page's order."""
    page = (shared_folder("notebooks") / "GLOSSARY.md").read_text(encoding="utf-8")
    entries = []
    # title and address are "" where an entry has no reference
    for word, meaning, title, address in _ENTRY.findall(page):
        reference = (title, address) if title else None
        entries.append(Term(word, meaning, reference))
    return tuple(entries)


def glossary(*words: str) -> None:
    """Show the entries of some terms, `glossary("busbw", "unit")`, or all of them."""
    chosen = [find(word) for word in words] if words else terms()
    present(Note(tuple(f"`{term.word}`: {term.meaning}{_read(term)}" for term in chosen)))


def _read(term: Term) -> str:
    """Return where to read more, or nothing."""
    if term.reference is None:
        return ""
    title, address = term.reference
    return f" Read: {title}, {address}"


def find(word: str) -> Term:
    """Return the entry of a word, however it is written; LookupError with the near ones."""
    known = {_key(term.word): term for term in terms()}
    key = _key(word)
    if key in known:
        return known[key]
    near = [known[near_key].word for near_key in difflib.get_close_matches(key, known, n=3, cutoff=0.5)]
    advice = f"near: {', '.join(near)}" if near else "glossary() shows all terms"
    raise LookupError(f"the glossary has no {word!r}; {advice}")


def _key(word: str) -> str:
    """Return a word without case, blanks and hyphens: `Emulated card` and `emulated-card` are one."""
    return word.lower().replace("_", "").replace("-", "").replace(" ", "")
