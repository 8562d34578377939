"""Notebooks 05 and 06: references and other right answers pass, known wrong ones are diagnosed, and the learner's
engine is the twin's equal.
"""

from __future__ import annotations

import pytest

from fsdplab.figures import alt_text, ledger_against_formula
from fsdplab.records.summary import Comm
from fsdplab.sessions import Failure
from fsdplab.teaching import one_unit, whole_model
from fsdplab.teaching.core import checking, in_use, registry
from fsdplab.teaching.core.comm_log import bytes_sent
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.core.exercise import Call, Question
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.run_submission import behaviours
from fsdplab.teaching.lessons.nb06_whole_model.lesson import ledger
from fsdplab.teaching.lessons.nb06_whole_model.units import CHOICES, plan
from tests.solutions import ended_of, must_name_each_slip, solutions_of, try_ended

ITEMS = [item for notebook in ("05", "06") for item in registry.items_of(notebook)]
EXERCISES = [item for item in ITEMS if isinstance(item, Exercise)]
QUESTIONS = [item for item in ITEMS if isinstance(item, Question)]
pytestmark = pytest.mark.timeout(600)  # dozens of solutions share one launch
HEAD = "import torch\nimport torch.distributed as dist\n\n\n"
RIGHT = {  # other right answers than the references
    "05.shard": {
        "pad first": (
            HEAD + "def shard(whole, rank, n):\n    c = -(-len(whole) // n)\n    padded = torch.cat([whole,"
            " whole.new_zeros(n * c - len(whole), *whole.shape[1:])])\n    return padded[rank * c : (rank + 1) *"
            " c].clone()\n"
        ),
        "chunks": (
            HEAD
            + "def shard(whole, rank, n):\n    c = -(-len(whole) // n)\n    chunks = torch.chunk(whole, n)\n    rows ="
            " chunks[rank] if rank < len(chunks) else whole[:0]\n    return torch.cat([rows, rows.new_zeros(c -"
            " len(rows), *whole.shape[1:])])\n"
        ),
    },
    "05.unshard": {
        "padding in the storage itself": (
            HEAD
            + "def unshard(mine, whole):\n    n = dist.get_world_size()\n    storage = whole.untyped_storage()\n   "
            " storage.resize_(n * mine.nbytes)\n    padded = mine.new_empty(0).set_(storage, 0, (n * len(mine),"
            " *mine.shape[1:]))\n    dist.all_gather(list(padded.chunk(n)), mine)\n"
        ),
        "a list of tensors": (
            HEAD
            + "def unshard(mine, whole):\n    pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(pieces, mine)\n    whole.untyped_storage().resize_(whole.nbytes)\n    whole[:] ="
            " torch.cat(pieces)[: len(whole)]\n"
        ),
        "one tensor": (
            HEAD + "def unshard(mine, whole):\n    padded = mine.new_empty(dist.get_world_size() * len(mine),"
            " *mine.shape[1:])\n    dist.all_gather_into_tensor(padded, mine)\n   "
            " whole.untyped_storage().resize_(whole.nbytes)\n    whole.copy_(padded[: len(whole)])\n"
        ),
        "broadcasts": (
            HEAD
            + "def unshard(mine, whole):\n    pieces = [mine.clone() for _ in range(dist.get_world_size())]\n    for"
            " rank, piece in enumerate(pieces):\n        dist.broadcast(piece, src=rank)\n   "
            " whole.untyped_storage().resize_(whole.nbytes)\n    whole.copy_(torch.cat(pieces)[: len(whole)])\n"
        ),
    },
    "05.guarded": {
        "an error of its own": (
            "class Dropped(RuntimeError):\n    pass\n\n\ndef guarded(whole, name):\n    if"
            " whole.untyped_storage().size() == 0:\n        raise Dropped('Unshard ' + name)\n    return whole\n"
        ),
        "by its address": (
            "def guarded(whole, name):\n    if whole.data_ptr() == 0:\n        raise RuntimeError('unshard ' + name + '"
            " first')\n    return whole\n"
        ),
    },
    "05.reduce": {
        "a reduce to each owner": (
            HEAD + "def reduce(gradient):\n    n = dist.get_world_size()\n    c = -(-len(gradient) // n)\n    padded ="
            " torch.cat([gradient, gradient.new_zeros(n * c - len(gradient), *gradient.shape[1:])])\n    pieces ="
            " list(padded.chunk(n))\n    for rank, piece in enumerate(pieces):\n        dist.reduce(piece, dst=rank)\n"
            "    return pieces[dist.get_rank()] / n\n"
        ),
        "averaged on the way": (
            HEAD + "def reduce(gradient):\n    n = dist.get_world_size()\n    c = -(-len(gradient) // n)\n    padded ="
            " torch.cat([gradient, gradient.new_zeros(n * c - len(gradient), *gradient.shape[1:])]) / n\n    mine ="
            " padded[:c].clone()\n    dist.reduce_scatter_tensor(mine, padded)\n    return mine\n"
        ),
        "all-to-all and a sum": (
            HEAD + "def reduce(gradient):\n    n = dist.get_world_size()\n    c = -(-len(gradient) // n)\n    padded ="
            " torch.cat([gradient, gradient.new_zeros(n * c - len(gradient), *gradient.shape[1:])])\n    received ="
            " torch.empty_like(padded)\n    dist.all_to_all_single(received, padded)\n    return"
            " torch.stack(received.chunk(n)).mean(0)\n"
        ),
    },
    "06.hooks": {
        "adds to a gradient that is there": (
            registry.find("06.hooks").reference.replace(
                "unit.mine.grad = reduce(unit.take_gradient())",
                "new, old = reduce(unit.take_gradient()), unit.mine.grad\n        unit.mine.grad = new if old is None"
                " else old + new",
            )
        ),
        "asks the storage, reduces first": (
            "def hooks(unit, unshard, reshard, reduce):\n    def gather():\n        if"
            " unit.whole.untyped_storage().nbytes() == 0:\n            unshard(unit.mine, unit.whole)\n\n    def"
            " drop():\n        if unit.name != 'root':\n            reshard(unit.whole)\n\n    def after_backward():\n "
            "       unit.mine.grad = reduce(unit.take_gradient())\n        reshard(unit.whole)\n\n    return [gather,"
            " drop, gather, after_backward]\n"
        ),
    },
    "06.choose_units": {
        "by size": (
            "def choose_units(name, module):\n    size = 4 * sum(p.numel() for p in module.parameters())\n    return"
            " name.count('.') == 2 and 2e6 < size < 5e6\n"
        ),
        "by class": (
            "def choose_units(name, module):\n    return type(module).__name__ in ('CausalAttention',"
            " 'GPTFeedForward')\n"
        ),
    },
    "06.schedule": {
        "two gathers before the first computation": (
            "def schedule(n):\n    steps = [('gather', 0), ('gather', 1)]\n    for i in range(n - 1):\n        steps +="
            " [('forward', i), ('drop', i)] + [('gather', i + 2)] * (i + 2 < n)\n    steps += [('forward', n - 1)]\n   "
            " for i in reversed(range(n)):\n        steps += [('reduce', i + 1)] * (i + 1 < n)\n        steps +="
            " [('gather', i - 1)] * (i > 0) + [('backward', i), ('drop', i)]\n    return (*steps, ('reduce', 0))\n"
        )
    },
}


