"""What the instrument draws, without a browser: outcomes, the crossover, A and B, guesses, and wrong input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, is_typeddict

import pytest

from fsdplab.figures.lab import messages, outcomes
from fsdplab.figures.lab.a_beside_b import Guess, difference, judge
from fsdplab.figures.lab.answers import Look, view_of
from fsdplab.figures.lab.asked import changes_of, look_of
from fsdplab.figures.lab.choices import PRESETS, Choices, check
from fsdplab.figures.lab.outcomes import Outcome, Step, crossover, outcome
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.records import RunRecord, Summary
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import steady
from fsdplab.widgets.lab_state import LabState
from fsdplab.widgets.strategy_lab import Instrument, StrategyLab

pytestmark = pytest.mark.quick
FIXED = {"device": "cpu"}
JOB = RunSpec(strategy="full_shard", model="gpt-20m", batch_size=2, sequence_length=128, link="150MB/s", device="cpu")
ENDS = PRESETS["laptop"].links
ON_GPUS = PRESETS["8 x H100"].choices


def answer(choices: Choices, look: Look, fixed: dict[str, Any], records: Any = ()) -> dict[str, Any]:
    return view_of(choices, look, fixed).answer(records)


def marks(choices: Choices, look: Look, fixed: dict[str, Any]) -> list[dict[str, Any]]:
    return view_of(choices, look, fixed).marks()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No runs of an earlier kernel are met."""
    monkeypatch.chdir(tmp_path)


# ---- outcomes


def test_an_outcome_is_the_steady_cards_step_and_the_predicted_memory() -> None:
    found, simulated = outcome(JOB), steady(JOB)
    assert found.step is not None and found.step.total == pytest.approx(simulated.summary.step_time_s.median)
    assert found.step.words == "919 ms, 65 % hidden" and round(found.peak / 1e6) == 232 and found.sent == 128944128
    waited = sum(message.waited for message in found.blocks["messages"])
    assert waited == pytest.approx(found.step.exposed * 1e3, abs=0.1)
    assert sum(end - start for start, end in found.blocks["exposed"]) == pytest.approx(waited, abs=0.1)
    late = outcome(replace(JOB, prefetch=0)).blocks["messages"][2]
    assert late[2:6] == ("blocks.1", "forward", "all-gather", "3.55 MB")
    assert late.cause == outcomes.CAUSES["late_start"]


def test_what_cannot_be_simulated_says_why() -> None:
    found = outcome(replace(JOB, link=None))
    assert (found.step, found.blocks, found.why_no_step) == (None, None, "not simulated without a link")
    assert found.peak and "torch-fsdp2" in outcome(replace(JOB, engine="torch-fsdp2", link=None)).why_no_memory


@pytest.mark.parametrize("units", ["linear", "model"])
def test_units_without_a_step_say_why(units: str) -> None:
    rows = answer(Choices(units=units), Look(), FIXED)["rows"]
    assert {(row["step"], row["why_no_step"]) for row in rows} == {
        (None, f"not simulated in units {units}, only in blocks")
    }
    assert all(row["peak"] for row in rows)
    refused = answer(replace(ON_GPUS, units=units), Look(), {})["errors"]
    assert refused == {
        "units": f"units is {units!r}; plans of published models have blocks as units: expected auto or block"
    }
    assert answer(replace(ON_GPUS, units="block"), Look(), {})["errors"] == {}
    assert (
        outcome(replace(JOB, link=None, emulate="8xH100", as_model="llama-3.1-8b")).why_no_step
        == "not simulated in the wind tunnel"
    )


def test_over_two_nodes_the_network_carries_less_of_hybrid_shard() -> None:
    preset = PRESETS["two nodes"]
    shown = answer(preset.choices, Look(*preset.sides), {})
    assert "Over the network, its nodes send 32.1 GB each, 26.1 GB (45 %) less." in shown["difference"]
    runs = {run.strategy: run for run in check(preset.choices).runs}
    full, hybrid = outcome(runs["full_shard"]), outcome(runs["hybrid_shard"])
    assert full.sent_by_a_node == full.sent, "one ring through all GPUs leaves a node once"
    parameters = 8_030_261_248
    # an all-reduce between two nodes sends each fp32 gradient once, whichever GPU has it
    assert hybrid.sent_by_a_node == pytest.approx(4 * parameters, rel=1e-3)
    assert "network" not in answer(ON_GPUS, Look(), {})["difference"]


