"""One table of strategies: no code asks for a strategy by its name, and a new row is a new strategy everywhere.

The first is read from the syntax trees of the package. The second is tried: a copy of the package gets one more row,
and a fresh interpreter plans, simulates, draws, offers and trains it.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdplab.common.names import STATES, STRATEGIES, STRATEGY_ROWS, StrategyRow
from fsdplab.planning.traffic import UnitShapes, step_traffic

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {  # file -> why its dict has the names of strategies as keys
    "teaching/exercises/02/model_state_bytes.py": "an exercise about these four strategies",
    "teaching/lessons/by_hand/on_ranks.py": "the lesson's own trainers, which learners write by hand",
}
_LOOKUPS = ("index", "count", "startswith", "endswith", "__eq__", "__contains__")


def is_named(node: ast.AST) -> bool:
    """Whether an expression is a strategy's name, or a literal collection with one in it."""
    if isinstance(node, ast.Constant):
        return node.value in STRATEGIES
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(is_named(each) for each in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("frozenset", "set", "tuple"):
        return any(is_named(each) for each in node.args)
    return False


def constants(tree: ast.AST) -> set[str]:
    """Constants that stand for a strategy's name or a collection of them anywhere in a file."""
    pairs = [(each.targets, each.value) for each in ast.walk(tree) if isinstance(each, ast.Assign)]
    pairs += [([each.target], each.value) for each in ast.walk(tree) if isinstance(each, ast.AnnAssign) and each.value]
    names = [target for targets, value in pairs if is_named(value) for target in targets]
    return {name.id for name in names if isinstance(name, ast.Name) and name.id.isupper()}


def asked_by_name(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of every comparison with a strategy's name, and of every table with such names as keys."""
    stand_for_it = constants(tree)

    def named(node: ast.AST) -> bool:
        return is_named(node) or isinstance(node, ast.Name) and node.id in stand_for_it

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(map(named, [node.left, *node.comparators])):
            yield node.lineno, "comparison"
        elif isinstance(node, ast.MatchValue) and named(node.value):
            yield node.value.lineno, "case"
        elif isinstance(node, ast.Dict) and any(key is not None and named(key) for key in node.keys):
            yield node.lineno, "table"
        elif isinstance(node, ast.Call):
            if any(word.arg in STRATEGIES for word in node.keywords):
                yield node.lineno, "table"
            if isinstance(node.func, ast.Attribute) and node.func.attr in _LOOKUPS and any(map(named, node.args)):
                yield node.lineno, "comparison"


@pytest.mark.quick
@pytest.mark.parametrize(
    "source",
    [
        'if spec.strategy == "full_shard": pass',
        'if "no_shard" != strategy: pass',
        'kept = strategy in ("full_shard", "hybrid_shard")',
        'kept = strategy not in {"zero1"}',
        'ONCE = ("no_shard", "zero1")\nkept = strategy in ONCE',
        'ONCE: frozenset[str] = frozenset(("zero1",))\nkept = strategy not in ONCE',
        'NAME = "hybrid_shard"\nkept = each.strategy == NAME',
        'gathers = {"full_shard": 2, "zero1": 1}[strategy]',
        "gathers = dict(full_shard=2, zero1=1)[strategy]",
        'chosen = names.index("full_shard")',
        'match strategy:\n    case "zero2" | "zero1":\n        pass',
    ],
)
def test_a_test_by_name_is_found(source):
    assert list(asked_by_name(ast.parse(source)))


@pytest.mark.quick
@pytest.mark.parametrize(
    "source",
    [
        'RunSpec(strategy="full_shard")',
        'DEFAULT = "full_shard"\nspec = replace(spec, strategy=DEFAULT)',
        'settings = {"strategy": "zero1", "prefetch": 0}',
        'sides: tuple[str, str] = ("no_shard", "full_shard")',
        "kept = strategy in IN_GROUPS",
        'kept = transport == "shm"',
    ],
)
def test_a_choice_of_a_strategy_is_no_test(source):
    assert not list(asked_by_name(ast.parse(source)))


@pytest.mark.quick
def test_no_code_asks_for_a_strategy_by_name():
    found = {}
    for path in sorted((ROOT / "fsdplab").rglob("*.py")):
        name = path.relative_to(ROOT / "fsdplab").as_posix()
        if tests := list(asked_by_name(ast.parse(path.read_text(encoding="utf-8")))):
            found[name] = tests
    assert {name: tests for name, tests in found.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) == set(found), "a place that no longer needs to be allowed is removed from the list"
    assert {what for tests in found.values() for _, what in tests} == {"table"}, "only tables are allowed"


@pytest.mark.quick
def test_the_rows_are_those_of_the_papers():
    """ZeRO's stages (Rajbhandari et al. 2020, section 5) and the collectives of a step, (gathers, reductions) of a
    block and of the root in three micro-batches, written down once more without the table.
    """
    written = {
        "no_shard": (0, (0, 1), (0, 1)), "zero1": (1, (1, 1), (1, 1)), "zero2": (2, (1, 3), (1, 3)),
        "shard_grad_op": (3, (3, 3), (3, 3)), "full_shard": (3, (6, 3), (3, 3)), "hybrid_shard": (3, (6, 3), (3, 3)),
    }  # fmt: skip
    assert tuple(written) == STRATEGIES
    units = [UnitShapes("root", (("weight", (8,)),)), UnitShapes("block", (("weight", (8,)),))]
    for name, (stage, block, root) in written.items():
        assert STRATEGY_ROWS[name].cuts == STATES[3 - stage :]
        rows = step_traffic(units, name, 4, micro_batches=3)
        counts = {(row.unit, row.kind): row.count for row in rows}
        for unit, (gathers, reductions) in {"block": block, "root": root}.items():
            assert counts.get((unit, "all_gather"), 0) == gathers
            assert counts.get((unit, "reduce_scatter"), counts.get((unit, "all_reduce"))) == reductions


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"cuts": ("gradients",)}, "the optimizer state is sharded first"),
        ({"cuts": ("parameters", "optimizer")}, "the optimizer state is sharded first"),
        ({"cuts": ("optimizer", "gradients")}, "the optimizer state is sharded first"),
        ({"cuts": ("weights",)}, "expected one of"),
        ({"cuts": STATES[1:], "reshards_after_forward": True}, "reshards parameters that it does not shard"),
        ({"cuts": (), "in_groups": True}, "shards nothing inside its groups"),
    ],
)
def test_a_row_that_the_engine_cannot_express_is_refused(row, why):
    with pytest.raises(ValueError, match=why):
        StrategyRow("made_up", colour="#123456", **row)


