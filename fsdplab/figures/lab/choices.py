"""The choices of the strategy lab, its presets, and the runs that they describe.

A preset is a machine with the choices that it begins with. The laptop's runs can be simulated and measured; those on
GPUs are simulated by the planner. A wrong choice gives one line at one control: that of the field that `RunSpec`
blames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, TypeAlias

from fsdplab.common.names import IN_GROUPS, OVER_ALL_RANKS
from fsdplab.common.sizes import parse_card
from fsdplab.planning.hardware import find_gpu
from fsdplab.planning.links import LinkError, parse_link
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
RANKS, TOKENS = (1, 2, 3, 4), range(1, 2**20 + 1)
NO_LINK, TUNNEL = "none", "wind tunnel"
SEQUENCE, GPU_SEQUENCE = 128, 4096  # tokens of a sequence, at first

# Choices that the twin, a plain loop in one process, lacks. (A wind tunnel and profiling add steps, so it has those.)
_NOT_OF_THE_TWIN = ("card", "checkpoint", "prefetch")

Run: TypeAlias = RunSpec | PlanSpec
Fixed = Mapping[str, Any]  # further fields of each RunSpec; `model` is a model of one's own, which the list offers


# ---- the table of choices


def _choice(default: Any, values: Any = None, sets: str = "", note: str = "", reads: Any = None) -> Any:
    """One choice: what it begins with, the values that are offered (or how choices and `fixed` give them), the field
    of a RunSpec that it sets, and how a note names it. What can be typed is read by `reads`, or judged by RunSpec.
    """
    return field(default=default, metadata={"values": values, "sets": sets, "note": note, "reads": reads})


@dataclass(frozen=True)
class Choices:
    """The controls' values: typed ones stay text (`card="300MB"`), multiple choices are tuples.

    `link` is a preset of planning.links, a rate such as `150MB/s` or `10gbit,50us`, `none`, or `wind tunnel`; between
    GPUs it is the bandwidth of one GPU, and over several nodes that of a node's network. `tokens` are those that a rank
    reads in a step, in sequences of `sequence` tokens, or of as many as the model takes.

    >>> Choices(strategies=("full_shard",), card="300MB").engines
    ('lab',)
    """

    preset: str = _choice("laptop", lambda *_: [*PRESETS], note="{}")
    model: str = _choice("gpt-20m", lambda choices, fixed: models_of(choices.preset, fixed), "model", "{}")
    ranks: int = _choice(2, lambda choices, _: PRESETS[choices.preset].ranks, "world_size", "{} ranks")
    strategies: tuple[str, ...] = _choice(OVER_ALL_RANKS, STRATEGIES, "strategy")
    engines: tuple[str, ...] = _choice(("lab",), tuple(ENGINES), "engine")
    shard_size: int = _choice(2, RANKS, "shard_size")
    units: str = _choice("auto", UNITS, "units", "units {}")
    precision: str = _choice("fp32", PRECISIONS, "precision", "{}")
    checkpoint: str = _choice("none", CHECKPOINTS, "checkpoint", "recompute {}")
    optimizer: str = _choice("adamw", OPTIMIZERS, "optimizer", "{}")
    prefetch: int = _choice(1, (0, 1, 2, 3, 4), "prefetch", "prefetch {}")
    link: str = _choice("150MB/s", None, "link", "{}", reads=lambda text: text in (NO_LINK, TUNNEL) or parse_link(text))
    tunnel: str = _choice("8xH100", None, "emulate")
    as_model: str = _choice(
        "llama-3.1-8b", lambda now, _: TARGETS if now.link == TUNNEL else (now.as_model,), "as_model"
    )
    card: str = _choice("330MB", None, "card", reads=parse_card)
    tokens: int = _choice(256, TOKENS, "batch_size", "{} tokens")
    sequence: int = _choice(SEQUENCE, TOKENS, "sequence_length", "sequences of {}")
    steps: int = _choice(3, range(1, 201), "steps")


CONTROLS = {each.name: each.metadata for each in fields(Choices)}
# the control that sets each field of a RunSpec
CONTROL_OF = {row["sets"]: control for control, row in CONTROLS.items() if row["sets"]}


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
    gpu: str = ""
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

_name_of = lru_cache(maxsize=64)(name_of)  # which reads the file


def models_of(preset: str, fixed: Fixed) -> tuple[str, ...]:
    """The models that a preset offers, one's own first; ModelError says in one line what is wrong with its file."""
    models = PRESETS[preset].models
    return (_name_of(fixed["model"]), *models) if "model" in fixed else models


