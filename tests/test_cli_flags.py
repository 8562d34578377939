"""Flags mean the same in every command: one name for one thing, and `--json FILE|-`."""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from fsdplab.cli import main
from fsdplab.cli.app import app
from fsdplab.cli.options import PLAN, RUN, function_of
from fsdplab.cli.plan.commands import app as plan
from fsdplab.planning.plan_spec import AS_IN_A_RUN
from fsdplab.records import RunRecord, Summary

FOUR = ("run", "compare", "bench", "plan step")
# what a training program may call each thing
THINGS = {
    "world size": ("--world-size", "--gpus", "--ranks", "--nproc", "-n"),
    "model": ("--model", "--preset"),
    "strategy": ("--strategy", "--sharding"),
    "precision": ("--precision", "--param-dtype", "--dtype"),
    "batch": ("--batch-size", "--batch", "--micro-batch", "--micro-batch-size"),
    "micro-batches": ("--micro-batches", "--grad-accum", "--accumulate"),
    "sequence length": ("--sequence-length", "--seq", "--seq-len", "--context"),
    "link": ("--link", "--bandwidth"),  # the `--network` of a plan is what joins its nodes
    "shard size": ("--shard-size", "--group-size"),
    "prefetch": ("--prefetch", "--ahead"),
    "checkpoint": ("--checkpoint", "--checkpointing", "--recompute"),
    "offload": ("--offload", "--cpu-offload"),
    "compile": ("--compile",),
    "optimizer": ("--optimizer",),
}
TINY = ["--model", "gpt-tiny", "--sequence-length", "16", "--time-limit", "100"]


def commands() -> dict[str, Any]:
    """Every command of typer's: `"plan step"` -> the command."""
    top = typer.main.get_command(app).commands
    plans = top.pop("plan").commands
    return top | {f"plan {name}": command for name, command in plans.items()}


def flags(command: Any) -> list[str]:
    return [name for parameter in command.params if parameter.param_type_name == "option" for name in parameter.opts]


def types(name: str) -> dict[str, Any]:
    """The types of a command's parameters, by their names in Python."""
    group, _, own = name.rpartition(" ")
    commands = plan.registered_commands if group else app.registered_commands
    (callback,) = [each.callback for each in commands if (each.name or each.callback.__name__) == own]
    parameters = inspect.signature(callback, eval_str=True).parameters
    found = {key: get_args(each.annotation) for key, each in parameters.items()}
    return {key: annotated[0] for key, annotated in found.items() if annotated}


def singular(flag: str) -> str:
    """`--strategies` is a list of what `--strategy` is."""
    return f"{flag[:-3]}y" if flag.endswith("ies") else flag


def with_two_names(things: Mapping[str, Sequence[str]], named: Mapping[str, Sequence[str]]) -> dict[str, dict]:
    """The things that have different names in different commands: the names, with the commands that use them."""
    used: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for thing, words in things.items():
        for command, own in named.items():
            if names := tuple(sorted({singular(flag) for flag in own} & set(words))):
                used[thing][names].append(command)
    return {thing: dict(names) for thing, names in used.items() if len(names) > 1}


