"""The result of a command is one value with one renderer, and an error that a command prints has one of two bases."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fsdplab.cli import doctor
from fsdplab.cli.answer import Answer, Line, Table
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.render import show
from fsdplab.common.errors import RunError, UserError
from fsdplab.planning import HardwareError, PlanError
from fsdplab.planning.links import LinkError
from fsdplab.profiling import AccountingError
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.records import RecordError
from fsdplab.sessions import RanksFailed
from fsdplab.sessions.spec import SpecError
from fsdplab.workloads.errors import ModelError, TextError
from tests.test_cli import ended

pytestmark = pytest.mark.quick

TABLE = Table(("name", "bytes"), [("a", "1 B"), ("b\x1b[2J", "20 B")], words=("name",))


def test_one_answer_is_printed_and_written_where_the_flags_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (Line("The sentence.", mood="bold"), TABLE, Line("predicted", "provenance"))
    answer = Answer(parts, {"rows": 2}, page=lambda: "<p>the page</p>")
    Outputs(json=str(tmp_path / "a.json"), html=tmp_path / "a.html").check().give(answer)
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert said == ["The sentence.", " name  bytes", " a       1 B", " b[2J   20 B", "provenance: predicted"]
    assert json.loads((tmp_path / "a.json").read_text()) == {"rows": 2}
    assert (tmp_path / "a.html").read_text() == "<p>the page</p>"


def test_json_on_stdout_sends_the_rest_to_stderr_and_no_page_is_made_unasked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def page() -> str:
        raise AssertionError("nobody asked for a page")

    Outputs(json="-").give(Answer([TABLE], {"rows": 2}, page))
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"rows": 2} and "20 B" in printed.err


def test_a_number_that_json_lacks_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of a bench whose model diverged: `NaN` is read by Python alone."""
    data = {"rows": ({"loss": float("nan"), "steps": [1, float("-inf"), 2.5]},), "word": "NaN", "yes": True}
    Outputs(json="-").give(Answer([TABLE], data))
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {
        "rows": [{"loss": None, "steps": [1, None, 2.5]}],
        "word": "NaN",
        "yes": True,
    }


@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("folds", [(), ("note",)])
def test_a_terminal_that_is_too_narrow_for_a_table_gets_every_figure_of_it(ruled: bool, folds: tuple[str, ...]) -> None:
    columns = ("run", "at the peak", "sent by a rank", "note")
    table = Table(columns, [("full_shard", "123.4 MB", "567.8 MB", "of the last step")], folds=folds, ruled=ruled)
    console = Console(width=34, file=StringIO())
    show(console, [table])
    drawn = console.file.getvalue()
    assert all(word in drawn for word in ("peak", "rank", "123.4", "567.8", "MB", "last"))
    wide = Console(width=80, file=StringIO())
    show(wide, [table])
    assert "full_shard" in wide.file.getvalue() and "123.4 MB" in wide.file.getvalue()


def test_a_line_with_a_command_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    words = "word " * 60
    Outputs().give(Answer([Line(words), Line(words, whole=True)], {}))
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    "kind",
    [AccountingError, HardwareError, LinkError, ModelError, PlanError, RecordError, SpecError, TextError, TraceError],
)
def test_an_error_that_the_user_can_mend_is_one_line_and_exit_code_2(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise kind("it is 3; expected\n2")

    monkeypatch.setattr(doctor, "capabilities", refuse)
    assert issubclass(kind, UserError)
    assert ended(["doctor"], capsys) == (2, "", "fsdplab: it is 3; expected 2\n")


def test_a_failure_is_its_report_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RunError("Rank 1 died.\n\nTraceback")

    monkeypatch.setattr(doctor, "capabilities", fail)
    assert issubclass(RanksFailed, RunError)
    assert ended(["doctor"], capsys) == (1, "", "Rank 1 died.\n\nTraceback\n")
