"""Shared memory between the ranks of one machine: slots that one rank writes and its peers read.

Every rank owns a few slots in anonymous memory (`memfd_create`: no name, nothing left behind, whatever kills whom). The
operations of a group are numbered alike on all ranks; number s uses slot s modulo the number of slots. Two counters a
slot order everything: `ready` (the owner wrote operation s) and `done` (this rank has read everybody's operation s). A
slot is written again only when every peer is done with what it held, so a fast rank that gathers ahead overwrites
nothing unread. Waiting sleeps in the kernel (futex) and ends with an error when the awaited rank died.

Plain stores of counters are ordered on x86-64 only, so the transport is offered there and nowhere else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import sys
import time
import weakref

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events

_FUTEX, _WAIT, _WAKE = 202, 0, 1  # the x86-64 system call and its operations, for memory shared between processes
_ENTRY = 64  # bytes between counters: one cache line each
_LABEL = 48  # bytes of a label: what is left of the line
_POLL_S = 0.05  # how often a sleeper looks whether the awaited rank lives


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def machine_of_this_rank() -> tuple[str, ...] | None:
    """What must be equal for two ranks to share memory: boot, launcher's node, and namespaces; None where impossible.

    Network namespaces share memory, but a link shaped between them must not be bypassed, so they count as machines.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or not hasattr(os, "pidfd_open"):
        return None
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user"))
    return boot, os.environ.get("GROUP_RANK", "0"), str(os.getuid()), *spaces


class SharingRefused(RuntimeError):
    """The system does not let a rank open its peers' memory (a hardened container, say)."""


class Slots:
    """The shared slots of all ranks of `group`, used for one kind of operation at a time per slot.

    An operation takes the slot of the one `count` before it, which must be `done` by then. Built over the group itself:
    every member must call it.
    """

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        self.rank, self.ranks, self.count = group.rank(), group.size(), count
        self.sequence = 0
        self._patience_s = compat.seconds_before_giving_up(group)
        self._claimed: list[tuple[int, str]] = [(0, "")] * count
        self._capacity = [0] * count
        self._files = [os.memfd_create(f"fsdplab-{kind}") for kind in ("counters", *map(str, range(count)))]
        os.ftruncate(self._files[0], max(mmap.PAGESIZE, 2 * count * _ENTRY))
        told: list[tuple[int, list[int]]] = [(0, [])] * self.ranks
        dist.all_gather_object(told, (os.getpid(), self._files), group=group)
        self.processes = [process for process, _ in told]
        self._peers, self._alive = self._open(told, group)
        self._counters = [_Counters(fds[0], count) for fds in self._peers]
        self._maps: list[list[mmap.mmap | None]] = [[None] * count for _ in range(self.ranks)]
        self._own: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * count
        descriptors = [*self._files, *self._alive, *(fd for fds in self._peers for fd in fds)]
        weakref.finalize(self, _close, descriptors)

    def _open(self, told: list[tuple[int, list[int]]], group: dist.ProcessGroup) -> tuple[list[list[int]], list[int]]:
        """Everybody's files and process handles; all ranks raise `SharingRefused`
        where one of them may not open them.
        """
        refused: OSError | None = None
        peers, alive = [], []
        try:
            peers = [[os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR) for fd in fds] for pid, fds in told]
            alive = [os.pidfd_open(pid) for pid, _ in told]
        except OSError as error:
            refused = error
        answers: list[str | None] = [None] * self.ranks
        dist.all_gather_object(answers, refused and str(refused), group=group)  # also: everybody has opened everything
        for rank, answer in enumerate(answers):
            if answer is not None:
                _close([*self._files, *alive])
                raise SharingRefused(f"rank {rank} may not open its peers' memory: {answer}") from refused
        return peers, alive

    def announce(self) -> None:
        """Tag this rank's memory as communication buffers."""
        for own in self._own:
            events.tag("communication_buffers", own, "")

    def claim(self, nbytes: int, label: str = "") -> tuple[int, torch.Tensor]:
        """The next operation's number, and this rank's slot for it (bytes), free to be written.

        `label` says what the operation is; all ranks must claim a number for the same label and size.
        """
        number = self._claim_number(nbytes, label)
        slot = number % self.count
        if nbytes > self._capacity[slot]:  # ranks use a slot for equal sizes, so all of them grow it at the same number
            self._capacity[slot] = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._files[1 + slot], self._capacity[slot])
            self._own[slot] = self._view(self.rank, slot)
            self.announce()
        return number, self._own[slot][:nbytes]

    def claim_place(self, nbytes: int, label: str, place: tuple[int, int]) -> int:
        """The next operation's number, for `nbytes` that lie at `place` in this rank's memory and not in a slot."""
        number = self._claim_number(nbytes, label)
        self._counters[self.rank].tell_place(number % self.count, *place)
        return number

    def _claim_number(self, nbytes: int, label: str) -> int:
        number = self.sequence = self.sequence + 1
        slot = number % self.count
        for peer in range(self.ranks):
            self._await(peer, self._counters[peer].done, slot, number - self.count, "finish reading")
        self._claimed[slot] = (nbytes, label)
        return number

    def publish(self, number: int) -> None:
        """This rank's slot holds operation `number`."""
        self._counters[self.rank].describe(number % self.count, *self._claimed[number % self.count])
        self._counters[self.rank].set(self._counters[self.rank].ready, number % self.count, number)

    def read(self, peer: int, number: int, nbytes: int) -> torch.Tensor:
        """What `peer` wrote for operation `number` (bytes), once it has; an error if it died or does something else."""
        self._await_written(peer, number)
        return self._view(peer, number % self.count)[:nbytes]

    def place_of(self, peer: int, number: int) -> tuple[int, int]:
        """Where `peer` keeps what operation `number` reads, once it may be read; errors as in `read`."""
        self._await_written(peer, number)
        return self._counters[peer].place(number % self.count)

    def _await_written(self, peer: int, number: int) -> None:
        slot = number % self.count
        self._await(peer, self._counters[peer].ready, slot, number, "write")
        theirs, ours = self._counters[peer].described(slot), self._claimed[slot]
        if theirs != (ours[0], _short(ours[1])):
            raise RuntimeError(
                f"ranks are out of step: as operation {number} rank {self.rank} runs {ours[1] or 'one'} ({ours[0]}"
                f" bytes), rank {peer} runs {theirs[1] or 'another'} ({theirs[0]} bytes); every rank must run the same"
                " units in the same order, so look for one that is skipped on some ranks"
            )

    def wait_until_read(self) -> None:
        """Return once every peer has read all that was published so far."""
        for number in range(max(1, self.sequence - self.count + 1), self.sequence + 1):
            for peer in range(self.ranks):
                self._await(peer, self._counters[peer].done, number % self.count, number, "finish reading")

    def done(self, number: int) -> None:
        """This rank has read everything of operation `number`."""
        self._counters[self.rank].set(self._counters[self.rank].done, number % self.count, number)

    def _view(self, owner: int, slot: int) -> torch.Tensor:
        """The memory of a slot; a tensor only while somebody holds it,
        so that a peer's memory is not counted as ours.
        """
        shared = self._maps[owner][slot]
        if shared is None or len(shared) < self._capacity[slot]:
            shared = self._maps[owner][slot] = mmap.mmap(self._peers[owner][1 + slot], self._capacity[slot])
        return torch.frombuffer(shared, dtype=torch.uint8)

    def _await(self, peer: int, kind: int, slot: int, number: int, what: str) -> None:
        counters, deadline = self._counters[peer], time.monotonic() + self._patience_s
        while (seen := counters.get(kind, slot)) < number:
            counters.sleep(kind, slot, seen)
            if counters.get(kind, slot) < number and _ended(self._alive[peer]):
                raise RuntimeError(
                    f"rank {self.rank} waited for rank {peer} to {what} operation {number}, but rank {peer} has died; "
                    "look for its own error in its log"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self.rank} waited {self._patience_s:.0f} s for rank {peer} to {what} operation {number} "
                    f"({self._claimed[slot][1] or 'unnamed'}); rank {peer} lives but has not come to it"
                )


