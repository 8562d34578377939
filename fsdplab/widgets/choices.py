"""The choices of the strategy lab, its presets, and the runs that they describe.

A preset is a machine with the choices that it begins with. The laptop's runs can be simulated and measured; those on
GPUs are simulated by the planner. A wrong choice gives one line at one control: that of the field that `RunSpec`
blames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from fsdplab.common.names import IN_GROUPS, OVER_ALL_RANKS
from fsdplab.common.sizes import parse_size
from fsdplab.figures.view import RunView
from fsdplab.planning.hardware import find_gpu
from fsdplab.planning.links import parse_link
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.planner import plan_spec
from fsdplab.sessions.own_plan import own_plan
from fsdplab.sessions.spec import (
    CHECKPOINTS,
    ENGINES,
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    UNITS,
    RunSpec,
    SpecError,
    near_matches,
)
from fsdplab.workloads import BYTE_VOCABULARY
from fsdplab.workloads import PRESETS as WORKLOADS
from fsdplab.workloads.own.sources import name_of, reads_text

MODELS = tuple(name for name, model in WORKLOADS.items() if model.vocabulary == BYTE_VOCABULARY)
TARGETS = tuple(name for name in WORKLOADS if name not in MODELS)  # published models, for GPUs and the wind tunnel
RANKS, PREFETCH, SHARD_SIZES = (1, 2, 3, 4), (0, 1, 2, 3, 4), (1, 2, 3, 4)
STEPS, TOKENS = range(1, 201), range(1, 2**20 + 1)
NO_LINK, TUNNEL = "none", "wind tunnel"
SEQUENCE, GPU_SEQUENCE = 128, 4096  # tokens of a sequence, at first

# Choices that the twin, a plain loop in one process, lacks. (A wind tunnel and profiling add steps, so it has those.)
_NOT_OF_THE_TWIN = ("card", "checkpoint", "prefetch")

# The choices that a RunSpec has under the same name and with the same value.
_AS_THEY_ARE = ("units", "precision", "checkpoint", "prefetch", "optimizer", "steps")

Fixed = Mapping[str, Any]  # further fields of each RunSpec; `model` is a model of one's own, which the list offers
Judge = Callable[[str, "Choices", Fixed], str]  # (the choice's name, all of them, fixed) -> what is wrong, or nothing


# ---- one control alone


def _offered(values: Sequence[Any] | Callable[[Choices, Fixed], Sequence[Any]]) -> Judge:
    """A judge of a value, or of several, that must be among these."""

    def judge(name: str, choices: Choices, fixed: Fixed) -> str:
        got, expected = getattr(choices, name), values(choices, fixed) if callable(values) else values
        if got == ():
            return f"nothing is chosen; expected at least one of {', '.join(expected)}"
        several = got if isinstance(getattr(Choices, name), tuple) else (got,)
        wrong = [each for each in several if isinstance(each, (bool, float)) or each not in expected]
        return f"{name} is {_unlike(wrong[0], expected)}" if wrong else ""

    return judge


def _unlike(got: Any, expected: Sequence[Any]) -> str:
    if isinstance(expected, range):
        return f"{got!r}; expected a whole number from {expected[0]} to {expected[-1]}"
    names = [*map(str, expected)]
    near = near_matches(got, names) if isinstance(got, str) else ""
    return f"{got!r}{near}; expected one of {', '.join(names)}"


def _readable(read: Callable[[Choices], object]) -> Judge:
    """A judge of a text that `read` reads, or refuses with a ValueError."""

    def judge(name: str, choices: Choices, fixed: Fixed) -> str:
        try:
            read(choices)
        except ValueError as error:
            return str(error)
        return ""

    return judge


def _read_link(choices: Choices) -> None:
    if choices.link not in (NO_LINK, TUNNEL):
        parse_link(choices.link)
    elif PRESETS[choices.preset].gpu:
        raise ValueError(f"link is {choices.link!r}; expected a rate between the GPUs, such as 450GB/s")


# ---- the table of choices


def _choice(default: Any, judge: Judge | None = None, sets: str = "", note: str = "") -> Any:
    """One choice: what it begins with, its judge where no RunSpec judges it, the fields of a RunSpec that it sets, and
    how a note names it.
    """
    return field(default=default, metadata={"judge": judge, "sets": tuple(sets.split()), "note": note})


@dataclass(frozen=True)
class Choices:
    """The controls' values: typed ones stay text (`card="300MB"`), multiple choices are tuples.

    `link` is a preset of planning.links, a rate such as `150MB/s` or `10gbit,50us`, `none`, or `wind tunnel`; between
    GPUs it is the bandwidth of one GPU, and over several nodes that of a node's network. `tokens` are those that a rank
    reads in a step, in sequences of `sequence` tokens, or of as many as the model takes.

    >>> Choices(strategies=("full_shard",), card="300MB").engines
    ('lab',)
    """

    preset: str = _choice("laptop", _offered(lambda *_: [*PRESETS]), note="{}")
    model: str = _choice("gpt-20m", _offered(lambda choices, fixed: models_of(choices.preset, fixed)), "model", "{}")
    ranks: int = _choice(2, _offered(lambda choices, _: PRESETS[choices.preset].ranks), "world_size", "{} ranks")
    strategies: tuple[str, ...] = _choice(OVER_ALL_RANKS, _offered(STRATEGIES), "strategy")
    engines: tuple[str, ...] = _choice(("lab",), _offered([*ENGINES]), "engine")
    shard_size: int = _choice(2, _offered(SHARD_SIZES), "shard_size")
    units: str = _choice("auto", _offered(UNITS), "units", "units {}")
    precision: str = _choice("fp32", _offered(PRECISIONS), "precision", "{}")
    checkpoint: str = _choice("none", _offered(CHECKPOINTS), "checkpoint", "recompute {}")
    optimizer: str = _choice("adamw", _offered(OPTIMIZERS), "optimizer", "{}")
    prefetch: int = _choice(1, _offered(PREFETCH), "prefetch", "prefetch {}")
    link: str = _choice("150MB/s", _readable(_read_link), "link", "{}")
    tunnel: str = _choice("8xH100", sets="emulate")
    as_model: str = _choice(
        "llama-3.1-8b", _offered(lambda now, _: TARGETS if now.link == TUNNEL else (now.as_model,)), "as_model"
    )
    card: str = _choice("330MB", _readable(lambda choices: parse_card(choices.card)), "card")
    tokens: int = _choice(256, _offered(TOKENS), "batch_size", "{} tokens")
    sequence: int = _choice(SEQUENCE, _offered(TOKENS), "sequence_length", "sequences of {}")
    steps: int = _choice(3, _offered(STEPS), "steps")


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
    sequences: tuple[int, int] = (32, 512)
    ranks: tuple[int, ...] = RANKS
    models: tuple[str, ...] = MODELS
    gpu: str | None = None
    per_node: int = 8
    sides: tuple[str, str] = ("no_shard", "full_shard")  # A and B


_ON_GPUS = Choices(
    "8 x H100", "llama-3.1-8b", 8, precision="bf16", link="450GB/s", card="80GiB", tokens=4096, sequence=GPU_SEQUENCE,
)  # fmt: skip
_TWO_NODES = replace(
    _ON_GPUS, preset="two nodes", ranks=16, link="12.5GB/s", strategies=("zero2", "full_shard", "hybrid_shard")
)
PRESETS: dict[str, Preset] = {
    "laptop": Preset(Choices(), "Link between the ranks", (10e6, 10e9), (32, 4096)),
    "8 x H100": Preset(
        _ON_GPUS, "NVLink of a GPU", (1e9, 1e12), (512, 65536), (512, 65536), (2, 4, 8), TARGETS, "h100"
    ),
    "two nodes": Preset(
        _TWO_NODES, "Ethernet of a node", (0.125e9, 400e9), (512, 65536), (512, 65536), (16, 32), TARGETS, "h100",
        sides=("full_shard", "hybrid_shard"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class OwnModel:
    """A model of one's own: what RunSpecs call it, its name in lists, and whether it reads the lab's text."""

    model: str
    name: str
    reads_text: bool


def own_model(fixed: Fixed) -> OwnModel | None:
    """The model of one's own among `fixed`; ModelError says in one line what is wrong with its file."""
    return _own_model(fixed["model"]) if "model" in fixed else None


