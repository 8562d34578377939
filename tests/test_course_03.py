"""Notebook 03: every right answer passes, every known wrong one is diagnosed, and what is trained equals the twin.

All solutions that return are tried in one launch on three ranks; one that raises or hangs needs a launch of its own.
"""

from __future__ import annotations

import pytest
import torch

from fsdplab.teaching import ddp_by_hand
from fsdplab.teaching.core import answers, display, registry
from fsdplab.teaching.core.exercise import Call, Choice, Question
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.run_submission import behaviours
from fsdplab.teaching.lessons.nb03_ddp_by_hand.bucket_costs import buckets, costs
from fsdplab.teaching.lessons.nb03_ddp_by_hand.on_ranks import RATE, SMALL, STEPS, Step, compared
from fsdplab.workloads import ByteText, build_model, loss_of
from fsdplab.workloads.twin import replay_gradients
from tests.solutions import ended_of, must_name_each_slip, solutions_of, try_ended

ITEMS = registry.items_of("03")
EXERCISES = [item for item in ITEMS if isinstance(item, Exercise)]
QUESTIONS = [item for item in ITEMS if isinstance(item, Question)]
CHOICES = [item for item in ITEMS if isinstance(item, Choice)]
RIGHT = {  # other right answers than the references
    "03.average_in_hook": {
        "torch's own average": (
            "import torch.distributed as dist\n\n\ndef average_in_hook(parameter):\n    dist.all_reduce(parameter.grad,"
            " op=dist.ReduceOp.AVG)\n"
        ),
        "divides first": (
            "import torch.distributed as dist\n\n\ndef average_in_hook(parameter):\n   "
            " parameter.grad.div_(dist.get_world_size())\n    dist.all_reduce(parameter.grad)\n"
        ),
        "reduced, then broadcast": (
            "import torch.distributed as dist\n\n\ndef average_in_hook(parameter):\n    dist.reduce(parameter.grad,"
            " 0)\n    parameter.grad /= dist.get_world_size()\n    dist.broadcast(parameter.grad, src=0)\n"
        ),
        "another tensor in its place": (
            "import torch\nimport torch.distributed as dist\n\n\ndef average_in_hook(parameter):\n    total ="
            " parameter.grad.clone()\n    work = dist.all_reduce(total, async_op=True)\n    work.wait()\n   "
            " parameter.grad = total / dist.get_world_size()\n"
        ),
    },
    "03.small_together": {
        "divides the pieces": registry.find("03.small_together").stub.replace("copy_(piece)", "copy_(piece / n)"),
        "divides first": (
            registry.find("03.small_together").stub.replace(
                "for parameter in small])\n        dist", "for parameter in small]) / n\n        dist"
            )
        ),
    },
    "03.in_buckets": {
        "a new list each time": (
            registry.find("03.in_buckets")
            .reference.replace("    def send():\n", "    def send():\n        nonlocal bucket\n")
            .replace("bucket.clear()", "bucket = []")
        ),
        "closed before it would be too full": (
            "import torch\nimport torch.distributed as dist\n\n\ndef in_buckets(model, bucket_bytes):\n    bucket ="
            " []\n\n    def ready(parameter):\n        held = sum(each.grad.nbytes for each in bucket)\n        if"
            " bucket and held + parameter.grad.nbytes > bucket_bytes:\n            send()\n       "
            " bucket.append(parameter)\n\n    def send():\n        flat ="
            " torch._utils._flatten_dense_tensors([each.grad for each in bucket])\n       "
            " dist.all_reduce(flat.div_(dist.get_world_size()))\n        parts ="
            " torch._utils._unflatten_dense_tensors(flat, [each.grad for each in bucket])\n        for each, part in"
            " zip(bucket, parts):\n            each.grad = part\n        bucket.clear()\n\n    for parameter in"
            " model.parameters():\n        parameter.register_post_accumulate_grad_hook(ready)\n    return send\n"
        ),
        "asynchronous": (
            "import torch\nimport torch.distributed as dist\n\n\ndef in_buckets(model, bucket_bytes):\n    bucket,"
            " under_way = [], []\n\n    def ready(parameter):\n        bucket.append(parameter)\n        if"
            " sum(each.grad.nbytes for each in bucket) >= bucket_bytes:\n            send()\n\n    def send():\n       "
            " if bucket:\n            joined = torch.cat([each.grad.flatten() for each in bucket])\n           "
            " under_way.append((list(bucket), joined, dist.all_reduce(joined, async_op=True)))\n           "
            " bucket.clear()\n\n    def finish():\n        send()\n        for members, joined, work in under_way:\n   "
            "         work.wait()\n            joined /= dist.get_world_size()\n            for each, piece in"
            " zip(members, joined.split([each.numel() for each in members])):\n               "
            " each.grad.copy_(piece.view_as(each))\n        under_way.clear()\n\n    for parameter in"
            " model.parameters():\n        parameter.register_post_accumulate_grad_hook(ready)\n    return finish\n"
        ),
        "scatter and gather": (
            registry.find("03.in_buckets").reference.replace(
                "            dist.all_reduce(joined)\n",
                "            n = dist.get_world_size()\n            joined = torch.cat([joined,"
                " joined.new_zeros(-len(joined) % n)])\n            blocks, own = list(joined.chunk(n)),"
                " torch.empty(len(joined) // n)\n            dist.reduce_scatter(own, blocks)\n           "
                " dist.all_gather(blocks, own)\n            joined = joined[: sum(each.numel() for each in bucket)]\n",
            )
        ),
    },
}


