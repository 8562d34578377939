"""Flags that are fields of a `RunSpec` or of a `PlanSpec`: their types, defaults and help are written there, once.

A command takes some with `@settings_of("world_size", "model", profile=2)`, and gets them as one dict, `settings`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from fsdplab.cli.outputs import Outputs
from fsdplab.common.names import STRATEGIES
from fsdplab.planning.plan_spec import AS_IN_A_RUN, PlanSpec, flag_of
from fsdplab.sessions.spec import RunSpec, SpecError
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
