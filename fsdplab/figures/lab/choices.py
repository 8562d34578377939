"""The choices of the strategy lab, its presets, and the runs that they describe.

A preset is a machine with the choices that it begins with. The laptop's runs can be simulated and measured; those on
GPUs are simulated by the planner. A wrong choice gives one line at one control: that of the field that `RunSpec`
blames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

_BLOCKS = ("auto", "block")  # units that are a model's blocks

# Choices that the twin, a plain loop in one process, lacks. (A wind tunnel and profiling add steps, so it has those.)
_NOT_OF_THE_TWIN = ("card", "checkpoint", "prefetch")

Run: TypeAlias = RunSpec | PlanSpec
Fixed = Mapping[str, Any]  # further fields of each RunSpec; `model` is a model of one's own, which the list offers


# ---- the table of choices


@dataclass(frozen=True)
class Control:
    """What a control offers: its values, or how choices and `fixed` give them, or None where text is typed, which
    `reads` checks or RunSpec. `sets` is the field of a RunSpec, `note` how a note names a value.
    """

    values: Sequence[Any] | Callable[[Choices, Fixed], Sequence[Any]] | None = None
    sets: str = ""
    note: str = ""
    reads: Callable[[str], object] | None = None

    def offered(self, choices: Choices, fixed: Fixed) -> Sequence[Any] | None:
        """The values that can be chosen; None where text is typed."""
        return self.values(choices, fixed) if callable(self.values) else self.values


def _choice(default: Any, **control: Any) -> Any:
    """One choice: the value that it begins with, and its control."""
    return field(default=default, metadata={"control": Control(**control)})


def _presets(choices: Choices, fixed: Fixed) -> Sequence[str]:
    return [*PRESETS]


def _models(choices: Choices, fixed: Fixed) -> Sequence[str]:
    return models_of(choices.preset, fixed)


def _ranks(choices: Choices, fixed: Fixed) -> Sequence[int]:
    return PRESETS[choices.preset].ranks


def _targets(choices: Choices, fixed: Fixed) -> Sequence[str]:
    """The models of the wind tunnel; without it the choice has no meaning, and any is right."""
    # whatever it is, the value is then among those expected
    return TARGETS if choices.link == TUNNEL else (choices.as_model,)


def _read_link(text: str) -> None:
    if text not in (NO_LINK, TUNNEL):
        parse_link(text)


@dataclass(frozen=True)
class Choices:
    """The controls' values: typed ones stay text (`card="300MB"`), multiple choices are tuples.

    `link` is a preset of planning.links, a rate such as `150MB/s` or `10gbit,50us`, `none`, or `wind tunnel`; between
    GPUs it is the bandwidth of one GPU, and over several nodes that of a node's network. `tokens` are those that a rank
    reads in a step, in sequences of `sequence` tokens, or of as many as the model takes.

    >>> Choices(strategies=("full_shard",), card="300MB").engines
    ('lab',)
    """

    preset: str = _choice("laptop", values=_presets, note="{}")
    model: str = _choice("gpt-20m", values=_models, sets="model", note="{}")
    ranks: int = _choice(2, values=_ranks, sets="world_size", note="{} ranks")
    strategies: tuple[str, ...] = _choice(OVER_ALL_RANKS, values=STRATEGIES, sets="strategy")
    engines: tuple[str, ...] = _choice(("lab",), values=tuple(ENGINES), sets="engine")
    shard_size: int = _choice(2, values=RANKS, sets="shard_size")
    units: str = _choice("auto", values=UNITS, sets="units", note="units {}")
    precision: str = _choice("fp32", values=PRECISIONS, sets="precision", note="{}")
    checkpoint: str = _choice("none", values=CHECKPOINTS, sets="checkpoint", note="recompute {}")
    optimizer: str = _choice("adamw", values=OPTIMIZERS, sets="optimizer", note="{}")
    prefetch: int = _choice(1, values=(0, 1, 2, 3, 4), sets="prefetch", note="prefetch {}")
    link: str = _choice("150MB/s", sets="link", note="{}", reads=_read_link)
    tunnel: str = _choice("8xH100", sets="emulate")
    as_model: str = _choice("llama-3.1-8b", values=_targets, sets="as_model")
    card: str = _choice("330MB", sets="card", reads=parse_card)
    tokens: int = _choice(256, values=TOKENS, sets="batch_size", note="{} tokens")
    sequence: int = _choice(SEQUENCE, values=TOKENS, sets="sequence_length", note="sequences of {}")
    steps: int = _choice(3, values=range(1, 201), sets="steps")


CONTROLS: dict[str, Control] = {each.name: each.metadata["control"] for each in fields(Choices)}
# the control that sets each field of a RunSpec
CONTROL_OF = {control.sets: name for name, control in CONTROLS.items() if control.sets}


@dataclass(frozen=True)
class Preset:
    """A machine: the choices that it begins with, what else can be chosen, and the ends of the sliders.

    `gpu` is the planner's name of its GPUs, of which `per_node` are in a node; None for this machine's own ranks.
    """

    choices: Choices
    link_words: str  # what the link's slider is called
    links: tuple[float, float]  # bytes per second
    tokens: tuple[int, int]  # of a rank in a step
    sequences: tuple[int, int] = (32, 512)  # tokens of a sequence
    ranks: tuple[int, ...] = RANKS
    models: tuple[str, ...] = MODELS
    gpu: str = ""
    per_node: int = 8
    sides: tuple[str, str] = ("no_shard", "full_shard")  # A and B

    @property
    def clock(self) -> str:
        """Where its steps are simulated."""
        if self.gpu:
            return f"simulated on {self.gpu.upper()} GPUs"
        return "simulated on the steady card"

    @property
    def guess_unit(self) -> str:
        """The unit of a guess of memory that is a number alone."""
        return "GB" if self.gpu else "MB"


_ON_GPUS = Choices(
    preset="8 x H100",
    model="llama-3.1-8b",
    ranks=8,
    precision="bf16",
    link="450GB/s",  # NVLink of an H100, in one direction
    card="80GiB",
    tokens=4096,
    sequence=GPU_SEQUENCE,
)
# 12.5 GB/s are 100 Gbit/s, which the eight GPUs of a node share
_TWO_NODES = replace(
    _ON_GPUS, preset="two nodes", ranks=16, link="12.5GB/s", strategies=("zero2", "full_shard", "hybrid_shard")
)
PRESETS: dict[str, Preset] = {
    "laptop": Preset(Choices(), link_words="Link between the ranks", links=(10e6, 10e9), tokens=(32, 4096)),
    "8 x H100": Preset(
        _ON_GPUS,
        link_words="NVLink of a GPU",
        links=(1e9, 1e12),
        tokens=(512, 65536),
        sequences=(512, 65536),
        ranks=(2, 4, 8),
        models=TARGETS,
        gpu="h100",
    ),
    "two nodes": Preset(
        _TWO_NODES,
        link_words="Ethernet of a node",
        links=(0.125e9, 400e9),  # 1 Gbit/s to 3200 Gbit/s
        tokens=(512, 65536),
        sequences=(512, 65536),
        ranks=(16, 32),
        models=TARGETS,
        gpu="h100",
        sides=("full_shard", "hybrid_shard"),
    ),
}

_name_of = lru_cache(maxsize=64)(name_of)  # which reads the file


def models_of(preset: str, fixed: Fixed) -> tuple[str, ...]:
    """The models that a preset offers, one's own first; ModelError says in one line what is wrong with its file."""
    models = PRESETS[preset].models
    if "model" not in fixed:
        return models
    return (_name_of(fixed["model"]), *models)


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
    # fixed fields are those of RunSpecs, which runs on GPUs are not
    if "sequence_length" in fixed and not on_gpus:
        return int(fixed["sequence_length"])
    sequence = min(choices.sequence, choices.tokens)
    if choices.model in WORKLOADS:
        return min(sequence, WORKLOADS[choices.model].context)
    # a model of one's own, of which no longest sequence is known
    return min(sequence, SEQUENCE) if on_gpus else sequence


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
    errors = _wrong_choices(choices, fixed)
    if errors:
        return Request(errors=errors)
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


