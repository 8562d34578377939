"""Adds a command as a row: its name, its help, its flags, and the function that answers.

Most flags are fields of a `RunSpec`, a `PlanSpec` or `Outputs`: their types, defaults and help are written there, once.
A command takes some with `taken(RUN, "world_size", "model", profile=2)`, and its function gets them together.

At the end are flags whose text is not the value: sizes, links, comma-separated names and numbers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fsdplab.cli.answer import Answer
from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import Outputs
from fsdplab.common.names import STRATEGIES
from fsdplab.common.sizes import parse_card, parse_size
from fsdplab.planning.plan_spec import AS_IN_A_RUN, PlanSpec, flag_of
from fsdplab.sessions.spec import Network, Placement, RunSpec, SpecError, WorkloadPart
from fsdplab.sessions.spec.choices import ON_SHARED_MEMORY
from fsdplab.sessions.spec.rules import check_value
from fsdplab.workloads.own.sources import reads_text


@dataclass(frozen=True)
class Flag:
    """Describes one flag: its type, its default, its help, and its names where it has others than that of the field.

    `one_of` are its known values; `read` makes the command's value of the flag's; `into` is the parameter that gets it
    together with others. An `argument` is given without a name, and must be given if its default is `...`. `more` is
    what else typer takes: `{"metavar": "FILE"}`.
    """

    type: Any
    default: Any
    help: str
    names: tuple[str, ...] = ()
    one_of: Sequence[Any] = ()
    read: Callable[[Any], Any] = lambda given: given
    into: str = ""
    argument: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def parameter(self, name: str) -> inspect.Parameter:
        """Return the parameter that typer makes the flag of."""
        complete = None
        if self.one_of:
            complete = self._known_words
        kind = typer.Argument if self.argument else typer.Option
        made = kind(*self.names, help=self.help, autocompletion=complete, **self.more)
        # `...` stands for a flag that must be given
        default = inspect.Parameter.empty if self.default is ... else self.default
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[self.type, made]
        )

    def _known_words(self) -> list[str]:
        """List what the shell completes."""
        return [str(word) for word in self.one_of]


def _flags_of(spec: type, names: Mapping[str, tuple[str, ...]] = {}) -> dict[str, Flag]:
    """Return a flag for each field of a spec that has a help text; `names` replace those of its fields."""
    types = get_type_hints(spec)
    flags = {}
    for of_field in fields(spec):
        about = of_field.metadata
        if "help" not in about:
            continue
        flags[of_field.name] = Flag(
            types[of_field.name],
            of_field.default,
            about["help"],
            names=names.get(of_field.name, about.get("flags", ())),
            one_of=about.get("one_of", about.get("known", ())),
            more={"metavar": about.get("metavar")},
        )
    return flags


def _other_than(none: str, name: str) -> Callable[[str], bool]:
    """Return a reader of a choice of a run that is yes or no in a plan: `--compile blocks`."""

    def read(given: str) -> bool:
        check_value(name, given, none, one_of=RUN[name].one_of)
        return given != none

    return read


def _size_of(flag: str) -> Callable[[str | None], int | None]:
    """Return a reader of a size in bytes that may be left out: `--host-memory 512GB`."""

    def read(given: str | None) -> int | None:
        if given is None:
            return None
        try:
            return parse_size(given)
        except ValueError:
            refuse(f"{flag} is {given[:30]!r}; expected a size such as 512GB, 1.5TB or 256GiB")

    return read


RUN = _flags_of(RunSpec, {"world_size": ("--world-size", "-n"), "as_model": ("--as",)})
_PLAN = _flags_of(
    PlanSpec,
    {
        **{of_plan: RUN[of_run].names or (flag_of(of_plan),) for of_plan, of_run in AS_IN_A_RUN.items()},
        "flash": ("--flash/--no-flash",),
        "tensor_parallel": ("--tp",),
        "context_parallel": ("--cp",),
        "pipeline_parallel": ("--pp",),
        "expert_parallel": ("--ep",),
    },
)
PLAN = {
    "model": Flag(str, "llama-3.1-8b", "A model such as llama-3.1-70b, or the config.json of a Hugging Face model."),
    "gpu": Flag(str, "h100-80gb", "The kind of GPU, such as h100-80gb, a100-40gb or 4090; or a JSON file of another."),
    **_PLAN,
    "seq": replace(_PLAN["seq"], type=int | None, default=None),
    "compile": replace(RUN["compile"], read=_other_than("none", "compile")),
    "offload": Flag(
        str,
        "none",
        "Where shards, gradients and optimizer state are kept: none (the GPU) or cpu.",
        one_of=RUN["offload"].one_of,
        read=_other_than("none", "offload"),
    ),
    "strategy": replace(_PLAN["strategy"], one_of=STRATEGIES),
    "host_memory": replace(_PLAN["host_memory"], type=str | None, read=_size_of("--host-memory")),
    "storage": replace(_PLAN["storage"], type=str | None, read=_size_of("--storage")),
}

OUTPUTS = _flags_of(Outputs)

# Flags of all commands that run; the order is that of `--help`.
OF_A_RUN = (
    "world_size",
    "model",
    "steps",
    "batch_size",
    "sequence_length",
    "micro_batches",
    "precision",
    "optimizer",
    "compile",
    "prefetch",
    "units",
    "shard_size",
    "profile",
    "link",
    "link_across",
    "link_queues",
    "emulate",
    "as_model",
    "text",
    "seed",
    "device",
    "start",
    "time_limit",
)


def in_flags(error: SpecError) -> str:
    """Write the error of a run in the flags that were given: `--world-size is 0`, and `give --engine lab` for
    `give engine='lab'`.
    """
    message = str(error)
    # world_size is 0 -> --world-size is 0
    if message.startswith(f"{error.field} is "):
        message = message.replace(error.field, _flag_of_run(error.field), 1)
    fields_of_run = "|".join(RUN)
    # give engine='lab' -> give --engine 'lab'
    message = re.sub(rf"\b({fields_of_run})=", lambda match: f"{_flag_of_run(match[1])} ", message)
    # a shell needs no quotes: --engine 'lab' or 'torch-fsdp2' -> --engine lab or torch-fsdp2
    return re.sub(r"(--[\w-]+ |\bor )'([^']*)'", r"\1\2", message)


def _flag_of_run(field_name: str) -> str:
    """Return the flag of a field of RunSpec: `--world-size`."""
    if field_name in RUN and RUN[field_name].names:
        return RUN[field_name].names[0]
    return f"--{field_name.replace('_', '-')}"


def examples(*lines: str) -> str:
    """Return the examples below the flags of a command or a group."""
    return "Examples:\n\n" + "\n\n".join(lines)


def taken(of: Mapping[str, Flag], *names: str, **defaults: Any) -> dict[str, Flag]:
    """Return these flags of a spec, or all of them; `defaults` replace those of the spec."""
    # the parameter of the command's function that gets these flags together
    into = "outputs" if of is OUTPUTS else "settings"
    flags = {}
    for name in names or of:
        default = defaults.get(name, of[name].default)
        flags[name] = replace(of[name], default=default, into=into)
    return flags


def add_command(
    app: typer.Typer, name: str, does: str, told: str, *flags: Mapping[str, Flag], shown: Sequence[str], **context: Any
) -> None:
    """Add a command: `told` is its help, `shown` are examples below. `does` names its function in this package, such as
    `"report:report_records"`, which is imported when the command runs, after what it writes is known to be writable.

    The function gets its flags by their names, those of a spec together as `settings`, and `outputs` if it takes them.
    An Answer that it returns is shown; a number is the exit code.
    """
    all_flags: dict[str, Flag] = {}
    for some in flags:
        all_flags |= some

    def command(**given: Any) -> None:
        # the arguments of the function, the fields of a spec, and those of Outputs
        values: dict[str, dict[str, Any]] = {"": {}, "settings": {}, "outputs": {}}
        for key, flag in all_flags.items():
            # the text of a flag becomes the value of a field: "512GB" -> 512 * 10**9
            values[flag.into][key] = flag.read(given[key])
        arguments, settings = values[""], values["settings"]
        if "time_limit" in settings:  # of a run
            _refuse_what_is_unused(settings, all_flags)
        outputs = Outputs(**values["outputs"]).check()
        if "start" in settings:
            # it imports torch while this process does too
            begin_warm(settings["start"])
        function = function_of(does)
        if settings:
            arguments["settings"] = settings
        # a command that prints by itself as it goes on takes them
        if "outputs" in inspect.signature(function).parameters:
            arguments["outputs"] = outputs
        result = function(**arguments)
        if isinstance(result, Answer):
            outputs.give(result)
            raise typer.Exit(result.code)
        raise typer.Exit(result or 0)

    # typer reads the flags from the signature
    parameters = [flag.parameter(key) for key, flag in all_flags.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.row = does, all_flags  # type: ignore[attr-defined]  # a test compares them
    app.command(name, help=told, epilog=examples(*shown), context_settings=context or None)(command)


def _refuse_what_is_unused(settings: Mapping[str, Any], flags: Mapping[str, Flag]) -> None:
    """Refuse flags of a text and its tokens that were given beside a model whose batches are its own."""
    if reads_text(settings["model"]) or not Path(settings["model"]).is_file():
        return
    file_name = Path(settings["model"]).name
    for name in ("batch_size", "sequence_length", "text"):
        if name in settings and settings[name] != flags[name].default:
            refuse(
                f"{_flag_of_run(name)} is {settings[name]}, but the batches of {file_name} are its own;"
                " leave it out, and change batch(at) in the file instead"
            )


def function_of(does: str) -> Callable[..., Any]:
    """Import the function of a row: `function_of("doctor:doctor")`."""
    module, _, name = does.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"fsdplab.cli.{module}"), name)
    return function


def begin_warm(start: str) -> None:
    """Start the warm starter before heavy imports, so that both processes import torch at the same time."""
    if start in ("auto", "warm"):
        from fsdplab.sessions.launch import warm

        warm.begin()


# ---- texts that are not the value


def card_of(text: str, common: dict[str, Any], otherwise: str) -> int | None:
    """Return the bytes of the emulated card; `auto` is the wind tunnel's card where there is one, else `otherwise`.

    An empty text is refused: a shell's variable that is not set.
    """
    if text == "auto":
        # the wind tunnel scales the target's card down to this model
        if common["emulate"] and common["as_model"]:
            network = Network(emulate=common["emulate"], as_model=common["as_model"])
            ranks = Placement(world_size=common["world_size"]).world_size
            return network.scaled_card(WorkloadPart(model=common["model"]), ranks)
        text = otherwise
    if not text.strip():
        refuse("--card is empty; expected a size such as 300MB, 1.5GB or 2GiB, or none")
    try:
        return parse_card(text)
    except ValueError as error:
        refuse(f"--{error}")


def link_of(common: dict[str, Any], engines: list[str], otherwise: str) -> str | None:
    """Return the emulated link; `none` is none, and `auto` is `otherwise` between CPU ranks that can be behind it."""
    link = common["link"]
    if link is None or link.strip().lower() == "none":
        return None
    if link != "auto":
        return str(link)
    device = Placement(world_size=common["world_size"], device=common["device"]).device_type
    if common["emulate"] or common["link_across"]:  # they bring links of their own
        return None
    # between GPUs, or with an engine that no link can be emulated for, `auto` is none
    if device != "cpu" or not set(engines) <= {"lab", *ON_SHARED_MEMORY}:
        return None
    return otherwise


def names(text: str) -> list[str]:
    """Split `"a, b"` into `["a", "b"]`; empty parts are dropped."""
    return [part.strip() for part in text.split(",") if part.strip()]


def known_strategy(text: str) -> str:
    """Return the text itself if it names a known strategy; settings may follow the name: `full_shard:prefetch=0`."""
    check_value("strategy", text.partition(":")[0].strip(), RUN["strategy"].default, one_of=STRATEGIES)
    return text


def strategies(text: str) -> list[str]:
    """Split `"zero1, full_shard:prefetch=0"` into its parts, each a known strategy."""
    return [known_strategy(part) for part in names(text)]


def whole_numbers(flag: str, text: str) -> list[int]:
    """Read `"0, 1"` as `[0, 1]`; anything else than whole numbers of at least 0 is an error that names the flag."""
    parts = names(text)
    valid = all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts)
    if not parts or not valid:
        refuse(f"{flag} has {text!r}; expected whole numbers of at least 0, such as 0,1,2")
    return [int(part) for part in parts]
