"""The choices of the strategy lab, its presets, and the runs that they describe.

A preset is a machine with the choices that it begins with. The laptop's runs can be simulated and measured; those on
GPUs are simulated by the planner. A wrong choice gives one line at one control: that of the field that `RunSpec`
blames.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fsdplab.common.names import IN_GROUPS, OVER_ALL_RANKS
from fsdplab.common.sizes import parse_size
from fsdplab.figures.view import RunView
from fsdplab.planning.links import LinkError, parse_link
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.planner import plan_spec
from fsdplab.sessions.spec import CHECKPOINTS, ENGINES, PRECISIONS, STRATEGIES, UNITS, RunSpec, SpecError, near_matches
from fsdplab.workloads import BYTE_VOCABULARY
from fsdplab.workloads import PRESETS as WORKLOADS

MODELS = tuple(name for name, model in WORKLOADS.items() if model.vocabulary == BYTE_VOCABULARY)
TARGETS = tuple(name for name in WORKLOADS if name not in MODELS)  # published models, for GPUs and the wind tunnel
RANKS, PREFETCH, SHARD_SIZES = (1, 2, 3, 4), (0, 1, 2, 3, 4), (1, 2, 3, 4)
NO_LINK, TUNNEL = "none", "wind tunnel"
TUNNELS = ("8xH100", "64xH100", "8xA100")  # proposals; RunSpec reads others too
MOST_STEPS, MOST_TOKENS = 200, 2**20
# what is said of a wrong value; `{got}` is the value
STEPS_WORDS = f"steps is {{got}}; expected a whole number from 1 to {MOST_STEPS}"
CARD_WORDS = "card is {got}; expected a size such as 300MB, 1.5GB or 2GiB, or nothing"
TUNNEL_WORDS = f"wind tunnel is {{got}}; expected a number of cards and their name, such as {' or '.join(TUNNELS[:2])}"
NOTHING_CHOSEN = "nothing is chosen; expected at least one"
TUNNEL_FORM = r"\s*[1-9]\d*\s*x\s*\S+.*"
SEQUENCE, GPU_SEQUENCE = 128, 4096  # tokens of a sequence, where a rank reads as many and the model takes them

# Choices that the twin, a plain loop in one process, lacks. (A wind tunnel and profiling add steps, so it has those.)
_NOT_OF_THE_TWIN = ("card", "checkpoint", "prefetch")


# ---- one control alone

Judge = Callable[["Choices"], str | None]  # the error of a choice, in one line


def _one_of(name: str, offered: Callable[[], Iterable[str | int]]) -> Judge:
    def judge(choices: Choices) -> str | None:
        got, expected = getattr(choices, name), list(offered())
        if got in expected and not isinstance(got, bool):
            return None
        near = near_matches(got, [str(each) for each in expected]) if isinstance(got, str) else ""
        return f"{name} is {got!r}{near}; expected one of {', '.join(map(str, expected))}"

    return judge


def _some_of(name: str, expected: tuple[str, ...]) -> Judge:
    def judge(choices: Choices) -> str | None:
        got = getattr(choices, name)
        unknown = [each for each in got if each not in expected]
        if unknown:
            return f"unknown {unknown[0]!r}{near_matches(unknown[0], expected)}; expected some of {', '.join(expected)}"
        return None if got else f"{NOTHING_CHOSEN} of {', '.join(expected)}"

    return judge


def _judge_engines(choices: Choices) -> str | None:
    if words := _some_of("engines", tuple(ENGINES))(choices):
        return words
    idle = [
        engine for engine in choices.engines if engine != "twin" and not set(ENGINES[engine]) & set(choices.strategies)
    ]
    if idle and _some_of("strategies", STRATEGIES)(choices) is None:
        return (
            f"{idle[0]} does {' and '.join(ENGINES[idle[0]])}, none of the chosen strategies; choose one of them, or"
            " leave the engine out"
        )
    return (
        None
        if choices.engines != ("twin",)
        else "the twin alone has nothing to be compared with; choose another engine too"
    )


def _judge_steps(choices: Choices) -> str | None:
    got = choices.steps
    fits = isinstance(got, int) and not isinstance(got, bool) and 1 <= got <= MOST_STEPS
    return None if fits else STEPS_WORDS.format(got=repr(got))


def _judge_tokens(choices: Choices) -> str | None:
    got = choices.tokens
    if not isinstance(got, int) or isinstance(got, bool) or not 1 <= got <= MOST_TOKENS:
        return f"tokens is {got!r}; expected a whole number from 1 to {MOST_TOKENS}"
    return None


def _judge_link(choices: Choices) -> str | None:
    on_gpus = bool(PRESETS[choices.preset].gpu) if choices.preset in PRESETS else False
    if choices.link in (NO_LINK, TUNNEL):
        return f"link is {choices.link!r}; expected a rate between the GPUs, such as 450GB/s" if on_gpus else None
    try:
        parse_link(choices.link)
    except LinkError as error:
        return str(error)
    return None


def _judge_card(choices: Choices) -> str | None:
    try:
        parse_card(choices.card)
    except ValueError as error:
        return str(error)
    return None


def _judge_tunnel(choices: Choices) -> str | None:
    if choices.link != TUNNEL or re.fullmatch(TUNNEL_FORM, choices.tunnel):
        return None
    return TUNNEL_WORDS.format(got=repr(choices.tunnel))


def _judge_target(choices: Choices) -> str | None:
    return _one_of("as_model", lambda: TARGETS)(choices) if choices.link == TUNNEL else None


def _offered(name: str, by_preset: str) -> Judge:
    """A judge of a choice that depends on the preset; a wrong preset has its own line."""

    def judge(choices: Choices) -> str | None:
        preset = PRESETS.get(choices.preset)
        return _one_of(name, lambda: getattr(preset, by_preset))(choices) if preset else None

    return judge


# ---- the table of choices


def _choice(default: Any, judge: Judge, sets: str = "", note: str = "") -> Any:
    """One choice: what it begins with, its judge, the fields of a RunSpec that it sets, and how a note names it."""
    return field(default=default, metadata={"judge": judge, "sets": tuple(sets.split()), "note": note})


@dataclass(frozen=True)
class Choices:
    """The controls' values: typed ones stay text (`card="300MB"`), multiple choices are tuples.

    `link` is a preset of planning.links, a rate such as `150MB/s` or `10gbit,50us`, `none`, or `wind tunnel`; between
    GPUs it is the bandwidth of one GPU, and over several nodes that of a node's network. `tokens` are those that a rank
    reads in a step.

    >>> Choices(strategies=("full_shard",), card="300MB").engines
    ('lab',)
    """

    preset: str = _choice("laptop", _one_of("preset", lambda: PRESETS), note="{}")
    model: str = _choice("gpt-20m", _offered("model", "models"), "model", "{}")
    ranks: int = _choice(2, _offered("ranks", "ranks"), "world_size", "{} ranks")
    strategies: tuple[str, ...] = _choice(OVER_ALL_RANKS, _some_of("strategies", STRATEGIES), "strategy")
    engines: tuple[str, ...] = _choice(("lab",), _judge_engines, "engine")
    shard_size: int = _choice(2, _one_of("shard_size", lambda: SHARD_SIZES), "shard_size")
    units: str = _choice("auto", _one_of("units", lambda: UNITS), "units", "units {}")
    precision: str = _choice("fp32", _one_of("precision", lambda: PRECISIONS), "precision", "{}")
    checkpoint: str = _choice("none", _one_of("checkpoint", lambda: CHECKPOINTS), "checkpoint", "recompute {}")
    prefetch: int = _choice(1, _one_of("prefetch", lambda: PREFETCH), "prefetch", "prefetch {}")
    link: str = _choice("150MB/s", _judge_link, "link", "{}")
    tunnel: str = _choice("8xH100", _judge_tunnel, "emulate")
    as_model: str = _choice("llama-3.1-8b", _judge_target, "as_model")
    card: str = _choice("330MB", _judge_card, "card")
    tokens: int = _choice(256, _judge_tokens, "batch_size sequence_length", "{} tokens")
    steps: int = _choice(3, _judge_steps, "steps")


CONTROLS = {each.name: each.metadata for each in fields(Choices)}
# the control that sets each field of a RunSpec
CONTROL_OF = {name: control for control, row in CONTROLS.items() for name in row["sets"]}


@dataclass(frozen=True)
class Preset:
    """A machine: the choices that it begins with, what else can be chosen, and the ends of the sliders.

    `gpu` is the planner's name of its GPUs, of which `per_node` are in a node; None for this machine's own ranks.
    """

    choices: Choices
    link_words: str
    links: tuple[float, float]  # bytes per second
    tokens: tuple[int, int]
    ranks: tuple[int, ...] = RANKS
    models: tuple[str, ...] = MODELS
    gpu: str | None = None
    per_node: int = 8
    sides: tuple[str, str] = ("no_shard", "full_shard")  # A and B


_ON_GPUS = Choices(
    "8 x H100", "llama-3.1-8b", 8, precision="bf16", link="450GB/s", card="80GiB", tokens=4096
)  # fmt: skip
_TWO_NODES = replace(
    _ON_GPUS, preset="two nodes", ranks=16, link="12.5GB/s", strategies=("zero2", "full_shard", "hybrid_shard")
)
PRESETS: dict[str, Preset] = {
    "laptop": Preset(Choices(), "Link between the ranks", (10e6, 10e9), (32, 4096)),
    "8 x H100": Preset(
        _ON_GPUS, "NVLink of a GPU", (1e9, 1e12), (512, 65536), (2, 4, 8), TARGETS, "h100"
    ),
    "two nodes": Preset(
        _TWO_NODES, "Ethernet of a node", (0.125e9, 400e9), (512, 65536), (16, 32), TARGETS, "h100",
        sides=("full_shard", "hybrid_shard"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """The runs of a set of choices, or one line for each control that prevents them; `left_out` names pairs that no
    engine supports.
    """

    specs: tuple[RunSpec, ...] = ()
    plans: tuple[PlanSpec, ...] = ()  # in place of specs, where the runs are on GPUs that the planner simulates
    errors: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""


def check(choices: Choices, fixed: Mapping[str, Any] | None = None) -> Request:
    """The runs that choices ask for, or why not, control by control; `fixed` are further fields of each RunSpec
    (`device="cpu"`).

    >>> check(Choices(ranks=9)).errors
    {'ranks': 'ranks is 9; expected one of 1, 2, 3, 4'}
    """
    errors = {name: words for name, row in CONTROLS.items() if (words := row["judge"](choices))}
    if errors:
        return Request(errors=errors)
    if choices.tokens % (sequence := sequence_of(choices, fixed or {})):
        words = f"tokens is {choices.tokens}; expected a multiple of {sequence}, the tokens of a sequence"
        return Request(errors={"tokens": words})
    if PRESETS[choices.preset].gpu:
        return _planned(choices)
    pairs = _pairs(choices)
    specs = []
    for strategy, engine in pairs:
        try:
            specs.append(_spec(choices, strategy, engine, fixed or {}))
        except SpecError as error:
            return Request(errors={_to_blame(error, choices, fixed or {}): str(error)})
    return Request(tuple(specs), left_out=_left_out(choices))


def parse_card(text: str) -> int | None:
    """Bytes of `300MB`, `1.5GB` or `2GiB`; None for an empty text or `none`; ValueError says what was expected."""
    if text.strip().lower() in ("", "none"):
        return None
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(CARD_WORDS.format(got=repr(text))) from None


def link_of(text: str) -> str | None:
    """The link of a RunSpec; None for `none` and the wind tunnel, which sets one of its own.

    >>> link_of("none"), link_of(" 150MB/s")
    (None, '150MB/s')
    """
    return None if text.strip() in (NO_LINK, TUNNEL) else text.strip()


def label(spec: RunSpec) -> str:
    """A run's name as the figures write it: `label(RunSpec(engine="torch-fsdp2")) == "torch-fsdp2"`."""
    return RunView(spec.strategy, spec.engine, spec.world_size).label