def own_model(choices: Choices, fixed: Fixed) -> str:
    """What RunSpecs call the model of one's own, where that is chosen; else ""."""
    model = str(fixed.get("model", ""))
    return model if model and _name_of(model) == choices.model else ""


def sequence_of(choices: Choices, fixed: Fixed) -> int:
    """Tokens of a sequence: `fixed`'s, else those chosen, or what a rank reads or the model takes, if that is less.

    >>> sequence_of(Choices(tokens=256), {}), sequence_of(Choices(tokens=64), {})
    (128, 64)
    """
    on_gpus = bool(PRESETS[choices.preset].gpu)
    if "sequence_length" in fixed and not on_gpus:
        return int(fixed["sequence_length"])
    most = SEQUENCE if on_gpus else choices.sequence  # of a model of one's own
    longest = WORKLOADS[choices.model].context if choices.model in WORKLOADS else most
    return min(choices.sequence, choices.tokens, longest)


# ---- from choices to runs


@dataclass(frozen=True)
class Request:
    """The runs of a set of choices, or one line for each control that prevents them; `left_out` names pairs that no
    engine supports.
    """

    runs: tuple[Run, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""

    @property
    def specs(self) -> tuple[RunSpec, ...]:
        """The runs that can be measured; those on GPUs are the planner's to simulate."""
        return tuple(run for run in self.runs if isinstance(run, RunSpec))


def alone(choices: Choices, strategy: str, fixed: Fixed) -> Request:
    """The request for one run of the lab's own engine."""
    return check(replace(choices, strategies=(strategy,), engines=("lab",)), fixed)


def check(choices: Choices, fixed: Fixed | None = None) -> Request:
    """The runs that choices ask for, or why not, control by control; `fixed` are further fields of each RunSpec
    (`device="cpu"`).

    >>> check(Choices(ranks=9)).errors
    {'ranks': 'ranks is 9; expected one of 1, 2, 3, 4'}
    """
    fixed = fixed or {}
    names = CONTROLS if choices.preset in PRESETS else ["preset"]  # which says what the others may be
    if errors := {name: words for name in names if (words := _wrong(name, choices, fixed))}:
        return Request(errors=errors)
    if choices.tokens % (sequence := sequence_of(choices, fixed)):
        words = f"tokens is {choices.tokens}; expected a multiple of {sequence}, the tokens of a sequence"
        return Request(errors={"tokens": words})
    try:
        if PRESETS[choices.preset].gpu:
            return Request(tuple(_plan(choices, strategy, fixed) for strategy in choices.strategies))
        return _on_this_machine(choices, fixed)
    except LinkError as error:
        return Request(errors={"link": str(error)})
    except PlanError as error:
        return Request(errors={"strategies": str(error)})
    except SpecError as error:
        return Request(errors={_to_blame(error, choices, fixed): str(error)})


def _wrong(name: str, choices: Choices, fixed: Fixed) -> str:
    """What is wrong with one choice, whatever the others are; or nothing."""
    got, row = getattr(choices, name), CONTROLS[name]
    if row["values"] is None:
        try:
            _ = row["reads"] and row["reads"](got)
        except ValueError as error:
            return str(error)
        return ""
    expected = row["values"](choices, fixed) if callable(row["values"]) else row["values"]
    if got == ():
        return f"nothing is chosen; expected at least one of {', '.join(expected)}"
    several = got if isinstance(getattr(Choices, name), tuple) else (got,)
    wrong = [each for each in several if isinstance(each, (bool, float)) or each not in expected]
    if not wrong:
        return ""
    if isinstance(expected, range):
        return f"{name} is {wrong[0]!r}; expected a whole number from {expected[0]} to {expected[-1]}"
    words = [*map(str, expected)]
    near = near_matches(wrong[0], words) if isinstance(wrong[0], str) else ""
    return f"{name} is {wrong[0]!r}{near}; expected one of {', '.join(words)}"


def _on_this_machine(choices: Choices, fixed: Fixed) -> Request:
    """A run for each strategy and engine; the twin, which replays them all, runs once and last."""
    engines = [engine for engine in choices.engines if engine != "twin"]
    if not engines:
        return Request(errors={"engines": "the twin alone has nothing to be compared with; choose another engine too"})
    for engine in engines:
        if not set(ENGINES[engine]) & set(choices.strategies):
            able = f"{engine} does {' and '.join(ENGINES[engine])}, none of the chosen strategies"
            return Request(errors={"engines": f"{able}; choose one of them, or leave the engine out"})
    pairs = [(strategy, engine) for engine in engines for strategy in choices.strategies]
    misses = [f"{engine} does not do {strategy}" for strategy, engine in pairs if strategy not in ENGINES[engine]]
    able_pairs = [(strategy, engine) for strategy, engine in pairs if strategy in ENGINES[engine]]
    able_pairs += [("full_shard", "twin")] * ("twin" in choices.engines)
    specs = tuple(_spec(choices, strategy, engine, fixed) for strategy, engine in able_pairs)
    return Request(specs, left_out=f"left out: {'; '.join(misses)}" if misses else "")


def _spec(choices: Choices, strategy: str, engine: str, fixed: Fixed) -> RunSpec:
    tunnel, sequence, own = choices.link == TUNNEL, sequence_of(choices, fixed), own_model(choices, fixed)
    wanted: dict[str, Any] = {name: getattr(choices, control) for name, control in CONTROL_OF.items()}
    wanted |= {
        "strategy": strategy, "engine": engine, "model": own or choices.model,
        "batch_size": choices.tokens // sequence, "sequence_length": sequence, "card": parse_card(choices.card),
        "link": None if (link := choices.link.strip()) in (NO_LINK, TUNNEL) else link,  # the tunnel sets its own
        "shard_size": choices.shard_size if strategy in IN_GROUPS else None,
        "emulate": choices.tunnel.strip() if tunnel else None, "as_model": choices.as_model if tunnel else None,
    }  # fmt: skip
    if own and not reads_text(own):  # its batches are its own
        del wanted["batch_size"], wanted["sequence_length"]
    wanted = {"profile": 1, **fixed, **wanted}
    if engine == "twin":
        wanted = {name: value for name, value in wanted.items() if name not in _NOT_OF_THE_TWIN} | {"memory": False}
    return RunSpec(**wanted)


def _plan(choices: Choices, strategy: str, fixed: Fixed) -> PlanSpec:
    """The planner's step, with the link and the card of the choices."""
    if choices.link in (NO_LINK, TUNNEL):
        raise LinkError(f"link is {choices.link!r}; expected a rate between the GPUs, such as 450GB/s")
    preset = PRESETS[choices.preset]
    mesh: dict[str, Any] = {"gpus": choices.ranks, "gpus_per_node": preset.per_node, "strategy": strategy}
    if own_model(choices, fixed):
        one = replace(choices, ranks=1, link=NO_LINK, card="none")
        of = _spec(one, "no_shard", "lab", {**fixed, "device": "cpu"})
        plan: PlanSpec = own_plan(of, find_gpu(preset.gpu), **mesh)
    else:
        sequence = sequence_of(choices, fixed)
        plan = plan_spec(
            choices.model, preset.gpu, seq=sequence, micro_batch=choices.tokens // sequence,
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
