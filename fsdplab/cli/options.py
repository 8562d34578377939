"""Flags that are fields of a `RunSpec`: their types, defaults and help are read from it, and so written once.

A command takes some with `@settings_of("world_size", "model", profile=2)`, and gets them as one dict, `settings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from fsdplab.sessions.spec import RunSpec

_FLAGS = {"world_size": ("--world-size", "-n"), "as_model": ("--as",)}
_FIELDS = {each.name: each for each in fields(RunSpec)}
_TYPES = get_type_hints(RunSpec)

SETTINGS: dict[str, Any] = {}  # marks the place of the flags in a command's parameters; never passed on

# Flags of all commands that run; the order is that of `--help`.
OF_A_RUN = (
    "world_size", "model", "steps", "batch_size", "sequence_length", "micro_batches", "precision", "compile",
    "prefetch", "units", "shard_size", "profile", "link", "link_across", "link_queues", "emulate", "as_model", "text",
    "seed", "device", "start", "time_limit",
)  # fmt: skip


def settings_of(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take these fields as flags; it gets them together as `settings`.

    `defaults` replace those of RunSpec. A `--card` is not among them: as a flag it is a text ("300MB").
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapper(**given: Any) -> None:
            command(settings={name: given.pop(name) for name in names}, **given)

        own = inspect.signature(command, eval_str=True).parameters
        flags = {name: _flag(name, defaults.get(name, _FIELDS[name].default)) for name in names}
        parameters: dict[str, inspect.Parameter] = {}
        for name, parameter in own.items():
            keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters |= flags if name == "settings" else {name: keyword}
        wrapper.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        wrapper.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return wrapper

    return decorate


def _flag(name: str, default: Any) -> inspect.Parameter:
    option = typer.Option(*_FLAGS.get(name, ()), help=_FIELDS[name].metadata["help"])
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[_TYPES[name], option]
    )
