"""Starts and ends every rank process.

It ends with its parent, reports to the mailbox, dumps its stack on request, joins the process group, and records a
failure. A rank never cleans up after a failure: its peers may be gone, and waiting for them would hang the run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.common.files import naming, write_whole
from fsdplab.sessions.launch.mailbox import AGENT_PID, RANKS_STORE, HeartbeatWriter, Mailbox
from fsdplab.sessions.launch.parent_death import end_with_parent
from fsdplab.sessions.launch.program import end_process, print_into
from fsdplab.sessions.launch.stacks import headline, of_exception
from fsdplab.sessions.spec.gpus import kernel_complaint
from fsdplab.sessions.worker.collective_hooks import watch_collectives

# The caller reports a hang long before the process group would give up.
_GROUP_PATIENCE = timedelta(hours=1)
_PEERS_CONNECT = timedelta(seconds=10)


class Diverged(RuntimeError):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class RankContext:
    """One rank of a run: its number, device, mailbox and heartbeat."""

    rank: int
    world_size: int
    device: torch.device
    mailbox: Mailbox
    heartbeat: HeartbeatWriter
    # every observed collective, name and bytes, where that was asked for: of a long run they are many
    issued: list[tuple[str, int]] | None = None

    def note_collective(self, name: str, nbytes: int) -> None:
        """Note a collective that is about to be issued."""
        if self.issued is not None:
            self.issued.append((name, nbytes))
        self.heartbeat.issue(f"{name} of {nbytes} bytes" if nbytes else name)

    def write(self, kind: str, content: dict[str, Any]) -> None:
        """Write a JSON file for the caller, whole or not at all."""
        write_whole(self.mailbox.of(self.rank, kind), json.dumps(content) + "\n")

    def append(self, kind: str, *rows: dict[str, Any]) -> None:
        """Add a line for each row to a file of JSON lines."""
        path = self.mailbox.of(self.rank, kind)
        with naming(path), path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def rank_process(
    folder: str,
    backend: str = "gloo",
    device: str | None = None,
    keep_issued: bool = False,
    traceback_of: Callable[[BaseException], str] = of_exception,
) -> Iterator[RankContext]:
    """Run the body as one rank of a process group (gloo or shm on the CPU, nccl on CUDA).

    The process ends after the body. `device` is "cuda" where the ranks of a gloo group compute on GPUs, "cuda:0" where
    all share that one, "cpu" where they are to use none, and "any" for somebody's own code, which begins on the CPU and
    finds a GPU of its own. `keep_issued`: the context lists all collectives. `traceback_of` makes the text of a report
    of the exception that ends the rank.
    """
    end_with_parent(int(os.environ[AGENT_PID]))
    mailbox = Mailbox(Path(folder))
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if not device:
        device = "cuda" if backend == "nccl" else "cpu"
    print_into(mailbox.of(rank, "out"), mailbox.of(rank, "err"))
    _answer_when_asked(mailbox, rank)
    context = RankContext(
        rank,
        world_size,
        _own_device(device),
        mailbox,
        HeartbeatWriter(mailbox.of(rank, "heartbeat"), rank),
        [] if keep_issued else None,
    )
    sys.excepthook = lambda kind, error, trace: _leave_note_and_end(context, error, traceback_of(error))
    dist.init_process_group(_known(backend), timeout=_GROUP_PATIENCE, **_meeting_place(rank, world_size))
    store = dist.distributed_c10d._get_default_store()
    # what peers wait for before they leave (`_wait_for_peers`)
    store.set(_connected(rank), "")
    with watch_collectives(context.note_collective):
        yield context
    context.heartbeat.enter("finished")
    _wait_for_peers(store, world_size)
    dist.destroy_process_group()
    # taking torch apart would cost half a second, and after a failure a destructor may wait for peers that wait for
    # this rank
    end_process(0)


def backend_of_cells(world_size: int) -> str:
    """Return the backend of ranks that run somebody's own code: gloo, and NCCL for tensors of GPUs where each rank has
    one.

    Where ranks share a GPU, gloo carries its tensors too. No CUDA context is made.
    """
    a_gpu_each = 0 < world_size <= torch.cuda.device_count()
    if a_gpu_each and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _known(backend: str) -> str:
    """Return the backend's name, which torch knows from now on."""
    if backend != "shm":
        return backend
    # imports torch's FSDP, a second that a cold rank of a learner's function need not take
    from fsdplab.engine.transport.shared_memory.process_group import register_backend

    return register_backend()