def _wrong_choices(choices: Choices, fixed: Fixed) -> dict[str, str]:
    """Control -> what is wrong with its choice, as far as it can be seen before a run is made of all of them."""
    if choices.preset not in PRESETS:  # which says what the others may be
        return {"preset": _wrong("preset", choices, fixed)}
    errors = {}
    for name in CONTROLS:
        words = _wrong(name, choices, fixed)
        if words:
            errors[name] = words
    if errors:
        return errors
    if PRESETS[choices.preset].gpu and choices.units not in _BLOCKS and not own_model(choices, fixed):
        words = f"units is {choices.units!r}; plans of published models have blocks as units: expected auto or block"
        return {"units": words}
    # 256 tokens in sequences of 128 are a batch of 2; of 200 tokens a part would be left
    sequence = sequence_of(choices, fixed)
    if choices.tokens % sequence:
        return {"tokens": f"tokens is {choices.tokens}; expected a multiple of {sequence}, the tokens of a sequence"}
    return {}


def _wrong(name: str, choices: Choices, fixed: Fixed) -> str:
    """What is wrong with one choice, whatever the others are; or nothing."""
    value, control = getattr(choices, name), CONTROLS[name]
    expected = control.offered(choices, fixed)
    if expected is None:
        return _wrong_text(value, control)
    if value == ():
        return f"nothing is chosen; expected at least one of {', '.join(expected)}"
    # the default tells which choices are multiple: theirs are tuples
    several = value if isinstance(getattr(Choices, name), tuple) else (value,)
    # True and 2.0 are equal to numbers that are offered
    wrong = [each for each in several if isinstance(each, (bool, float)) or each not in expected]
    if not wrong:
        return ""
    if isinstance(expected, range):
        return f"{name} is {wrong[0]!r}; expected a whole number from {expected[0]} to {expected[-1]}"
    words = [str(each) for each in expected]
    near = near_matches(wrong[0], words) if isinstance(wrong[0], str) else ""
    return f"{name} is {wrong[0]!r}{near}; expected one of {', '.join(words)}"