@lru_cache(maxsize=64)
def _own_model(model: str) -> OwnModel:
    return OwnModel(model, name_of(model), reads_text(model))


def models_of(preset: str, fixed: Fixed) -> tuple[str, ...]:
    """The models that a preset offers, one's own first."""
    own, models = own_model(fixed), PRESETS[preset].models
    return (own.name, *models) if own else models


def chosen_own(choices: Choices, fixed: Fixed) -> OwnModel | None:
    """One's own model where that is chosen."""
    own = own_model(fixed)
    return own if own and own.name == choices.model else None


@dataclass(frozen=True)
class Request:
    """The runs of a set of choices, or one line for each control that prevents them; `left_out` names pairs that no
    engine supports.
    """

    specs: tuple[RunSpec, ...] = ()
    plans: tuple[PlanSpec, ...] = ()  # in place of specs, where the runs are on GPUs that the planner simulates
    errors: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""

    @property
    def runs(self) -> tuple[RunSpec, ...] | tuple[PlanSpec, ...]:
        """The runs, on this machine or on GPUs."""
        return self.specs or self.plans


def alone(choices: Choices, strategy: str, fixed: Fixed) -> Request:
    """The request for one run of the lab's own engine."""
    return check(replace(choices, strategies=(strategy,), engines=("lab",)), fixed)


