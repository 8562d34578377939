"""Flags' names of before, and flags that are commands now: they work until the next version, with a note on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from fsdplab.cli.errors import refuse

# command -> old name -> the name that all commands have now
RENAMED: Mapping[str, Mapping[str, str]] = {
    "plan": {
        "--gpus": "--world-size", "--seq": "--sequence-length", "--micro-batch": "--batch-size",
        "--grad-accum": "--micro-batches", "--param-dtype": "--precision", "--checkpointing": "--checkpoint",
    },
}  # fmt: skip
# command -> a flag that had no value before -> the value that it stood for
WITHOUT_VALUE: Mapping[str, Mapping[str, str]] = {
    "bench": {"--compile": "blocks"}, "doctor": {"--json": "-"}, "plan": {"--compile": "blocks", "--offload": "cpu"},
}  # fmt: skip
# flags of `plan` that are its commands now; two of them had no value
COMMANDS = {"--fit": "fit", "--sweep": "sweep", "--simulate": "simulate", "--ask": "ask", "--validate": "validate"}
_ALONE = ("--fit", "--simulate")


def as_today(args: Sequence[str]) -> list[str]:
    """The arguments of `fsdplab` with today's names of flags: `["plan", "--seq", "8"]` -> `["plan",
    "--sequence-length", "8"]`. One thing that is given by both of its names ends the command with exit code 2.
    """
    command = args[0] if args else ""
    renamed, values = RENAMED.get(command, {}), WITHOUT_VALUE.get(command, {})
    given = {word.partition("=")[0] for word in args}
    for old, new in renamed.items():
        if {old, new} <= given:
            refuse(f"{command} got both {old} and {new}, which are one thing; give {new} only")
    found: list[str] = []
    for place, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if flag in renamed:
            _note(f"{command} {flag} is now {renamed[flag]}")
            word = f"{renamed[flag]}{equals}{value}"
        found.append(word)
        following = args[place + 1] if place + 1 < len(args) else "--"
        if word in values and following != "-" and following.startswith("-"):
            found.append(values[word])
            _note(f"{command} {word} takes a value now, such as {word} {values[word]}")
    return ["plan", *_with_command(found[1:])] if command == "plan" else found


def _with_command(args: list[str]) -> list[str]:
    """`["--world-size", "8", "--fit"]` -> `["fit", "--world-size", "8"]`; what a value follows keeps it."""
    given = [word for word in args if word.partition("=")[0] in COMMANDS]
    if not given or args[0] in (*COMMANDS.values(), "step", "--help", "-h"):
        return args
    if len(given) > 1:
        refuse(f"{' and '.join(given)} were given; expected one of them, or none for the plan of a step")
    flag, equals, value = given[0].partition("=")
    command, place = COMMANDS[flag], args.index(given[0])
    before, after = args[:place], args[place + 1 :]
    if equals and flag in _ALONE:
        refuse(f"{flag} is {value!r}; expected no value: fsdplab plan {command}")
    if flag == "--sweep" and not equals:
        value, after = "".join(after[:1]), after[1:]
    print(f"fsdplab: plan {flag} is now plan {command}; the flag works until the next version", file=sys.stderr)
    return [command, *([value] if equals or flag == "--sweep" else []), *before, *after]


def _note(words: str) -> None:
    print(f"fsdplab: {words}; the form of before works until the next version", file=sys.stderr)
