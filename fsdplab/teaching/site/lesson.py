"""An executed notebook as a lesson's page: its cells as HTML, and what the other pages say about it.

Readers see the learner's side: the stub of an exercise, and below it the solution, folded, with what its check said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from markupsafe import Markup
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from fsdplab.teaching.authoring.course import STARTS, CourseError, tags_of
from fsdplab.teaching.site.foreign_html import without_scripts
from fsdplab.teaching.site.outputs import plain, shown

_HEADING = re.compile(r'<h([23])(?: id="([^"]+)")?>(.*?)</h\1>', re.DOTALL)
_NUMBERED = re.compile(r"#\s+(\d\d)\s+(.+)")
_HIDDEN = {"teacher", "hide-cell", "remove-cell"}
_ORIGINS = "what_was_real("
_BESIDE = re.compile(r'href="([\w-]+)\.ipynb')  # other notebooks are pages of the site too
_MAGIC = re.compile(r"^%%(\S+)")


@dataclass(frozen=True)
class Section:
    """A heading of a page, and the words below it: `Section("three-collectives", "Three collectives", "In a ...")`."""

    anchor: str
    heading: str
    words: str


@dataclass(frozen=True)
class Lesson:
    """A page: `name` is its file's, without suffix; `question` and `minutes` are "" where the notebook says neither."""

    name: str
    number: str
    title: str
    minutes: str
    question: str
    body: Markup
    sections: tuple[Section, ...]
    origins: Markup

    @property
    def page(self) -> str:
        """The address of its page: `01_collectives.html`, with signs that no address has in their other form."""
        return quote(f"{self.name}.html")

    @property
    def label(self) -> str:
        """`01 Collectives`."""
        return f"{self.number} {self.title}".strip()


def lesson_of(name: str, notebook: NotebookNode) -> Lesson:
    """The page of an executed notebook; CourseError for one without text."""
    first = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown" and cell.source.strip()), None)
    if first is None:
        raise CourseError(f"{name}.ipynb holds no text; the first Markdown cell of a lesson begins with `# 01 Title`")
    notebook, _ = CoalesceStreamsPreprocessor().preprocess(notebook, {})
    number, title = _titled(first, name)
    body = _anchored(Markup("\n").join(_pieces(notebook.cells)))
    return Lesson(
        name,
        number,
        title,
        minutes=_found(r"\*(\d+) minutes", first),
        question=_found(r"^>\s*\*\*(.+?)\*\*\s*$", first),
        body=body,
        sections=tuple(_sections(title, body)),
        origins=Markup("\n").join(shown(cell.outputs[:1]) for cell in notebook.cells if _tells_origins(cell)),
    )


def _titled(text: str, name: str) -> tuple[str, str]:
    line = text.strip().splitlines()[0]
    numbered = _NUMBERED.match(line)
    if numbered:
        return numbered.group(1), numbered.group(2).strip()
    return "", line.lstrip("# ").strip() if line.startswith("#") else name.replace("_", " ")


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else ""


def _tells_origins(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and _ORIGINS in cell.source and bool(cell.get("outputs"))


def _pieces(cells: Sequence[NotebookNode]) -> Iterator[Markup]:
    for cell in cells:
        tags = set(tags_of(cell))
        if tags & _HIDDEN or not cell.source.strip():
            continue
        if cell.cell_type == "markdown":
            yield _folded(text_html(cell.source)) if "solution" in tags else text_html(cell.source)
        elif "stub" in tags:
            yield Markup('<div class="cell stub">{}</div>').format(code(cell.source))
        elif cell.cell_type == "code":
            made = _ran(cell)
            yield _folded(made) if "solution" in tags else made


def _folded(content: Markup) -> Markup:
    return Markup('<details class="solution"><summary>Solution</summary>{}</details>').format(content)


def _ran(cell: NotebookNode) -> Markup:
    # the start cell prints its edition and a folder: of the reader's run, not of this one
    outputs = () if STARTS in cell.source else cell.get("outputs") or ()
    return Markup('<div class="cell">{}{}</div>').format(code(cell.source), shown(outputs))


def code(source: str) -> Markup:
    """A cell's source, highlighted: `%%ranks` and other cell magics stay a line of their own above the Python."""
    text = source.replace(STARTS, 'edition="learner"').strip("\n")
    magic = _MAGIC.match(text)
    language = "bash" if magic and magic.group(1) in ("bash", "sh") or text.startswith("!") else "python"
    head, rest = text.split("\n", 1) if magic and "\n" in text else ("", text)
    made = highlight(rest, get_lexer_by_name(language), HtmlFormatter(nowrap=True))
    above = Markup('<span class="magic">{}</span>\n').format(head) if head else Markup()
    return Markup('<pre class="code"><code>{}{}</code></pre>').format(above, Markup(made))


def code_colours() -> str:
    """The style sheet of highlighted code, on light and on dark pages."""
    light = HtmlFormatter(style="default").get_style_defs(["pre.code", ".highlight"])
    dark = HtmlFormatter(style="github-dark").get_style_defs([".dark pre.code", ".dark .highlight"])
    own = (".dark ", "pre.code ", ".highlight ")
    rules = [line for line in f"{light}\n{dark}".splitlines() if line.startswith(own)]
    return "\n".join(rule for rule in rules if "{ background" not in rule)  # the page has its own


def text_html(source: str) -> Markup:
    """A Markdown cell as HTML without scripts, its links to other notebooks and the glossary as pages."""
    rendered = MarkdownWithMath(renderer=IPythonRenderer(escape=False, exclude_anchor_links=True)).render(source)
    made = str(without_scripts(rendered))
    linked = _BESIDE.sub(r'href="\1.html', made.replace('href="GLOSSARY.md', 'href="glossary.html'))
    return Markup(re.sub(r"(<table\b.*?</table>)", r'<div class="wide">\1</div>', linked, flags=re.DOTALL))


def _anchored(body: Markup) -> Markup:
    """Every heading with an address of its own, made of its words: `three-collectives`, the second time
    `three-collectives-2`.
    """
    seen = Counter[str]()

    def anchored(heading: re.Match[str]) -> str:
        level, _, content = heading.groups()
        words = re.sub(r"[^a-z0-9]+", "-", plain(content).lower()).strip("-") or "part"
        seen[words] += 1
        return f'<h{level} id="{words}{f"-{seen[words]}" if seen[words] > 1 else ""}">{content}</h{level}>'

    return Markup(_HEADING.sub(anchored, body))


def _sections(title: str, body: Markup) -> Iterator[Section]:
    """The page cut at its headings; what is above the first belongs to the title."""
    anchor, heading, start = "", title, 0
    for match in _HEADING.finditer(body):
        yield Section(anchor, heading, plain(body[start : match.start()]))
        anchor, heading, start = match.group(2), plain(match.group(3)), match.end()
    yield Section(anchor, heading, plain(body[start:]))