def check(choices: Choices, fixed: Fixed | None = None) -> Request:
    """The runs that choices ask for, or why not, control by control; `fixed` are further fields of each RunSpec
    (`device="cpu"`).

    >>> check(Choices(ranks=9)).errors
    {'ranks': 'ranks is 9; expected one of 1, 2, 3, 4'}
    """
    judges, fixed = {name: row["judge"] for name, row in CONTROLS.items() if row["judge"]}, fixed or {}
    if choices.preset not in PRESETS:
        judges = {"preset": judges["preset"]}  # the others ask the preset what it offers
    if errors := {name: words for name, judge in judges.items() if (words := judge(name, choices, fixed))}:
        return Request(errors=errors)
    if words := _nothing_compared(choices):
        return Request(errors={"engines": words})
    if choices.tokens % (sequence := sequence_of(choices, fixed)):
        words = f"tokens is {choices.tokens}; expected a multiple of {sequence}, the tokens of a sequence"
        return Request(errors={"tokens": words})
    if PRESETS[choices.preset].gpu:
        return _planned(choices, fixed)
    pairs = _pairs(choices)
    specs = []
    for strategy, engine in pairs:
        try:
            specs.append(_spec(choices, strategy, engine, fixed))
        except SpecError as error:
            return Request(errors={_to_blame(error, choices, fixed): str(error)})
    return Request(tuple(specs), left_out=_left_out(choices))


def parse_card(text: str) -> int | None:
    """Bytes of `300MB`, `1.5GB` or `2GiB`; None for an empty text or `none`; ValueError says what was expected."""
    if text.strip().lower() in ("", "none"):
        return None
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(f"card is {text!r}; expected a size such as 300MB, 1.5GB or 2GiB, or nothing") from None


def label(spec: RunSpec) -> str:
    """A run's name as the figures write it: `label(RunSpec(engine="torch-fsdp2")) == "torch-fsdp2"`."""
    return RunView(spec.strategy, spec.engine, spec.world_size).label


# ---- all together


def _pairs(choices: Choices) -> list[tuple[str, str]]:
    """Strategy and engine of each run; the twin, which replays them all, runs once and last."""
    engines = [engine for engine in choices.engines if engine != "twin"]
    pairs = [(strategy, engine) for engine in engines for strategy in choices.strategies if strategy in ENGINES[engine]]
    return pairs + [("full_shard", "twin")] * ("twin" in choices.engines)


def _nothing_compared(choices: Choices) -> str:
    """Why an engine has nothing to run, or nothing beside it; or nothing."""
    if choices.engines == ("twin",):
        return "the twin alone has nothing to be compared with; choose another engine too"
    for engine in choices.engines:
        if engine != "twin" and not set(ENGINES[engine]) & set(choices.strategies):
            able = f"{engine} does {' and '.join(ENGINES[engine])}, none of the chosen strategies"
            return f"{able}; choose one of them, or leave the engine out"
    return ""


