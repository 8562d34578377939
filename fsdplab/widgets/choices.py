"""The choices of the strategy lab, and the runs that they describe.

A wrong choice gives one line at one control. `RunSpec` checks whether a run is possible, but does not name a control:
the error is shown at the first control whose default would make the run possible.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdplab.figures.view import RunView
from fsdplab.planning.links import PRESETS as LINKS
from fsdplab.planning.links import LinkError, parse_link
from fsdplab.sessions.spec import CHECKPOINTS, ENGINES, PRECISIONS, STRATEGIES, UNITS, RunSpec, SpecError, near_matches
from fsdplab.workloads import BYTE_VOCABULARY, PRESETS

MODELS = tuple(name for name, model in PRESETS.items() if model.vocabulary == BYTE_VOCABULARY)
TARGETS = tuple(name for name in PRESETS if name not in MODELS)  # published models, for the wind tunnel
RANKS, PREFETCH, SHARD_SIZES = (1, 2, 3, 4), (0, 1, 2, 3, 4), (1, 2, 3, 4)
NO_LINK, CUSTOM, TUNNEL = "none", "custom", "wind tunnel"
LINK_CHOICES = (NO_LINK, *LINKS, CUSTOM, TUNNEL)
TUNNELS = ("8xH100", "64xH100", "8xA100")  # proposals; RunSpec reads others too
MOST_STEPS = 200
# what is said of a wrong value; `{got}` is the value
STEPS_WORDS = f"steps is {{got}}; expected a whole number from 1 to {MOST_STEPS}"
CARD_WORDS = "card is {got}; expected a size such as 300MB, 1.5GB or 2GiB, or nothing"
TUNNEL_WORDS = f"wind tunnel is {{got}}; expected a number of cards and their name, such as {' or '.join(TUNNELS[:2])}"
NOTHING_CHOSEN = "nothing is chosen; expected at least one"
TUNNEL_FORM = r"\s*[1-9]\d*\s*x\s*\S+.*"

_SCALE = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# Choices that the twin, a plain loop in one process, lacks. (A wind tunnel and profiling add steps, so it has those.)
_NOT_OF_THE_TWIN = ("card", "checkpoint", "prefetch")


@dataclass(frozen=True)
class Choices:
    """The controls' values: typed ones stay text (`card="300MB"`), multiple choices are tuples.

    >>> Choices(strategies=("full_shard",), card="300MB").engines
    ('lab',)
    """

    model: str = "gpt-20m"
    ranks: int = 2
    strategies: tuple[str, ...] = ("no_shard", "full_shard")
    engines: tuple[str, ...] = ("lab",)
    shard_size: int = 2
    units: str = "auto"
    precision: str = "fp32"
    checkpoint: str = "none"
    prefetch: int = 1
    link: str = NO_LINK
    custom_link: str = "200mbit"
    tunnel: str = "8xH100"
    as_model: str = "llama-3.1-8b"
    card: str = ""
    steps: int = 8


@dataclass(frozen=True)
class Request:
    """The runs of a set of choices, or one line for each control that prevents them; `left_out` names pairs that no
    engine supports.
    """

    specs: tuple[RunSpec, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""


def check(choices: Choices, fixed: Mapping[str, Any] | None = None) -> Request:
    """The runs that choices ask for, or why not, control by control; `fixed` are further fields of each RunSpec
    (`device="cpu"`).

    >>> check(Choices(ranks=9)).errors
    {'ranks': 'ranks is 9; expected one of 1, 2, 3, 4'}
    """
    errors = {name: words for name, judge in _JUDGES.items() if (words := judge(choices))}
    if errors:
        return Request(errors=errors)
    pairs = _pairs(choices)
    specs = []
    for strategy, engine in pairs:
        try:
            specs.append(_spec(choices, strategy, engine, fixed or {}))
        except SpecError as error:
            return Request(errors={_to_blame(choices, strategy, engine, fixed or {}): str(error)})
    return Request(tuple(specs), left_out=_left_out(choices))


def parse_card(text: str) -> int | None:
    """Bytes of `300MB`, `1.5GB` or `2GiB`; None for an empty text or `none`; ValueError says what was expected."""
    if text.strip().lower() in ("", "none"):
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower().replace("_", ""))
    nbytes = int(float(found[1]) * _SCALE[found[2]]) if found and found[2] in _SCALE else 0
    if nbytes < 1:
        raise ValueError(CARD_WORDS.format(got=repr(text)))
    return nbytes


def label(spec: RunSpec) -> str:
    """A run's name as the figures write it: `label(RunSpec(engine="torch-fsdp2")) == "torch-fsdp2"`."""
    return RunView(spec.strategy, spec.engine, spec.world_size).label


# ---- one control alone

Judge = Callable[[Choices], str | None]  # the error of a choice, in one line


def _one_of(name: str, expected: Sequence[str | int]) -> Judge:
    def judge(choices: Choices) -> str | None:
        got = getattr(choices, name)
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


def _judge_custom(choices: Choices) -> str | None:
    if choices.link != CUSTOM:
        return None
    try:
        parse_link(choices.custom_link)
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
    return _one_of("as_model", TARGETS)(choices) if choices.link == TUNNEL else None


_JUDGES: dict[str, Judge] = {
    "model": _one_of("model", MODELS),
    "ranks": _one_of("ranks", RANKS),
    "steps": _judge_steps,
    "precision": _one_of("precision", PRECISIONS),
    "shard_size": _one_of("shard_size", SHARD_SIZES),
    "units": _one_of("units", UNITS),
    "prefetch": _one_of("prefetch", PREFETCH),
    "checkpoint": _one_of("checkpoint", CHECKPOINTS),
    "card": _judge_card,
    "link": _one_of("link", LINK_CHOICES),
    "custom_link": _judge_custom,
    "tunnel": _judge_tunnel,
    "as_model": _judge_target,
    "strategies": _some_of("strategies", STRATEGIES),
    "engines": _judge_engines,
}


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
    tunnel = choices.link == TUNNEL
    links = {NO_LINK: None, TUNNEL: None, CUSTOM: choices.custom_link.strip()}
    wanted = {
        "profile": 1, **fixed, "strategy": strategy, "engine": engine, "world_size": choices.ranks,
        "model": choices.model, "units": choices.units,
        "precision": choices.precision, "checkpoint": choices.checkpoint, "prefetch": choices.prefetch,
        "steps": choices.steps,
        "card": parse_card(choices.card), "link": links.get(choices.link, choices.link),
        "shard_size": choices.shard_size if strategy == "hybrid_shard" else None,
        "emulate": choices.tunnel.strip() if tunnel else None, "as_model": choices.as_model if tunnel else None,
    }  # fmt: skip
    if engine == "twin":
        wanted = {name: value for name, value in wanted.items() if name not in _NOT_OF_THE_TWIN} | {"memory": False}
    return RunSpec(**wanted)


def _to_blame(choices: Choices, strategy: str, engine: str, fixed: Mapping[str, Any]) -> str:
    """The control whose default would have made this run possible; the engines where none would."""
    for name in (
        "shard_size",
        "checkpoint",
        "prefetch",
        "units",
        "precision",
        "link",
        "tunnel",
        "as_model",
        "card",
        "ranks",
        "model",
    ):
        default = getattr(Choices(), name)
        try:
            if getattr(choices, name) != default:
                _spec(replace(choices, **{name: default}), strategy, engine, fixed)
                return name
        except SpecError:
            continue
    return "engines"