def test_a_plan_is_simulated_with_the_link_and_the_card_of_the_choices() -> None:
    (plan,) = check(replace(ON_GPUS, strategies=("full_shard",), link="1GB/s")).runs
    assert isinstance(plan, PlanSpec) and plan.gpu.link.bytes_per_s == 1e9 and plan.gpu.memory_bytes == 80 * 2**30
    slow, fast = (outcome(plan), outcome(check(replace(ON_GPUS, strategies=("full_shard",))).runs[0]))
    assert slow.peak == fast.peak and slow.step.exposed > 20 * fast.step.exposed
    (wide,) = check(replace(PRESETS["two nodes"].choices, strategies=("hybrid_shard",))).runs
    assert wide.gpu.nic_bytes_per_s == 12.5e9 / 8, "a node's GPUs share its network"


# ---- the crossover


@pytest.mark.parametrize("strategy", ["no_shard", "zero2", "full_shard"])
def test_no_rank_waits_between_two_units_from_the_crossover_on(strategy: str) -> None:
    run = replace(JOB, strategy=strategy)
    found = crossover(run, ENDS)
    for factor, waits in ((1.0, False), (0.98, True)):
        record = steady(replace(run, link=f"{factor * found[0] / 1e6:.3f}MB/s"))
        spans = sorted(
            (r["start_ns"], r["end_ns"], r["phase"], r["unit"])
            for r in record.table("timeline")
            if r["lane"] == "compute"
        )
        gaps = [
            later[0] - span[1] for span, later in zip(spans, spans[1:])
            if span[2] == later[2] and "root" not in (span[3], later[3])
        ]  # fmt: skip
        assert (sum(gaps) > 1000) is waits, f"{strategy} at {factor} of its crossover: {sum(gaps)} ns between units"
        if not waits:
            assert record.summary.comm.exposed_s == pytest.approx(found[1], rel=0.05)


def test_the_crossover_does_not_depend_on_the_runs_own_link() -> None:
    outcomes._crossover.cache_clear()
    links = ("150MB/s", "4GB/s", "150MB/s,1ms")
    first, other, slow_to_begin = (crossover(replace(JOB, link=link), ENDS) for link in links)
    assert first == other and outcomes._crossover.cache_info().currsize == 2, (
        "a link's latency counts, its speed does not"
    )
    assert slow_to_begin[0] > first[0]
    outcomes._outcome.cache_clear()
    assert outcome(JOB) is outcome(replace(JOB, card=300_000_000)), "a dragged card costs no simulation"
    longer = crossover(replace(JOB, batch_size=4), ENDS)
    assert longer[0] == pytest.approx(crossover(JOB, ENDS)[0] / 2, rel=0.05), "twice the compute"


def test_without_prefetch_no_speed_hides_all_and_a_fast_range_hides_everywhere() -> None:
    assert crossover(replace(JOB, prefetch=0), ENDS) is None
    assert crossover(JOB, (1e9, 1e10))[0] == 1e9
    found = marks(Choices(prefetch=0), Look(), FIXED)
    assert [mark["words"] for mark in found] == [
        "A from 193 MB/s: only the ends exposed, 83.0 ms",
        "B waits at every speed",
    ]


# ---- A and B


def an_outcome(peak: int = 200, step: float = 1.0, exposed: float = 0.25, sent: int = 100) -> Outcome:
    return Outcome({"activations": peak * 10**6}, sent * 10**6, Step(step - exposed - 0.25, 0.25, exposed))


