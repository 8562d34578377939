"""The roofline of overlap: ratios by hand, the crossover that the simulation finds too, points of runs, the figure."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab import figures
from fsdplab.figures.style import alt_text
from fsdplab.planning import overlap
from fsdplab.planning.links import PRESETS, LinkSpec
from fsdplab.planning.overlap import overlap_of, overlap_point
from fsdplab.planning.planner import plan_spec
from fsdplab.planning.simulation import simulate
from fsdplab.planning.step_time import Compute, work_of
from fsdplab.planning.windtunnel import TARGET_TOKENS
from fsdplab.records import RunRecord

pytestmark = pytest.mark.quick
DATA = Path(__file__).parent.parent / "data"
RECORDED, TUNNEL = DATA / "traces-08", DATA / "wind-tunnel-8b"


def spec_of(**choices):
    return plan_spec("llama-3.1-8b", choices.pop("gpu", "h100"), **{"gpus": 64, "seq": 64} | choices)


def test_the_ratio_is_bytes_over_bandwidth_over_compute():
    spec = spec_of(gpus=8, micro_batch=16)
    found, compute = overlap_of(spec, LinkSpec("1 GB/s", 1e9, 0.0)), Compute(spec, None)
    block = 218_112_000  # parameters of a block of Llama 3.1 8B
    assert found.communication_s["forward"] == pytest.approx(block * 2 * 7 / 8 / 1e9)
    assert found.communication_s["backward"] == pytest.approx(block * (2 + 4) * 7 / 8 / 1e9)
    assert found.compute_s == {"forward": compute.forward_s, "backward": compute.backward_s}
    assert found.ratio("forward") == found.communication_s["forward"] / compute.forward_s


def test_twice_the_tokens_halve_the_ratio():
    small, large = (overlap_of(spec_of(micro_batch=batch)) for batch in (4, 8))
    for phase in overlap.PHASES:
        assert small.ratio(phase, 2 * small.tokens) == pytest.approx(large.ratio(phase))
        assert small.crossover(phase) == pytest.approx(large.crossover(phase))
        assert small.ratio(phase, small.crossover(phase)) == pytest.approx(1)


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "shard_grad_op", "zero2"])
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_the_simulation_hides_from_the_crossover_on(strategy, gpu):
    spec = spec_of(strategy=strategy, gpu=gpu)
    batch = math.ceil(overlap_of(spec).crossover_tokens / spec.seq)  # the fewest that hide every block's

    def exposed(micro_batch: int) -> int:
        """Of the blocks between the first and the last two, which the ends of the phases leave alone."""
        rows = simulate(replace(spec, micro_batch=micro_batch)).table("exposed")
        inner = {f"blocks.{index}" for index in range(2, spec.model.layers - 2)}
        return sum(row["exposed_ns"] for row in rows if row["unit"] in inner)

    # what an all-reduce over replicas lags behind, a block more hides: one sequence fewer shows at the end alone
    fewer = batch * 9 // 10
    assert batch > 2 and exposed(fewer) > 0 and exposed(batch) == 0


def test_a_slower_link_moves_the_crossover():
    fast, slow = (overlap_of(spec_of(), LinkSpec("", rate, 0.0)).crossover_tokens for rate in (100e9, 12.5e9))
    assert slow == pytest.approx(8 * fast)
    late = overlap_of(spec_of(), PRESETS["eth100"]).crossover_tokens  # the same rate, and 20 us a step
    assert late > slow


def test_one_gpu_sends_nothing():
    found = overlap_of(spec_of(gpus=1))
    assert found.crossover_tokens == 0
    assert "sends nothing" in figures.overlap_roofline(spec_of(gpus=1)).layout.title.text


def test_a_recorded_run_lies_on_its_links_line():
    point = overlap_point(RunRecord.load(RECORDED))
    assert point.tokens == 16 * 128 and point.measured == pytest.approx(point.predicted, rel=0.01)


def test_a_run_in_the_wind_tunnel_is_a_point_of_the_job_that_it_stands_for():
    """At the target's tokens, beside the target's ratio: Llama 3.1 8B on 8 H100, 0.127 by windtunnel.py's example."""
    record = RunRecord.load(TUNNEL)
    point = overlap_point(record)
    assert (record.spec["model"], record.spec["batch_size"] * record.spec["sequence_length"]) == ("gpt-20m", 256)
    assert point.tokens == TARGET_TOKENS == 8192 and point.predicted == pytest.approx(0.1275, abs=1e-4)
    assert point.source == "wind tunnel's target, llama-3.1-8b on 8xH100"
    # the tunnel takes its link from the compute of its calibration, which other work on the machine made longer
    assert 0.75 < point.predicted / point.measured < 1.25
    computed = sum(row["compute_ns"] for row in record.table("breakdown"))
    link, steps = record.summary.link, {row["step"] for row in record.table("breakdown")}
    sent = [row["wire_bytes"] for row in record.table("ledger") if row["step"] in steps]
    needed = sum(sent) / link.bytes_per_s + len(sent) * link.latency_s
    assert point.measured == pytest.approx(needed * 1e9 / computed, rel=0.01)


