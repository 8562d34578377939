"""Flags that are fields of a `RunSpec` or of a `PlanSpec`: their types, defaults and help are written there, once.

A command takes some with `@settings_of("world_size", "model", profile=2)`, and gets them as one dict, `settings`.

At the end are flags whose text is not the value: sizes, links, comma-separated names and numbers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import Outputs
from fsdplab.common.names import STRATEGIES
from fsdplab.common.sizes import parse_size
from fsdplab.planning.plan_spec import AS_IN_A_RUN, PlanSpec, flag_of
from fsdplab.sessions.spec import Network, Placement, RunSpec, SpecError, WorkloadPart, near_matches
from fsdplab.sessions.spec.rules import check_value

SETTINGS: dict[str, Any] = {}  # marks the place of the flags in a command's parameters; never passed on


@dataclass(frozen=True)
class Flag:
    """One flag: its type, its default, its help, and its names where it has others than that of the field.

    `one_of` are its known values; `read` makes the field's value of the flag's; `metavar` stands for the value in help.
    """

    type: Any
    default: Any
    help: str
    names: tuple[str, ...] = ()
    one_of: Sequence[Any] = ()
    read: Callable[[Any], Any] = lambda given: given
    metavar: str | None = None


def _fields(spec: type, names: Mapping[str, tuple[str, ...]] = {}) -> dict[str, Flag]:
    """The fields of a spec that have a help text."""
    types = get_type_hints(spec)
    return {
        each.name: Flag(
            types[each.name], each.default, each.metadata["help"],
            names.get(each.name, each.metadata.get("flags", ())),
            each.metadata.get("one_of", each.metadata.get("known", ())),
            metavar=each.metadata.get("metavar"),
        )
        for each in fields(spec)
        if "help" in each.metadata
    }  # fmt: skip


def _other_than(none: str, name: str) -> Callable[[str], bool]:
    """Reads a choice of a run that is yes or no in a plan: `--compile blocks`."""

    def read(given: str) -> bool:
        check_value(name, given, none, one_of=RUN[name].one_of)
        return given != none

    return read


RUN = _fields(RunSpec, {"world_size": ("--world-size", "-n"), "as_model": ("--as",)})
_PLAN = _fields(
    PlanSpec,
    {
        **{own: RUN[name].names or (flag_of(own),) for own, name in AS_IN_A_RUN.items()},
        "flash": ("--flash/--no-flash",), "tensor_parallel": ("--tp",), "context_parallel": ("--cp",),
        "pipeline_parallel": ("--pp",), "expert_parallel": ("--ep",),
    },
)  # fmt: skip
PLAN = {
    "model": Flag(str, "llama-3.1-8b", "A model such as llama-3.1-70b, or the config.json of a Hugging Face model."),
    "gpu": Flag(
        str, "h100-80gb", "The kind of GPU, such as h100-80gb, a100-40gb or 4090; or a JSON file of another."
    ),
    **_PLAN,
    "seq": replace(_PLAN["seq"], type=int | None, default=None),
    "compile": replace(RUN["compile"], read=_other_than("none", "compile")),
    "offload": Flag(
        str, "none", "Where shards, gradients and optimizer state are kept: none (the GPU) or cpu.",
        one_of=RUN["offload"].one_of, read=_other_than("none", "offload"),
    ),
    "strategy": replace(_PLAN["strategy"], one_of=STRATEGIES),
}  # fmt: skip

_OUTPUTS = _fields(Outputs)

# Flags of all commands that run; the order is that of `--help`.
OF_A_RUN = (
    "world_size", "model", "steps", "batch_size", "sequence_length", "micro_batches", "precision", "optimizer",
    "compile", "prefetch", "units", "shard_size", "profile", "link", "link_across", "link_queues", "emulate",
    "as_model", "text", "seed", "device", "start", "time_limit",
)  # fmt: skip


def in_flags(error: SpecError) -> str:
    """The error of a run in the flags that were given: `--world-size is 0`, and `give --engine lab` for
    `give engine='lab'`.
    """
    flags = {name: flag.names[0] if flag.names else f"--{name.replace('_', '-')}" for name, flag in RUN.items()}
    told, field = str(error), error.field
    if told.startswith(f"{field} is "):
        told = told.replace(field, flags.get(field, f"--{field.replace('_', '-')}"), 1)
    told = re.sub(rf"\b({'|'.join(flags)})=", lambda found: f"{flags[found[1]]} ", told)
    return re.sub(r"(--[\w-]+ |\bor )'([^']*)'", r"\1\2", told)


def examples(*lines: str) -> str:
    """The examples below a command's flags."""
    return "Examples:\n\n" + "\n\n".join(lines)


