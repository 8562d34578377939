"""A system call that the kernel denies to this process and to all that it starts, by seccomp as a container does."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from pathlib import Path

_NUMBERS = {
    "x86_64": {"flock": 73, "sched_setaffinity": 203, "pidfd_open": 434},
    "aarch64": {"flock": 32, "sched_setaffinity": 122, "pidfd_open": 434},
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_DENY, _ALLOW = 0x00050000, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]


def deny(call: str) -> None:
    """From now on `call` fails with EPERM: `deny("pidfd_open")`."""
    steps = [
        (_LOAD, 0, 0, 0),  # the number of the call
        (_JUMP_IF_EQUAL, 0, 1, _NUMBERS[platform.machine()][call]),
        (_RETURN, 0, 0, _DENY | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "seccomp is not allowed here")


def at_every_start(folder: Path, code: str, only: str = "") -> str:
    """The PYTHONPATH with which each new Python whose command line holds `only` begins with `code`."""
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    (folder / "sitecustomize.py").write_text(f"import sys\nif {only!r} in ' '.join(sys.orig_argv):\n{lines}")
    return str(folder)