def _connected(rank: int) -> str:
    return f"fsdplab/connected/{rank}"


def _wait_for_peers(store: dist.Store, world_size: int) -> None:
    """Return once every rank has formed its group: leaving sooner breaks a peer's connection.

    The wait for a dead peer is bounded by the time that the launcher needs to notice.
    """
    try:
        store.wait([_connected(rank) for rank in range(world_size)], _PEERS_CONNECT)
    except RuntimeError:  # a peer has died, which the launcher tells
        pass


def _meeting_place(rank: int, world_size: int) -> dict[str, Any]:
    """Return the arguments of the rendezvous: a file of the run's folder for forked ranks (no port), else none, as
    torchrun has set its address.
    """
    path = os.environ.get(RANKS_STORE)
    if not path:
        return {}
    return {"store": dist.FileStore(path, world_size), "rank": rank, "world_size": world_size}


def _own_device(kind: str) -> torch.device:
    if kind == "cpu":
        _hide_the_gpus()
    elif kind == "any" and torch.cuda.device_count():
        # what torch does itself at the first use of CUDA, as for the seed: a context now would take memory for nothing
        torch.cuda._lazy_call(lambda: torch.cuda.set_device(_gpu_of_this_rank()))
    if kind in ("cpu", "any"):
        return torch.device("cpu")
    own = torch.device(kind)
    if own.index is None:
        own = _gpu_of_this_rank()
    try:
        torch.cuda.set_device(own)
    except RuntimeError as error:  # another process has taken its memory, or the GPU itself
        reason = str(error).splitlines()[0]
        sys.exit(
            f"{own} cannot be used ({reason}); nvidia-smi shows the processes that use it, CUDA_VISIBLE_DEVICES hides"
            " it"
        )
    return own


def _gpu_of_this_rank() -> torch.device:
    # 4 ranks on 2 GPUs: ranks 0 and 2 share the first
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def _hide_the_gpus() -> None:
    """Hide the GPUs from this process.

    Else an optimizer's first step makes a CUDA context on GPU 0, also for parameters on the CPU: 400 MB a rank, and an
    error where the compute mode lets one process use a GPU.
    """
    if torch.backends.cuda.is_built():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _answer_when_asked(mailbox: Mailbox, rank: int) -> None:
    faulthandler.enable()
    # faulthandler writes from the signal handler itself, so a rank that waits inside C++ answers too; the file stays
    # open
    faulthandler.register(signal.SIGUSR1, file=mailbox.of(rank, "stack").open("a"), all_threads=True)


def _leave_note_and_end(context: RankContext, error: BaseException, text: str) -> None:
    note = {
        "kind": "diverged" if isinstance(error, Diverged) else "raised",
        "error": headline(error) + _why_no_kernel(error),
        "traceback": text,
        "time": time.time(),
        "at": asdict(context.heartbeat.last()),
    }
    with suppress(OSError):  # on a full disk nobody can be told; the caller, which writes there too, says why
        context.write("failure", note)
        sys.stderr.write(text or f"{headline(error)}\n")
    end_process(1)


def _why_no_kernel(error: BaseException) -> str:
    """Say what to do where this torch was built without kernels for the GPU; "" for other errors."""
    if "no kernel image is available" not in str(error):
        return ""
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    complaint = kernel_complaint(name, capability, torch.cuda.get_arch_list())
    if not complaint:
        return ""
    return f": {complaint}"