def settings_of(
    *names: str, of: Mapping[str, Flag] = RUN, into: str = "settings", made: Callable[..., Any] = dict, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take these fields as flags; it gets them together as `settings`, or as what is `made` of them.

    `defaults` replace those of the spec. A `--card` is not among them: as a flag it is a text ("300MB").
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapper(**given: Any) -> None:
            command(**{into: made(**{name: of[name].read(given.pop(name)) for name in names})}, **given)

        own = inspect.signature(command, eval_str=True).parameters
        flags = {name: _parameter(name, of[name], defaults.get(name, of[name].default)) for name in names}
        parameters: dict[str, inspect.Parameter] = {}
        for name, parameter in own.items():
            keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters |= flags if name == into else {name: keyword}
        wrapper.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        wrapper.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return wrapper

    return decorate


def outputs_of(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take these targets as flags; it gets them as `outputs`, known to be writable."""
    return settings_of(*names, of=_OUTPUTS, into="outputs", made=lambda **given: Outputs(**given).check())


def _parameter(name: str, flag: Flag, default: Any) -> inspect.Parameter:
    complete = (lambda: [str(word) for word in flag.one_of]) if flag.one_of else None
    option = typer.Option(*flag.names, help=flag.help, metavar=flag.metavar, autocompletion=complete)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[flag.type, option]
    )


# ---- texts that are not the value


def parse_card(text: str) -> int | None:
    """Bytes of `300MB`, `1.5GB`, `2GiB` or a plain number; None for `none`. Anything else is an error."""
    if text.strip().lower() == "none":
        return None
    try:
        return parse_size(text)
    except ValueError:
        refuse(f"--card is {text!r}; expected a size such as 300MB, 1.5GB or 2GiB, or none")


def card_of(text: str, common: dict[str, Any], otherwise: str) -> int | None:
    """Bytes of the emulated card; `auto` is the wind tunnel's card where there is one, else `otherwise`."""
    if text != "auto":
        return parse_card(text)
    if not (common["emulate"] and common["as_model"]):
        return parse_card(otherwise)
    network = Network(emulate=common["emulate"], as_model=common["as_model"])
    ranks = Placement(world_size=common["world_size"]).world_size
    return network.scaled_card(WorkloadPart(model=common["model"]), ranks)


def link_of(common: dict[str, Any], engines: list[str], otherwise: str) -> str | None:
    """The emulated link; `none` is none, and `auto` is `otherwise` between CPU ranks that can be put behind it."""
    from fsdplab.sessions.spec.choices import ON_SHARED_MEMORY

    link = common["link"]
    if link != "auto":
        return None if link is None or link.strip().lower() == "none" else str(link)
    apart = common["emulate"] or common["link_across"] or not set(engines) <= {"lab", *ON_SHARED_MEMORY}
    device = Placement(world_size=common["world_size"], device=common["device"]).device_type
    return None if apart or device != "cpu" else otherwise


def names(text: str) -> list[str]:
    """`"a, b"` -> `["a", "b"]`; empty parts are dropped."""
    return [part.strip() for part in text.split(",") if part.strip()]


def check_strategies(found: Sequence[str]) -> None:
    """Refuse an unknown strategy; settings may follow a name, as in `full_shard:prefetch=0`."""
    for name in (text.partition(":")[0].strip() for text in found):
        if name not in STRATEGIES:
            near = near_matches(name, tuple(STRATEGIES))
            refuse(f"unknown strategy {name!r}{near}; expected one of {', '.join(STRATEGIES)}")


def one_strategy(named: str | None, flag: str) -> str:
    """The strategy of `run zero1` or of `run --strategy zero1`; two different ones are an error."""
    if named and flag not in (named, RUN["strategy"].default):
        refuse(f"{named} and --strategy {flag} were given; expected one strategy")
    return named or flag


def whole_numbers(flag: str, text: str) -> list[int]:
    """`"0, 1"` -> `[0, 1]`; anything else than whole numbers of at least 0 is an error that names the flag."""
    parts = names(text)
    if not parts or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        refuse(f"{flag} has {text!r}; expected whole numbers of at least 0, such as 0,1,2")
    return [int(part) for part in parts]