SOLUTIONS = solutions_of(EXERCISES, RIGHT)
choosing = registry.find("06.choose_units").module()


@pytest.mark.parametrize("solution", SOLUTIONS, ids=str)
def test_right_solutions_pass_and_wrong_ones_are_diagnosed(tried, solution):
    solution.must_report(tried[solution.key])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "exercise,known", ended_of(EXERCISES), ids=lambda value: getattr(value, "id", None) or f"line {value.line}"
)
def test_solutions_that_raise_are_reported_with_the_error(workspace, exercise, known):
    feedback = try_ended(exercise, known, workspace)
    assert "raised an error" in feedback.headline and known.cause in feedback.cause


@pytest.mark.parametrize("item", QUESTIONS, ids=lambda item: item.id)
def test_questions_accept_the_right_number_and_name_each_slip(course, item):
    must_name_each_slip(item)


# --- what the references give


def seen(workspace, exercise):
    """What the first case shows of the reference, by rank."""
    found = registry.find(exercise)
    (seen,) = behaviours([(found, workspace.save(exercise, found.reference))], workspace)
    workspace.file_of(exercise).unlink()
    return [trial.returned for trial in seen.trials[0]]


def test_golden_values(workspace):
    shards = seen(workspace, "05.shard")
    assert [facts["own rows"][:, 0].tolist() for facts in shards] == [[1, 3, 5], [7, 9, 11], [13]]
    assert shards[2]["padding"].tolist() == [[0, 0]] * 2 and shards[2]["bytes behind it"] == 3 * 2 * 4
    assert seen(workspace, "05.unshard")[1]["rows of whole"].flatten().tolist() == list(range(1, 15))
    assert seen(workspace, "05.reshard")[0] == {
        "bytes behind whole": 0,
        "bytes behind what autograd kept": 0,
        "shape": [7, 2],
    }
    assert seen(workspace, "05.guarded")[0]["the guard"] == "returns"
    mean = seen(workspace, "05.reduce")[
        2
    ]  # (1 + 11 + 21) / 3 = 11 times the row 13, 14, whose multiples of 3 were given
    assert mean["rows"].tolist() == [[3 * 11 * 13, 3 * 11 * 14]] and not mean["padding"].any()
    assert (
        registry.find("06.hooks").expected["bytes gathered at the peak"]
        == plan("gpt-tiny", CHOICES["every block"]).peak
    )