def _left_out(choices: Choices) -> str:
    """One line on the requested pairs that no engine supports."""
    misses = [
        f"{engine} does not do {strategy}"
        for engine in choices.engines
        for strategy in choices.strategies
        if engine != "twin" and strategy not in ENGINES[engine]
    ]
    return f"left out: {'; '.join(misses)}" if misses else ""


def _spec(choices: Choices, strategy: str, engine: str, fixed: Fixed) -> RunSpec:
    tunnel, sequence, own = choices.link == TUNNEL, sequence_of(choices, fixed), chosen_own(choices, fixed)
    batch = {"batch_size": choices.tokens // sequence, "sequence_length": sequence}
    wanted = {
        "profile": 1, **fixed, **(batch if own is None or own.reads_text else {}),
        **{name: getattr(choices, name) for name in _AS_THEY_ARE}, "strategy": strategy, "engine": engine,
        "world_size": choices.ranks, "model": own.model if own else choices.model,
        "card": parse_card(choices.card),
        "link": None if (link := choices.link.strip()) in (NO_LINK, TUNNEL) else link,  # the tunnel sets its own
        "shard_size": choices.shard_size if strategy in IN_GROUPS else None,
        "emulate": choices.tunnel.strip() if tunnel else None, "as_model": choices.as_model if tunnel else None,
    }  # fmt: skip
    if engine == "twin":
        wanted = {name: value for name, value in wanted.items() if name not in _NOT_OF_THE_TWIN} | {"memory": False}
    return RunSpec(**wanted)


def sequence_of(choices: Choices, fixed: Fixed) -> int:
    """Tokens of a sequence: `fixed`'s, else those chosen, or what a rank reads or the model takes, if that is less.

    >>> sequence_of(Choices(tokens=256), {}), sequence_of(Choices(tokens=64), {})
    (128, 64)
    """
    if "sequence_length" in fixed:
        return int(fixed["sequence_length"])
    most = SEQUENCE if PRESETS[choices.preset].gpu else choices.sequence  # of a model of one's own
    longest = WORKLOADS[choices.model].context if choices.model in WORKLOADS else most
    return min(choices.sequence, choices.tokens, longest)


def _planned(choices: Choices, fixed: Fixed) -> Request:
    """The planner's steps, one a strategy, with the link and the card of the choices."""
    try:
        return Request(plans=tuple(_plan(choices, strategy, fixed) for strategy in choices.strategies))
    except PlanError as error:
        return Request(errors={"strategies": str(error)})
    except SpecError as error:
        return Request(errors={_to_blame(error, choices, fixed): str(error)})


def _plan(choices: Choices, strategy: str, fixed: Fixed) -> PlanSpec:
    preset, own = PRESETS[choices.preset], chosen_own(choices, fixed)
    mesh: dict[str, Any] = {"gpus": choices.ranks, "gpus_per_node": preset.per_node, "strategy": strategy}
    if own:
        alone = replace(choices, ranks=1, link=NO_LINK, card="none")
        of = _spec(alone, "no_shard", "lab", {**fixed, "device": "cpu"})
        plan: PlanSpec = own_plan(of, find_gpu(preset.gpu or ""), **mesh)
    else:
        sequence = sequence_of(choices, {})
        plan = plan_spec(
            choices.model, preset.gpu or "", seq=sequence, micro_batch=choices.tokens // sequence,
            param_dtype=choices.precision, checkpointing=choices.checkpoint, prefetch=choices.prefetch,
            optimizer=choices.optimizer, **mesh,
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


def _to_blame(error: SpecError, choices: Choices, fixed: Fixed) -> str:
    """The control of the first field to blame that is not at its default; the engines where there is none."""
    controls = [CONTROL_OF.get(name, name) for name in error.fields if name not in {*fixed} - {"model"}]
    moved = [name for name in controls if hasattr(choices, name) and getattr(choices, name) != getattr(Choices(), name)]
    return moved[0] if moved else "engines"
