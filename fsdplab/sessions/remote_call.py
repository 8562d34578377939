"""Calls a function from a saved file on real ranks: what an exercise's check does with a learner's solution.

The function is read from its file in fresh processes, so it may block, crash or call os._exit without harm to the
caller. Values are sent in files written by torch.save and read with `weights_only=True`: numbers, text, tensors, and
lists, tuples and dicts of them.

    main(FOLDER, SOURCE, FUNCTION, DEVICE)      what each rank runs, called by launch/program.py
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fsdplab.common.temporary import folder_of_this_process
from fsdplab.sessions.launch.launcher import once_more, run_ranks
from fsdplab.sessions.launch.mailbox import LiveOutput, Mailbox, OnOutput
from fsdplab.sessions.stopped import stops_in_one_line
from fsdplab.sessions.worker.rank_process import backend_of_cells, rank_process

VALUES = "None, bool, int, float, str, plain tensors, and lists, tuples and dicts of them"
_PLAIN = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter)


class IssuedCollective(NamedTuple):
    """One collective that a function called: `IssuedCollective("all_reduce", 4096)`, with the bytes of its payload."""

    name: str
    nbytes: int


class RankValues(list[Any]):
    """The returned values, one a rank; `output` and `collectives` hold what each rank printed and called."""

    def __init__(self, values: list[Any], output: list[str], collectives: list[list[IssuedCollective]]) -> None:
        super().__init__(values)
        self.output = output
        self.collectives = collectives


@stops_in_one_line
def call_on_ranks(
    source_path: str | Path,
    function_name: str,
    *,
    world_size: int,
    payload: Any = None,
    time_limit: float = 30.0,
    start: str = "auto",
    on_output: OnOutput | None = None,
    device: str = "cpu",
) -> RankValues:
    """Call `function(payload)`, or `function(rank, world_size, payload)`, on gloo ranks; the values in order of rank.

    With `def double(rank, world_size, payload): return 2 * payload` in double.py, `call_on_ranks("double.py", "double",
    world_size=2, payload=4)` is `[8, 8]`. `on_output(rank, line)` gets what the ranks print while they run. The
    ranks see no GPU; with `device="any"` each has one of its own, which NCCL serves where there are enough. RanksFailed
    when a rank raises, dies or does not end within `time_limit` seconds; ValueError when the file or the payload cannot
    be sent to the ranks.
    """
    source = Path(source_path).resolve()
    if not source.is_file():
        raise ValueError(f"There is no file {source}; give the path of the saved source with `{function_name}` in it.")
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; expected at least 1.")
    if (unsupported := unsupported_type(payload)) is not None:
        raise ValueError(
            f"The payload holds something of type {unsupported}, which cannot be sent to the ranks; give {VALUES}."
        )

    def attempt() -> RankValues:
        with tempfile.TemporaryDirectory(prefix="call-", dir=folder_of_this_process()) as folder:
            mailbox = Mailbox(Path(folder))
            torch.save(payload, mailbox.folder / "payload")
            program = ["-m", "fsdplab.sessions.remote_call", folder, str(source), function_name, device]
            # nobody listens: the files of no rank are followed
            output = LiveOutput(mailbox, world_size if on_output else 0, on_output or (lambda rank, line: None))
            try:
                run_ranks(
                    program, mailbox, world_size=world_size, time_limit=time_limit, start=start, on_look=output.look
                )
            finally:
                output.flush()
            return _collect(mailbox, world_size)

    return once_more(attempt)


def _collect(mailbox: Mailbox, world_size: int) -> RankValues:
    # weights_only: what a learner's rank has written can run no code here
    handed_over = [torch.load(mailbox.of(rank, "result"), weights_only=True) for rank in range(world_size)]
    return RankValues(
        [result["value"] for result in handed_over],
        [mailbox.of(rank, "out").read_text(errors="replace") for rank in range(world_size)],
        [[IssuedCollective(*call) for call in result["collectives"]] for result in handed_over],
    )


# ---- what each rank runs


def main(folder: str, source: str, function_name: str, device: str) -> None:
    """Call the function on this rank, whose `device` is "cpu" or "any"."""
    backend = backend_of_cells(int(os.environ["WORLD_SIZE"])) if device == "any" else "gloo"
    with rank_process(folder, backend, device, keep_issued=True) as context:
        payload = torch.load(context.mailbox.folder / "payload", weights_only=True)
        function = getattr(_module(Path(source)), function_name)
        context.heartbeat.enter(function_name)
        # `function(payload)`; else the three arguments of the docstring
        takes_one = len(inspect.signature(function).parameters) == 1
        value = function(payload) if takes_one else function(context.rank, context.world_size, payload)
        unsupported = unsupported_type(value)
        if unsupported is not None:
            raise TypeError(
                f"{function_name} returned something of type {unsupported}, which cannot be sent; return {VALUES}"
            )
        torch.save({"value": value, "collectives": context.issued}, context.mailbox.of(context.rank, "result"))


def _module(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None, f"{source} is no Python file"
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look a class's module up there
    sys.modules[source.stem] = module
    spec.loader.exec_module(module)
    return module


def unsupported_type(value: object) -> str | None:
    """Return the name of the first type in a value that cannot be sent: `"DTensor"`; None when all can.

    Subclasses are unsupported: a DTensor cannot be read without its process group, a numpy number not without numpy.
    """
    if type(value) in _PLAIN:
        return None
    if type(value) is dict:
        return _first(*value.keys(), *value.values())
    if type(value) is list or type(value) is tuple:
        return _first(*value)
    return type(value).__name__


def _first(*values: object) -> str | None:
    return next(filter(None, map(unsupported_type, values)), None)