def test_reading_a_dropped_tensor_ends_a_process_not_the_notebook(course, capsys):
    one_unit.read_dropped()
    assert "SIGSEGV" in capsys.readouterr().out


# --- one layer and whole models with the functions in use


def test_the_parts_in_use_follow_the_checks(course, capsys):
    own = registry.find("05.shard").reference + "\n# mine\n"
    course.workspace.save("05.shard", own)
    assert in_use.whose("05.shard") == "with the reference shard", "saved, but its check has not passed"
    course.workspace.note_pass("05.shard", own)
    checking.use("05.shard", "05.unshard")
    said = capsys.readouterr().out
    assert "using your shard" in said and "using the reference unshard" in said
    assert 'HERE / "05.shard.py"' in (course.workspace.path / "in_use.py").read_text()
    assert in_use.functions("05.shard")["shard"].__code__.co_filename == str(course.workspace.file_of("05.shard"))
    course.workspace.file_of("05.shard").unlink()


def test_a_layer_lives_and_equals_the_whole_one(course):
    life = one_unit.life_of_a_layer(rows=33, columns=8, world_size=2)
    assert life.differences == {"output": 0.0, "sharded gradient": 0.0}
    by_moment = {moment["moment"]: moment for moment in life.moments}
    whole, mine = 33 * 8 * 4, 17 * 8 * 4
    assert [
        by_moment[name]["unsharded_parameters"] for name in ("unshard", "reshard", "unshard again", "reshard again")
    ] == [whole, 0, whole, 0]
    assert by_moment["at rest again"]["sharded_gradients"] == by_moment["shard (at rest)"]["sharded_parameters"] == mine
    assert life.peak_megabytes == (mine + whole + whole) / 1e6, "in backward: slice, weight and unsharded gradient"
    assert "unsharded" in alt_text(one_unit.layer_figure(life)).lower()


@pytest.fixture(scope="module")
def training(course):
    return whole_model.train("gpt-tiny", steps=4)


def test_the_learners_engine_equals_the_twin_and_the_lab(training):
    assert training.losses["my_fsdp"] == training.losses["twin"] == training.losses["lab"]
    assert len(training.losses["twin"]) == 4 and training.losses["twin"][-1] < training.losses["twin"][0]
    for name in ("my_fsdp", "lab"):
        assert training.differs[name] == {"largest": 0.0, "floats": 0, "of": 141_056}


def test_its_collectives_are_the_formulas_and_the_labs(training):
    summaries = [training.records[name].summary for name in ("my_fsdp", "lab")]
    assert [summary.comm.collectives_per_step for summary in summaries] == [training.plan.collectives] * 2 == [8, 8]
    assert [summary.comm.bytes_per_step for summary in summaries] == [training.plan.traffic(2)] * 2
    mine, lab = (
        sorted(
            (row["unit"], row["phase"], row["kind"], row["logical_bytes"])
            for row in training.records[name].table("ledger")
            if row["step"] == 3
        )
        for name in ("my_fsdp", "lab")
    )
    assert mine == lab