SOLUTIONS = solutions_of(EXERCISES, RIGHT)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("solution", SOLUTIONS, ids=str)
def test_right_solutions_pass_and_wrong_ones_are_diagnosed(tried, solution):
    solution.must_report(tried[solution.key])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "exercise,known", ended_of(EXERCISES), ids=lambda value: getattr(value, "id", "") or value.ends
)
def test_solutions_that_raise_or_hang_are_diagnosed(workspace, exercise, known):
    assert known.cause in try_ended(exercise, known, workspace).cause


def test_the_feedback_names_step_parameter_and_index(tried):
    exercise = registry.find("03.small_together", Exercise)
    known = next(known for known in exercise.mistakes if "divided already" in known.source)
    feedback = tried[exercise.id, f"line {known.line}"]
    assert "gradients of step 0['blocks.0.attention_norm.weight']" in feedback.tensor and feedback.index == (0,)
    assert "(20 of 35 differ, all of them 1-D)" in feedback.cause


@pytest.mark.timeout(300)
def test_the_references_gradients_are_the_unsharded_twins(workspace):
    solutions = [(exercise, workspace.save(exercise.id, exercise.reference)) for exercise in EXERCISES]
    text, twin = ByteText.from_standard_library(), build_model(SMALL)
    optimizer, expected = torch.optim.SGD(twin.parameters(), lr=RATE), []
    for step in range(STEPS):
        batches = [[text.batch(step, rank, 3, batch_size=2, sequence_length=32)] for rank in range(3)]
        replay_gradients(twin, batches, loss_of)
        expected.append(compared(twin))
        optimizer.step()
        optimizer.zero_grad()
    for behaviour in behaviours(solutions, workspace):
        for trial in (trial for ranks in behaviour.trials for trial in ranks):
            got = [trial.returned[f"gradients of step {step}"] for step in range(STEPS)]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_rules_on_messages_judge_hand_written_steps():
    messages = registry.find("03.in_buckets", Exercise).module().messages
    gradients = {str(number): torch.zeros(1000) for number in range(36)}  # 4000 bytes each

    def wrong(during, after):
        step = Step(
            gradients, [Call("all_reduce", size) for size in during], [Call("all_reduce", size) for size in after]
        )
        right = messages([Step(gradients, [Call("all_reduce", 36_000)] * 3, [Call("all_reduce", 36_000)])], 36_000)
        return [fact for fact, value in messages([step], 36_000).items() if value != right[fact]]

    assert wrong([20_000] * 7, [4000]) == [], "each bucket closed before it would be too full"
    assert wrong([], [36_000] * 4) == ["what leaves during backward"]
    assert wrong([108_000], [36_000]) == ["the largest message"]
    assert wrong([4000] * 36, []) == ["messages a step"]


# --- questions


@pytest.mark.parametrize("item", QUESTIONS, ids=lambda item: item.id)
def test_a_right_number_is_accepted_however_it_is_written_and_slips_are_named(course, item):
    right = item.right()
    for value in (right, right * (1 + item.tolerance / 2), f"{right} {item.unit}"):
        assert answers.grade_answer(item.id, value).passed
    must_name_each_slip(item)


@pytest.mark.parametrize("item", CHOICES, ids=lambda item: item.id)
def test_choices_explain_every_letter(course, item):
    for letter in item.options:
        verdict = answers.grade_answer(item.id, letter)
        assert verdict.passed == (letter == item.right) and item.because[letter] in str(verdict)


# --- the lesson


def test_buckets_and_their_costs():
    assert buckets((3, 3, 3), 5) == [6, 3] and buckets((3, 3), 3) == [3, 3] and buckets((), 3) == []
    found = costs("gpt-tiny", 0.08, 50, 10, ranks=2)
    assert [cost.messages for cost in found] == [37, 6, 1]
    whole = 564_224 / 10e9
    assert found[2].total == found[2].last == pytest.approx(50e-6 + whole), "one message leaves after backward"
    assert [cost.total for cost in found] == pytest.approx([cost.messages * 50e-6 + whole for cost in found])
    assert "37 messages" in display.alt_text(ddp_by_hand.bucket_costs("gpt-tiny", 0.08, 50, 10))


@pytest.mark.timeout(600)
def test_the_references_train_like_the_twin(course):
    # DDP rearranges its buckets in step 2
    hook, buckets, ddp, lab = ddp_by_hand.data_parallel(steps=3, bucket_bytes=80_000)
    for run in (hook, buckets, ddp, lab):
        assert run.verdict == "equal in every bit" and run.bytes_sent == run.payload == 564_224
        assert run.losses == pytest.approx(run.twin_losses, abs=1e-7) and run.moment_bytes == 2 * run.payload
    assert (hook.collectives, buckets.collectives, buckets.calls_in_backward, lab.collectives) == (37, 6, 5, 3)
    assert hook.sent == hook.ready and buckets.payload - buckets.sent[-1] == 65_536
    assert "6 messages instead of 37; 65.5 kB left after backward" in display.alt_text(
        ddp_by_hand.bucket_figure([hook, buckets, ddp, lab])
    )


@pytest.mark.timeout(600)
def test_the_faulty_version_hides_behind_adam(course):
    adamw, sgd = ddp_by_hand.faulty(steps=4).runs
    assert adamw.losses == pytest.approx(adamw.twin_losses, abs=1e-4) and sgd.losses != pytest.approx(
        sgd.twin_losses, abs=1e-4
    )
    groups = {round(ratio) for ratio in adamw.ratios.values()}
    doubled = [name for name, ratio in adamw.ratios.items() if ratio > 1.5]
    assert groups == {1, 2} and len(doubled) == 20 and all("norm" in name or name.endswith("bias") for name in doubled)


@pytest.mark.timeout(600)
def test_without_messages_the_ranks_drift_apart(course):
    rows = ddp_by_hand.drift(steps=2).rows
    assert 0 < float(rows[0][-1]) < float(rows[1][-1])