# ---- all together


def _pairs(choices: Choices) -> list[tuple[str, str]]:
    """Strategy and engine of each run; the twin, which replays them all, runs once and last."""
    engines = [engine for engine in choices.engines if engine != "twin"]
    pairs = [(strategy, engine) for engine in engines for strategy in choices.strategies if strategy in ENGINES[engine]]
    return pairs + [("full_shard", "twin")] * ("twin" in choices.engines)


def _left_out(choices: Choices) -> str:
    """One line on the requested pairs that no engine supports."""
    misses = [
        f"{engine} does not do {strategy}"
        for engine in choices.engines
        for strategy in choices.strategies
        if engine != "twin" and strategy not in ENGINES[engine]
    ]
    return f"left out: {'; '.join(misses)}" if misses else ""


def _spec(choices: Choices, strategy: str, engine: str, fixed: Mapping[str, Any]) -> RunSpec:
    tunnel, sequence = choices.link == TUNNEL, sequence_of(choices, fixed)
    wanted = {
        "profile": 1, **fixed, "batch_size": choices.tokens // sequence, "sequence_length": sequence,
        "strategy": strategy, "engine": engine, "world_size": choices.ranks,
        "model": choices.model, "units": choices.units,
        "precision": choices.precision, "checkpoint": choices.checkpoint, "prefetch": choices.prefetch,
        "steps": choices.steps,
        "card": parse_card(choices.card), "link": link_of(choices.link),
        "shard_size": choices.shard_size if strategy in IN_GROUPS else None,
        "emulate": choices.tunnel.strip() if tunnel else None, "as_model": choices.as_model if tunnel else None,
    }  # fmt: skip
    if engine == "twin":
        wanted = {name: value for name, value in wanted.items() if name not in _NOT_OF_THE_TWIN} | {"memory": False}
    return RunSpec(**wanted)


