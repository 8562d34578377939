"""What the README and the pages of docs/ promise: commands, links, the course's table, the program."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.test_recording import environment

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_two_commands_and_the_small_torch_are_the_first_thing_to_type():
    comment, *lines = blocks("")[0].splitlines()
    assert comment.startswith("# torch's CPU build") and "with a GPU leave this line out" in comment
    assert lines == [
        "pip install uv && uv pip install torch --torch-backend=cpu",
        'pip install -e ".[lab]" && fsdplab compare',
        'pip install -e ".[test]" && pytest -n 3',
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    found = re.findall(r"\]\(([^)#:]+)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8"))
    assert page != PAGES[0] or len(found) > 10
    for target, heading in found:
        assert (page.parent / target).is_file(), f"{page.name}: {target} is not there"
        titles = re.findall(r"^#+ (.*)$", (page.parent / target).read_text(encoding="utf-8"), re.M) if heading else []
        assert not heading or heading in {re.sub(r"[^\w-]", "", each.lower().replace(" ", "-")) for each in titles}


def test_every_page_is_named_in_the_readme_and_its_pictures_are_small():
    assert [page.name for page in PAGES[2:] if f"(docs/{page.name})" not in README] == []
    pictures = [ROOT / path for path in re.findall(r"!\[[^\]]{30,}\]\(([^)]+)\)", README)]
    assert len(pictures) == README.count("![") == 4 and all(path.stat().st_size < 200_000 for path in pictures)
    made = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert all(f"figures/{path.name}" in made for path in pictures)


def test_the_commands_that_pages_name_exist():
    from fsdplab.cli.app import app

    known = {each.name or each.callback.__name__.replace("_", "-") for each in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    named = {name for page in PAGES for name in re.findall(r"(?<!from )\bfsdplab ([a-z][a-z-]+)", code_of(page))}
    assert len(named) > 8 and named <= known, named - known


def code_of(page: Path) -> str:
    """What a page writes as code: blocks, and between backticks."""
    text = page.read_text(encoding="utf-8")
    in_blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return "\n".join([*in_blocks, *re.findall(r"`([^`\n]+)`", text)])


def test_the_courses_table_says_what_the_notebooks_say():
    rows = {
        number: (title, minutes) for number, title, minutes in re.findall(r"\| (\d\d) \| (.+?) \| (\d+) \|", README)
    }
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert len(notebooks) >= 13
    for path in notebooks:
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        number, title, minutes = re.match(r"# (\d\d) (.+)\n\s*\*(\d+) minutes", first).groups()
        assert rows.get(number) == (title, minutes), f"README's row of {path.name}"


def test_the_tracks_need_no_notebook_outside_them():
    needed = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        (before,) = re.findall(r"Before this: ([^.]*)\.", first)
        needed[path.name[:2]] = set(re.findall(r"\b\d\d\b", re.sub(r"\([^)]*\)", "", before)))
    tracks = [line.split(", ") for line in re.findall(r": (\d\d(?:, \d\d)+)\.", README)]
    assert len(tracks) == 3
    for track in tracks:
        for place, number in enumerate(track):
            assert needed[number] <= set(track[:place]), f"{number} of {track} needs {needed[number]} before it"


def printed_by(program: str) -> list[float]:
    """The losses that a program prints which starts and ends the process group itself."""
    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # the ranks of the tests have one already
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {})  # noqa: S102  the README's own
    return [float(line.split()[1]) for line in out.getvalue().splitlines()]


def test_the_program_trains_on_two_ranks(ranks):
    (program,) = blocks("python")
    first, second = ranks(2, printed_by, program)
    assert len(first) == 20 and second == [] and first[-1] < 0.7 * first[0]
    assert "torchrun --standalone --nproc-per-node 2 mine.py" in README and program.startswith("# mine.py")


@pytest.mark.full("a recorded job of torchrun's")
def test_the_program_is_told_what_the_readme_quotes(tmp_path):
    """The quoted time and share are those of one run, and are not compared; the sentence is."""
    (program,) = blocks("python")
    (tmp_path / "mine.py").write_text(program, encoding="utf-8")
    (command,) = re.findall(r"^(fsdplab record .*)$", README, re.MULTILINE)
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    sentence = r"(The optimizer .*?): [\d.]+ m?s of each step \(\d+ %\)\.$"
    quoted = re.findall(f"^> {sentence}", README, re.MULTILINE)
    told = re.findall(f"^{sentence}", done.stdout, re.MULTILINE)
    assert len(quoted) == 1 and told[:1] == quoted
