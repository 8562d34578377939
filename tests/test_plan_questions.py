"""Questions as people ask them: the command that answers, and the answer beside arithmetic that is written here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdplab.planning.hardware import GPUS
from fsdplab.planning.planner import parse_sweep, plan_spec, with_value
from tests.test_plan import ended

pytestmark = pytest.mark.quick
H100 = 80 * 2**30  # bytes
RTX_4090 = 24 * 2**30
FLOPS = 0.741 * 989e12  # that products reach on an H100
EIGHT, SEVENTY = 8_030_261_248, 70_553_706_496  # parameters


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs a command, and returns what it prints on one line, and its JSON."""

    def run(command: str) -> tuple[str, dict[str, Any]]:
        path = tmp_path / "answer.json"
        code, out, said = ended([*command.split()[1:], "--json", str(path)], capsys)
        assert code == 0, said
        return " ".join(out.split()), json.loads(path.read_text())

    return run


def test_which_is_the_largest_model_for_eight_cards(asked):
    """16 bytes a parameter over 8 H100: 43 billion parameters at most, so 13 B trains and 70 B does not."""
    models = "llama-3.1-8b,llama-2-13b,llama-3.1-70b"
    said, found = asked(f"fsdplab plan sweep model={models} --gpu h100 --world-size 8 --checkpoint full")
    fits = {row["model"]: row["fits"] != "no" for row in found["rows"]}
    parameters = {row["model"]: row["parameters"] for row in found["rows"]}
    assert fits == {name: 16 * count / 8 < H100 for name, count in parameters.items()}
    assert "model llama-3.1-70b: does not fit" in said and [*fits.values()] == [True, True, False]


def test_how_few_cards_train_a_model_with_a_sequence(asked):
    """8 B parameters need 128 GB of states: one H100 of 85.9 GB holds them not, two do. 70 B: 1,129 GB, 14 cards; of
    whole nodes 16, where gathered blocks fit beside them only if tensor parallelism cuts them, so 24 without it.
    """
    said, _ = asked("fsdplab plan fit --model llama-3.1-8b --gpu h100 --world-size 8 --sequence-length 8192")
    assert 1 < 16 * EIGHT / H100 < 2 and "fewest GPUs: 2 with" in said
    large = "fsdplab plan fit --model llama-3.1-70b --gpu h100 --world-size 16 --sequence-length 4096"
    said, _ = asked(large)
    assert 13 < 16 * SEVENTY / H100 < 14 and "fewest GPUs: 16 with" in said
    said, _ = asked(f"{large} --keep tp")
    assert "fewest GPUs: 24 with" in said


def test_lora_or_full(asked):
    """8 B on 4 x RTX 4090: 32.1 GB of states a card do not fit; adapters leave 16.1 / 4 GB of a bf16 base. A frozen
    matrix has two products of three: up to 1.5 times the speed.
    """
    command = "fsdplab plan sweep lora-rank=0,16 --model llama-3.1-8b --gpu 4090 --world-size 4 --checkpoint full"
    _, found = asked(f"{command} --loss chunked")
    full, adapters = found["rows"]
    assert 16 * EIGHT / 4 > RTX_4090 > 2 * EIGHT / 4
    assert (full["fits"], adapters["fits"]) == ("no", "yes")
    by_category = adapters["memory_bytes"]["by_category"]
    assert by_category["sharded_parameters"] == pytest.approx(2 * EIGHT / 4, rel=0.03), "and adapters of rank 16"
    faster = adapters["tokens_per_s_per_gpu"] / full["tokens_per_s_per_gpu"]
    assert 1.1 < faster < 1.5


def test_how_large_can_the_batch_be(asked):
    """Eager: 12 bytes a logit, 128,256 words, 4,096 tokens: 6.3 GB a sequence, beside its kept activations."""
    command = "fsdplab plan --model llama-3.1-8b --gpu h100 --world-size 8 --checkpoint full"
    said, _ = asked(command)
    found = re.search(r"--batch-size (\d+) is the largest that fits: ([\d.]+) GB at the peak", said)
    most = int(found[1])
    _, fitting = asked(f"{command} --batch-size {most}")
    _, too_large = asked(f"{command} --batch-size {most + 1}")
    assert fitting["fits"] != "no" and too_large["fits"] == "no"
    logits = 12 * 128_256 * 4096
    kept = 32 * 2 * 4096 * 4096  # of 32 blocks their inputs, in bf16
    more = too_large["memory_bytes"]["total"] - fitting["memory_bytes"]["total"]
    assert more == pytest.approx(logits + kept, rel=0.02)
    assert most == pytest.approx((H100 - 4 * EIGHT / 8 - 8 * EIGHT / 8 - 2**30) / (logits + kept), abs=1)