def _wrong_text(text: str, control: Control) -> str:
    """Why a typed choice cannot be read; "" where it can, or where RunSpec reads it."""
    if control.reads is None:
        return ""
    try:
        control.reads(text)
    except ValueError as error:
        return str(error)
    return ""


def _on_this_machine(choices: Choices, fixed: Fixed) -> Request:
    """A run for each strategy and engine; the twin, which replays them all, runs once and last."""
    engines = [engine for engine in choices.engines if engine != "twin"]
    if not engines:
        return Request(errors={"engines": "the twin alone has nothing to be compared with; choose another engine too"})
    pairs: list[tuple[str, str]] = []
    missing: list[str] = []
    for engine in engines:
        # an engine that is chosen runs what it can, and what it cannot is named
        able = [strategy for strategy in choices.strategies if strategy in ENGINES[engine]]
        if not able:
            does = f"{engine} does {' and '.join(ENGINES[engine])}, none of the chosen strategies"
            return Request(errors={"engines": f"{does}; choose one of them, or leave the engine out"})
        pairs += [(strategy, engine) for strategy in able]
        missing += [f"{engine} does not do {strategy}" for strategy in choices.strategies if strategy not in able]
    if "twin" in choices.engines:
        # the twin does not shard: the strategy is a name only
        pairs.append(("full_shard", "twin"))
    specs = tuple(_spec(choices, strategy, engine, fixed) for strategy, engine in pairs)
    if missing:
        return Request(specs, left_out=f"left out: {'; '.join(missing)}")
    return Request(specs)


def _spec(choices: Choices, strategy: str, engine: str, fixed: Fixed) -> RunSpec:
    """The run of one strategy and engine: the fields that controls set, over those that are fixed for all runs."""
    # field of a RunSpec -> what its control has
    chosen: dict[str, Any] = {name: getattr(choices, control) for name, control in CONTROL_OF.items()}
    chosen["strategy"], chosen["engine"] = strategy, engine
    chosen["card"] = parse_card(choices.card)
    if strategy not in IN_GROUPS:
        # other strategies shard over all ranks
        chosen["shard_size"] = None
    chosen["link"] = choices.link.strip()
    if chosen["link"] in (NO_LINK, TUNNEL):  # the tunnel sets its own
        chosen["link"] = None
    if choices.link == TUNNEL:
        chosen["emulate"] = choices.tunnel.strip()
    else:
        chosen["emulate"] = chosen["as_model"] = None
    sequence = sequence_of(choices, fixed)
    # 256 tokens in sequences of 128: a batch of 2
    chosen["batch_size"], chosen["sequence_length"] = choices.tokens // sequence, sequence
    own = own_model(choices, fixed)
    if own:
        chosen["model"] = own
        if not reads_text(own):  # its batches are its own
            del chosen["batch_size"], chosen["sequence_length"]
    # later ones win: what a control sets, then fixed fields, then one profiled step
    settings = {"profile": 1, **fixed, **chosen}
    if engine == "twin":
        settings = {name: value for name, value in settings.items() if name not in _NOT_OF_THE_TWIN}
        settings["memory"] = False
    return RunSpec(**settings)


def _plan(choices: Choices, strategy: str, fixed: Fixed) -> PlanSpec:
    """The planner's step, with the link and the card of the choices."""
    if choices.link in (NO_LINK, TUNNEL):
        # GPUs always have a link, and the tunnel is for ranks of this machine
        raise LinkError(f"link is {choices.link!r}; expected a rate between the GPUs, such as 450GB/s")
    preset = PRESETS[choices.preset]
    mesh: dict[str, Any] = {"gpus": choices.ranks, "gpus_per_node": preset.per_node, "strategy": strategy}
    plan: PlanSpec
    if own_model(choices, fixed):
        # a rank alone is recorded: it has no shards, link and card
        one_rank = replace(choices, ranks=1, link=NO_LINK, card="none")
        run = _spec(one_rank, "no_shard", "lab", {**fixed, "device": "cpu"})
        plan = own_plan(run, find_gpu(preset.gpu), **mesh)
    else:
        sequence = sequence_of(choices, fixed)
        plan = plan_spec(
            choices.model,
            preset.gpu,
            seq=sequence,
            micro_batch=choices.tokens // sequence,
            param_dtype=choices.precision,
            checkpointing=choices.checkpoint,
            prefetch=choices.prefetch,
            optimizer=choices.optimizer,
            **mesh,
        )
    # a card of `none` leaves the GPU's own memory
    gpu = replace(plan.gpu, memory_bytes=parse_card(choices.card) or plan.gpu.memory_bytes)
    return at_bandwidth(replace(plan, gpu=gpu), parse_link(choices.link).bytes_per_s)


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
    # the reader can change no fixed field, but can choose another model than one's own
    no_choice = {*fixed} - {"model"}
    for name in error.fields:
        control = CONTROL_OF.get(name, name)
        if name in no_choice or control not in CONTROLS:
            continue
        if getattr(choices, control) != getattr(Choices, control):
            return control
    return "engines"