def _ended(process: int) -> bool:
    """Whether the process behind a handle has ended; `select` would refuse handles above 1,023."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _short(label: str) -> str:
    return label.encode()[:_LABEL].decode(errors="ignore")


class _Counters:
    """One rank's counters in shared memory: `ready` and `done` of every slot, 32 bits each, one cache line apart.

    Behind `ready` stands what the slot holds: its size and its label.
    """

    ready, done = 0, 1

    def __init__(self, fd: int, count: int) -> None:
        self._memory = mmap.mmap(fd, max(mmap.PAGESIZE, 2 * count * _ENTRY))
        self._words = [
            [ctypes.c_uint32.from_buffer(self._memory, (2 * slot + kind) * _ENTRY) for slot in range(count)]
            for kind in (self.ready, self.done)
        ]
        self._call = ctypes.CDLL(None, use_errno=True).syscall

    def get(self, kind: int, slot: int) -> int:
        return self._words[kind][slot].value

    def set(self, kind: int, slot: int, number: int) -> None:
        """Store and wake whoever sleeps on it."""
        word = self._words[kind][slot]
        word.value = number
        self._call(_FUTEX, ctypes.byref(word), _WAKE, ctypes.c_int(2**31 - 1), None, None, 0)

    def describe(self, slot: int, nbytes: int, label: str) -> None:
        """Say what the slot is about to hold; `set` comes after it."""
        start = 2 * slot * _ENTRY + 8
        self._memory[start : start + 8] = nbytes.to_bytes(8, "little")
        self._memory[start + 8 : start + 8 + _LABEL] = label.encode()[:_LABEL].ljust(_LABEL, b"\0")

    def tell_place(self, slot: int, descriptor: int, number: int) -> None:
        """Say where the operation's bytes lie, behind the slot's `done`; `set` of `ready` comes after it."""
        start = (2 * slot + 1) * _ENTRY + 8
        self._memory[start : start + 16] = descriptor.to_bytes(8, "little") + number.to_bytes(8, "little")

    def place(self, slot: int) -> tuple[int, int]:
        """What `tell_place` said."""
        start = (2 * slot + 1) * _ENTRY + 8
        told = self._memory[start : start + 16]
        return int.from_bytes(told[:8], "little"), int.from_bytes(told[8:], "little")

    def described(self, slot: int) -> tuple[int, str]:
        """What `describe` said."""
        start = 2 * slot * _ENTRY + 8
        label = self._memory[start + 8 : start + 8 + _LABEL].rstrip(b"\0")
        return int.from_bytes(self._memory[start : start + 8], "little"), label.decode(errors="ignore")

    def sleep(self, kind: int, slot: int, seen: int) -> None:
        """Sleep until the word is no longer `seen`, or for a while."""
        pause = _Timespec(0, int(_POLL_S * 1e9))
        word = ctypes.byref(self._words[kind][slot])
        self._call(_FUTEX, word, _WAIT, ctypes.c_uint32(seen), ctypes.byref(pause), None, 0)
