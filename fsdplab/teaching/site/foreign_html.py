"""HTML that came with a notebook, without what could run in the reader's page.

A notebook may be somebody else's, and its outputs and Markdown may hold scripts, handlers of events (`onerror`), links
to `javascript:` and frames. `without_scripts` keeps a list of tags, attributes and styles, and drops all others; bleach
does it, which nbconvert uses, with a list of its own that lacks headings, lists and pictures. The pages also have a
policy for the browser: no script runs.
"""

from __future__ import annotations

import html
import re

from bleach.css_sanitizer import ALLOWED_CSS_PROPERTIES, CSSSanitizer
from bleach.sanitizer import Cleaner
from markupsafe import Markup

_TAGS = frozenset({
    "a", "abbr", "b", "blockquote", "br", "caption", "center", "code", "col", "colgroup", "dd", "del", "details",
    "dfn", "div", "dl", "dt", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "ins", "kbd", "li", "mark",
    "ol", "p", "pre", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "summary", "sup", "table",
    "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul", "var",
})  # fmt: skip
_EVERYWHERE = ("class", "style", "title")
_ATTRIBUTES = {
    "a": ("href", "id", "name"), "img": ("alt", "height", "src", "width"), "ol": ("start",), "details": ("open",),
    "col": ("span",), "colgroup": ("span",), "td": ("align", "colspan", "rowspan"),
    "th": ("align", "colspan", "rowspan", "scope"), **{f"h{level}": ("id",) for level in range(1, 7)},
}  # fmt: skip
_STYLES = ALLOWED_CSS_PROPERTIES | frozenset({
    "align-items", "background", "border", "border-bottom", "border-left", "border-radius", "border-right",
    "border-top", "bottom", "flex", "flex-wrap", "gap", "grid-template-columns", "justify-content", "left",
    "list-style", "margin", "margin-bottom", "margin-left", "margin-right", "margin-top", "max-height", "max-width",
    "min-height", "min-width", "opacity", "overflow-wrap", "overflow-x", "overflow-y", "padding", "padding-bottom",
    "padding-left", "padding-right", "padding-top", "position", "right", "top",
})  # fmt: skip
_WITH_ITS_CONTENT = re.compile(r"<(script|style)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE)
_IGNORED_IN_ADDRESSES = re.compile(r"[\x00-\x20\x7f-\xa0\s]")


def without_scripts(foreign: str) -> Markup:
    """The HTML with its text, tables, pictures and links, and without anything that runs or loads a page.

    >>> without_scripts('<b onclick="evil()">x</b><script>evil()</script>')
    Markup('<b>x</b>')
    """
    return Markup(_cleaner.clean(_WITH_ITS_CONTENT.sub("", foreign)))


def _is_kept(tag: str, name: str, value: str) -> bool:
    """Whether an attribute stays; a picture may be in its address, a page may not."""
    if (tag, name) == ("a", "href"):
        return not _IGNORED_IN_ADDRESSES.sub("", html.unescape(value)).lower().startswith("data:")
    return name in _EVERYWHERE or name in _ATTRIBUTES.get(tag, ())


_cleaner = Cleaner(
    tags=_TAGS, attributes=_is_kept, protocols={"http", "https", "mailto", "data"}, strip=True, strip_comments=True,
    css_sanitizer=CSSSanitizer(allowed_css_properties=_STYLES),
)  # fmt: skip