def test_the_difference_has_the_numbers_of_both() -> None:
    said = difference(an_outcome(), an_outcome(150, 1.1, 0.35, 150), ("no_shard", "full_shard"))
    assert said == (
        "B, full_shard, needs 150 MB a rank, 50.0 MB (25 %) less than A, no_shard. Its step takes 1.10 s,"
        " 100 ms (10 %) longer. It sends 1.5 times as much, and 350 ms are exposed (A: 250 ms)."
    )
    same = difference(an_outcome(), an_outcome(), ("a", "b"))
    assert "as much as A, a." in same and "as long." in same and "sends as much" in same
    assert difference(Outcome(None, None, None), an_outcome(), ("a", "b")) == ""
    alone = difference(an_outcome(sent=0), an_outcome(), ("a", "b"))
    assert "It sends 100 MB, where A sends nothing" in alone, "one rank alone sends nothing"
    assert "sends as much, and" in difference(an_outcome(), an_outcome(), ("a", "b"), "bf16")
    halved = difference(an_outcome(), an_outcome(sent=97), ("a", "b"), "bf16")
    assert "0.97 times as much (gathers in bf16, reductions in fp32)" in halved


@pytest.mark.parametrize(
    "faster,memory,words",
    [
        ("A", "150MB", "Right: A has the shorter step (A 1.00 s, B 1.10 s). You said 150 MB for B: it "
         "needs 200 MB (25 % too little)."),
        ("B", "210MB", "You said B: A has the shorter step (A 1.00 s, B 1.10 s). You said 210 MB for B: it "
         "needs 200 MB (within 10 %)."),
    ],
)  # fmt: skip
def test_a_guess_stands_beside_the_answer(faster: str, memory: str, words: str) -> None:
    assert judge(Guess(True, True, faster, memory), an_outcome(), an_outcome(step=1.1)) == words


def test_a_number_alone_is_a_guess_in_the_unit_behind_the_field() -> None:
    for preset, memory, said in (("laptop", "180", "180 MB"), ("8 x H100", "40", "40.0 GB"), ("laptop", "2e2", None)):
        assert answer(PRESETS[preset].choices, Look(guess=Guess(on=True)), {})["unit"] == (
            "GB" if "H" in preset else "MB"
        )
        shown = answer(PRESETS[preset].choices, Look(guess=Guess(True, True, "A", memory)), {})
        assert f"You said {said} for B" in shown.get("judged", "") if said else shown["errors"]["guess"]


def test_steps_that_are_nearly_equal_are_equal() -> None:
    said = judge(Guess(True, True, "equal", "200MB"), an_outcome(), an_outcome(step=1.01))
    assert said.startswith("Right: the steps are equally long")


@pytest.mark.parametrize(
    "faster,memory,words",
    [
        ("", "200MB", "First choose A, B or equal: whose step do you expect to be shorter?"),
        ("C", "200MB", "First choose A, B or equal"),
        ("A", "much", "The memory is 'much'; expected a number of MB, or a size with its unit, such as 1.5GB."),
        ("A", "", "Now write how much memory you expect B to need, in MB: a rough number is enough."),
        ("A", "-3", "expected a number of MB"),
    ],
)
def test_a_wrong_guess_is_refused_and_the_answer_stays_hidden(faster: str, memory: str, words: str) -> None:
    guess = Guess(True, True, faster, memory)
    with pytest.raises(ValueError, match=re.escape(words)):
        judge(guess, an_outcome(), an_outcome())
    shown = answer(Choices(), Look(guess=guess), FIXED)
    assert shown["hidden"] and words in shown["errors"]["guess"] and "rows" not in shown


def test_a_guess_hides_every_figure_until_it_is_given() -> None:
    hidden = answer(Choices(), Look(guess=Guess(on=True)), FIXED)
    assert marks(Choices(), Look(guess=Guess(on=True)), FIXED) == [] == marks(Choices(ranks=9), Look(), FIXED)
    assert hidden["hidden"] and hidden["errors"] == {} and not {"rows", "timeline", "difference"} & set(hidden)
    shown = answer(Choices(), Look(guess=Guess(True, True, "A", "232MB")), FIXED)
    assert (
        shown["judged"].startswith("Right: A has the shorter step (A 855 ms, B 919 ms).")
        and "within 10 %" in shown["judged"]
    )


# ---- all that is drawn


def test_the_default_scenario() -> None:
    shown = answer(Choices(), Look(), FIXED)
    json.dumps(shown)
    assert [(row["name"], round(row["step_s"] * 1e3)) for row in shown["rows"]] == [
        ("no_shard", 855), ("zero1", 755), ("zero2", 755), ("shard_grad_op", 755), ("full_shard", 919)
    ]  # fmt: skip
    assert shown["memory_title"] == "Memory: no_shard is 43.4 MB over the card" and shown["card"] == 330_000_000
    assert shown["step_title"] == "Shortest step: 3 of 5 are equal"
    assert shown["clock"] == "simulated on the steady card"
    assert answer(PRESETS["8 x H100"].choices, Look(), {})["step_title"] == "Shortest step: 3 of 5 are equal"
    assert [run["side"] for run in shown["timeline"]] == ["A", "B"] and shown["rows"][0]["over"] == 43433628