def ended(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


# ---- one name for one thing


@pytest.mark.quick
def test_run_compare_bench_and_plan_give_one_thing_one_name() -> None:
    named = {name: flags(command) for name, command in commands().items() if name in FOUR}
    assert with_two_names(THINGS, named) == {}
    for thing in ("world size", "model", "strategy", "precision", "batch", "sequence length"):
        assert all({singular(flag) for flag in named[name]} & set(THINGS[thing]) for name in FOUR), thing


@pytest.mark.quick
def test_two_names_of_one_thing_are_found() -> None:
    named = {"run": ["--world-size", "-n", "--strategy"], "compare": ["--strategies"], "plan": ["--gpus", "-n"]}
    assert with_two_names(THINGS, named) == {
        "world size": {("--world-size", "-n"): ["run"], ("--gpus", "-n"): ["plan"]}
    }


@pytest.mark.quick
def test_a_flag_of_several_commands_takes_the_same_kind_of_value() -> None:
    kinds: dict[str, set[type]] = defaultdict(set)
    for name in FOUR:
        for parameter in commands()[name].params:
            for flag in parameter.opts if parameter.name in types(name) else ():
                kind = types(name)[parameter.name]
                kinds[flag].add((get_args(kind) or (kind,))[0])
    # a bench has a row for each prefetch
    assert {flag for flag, found in kinds.items() if len(found) > 1} == {"--prefetch"}


@pytest.mark.quick
def test_what_a_plan_has_of_a_run_has_the_flag_of_the_run() -> None:
    assert set(RUN) & set(PLAN) | set(AS_IN_A_RUN.values()) == {
        "strategy", "model", "shard_size", "prefetch", "offload", "optimizer", "compile", *AS_IN_A_RUN.values(),
    }  # fmt: skip
    of_run, of_plan = ({parameter.name: parameter.opts for parameter in commands()[name].params} for name in
                       ("run", "plan step"))  # fmt: skip
    for own, name in AS_IN_A_RUN.items():
        assert of_plan[own] == of_run[name]


@pytest.mark.quick
def test_the_function_of_a_command_takes_its_flags() -> None:
    rows = [each.callback.row for each in (*app.registered_commands, *plan.registered_commands)
            if hasattr(each.callback, "row")]  # fmt: skip
    assert len(rows) == 13
    for does, every in rows:
        parameters = set(inspect.signature(function_of(does)).parameters)
        own = {name for name, flag in every.items() if not flag.into}
        spec = {flag.into for flag in every.values() if flag.into}
        assert own <= parameters and parameters - own <= spec and spec - parameters <= {"outputs"}, does


# ---- one name


@pytest.mark.quick
def test_a_run_is_given_its_strategy_as_a_word_or_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["zero9"], ["--strategy", "zero9"]):
        code, _, said = ended(["run", *given], capsys)
        assert code == 2 and "unknown strategy 'zero9'" in said
    code, _, said = ended(["run", "zero1", "--strategy", "zero2"], capsys)
    assert code == 2 and said == "fsdplab: zero1 and --strategy zero2 were given; expected one strategy\n"


# ---- --json


@pytest.mark.quick
def test_json_is_one_flag_of_all_commands() -> None:
    found = {
        name: (types(name)[parameter.name], parameter.metavar, parameter.help)
        for name, command in commands().items()
        for parameter in command.params
        if "--json" in parameter.opts
    }
    assert {"run", "compare", "report", "bench", "doctor", "plan step"} <= set(found)
    assert set(found.values()) == {(str | None, "FILE|-", "Write the answer as JSON to a file, or to stdout with -.")}


@pytest.fixture
def record(tmp_path: Path) -> str:
    RunRecord(
        tmp_path / "record", spec={"strategy": "zero1", "engine": "lab", "world_size": 2}, summary=Summary()
    ).save()
    return str(tmp_path / "record")


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "step"], ["plan", "fit"], ["plan", "sweep", "world-size=8,16"], ["plan", "simulate"],
        ["doctor"], ["report"],
        ["bench", *TINY, "--strategies", "full_shard", "--engines", "", "--rounds", "1"],
        ["compare", *TINY, "--strategies", "full_shard", "--steps", "1", "--profile", "0"],
        ["run", *TINY, "--steps", "1", "--profile", "0"],
    ],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_json_goes_to_a_file_or_alone_to_stdout(
    command: list[str], record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a run is recorded
    command = [*command, record] if command == ["report"] else command
    code, shown, said = ended([*command, "--json", str(tmp_path / "a.json")], capsys)
    assert code == 0, said
    code, alone, beside = ended([*command, "--json", "-"], capsys)
    assert code == 0, beside
    written, printed = json.loads((tmp_path / "a.json").read_text()), json.loads(alone)
    assert written.keys() == printed.keys() and shown.strip() and beside.strip()
    assert not Path("-").exists()
    code, _, refused = ended([*command, "--json", "/no/such/folder/a.json"], capsys)
    assert code == 2 and refused.splitlines()[-1].startswith("fsdplab: --json /no/such/folder/a.json cannot be written")


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments,flag,given",
    [
        (["run", "--steps", "x"], "--steps", "'x'"),
        (["compare", "-n", "1.5"], "--world-size", "'1.5'"),
        (["run", "--time-limit", "soon"], "--time-limit", "'soon'"),
        (["lab", "--port", "70000"], "--port", "70000"),
    ],
)
def test_a_value_that_is_no_number_is_named(arguments, flag, given, capsys):
    code, _, err = ended(arguments, capsys)
    assert code == 2 and err.count("\n") == 1 and flag in err and given in err
    assert "Input should be" not in err and "--help`" in err