# ---- one more row

NEW_ROW = '        StrategyRow("kept_shard", STATES, "#123456", known_as="ZeRO-2.5"),\n'
TRIED = """
import json
from typer.testing import CliRunner
from fsdplab.cli.app import app
from fsdplab.engine import STRATEGIES
from fsdplab.figures.report.page import comparison_page
from fsdplab.records import comparison_json
from fsdplab.figures.style import STRATEGY_COLOURS
from fsdplab.planning.planner import plan_spec, plan_of
from fsdplab.planning.simulation import simulate_work, work_of
from fsdplab.sessions import run
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.spec import ENGINES, RunSpec
from fsdplab.figures.lab.choices import Choices, check

def about(strategy):
    spec = plan_spec("llama-3.1-8b", "h100", gpus=16, strategy=strategy)
    here = RunSpec(strategy=strategy, model="gpt-tiny", batch_size=1, sequence_length=32, steps=1)
    return {"plan": plan_of(spec).memory.peak.total, "simulated": simulate_work(work_of(spec)).step_s,
            "predicted": predict(here).bytes_per_step, "resting": predict(here).by_category}

def ran(strategy):
    record = run(RunSpec(strategy=strategy, model="gpt-tiny", batch_size=1, sequence_length=32, steps=1))
    return record, [[row["unit"], row["kind"], row["wire_bytes"]] for row in record.table("ledger") if row["step"] == 2]

console = CliRunner()
new = "kept_shard"
(record, sent), (like, like_sent) = ran(new), ran("shard_grad_op")
print(json.dumps({
    "new": about(new), "like": about("shard_grad_op"), "sent": sent, "like_sent": like_sent,
    "losses": record.summary.losses, "like_losses": like.summary.losses,
    "colour": STRATEGY_COLOURS[new], "engines": [name for name, able in ENGINES.items() if new in able],
    "engine": STRATEGIES[new].reshard_after_forward,
    "page": new in comparison_page(comparison_json([record], record), [record]),
    "widget": [spec.strategy for spec in check(Choices(strategies=(new,))).specs],
    "help": [new in console.invoke(app, f"{words} --help").output for words in ("plan step", "run", "compare")],
    "refused": str(console.invoke(app, ["run", "kept_shart"]).exception),
}))
"""


def test_one_more_row_is_a_strategy_everywhere(tmp_path):
    shutil.copytree(ROOT / "fsdplab", tmp_path / "fsdplab")
    names = tmp_path / "fsdplab" / "common" / "names.py"
    before, after = names.read_text(encoding="utf-8").split('        StrategyRow("zero1"')
    names.write_text(f'{before}{NEW_ROW}        StrategyRow("zero1"{after}', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", TRIED], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["new"] == said["like"] and said["sent"] == said["like_sent"] != []
    assert said["losses"] == said["like_losses"]
    assert said["colour"] == "#123456" and said["engine"] is False
    assert said["engines"] == ["lab", "torch-fsdp2", "twin"]
    assert said["page"] and said["widget"] == ["kept_shard"] and all(said["help"])
    assert "did you mean kept_shard?" in said["refused"]