def test_the_card_marks_what_exceeds_it() -> None:
    titles = {card: answer(Choices(card=card), Look(), FIXED)["memory_title"] for card in ("250MB", "1GB", "none")}
    assert titles == {
        "250MB": "Memory: 4 of 5 are over the card of 250 MB", "1GB": "Memory: all fit the card of 1.00 GB",
        "none": "Memory of a rank at its peak",
    }  # fmt: skip


def test_a_pinned_run_keeps_its_settings_and_names_those_that_differ() -> None:
    look = Look("full_shard", "full_shard", pinned=Choices())
    shown = answer(Choices(prefetch=0, link="300MB/s"), look, FIXED)
    first = shown["rows"][0]
    assert (first["name"], first["note"], first["step_words"]) == (
        "full_shard (A)", "prefetch 1, 150MB/s", "919 ms, 65 % hidden"
    )  # fmt: skip
    assert "than A, full_shard (prefetch 1, 150MB/s)" in shown["difference"] and len(shown["rows"]) == 6


def test_wrong_choices_that_were_pinned_are_passed_over() -> None:
    shown = answer(Choices(), Look("full_shard", "zero1", pinned=Choices(card="much")), FIXED)
    assert len(shown["rows"]) == 5 and shown["a"] == "full_shard" and "pinned" not in shown["rows"][0]


@pytest.mark.parametrize(
    "choices,name",
    [
        (Choices(card="much"), "card"), (Choices(link="fast"), "link"), (Choices(preset="cluster"), "preset"),
        (Choices(tokens=200), "tokens"), (Choices(strategies=()), "strategies"),
        (Choices(engines=("torch-fsdp2",)), "engines"), (replace(ON_GPUS, link="none"), "link"),
        (replace(ON_GPUS, model="gpt-20m"), "model"), (replace(ON_GPUS, ranks=3), "ranks"),
    ],
)  # fmt: skip
def test_a_wrong_choice_is_named_and_nothing_is_drawn(choices: Choices, name: str) -> None:
    shown = answer(choices, Look(), FIXED)
    assert list(shown) == ["errors"] and list(shown["errors"]) == [name]


def a_record(peak: int, step: float, **changes: Any) -> RunRecord:
    spec = replace(JOB, strategy="no_shard", card=330_000_000, **changes).as_dict()
    content = {"peak_memory_bytes": {"total": peak}, "step_time_s": {"median": step, "min": step}}
    return RunRecord(Path("nowhere"), spec=spec, environment={}, summary=Summary.from_dict(content))


def test_measured_runs_lie_over_the_simulation_of_the_same_settings_only() -> None:
    records = [
        a_record(373, 0.8),
        a_record(374, 0.9),
        a_record(1, 0.1, prefetch=0),
        a_record(2, 0.2, engine="torch-ddp", link=None),
    ]
    rows = {row["name"]: row["measured"] for row in answer(Choices(card="400MB"), Look(), FIXED, records)["rows"]}
    assert rows["no_shard"] == {"peak": 374, "step_s": 0.9, "peak_words": "374 B", "step_words": "900 ms"}
    assert rows["full_shard"] is None, "another strategy was measured"
    assert answer(Choices(link="300MB/s"), Look(), FIXED, records)["rows"][0]["measured"] is None


# ---- the widget


def test_what_the_page_asks_for_is_taken_and_the_rest_ignored() -> None:
    asked = {"link": "300MB/s", "strategies": ["zero2", "full_shard"], "colour": "red", "tokens": 256}
    assert changes_of(asked, Choices()) == {"link": "300MB/s", "strategies": ("zero2", "full_shard")}
    assert changes_of({"preset": "no such"}, Choices()) == {"preset": "no such"}, "which the choices then refuse"
    look = look_of({"a": "zero2", "b": "nobody", "pin": True, "guess": {"on": True, "x": 1}}, Look(), Choices())
    assert (look.a, look.b, look.pinned, look.guess) == ("zero2", "full_shard", Choices(), Guess(on=True))
    assert look_of({"pin": True}, look, Choices(prefetch=0)).pinned == Choices(), "A stays as it was pinned"
    assert look_of({"pin": False}, look, Choices()).pinned is None