def sequence_of(choices: Choices, fixed: Mapping[str, Any]) -> int:
    """Tokens of a sequence: `fixed`'s, else 128 (4,096 on GPUs) or what a rank reads, if that is less.

    >>> sequence_of(Choices(tokens=256), {}), sequence_of(Choices(tokens=64), {})
    (128, 64)
    """
    if "sequence_length" in fixed:
        return int(fixed["sequence_length"])
    usual = GPU_SEQUENCE if PRESETS[choices.preset].gpu else SEQUENCE
    return min(usual, choices.tokens, WORKLOADS[choices.model].context)


def _planned(choices: Choices) -> Request:
    """The planner's steps, one a strategy, with the link and the card of the choices."""
    try:
        return Request(plans=tuple(_plan(choices, strategy) for strategy in choices.strategies))
    except PlanError as error:
        return Request(errors={"strategies": str(error)})


def _plan(choices: Choices, strategy: str) -> PlanSpec:
    preset, sequence = PRESETS[choices.preset], sequence_of(choices, {})
    plan = plan_spec(
        choices.model, preset.gpu or "", gpus=choices.ranks, gpus_per_node=preset.per_node, strategy=strategy,
        seq=sequence, micro_batch=choices.tokens // sequence, param_dtype=choices.precision,
        checkpointing=choices.checkpoint, prefetch=choices.prefetch,
    )  # fmt: skip
    card = parse_card(choices.card) or plan.gpu.memory_bytes
    return at_bandwidth(replace(plan, gpu=replace(plan.gpu, memory_bytes=card)), parse_link(choices.link).bytes_per_s)


def at_bandwidth(plan: PlanSpec, bytes_per_s: float) -> PlanSpec:
    """The same step with another link between GPUs; over several nodes, with another network of a node, which its GPUs
    share.
    """
    gpu = plan.gpu
    if plan.gpus > plan.gpus_per_node:
        return replace(plan, gpu=replace(gpu, nic_bytes_per_s=bytes_per_s / plan.gpus_per_node))
    return replace(plan, gpu=replace(gpu, link=replace(gpu.link, bytes_per_s=bytes_per_s)))


def _to_blame(error: SpecError, choices: Choices, fixed: Mapping[str, Any]) -> str:
    """The control of the first field to blame that is not at its default; the engines where there is none."""
    controls = [CONTROL_OF.get(name, name) for name in error.fields if name not in fixed]
    moved = [name for name in controls if hasattr(choices, name) and getattr(choices, name) != getattr(Choices(), name)]
    return moved[0] if moved else "engines"