def test_is_this_clusters_network_enough(asked):
    """A step of 8 B on two nodes sends 58 GB a rank, over the eight network cards of a node. 400 Gb/s: 0.16 s, which
    hide behind 0.5 s of compute; 100 Gb/s Ethernet at the 0.67 that rings over two nodes reach: 0.87 s, which do not.
    """
    command = "fsdplab plan sweep network=ib400,eth100 --model llama-3.1-8b --gpu h100 --world-size 16"
    _, found = asked(command)
    fast, slow = found["rows"]
    assert fast["exposed_s"] / fast["step_time_s"] < 0.1 < 0.5 < slow["exposed_s"] / slow["step_time_s"]
    sent = slow["comm_bytes_per_step"]["shard"]
    assert slow["communication_s"] == pytest.approx(sent / (8 * 12.5e9 * 0.7 / (1 + 0.1 * (2**0.5 - 1))), rel=0.05)
    assert slow["communication_s"] > slow["compute_s"] > 2 * fast["communication_s"]


def test_what_does_a_second_node_buy(asked):
    """70 B under full recomputation with gradients in bf16: of two nodes more than 1.9 times the tokens, and half of
    the states: 16 bytes a parameter over 8 and 16 cards.
    """
    command = "fsdplab plan sweep world-size=8,16 --model llama-3.1-70b --gpu h100 --checkpoint full"
    said, found = asked(f"{command} --reduce-dtype bf16")
    one, two = found["rows"]
    assert one["fits"] == "no" and two["fits"] == "likely" and 16 * SEVENTY / 8 > H100 > 16 * SEVENTY / 16
    speeds = [row["tokens_per_s_per_gpu"] * row["gpus"] for row in (one, two)]
    assert 1.9 < speeds[1] / speeds[0] < 2 and all(f" {speed:,.0f} " in said for speed in speeds)


def test_how_long_and_how_much_for_a_trillion_tokens(asked):
    """6 operations a parameter and token, at what products reach of 16 H100: 1,141 hours at the least; attention, the
    element-wise operators and the loss make it twice that.
    """
    command = "fsdplab plan --model llama-3.1-8b --gpu h100 --world-size 16 --tokens 1e12 --price 2.5"
    said, found = asked(command)
    least = 6 * EIGHT * 1e12 / (16 * FLOPS) / 3600
    assert least < found["hours"] < 2.1 * least
    assert found["gpu_hours"] == pytest.approx(16 * found["hours"])
    hours, dollars = found["hours"], 2.5 * found["gpu_hours"]
    assert f"1,000,000,000,000 tokens {hours:,.1f} hours, {16 * hours:,.0f} GPU-hours, ${dollars:,.0f}" in said
    said, found = asked(command.replace("plan", "plan fit"))
    given = found["as_given"]
    assert f"{given['gpu_hours'] / 16:,.1f}" in said and given["dollars"] == pytest.approx(2.5 * given["gpu_hours"])


def test_what_a_card_holds_is_explained_where_it_is_first_named(asked):
    said, _ = asked("fsdplab plan --model llama-3.1-8b --sequence-length 1024 --micro-batches 2")
    assert "card: 85.9 GB: the 80 GiB (2^30 bytes each) of the H100 SXM 80GB; sizes here are in GB of 10^9" in said
    assert said.index("80 GiB") < said.index("memory of a rank") and pytest.approx(85.9, abs=0.01) == H100 / 1e9
    assert "1 sequence of 1,024 tokens a micro-batch, 2 micro-batches a step" in said
    assert all(f"{gpu.memory_bytes / 2**30:.4g} GiB" in gpu.memory_words for gpu in GPUS.values())


# ---- values of a sweep that are words


def test_words_are_swept():
    assert parse_sweep("model=gpt2, llama-3.1-8b") == ("model", ["gpt2", "llama-3.1-8b"])
    assert parse_sweep("checkpoint=none,full") == ("checkpointing", ["none", "full"])
    spec = plan_spec("llama-3.1-8b", "h100", gpus=16, strategy="hybrid_shard", shard_size=8)
    assert with_value(spec, "gpu", "a100-40gb").gpu.memory_bytes == 40 * 2**30
    assert with_value(spec, "strategy", "zero2").strategy == "zero2"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("model=gpt3", "gpt3"),
        ("gpu=h1000", "unknown GPU 'h1000'"),
        ("network=ib500", "ib500"),
        ("strategy=full_shardd", "--strategy is 'full_shardd' (did you mean full_shard"),
        ("loss=eager,,fused", "expected 1 to 64 words with commas between"),
        ("loss=", "expected 1 to 64 words with commas between"),
        ("batch-size=4,x", "expected 1 to 64 whole numbers"),
        ("colour=red", "expected one of world-size, "),
    ],
)
def test_a_wrong_sweep_is_refused_in_one_line(values, words, capsys):
    code, out, said = ended(["plan", "sweep", values, "--world-size", "16"], capsys)
    assert code == 2 and not out and words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [(["--price", "2"], "give its --tokens too"), (["--price", "-1", "--tokens", "1e9"], "--price is -1.0")],
)
def test_a_price_needs_tokens_and_is_above_nothing(given, words, capsys):
    code, out, said = ended(["plan", *given], capsys)
    assert code == 2 and not out and words in said and said.count("\n") == 1