def test_the_answer_repeats_the_number_of_the_question() -> None:
    state, pressed = LabState(FIXED), []
    instrument = Instrument(state, lambda: pressed.append("measure"))
    instrument.asked = {"n": 7, "choices": {"prefetch": 0}, "a": "zero1", "b": "full_shard"}
    assert instrument.answer["n"] == 7 and instrument.answer["a"] == "zero1" and state.choices.prefetch == 0
    instrument.asked = {"n": 8, "choices": {"card": "much"}}
    assert instrument.answer["errors"] == {"card": state.request.errors["card"]} and instrument.answer["n"] == 8
    instrument.pressed = {"n": 8, "what": "format the disk"}
    instrument.pressed = {"n": 9, "what": "measure"}
    assert pressed == ["measure"]


def test_a_preset_brings_its_choices_and_cannot_be_measured() -> None:
    lab = StrategyLab(FIXED, preset="two nodes", tokens=8192)
    assert lab.state.choices.tokens == 8192 and lab.state.choices.model == "llama-3.1-8b"
    assert (lab.instrument.answer["a"], lab.instrument.answer["b"]) == ("full_shard", "hybrid_shard")
    assert "cannot be measured" in lab.instrument.progress["message"]
    with pytest.raises(RuntimeError, match="simulated and cannot be measured"):
        lab.run(1)
    lab.instrument.asked = {"n": 1, "choices": {**lab.instrument.answer["asked"]["choices"], "preset": "laptop"}}
    assert lab.state.choices == Choices() and lab.instrument.progress["what"] == "Measure 5 runs"
    with pytest.raises(ValueError, match="preset is 'cluster'; expected one of laptop"):
        StrategyLab(FIXED, preset="cluster")
    lab.instrument.asked = {"n": 2, "choices": {"preset": "cluster"}}
    assert list(lab.instrument.answer["errors"]) == ["preset"]


def test_the_sizes_of_a_batch_that_are_fixed_set_the_tokens() -> None:
    assert LabState({"batch_size": 3, "sequence_length": 32}).choices.tokens == 96
    assert LabState({"sequence_length": 32}).choices.tokens == 64 and LabState({}).choices.tokens == 256
    (spec,) = LabState({"batch_size": 3, "sequence_length": 32}, strategies=("full_shard",)).request.specs
    assert (spec.batch_size, spec.sequence_length) == (3, 32)


# ---- the messages and the page's script


SCRIPT = (Path(messages.__file__).parent / "instrument.js").read_text(encoding="utf-8")
READ_AS = {  # variable of the script -> the messages that it holds
    "answer": (messages.Drawn, messages.Hidden, messages.AnswerTo),
    "offers": (messages.Offers,),
    "preset": (messages.PresetOffer,),
    "asked": (messages.Asked,),
    "row": (messages.Row, messages.Change),
    "band": (messages.Band,),
    "now": (messages.Progress,),
    "more": (messages.More, messages.Row),
}
OF_THE_DOM = {"replaceChildren", "map", "includes", "filter"}


@pytest.mark.parametrize("variable", READ_AS)
def test_the_script_reads_keys_that_the_messages_have(variable: str) -> None:
    keys = {key for message in READ_AS[variable] for key in message.__annotations__}
    read = set(re.findall(rf"\b{variable}\??\.(\w+)", SCRIPT))
    assert read and read - OF_THE_DOM <= keys, f"{variable}: {read - OF_THE_DOM - keys}"


def test_every_key_that_is_sent_is_read() -> None:
    sent = {
        f"{name}.{key}": key
        for name, each in vars(messages).items()
        if is_typeddict(each)
        for key in each.__annotations__
    }
    unread = {name for name, key in sent.items() if not re.search(rf"\b{key}\b", SCRIPT)}
    assert len(sent) > 60 and unread == {"Change.gain"}, "rows are sorted by it before they are sent"
