"""Flags that are fields of a `RunSpec` or of a `PlanSpec`: their types, defaults and help are written there, once.

A command takes some with `@settings_of("world_size", "model", profile=2)`, and gets them as one dict, `settings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from fsdplab.common.names import STRATEGIES
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.sessions.spec import RunSpec

SETTINGS: dict[str, Any] = {}  # marks the place of the flags in a command's parameters; never passed on


@dataclass(frozen=True)
class Flag:
    """One flag: its type, its default, its help, and its names where it has more than that of the field."""

    type: Any
    default: Any
    help: str
    names: tuple[str, ...] = ()


def _fields(spec: type, names: Mapping[str, tuple[str, ...]]) -> dict[str, Flag]:
    """The fields of a spec that have a help text."""
    types = get_type_hints(spec)
    told = [each for each in fields(spec) if "help" in each.metadata]
    return {each.name: Flag(types[each.name], each.default, each.metadata["help"], names.get(each.name, ()))
            for each in told}  # fmt: skip


RUN = _fields(RunSpec, {"world_size": ("--world-size", "-n"), "as_model": ("--as",)})
_PLAN = _fields(
    PlanSpec,
    {  # what `run` and `compare` call otherwise has that name too
        "gpus": ("--gpus", "--world-size", "-n"), "micro_batch": ("--micro-batch", "--batch-size"),
        "grad_accum": ("--grad-accum", "--micro-batches"), "flash": ("--flash/--no-flash",),
        "tensor_parallel": ("--tp",), "context_parallel": ("--cp",),
    },
)  # fmt: skip
PLAN = {
    "model": Flag(str, "llama-3.1-8b", "A model such as llama-3.1-70b, or the config.json of a Hugging Face model."),
    "gpu": Flag(str, "h100-80gb", "The kind of GPU, such as h100-80gb, a100-40gb or 4090."),
    **_PLAN,
    "seq": Flag(int | None, None, _PLAN["seq"].help, ("--seq", "--sequence-length")),
}

# Flags of all commands that run; the order is that of `--help`.
OF_A_RUN = (
    "world_size", "model", "steps", "batch_size", "sequence_length", "micro_batches", "precision", "compile",
    "prefetch", "units", "shard_size", "profile", "link", "link_across", "link_queues", "emulate", "as_model", "text",
    "seed", "device", "start", "time_limit",
)  # fmt: skip


def examples(*lines: str) -> str:
    """The examples below a command's flags."""
    return "Examples:\n\n" + "\n\n".join(lines)


def settings_of(
    *names: str, of: Mapping[str, Flag] = RUN, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take these fields as flags; it gets them together as `settings`.

    `defaults` replace those of the spec. A `--card` is not among them: as a flag it is a text ("300MB").
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapper(**given: Any) -> None:
            command(settings={name: given.pop(name) for name in names}, **given)

        own = inspect.signature(command, eval_str=True).parameters
        flags = {name: _parameter(name, of[name], defaults.get(name, of[name].default)) for name in names}
        parameters: dict[str, inspect.Parameter] = {}
        for name, parameter in own.items():
            keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters |= flags if name == "settings" else {name: keyword}
        wrapper.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        wrapper.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return wrapper

    return decorate


def _parameter(name: str, flag: Flag, default: Any) -> inspect.Parameter:
    complete = (lambda: list(STRATEGIES)) if name == "strategy" else None
    option = typer.Option(*flag.names, help=flag.help, autocompletion=complete)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[flag.type, option]
    )