def test_its_gathered_bytes_are_the_arithmetics(training):
    assert training.mine.summary.gathered_bytes == training.plan.peak
    assert training.records["lab"].summary.gathered_bytes >= training.plan.peak, "the lab gathers one unit ahead"
    assert "141,056" in str(training) and "formula" in training._repr_html_()


def test_an_engine_of_other_right_answers_is_the_twins_equal_too(course, tmp_path):
    """What a learner passed with is what runs in 06, and their engine sends what the formula says."""
    own = open_course("learner", tmp_path / "my_fsdp").workspace
    for exercise, solved in RIGHT.items():
        source = list(solved.values())[-1] if exercise != "05.unshard" else solved["one tensor"]
        own.save(exercise, source)
        own.note_pass(exercise, source)
    try:
        run = whole_model.train("gpt-tiny", steps=2, engines=("mine", "twin"))
    finally:
        open_course("learner", course.workspace.path)
    assert run.whose == "with your shard, unshard, guarded, reduce, hooks and the reference reshard"
    assert run.losses["my_fsdp"] == run.losses["twin"] and run.differs["my_fsdp"]["largest"] == 0
    assert run.mine.summary.comm == Comm(bytes_per_step=run.plan.traffic(2), collectives_per_step=8)


def test_its_figures_say_what_they_show(training):
    figure = whole_model.gathered_figure(training)
    assert "gather blocks.1" in alt_text(figure) and len(figure.data) == 3
    assert "equals the formula" in ledger_against_formula(training.mine).layout.title.text
    assert "every block" in alt_text(
        whole_model.choices_figure(
            target=choosing.TARGET, choose_units=lambda name, module: name.endswith((".attention", ".feed_forward"))
        )
    )


# --- units by arithmetic


def test_plans_of_units():
    blocks = plan("gpt-tiny", CHOICES["every block"])
    assert [name for name, _ in blocks.units] == ["blocks.1", "blocks.0", "root"] and blocks.collectives == 8
    nested = plan("gpt-tiny", lambda name, module: type(module).__name__ == "GPTBlock" or name.endswith("feed_forward"))
    assert nested.peak == blocks.peak, "a unit inside a unit does not lower the peak: both are gathered"
    whole = plan("gpt-tiny", CHOICES["the whole model"])
    assert whole.peak == 4 * 141_056 and whole.traffic(2) == 2 * whole.peak // 2
    with pytest.raises(ValueError, match="never called"):
        plan("gpt-tiny", lambda name, module: name == "blocks")


def test_the_target_wants_a_choice():
    """Neither the ready-made choices nor nesting meet it."""
    target, limit = choosing.TARGET, choosing.LIMIT
    for is_unit in CHOICES.values():
        each = plan("gpt-20m", is_unit)
        assert each.peak > target or each.collectives > limit


def test_bytes_that_calls_send():
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv")
    assert [bytes_sent(Call(kind, 12), 3) for kind in kinds] == [8, 24, 16, 8, 12, 0]
    row = {"step": 0, "phase": "forward", "unit": "root", "what": "unshard", "calls": [("all_gather", 12)], "bytes": 4}
    (kept,) = ledger([row, {**row, "what": "reshard"}], 3)
    assert (kept["kind"], kept["logical_bytes"], kept["wire_bytes"]) == ("all_gather", 12, 8)


def test_rows_that_each_rank_keeps():
    own, padding = one_unit.rows_figure(4, 3).data
    assert list(zip(own.y, own.text)) == [("rank 0", "0"), ("rank 0", "1"), ("rank 1", "2"), ("rank 1", "3")]
    assert list(padding.y) == ["rank 2"] * 2
    assert "c = 2, 2 padding rows, 1 rank without a row" in one_unit.rows_figure(4, 3).layout.title.text
    assert "padding" in alt_text(one_unit.rows_figure(64, 8)) and len(one_unit.rows_figure(64, 8).data[0].x) == 64


def test_a_crash_of_the_ranks_is_still_the_feedback(course):
    failure = Failure("died", "Rank 0 died: it ended with SIGSEGV.", 0)
    assert "crash" in checking.feedback_on_failure(registry.find("06.hooks"), failure).cause