def test_the_figure_puts_it_on_the_jobs_line():
    spec = spec_of(gpus=8, seq=8192)
    drawn = figures.overlap_roofline(spec, RunRecord.load(TUNNEL))
    (point,) = [trace for trace in drawn.data if trace.mode == "markers" and trace.name]
    assert point.x[0] == pytest.approx(8192) and point.name == "full_shard, measured"
    target = next(trace for trace in drawn.data if "wind tunnel's target" in (trace.name or ""))
    at_point = target.y[0] * target.x[0] / point.x[0]
    assert at_point == pytest.approx(0.1275, abs=1e-4) and abs(math.log10(at_point / point.y[0])) < 0.15
    planned = overlap_of(spec)
    assert 0.95 * planned.ratio("forward") < at_point < planned.ratio("backward"), "near the plan's own lines"
    assert "the link is emulated (wind tunnel of" in drawn.layout.title.subtitle.text.replace("<br>", " ")


def test_a_run_in_the_wind_tunnel_without_a_profile_is_refused(tmp_path):
    spec = RunRecord.load(TUNNEL).spec
    with pytest.raises(ValueError, match="run it again with --profile 2"):
        overlap_point(RunRecord(tmp_path, spec=spec))


def test_a_simulated_run_is_a_point_on_the_plans_line_but_for_what_collectives_take_of_its_compute():
    spec = spec_of(micro_batch=40)
    point, found = overlap_point(simulate(spec)), overlap_of(spec)
    seconds = (sum(each.values()) for each in (found.communication_s, found.compute_s))
    communication, compute = seconds
    slowed = work_of(spec).slowed_s / spec.model.layers  # that of the root, a small part, is not told apart
    assert point.tokens == spec.tokens and point.predicted is None
    assert point.measured == pytest.approx(communication / (compute + slowed), rel=0.03)


def test_a_run_without_a_profile_is_refused(tmp_path):
    with pytest.raises(ValueError, match="run it again with --profile 2"):
        overlap_point(RunRecord(tmp_path, spec={"strategy": "full_shard", "engine": "lab", "world_size": 2}))


def test_the_figure_has_a_line_a_phase_that_falls_by_a_decade_in_a_decade():
    spec = spec_of(seq=4096)
    drawn = figures.overlap_roofline(spec, RunRecord.load(RECORDED))
    lines = {trace.name: trace for trace in drawn.data if trace.mode == "lines"}
    assert list(lines)[1] == "backward: hidden from 2,517 tokens on" and len(lines) == 3
    for line in lines.values():
        assert line.y[1] / line.y[0] == pytest.approx(line.x[0] / line.x[1])
    found = overlap_of(spec)
    crossings = [trace.x[0] for trace in drawn.data if trace.marker.symbol == "diamond"]
    assert crossings == pytest.approx([found.crossover(phase) for phase in overlap.PHASES])
    (point,) = [trace for trace in drawn.data if trace.mode == "markers" and trace.name]
    assert point.x[0] == pytest.approx(2048) and point.name.endswith("measured")
    formula = lines["full_shard: its link's formula"]
    assert formula.y[0] * formula.x[0] / point.x[0] == pytest.approx(point.y[0], rel=0.02)
    said = drawn.layout.title.subtitle.text.replace("<br>", " ")
    assert said.startswith("Predicted for llama-3.1-8b, full_shard") and "Measured on 2 CPU ranks" in said
    assert "hidden from 2,517 tokens a rank on" in drawn.layout.title.text.replace("<br>", " ")
    assert "Lines of communication" in alt_text(drawn)


def test_a_simulated_point_is_called_so():
    drawn = figures.overlap_roofline(spec_of(), simulate(spec_of(micro_batch=8)))
    assert [trace.name for trace in drawn.data if trace.mode == "markers" and trace.name] == ["full_shard, simulated"]
    assert "Simulated for 64 GPU ranks" in drawn.layout.title.subtitle.text.replace("<br>", " ")


def test_several_gpus_and_links_are_compared_by_what_hides_last():
    plans = {f"{gpus} {gpu}": spec_of(gpu=gpu, gpus=gpus) for gpu, gpus in (("h100", 8), ("h100", 512), ("a100", 64))}
    drawn = figures.overlap_roofline(plans)
    lines = [trace for trace in drawn.data if trace.mode == "lines"]
    assert [line.name.split(",")[0] for line in lines] == list(plans)
    tokens = {name: overlap_of(spec).crossover_tokens for name, spec in plans.items()}
    first, last = min(tokens, key=tokens.get), max(tokens, key=tokens.get)
    title = drawn.layout.title.text.replace("<br>", " ")
    assert f"soonest on {first} (" in title and f"last on {last} (" in title
    assert all(math.isfinite(value) for line in lines for value in (*line.x, *line.y))


@pytest.mark.parametrize("count", [0, 7])
def test_no_or_too_many_plans_are_refused(count):
    with pytest.raises(ValueError, match="draws 1 to 6 plans"):
        figures.overlap_roofline({str(index): spec_of() for index in range(count)})
