"""Notebook 03: the references' gradients are the twin's, and what is trained equals it."""

from __future__ import annotations

import pytest
import torch

from fsdplab.teaching import ddp_by_hand
from fsdplab.teaching.core import display, registry
from fsdplab.teaching.core.exercise import Call
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.run_submission import behaviours
from fsdplab.teaching.lessons.nb03_ddp_by_hand.lesson import buckets, costs
from fsdplab.teaching.lessons.nb03_ddp_by_hand.on_ranks import RATE, SMALL, STEPS, Step, compared
from fsdplab.workloads import ByteText, build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

ITEMS = registry.items_of("03")
EXERCISES = [item for item in ITEMS if isinstance(item, Exercise)]


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
def test_the_functions_in_use_train_like_the_twin(course):
    own = registry.find("03.average_in_hook").reference + "\n# mine\n"
    course.workspace.save("03.average_in_hook", own)
    course.workspace.note_pass("03.average_in_hook", own)
    # DDP rearranges its buckets in step 2
    hook, buckets, ddp, lab = ddp_by_hand.data_parallel(steps=3, bucket_bytes=80_000)
    assert (hook.name, buckets.name) == ("your hook", "the reference buckets of 80.0 kB")
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
