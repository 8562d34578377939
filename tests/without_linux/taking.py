"""Takes away what Python has on Linux and not on macOS, and where asked what Windows has not either.

Names go from their modules. Files under /proc, /sys and /dev/shm are not found, whoever opens them in Python, except
the libraries of `NEEDS_LINUX`: they are built for Linux and have other files on a Mac.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

NEEDS_LINUX = ("psutil", "send2trash")
HIDDEN = ("/proc", "/sys", "/dev/shm")
OPENS = ("open", "os.listdir", "os.scandir", "os.chdir")  # events of sys.addaudithook that come with a path
LOOKS = ("stat", "lstat", "access", "readlink", "statvfs")  # functions of os without such an event

# Names, or their beginnings where they end with "*", that a Python for macOS does not have.
LINUX: dict[ModuleType, str] = {
    os: (
        "memfd_create MFD_* pidfd_open P_PIDFD eventfd* EFD_* setns unshare CLONE_* splice SPLICE_* copy_file_range"
        " sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler sched_setscheduler"
        " sched_rr_get_interval sched_param SCHED_BATCH SCHED_IDLE SCHED_RESET_ON_FORK posix_fadvise POSIX_FADV_*"
        " posix_fallocate fdatasync getrandom GRND_* getxattr setxattr listxattr removexattr XATTR_* O_DIRECT"
        " O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE RWF_* pipe2 getresuid getresgid setresuid setresgid waitid"
        " waitid_result WEXITED WNOWAIT WSTOPPED"
    ),
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGPOLL SIGSTKFLT SIGCLD",
    resource: (
        "prlimit RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_OFILE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_SIGPENDING RUSAGE_THREAD"
    ),
    select: "epoll EPOLL* POLLRDHUP POLLMSG",
    socket: (
        "SO_PEERCRED SO_PASSCRED SO_PASSSEC SO_PEERSEC SO_BINDTODEVICE SO_DOMAIN SO_PROTOCOL SO_MARK SO_PRIORITY"
        " SO_INCOMING_CPU SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK AF_VSOCK AF_ALG AF_CAN AF_TIPC"
    ),
    mmap: (
        "MADV_DODUMP MADV_DOFORK MADV_DONTDUMP MADV_DONTFORK MADV_HUGEPAGE MADV_HWPOISON MADV_MERGEABLE MADV_NOHUGEPAGE"
        " MADV_REMOVE MADV_UNMERGEABLE MADV_SOFT_OFFLINE MAP_DENYWRITE MAP_EXECUTABLE MAP_POPULATE MAP_STACK"
    ),
    fcntl: (
        "F_ADD_SEALS F_GET_SEALS F_SEAL_* F_GETPIPE_SZ F_SETPIPE_SZ F_GETLEASE F_SETLEASE F_GETSIG F_SETSIG F_NOTIFY"
        " F_EXLCK F_SHLCK DN_*"
    ),
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
}
# Functions of the C library; `syscall` is there on macOS too, with other numbers: nobody may call it.
LINUX_C = {
    "prctl", "fallocate", "posix_fallocate", "posix_fadvise", "sync_file_range", "memfd_create", "unshare", "setns",
    "malloc_trim", "mallopt", "mallinfo2", "sched_setaffinity", "sched_getaffinity", "epoll_create1", "eventfd",
    "mremap", "gettid", "get_nprocs", "sysinfo",
}  # fmt: skip


def take_away(what: str) -> None:
    """Take away what only Linux has; with "posix" also what Windows has not, from fsdplab's own modules."""
    sys.meta_path.insert(0, _BuiltForLinux())
    for module, names in LINUX.items():
        _remove(module, names)
    _hide_files()
    _hide_c_functions()
    _only_sockets_of_macos()
    measure = resource.getrusage
    resource.getrusage = lambda whose: _with_bytes(measure(whose))
    _say_darwin()
    if what == "posix":
        import windows

        windows.take_away()


def _remove(module: ModuleType, names: str) -> None:
    for name in names.split():
        found = [each for each in vars(module) if each == name or name[-1] == "*" and each.startswith(name[:-1])]
        for each in found:
            delattr(module, each)


# ---- files


def _hide_files() -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPENS:
            _find(arguments[0], sys._getframe(0).f_back)  # the main program is opened by nobody
        elif event in ("socket.bind", "socket.connect") and str(arguments[1])[:1] in ("\0", "b'\\x00"):
            raise FileNotFoundError(errno.ENOENT, "no abstract socket addresses here")

    sys.addaudithook(hook)
    for name in LOOKS:
        looks = _not_at_hidden(getattr(os, name))
        for each in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if getattr(os, name) in each:
                each.add(looks)
        setattr(os, name, looks)


def _not_at_hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    def looks(path: Any, *arguments: Any, **named: Any) -> Any:
        try:
            _find(path, sys._getframe(0).f_back)
        except FileNotFoundError:
            if function.__name__ == "access":
                return False
            raise
        return function(path, *arguments, **named)

    looks.__name__ = function.__name__
    return looks


def _find(path: Any, caller: FrameType | None) -> None:
    """FileNotFoundError where the path is hidden from the caller."""
    if isinstance(path, int) or path is None:
        return
    name = os.fsdecode(path)
    hidden = any(name == each or name.startswith(f"{each}/") for each in HIDDEN)
    of = str(caller.f_globals.get("__name__")).partition(".")[0] if caller else ""
    if hidden and of not in NEEDS_LINUX:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


# ---- the C library, sockets


def _hide_c_functions() -> None:
    find = ctypes.CDLL.__getitem__

    def found(library: ctypes.CDLL, name: str) -> Any:
        if name in LINUX_C:
            raise AttributeError(f"a C library without {name}")
        return _other_numbers if name == "syscall" else find(library, name)

    ctypes.CDLL.__getitem__ = found  # type: ignore[method-assign]


def _other_numbers(*_: object) -> int:
    raise OSError(errno.ENOSYS, "syscall with a number of Linux")


def _only_sockets_of_macos() -> None:
    del selectors.EpollSelector
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc]
    make = socket.socketpair

    def socketpair(family: Any = None, type: Any = socket.SOCK_STREAM, proto: int = 0) -> Any:
        if type == socket.SOCK_SEQPACKET:
            raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
        return make(family, type, proto)

    socket.socketpair = socketpair


def _with_bytes(usage: resource.struct_rusage) -> resource.struct_rusage:
    """`ru_maxrss` in bytes, as macOS gives it; Linux gives KiB."""
    values = list(usage)
    values[2] *= 1024
    return resource.struct_rusage(values)


# ---- the name of the system


def _say_darwin() -> None:
    """What Python's own modules for macOS ask for besides."""
    proxies = ModuleType("_scproxy")
    proxies._get_proxy_settings = dict  # type: ignore[attr-defined]
    proxies._get_proxies = dict  # type: ignore[attr-defined]
    sys.modules["_scproxy"] = proxies
    os.environ["_PYTHON_SYSCONFIGDATA_NAME"] = _sysconfig_data()
    name = platform.system

    def system() -> str:  # torch finds its libraries by it, which end in .so here
        return name() if sys._getframe(1).f_globals.get("__name__") == "torch" else "Darwin"

    platform.system = system
    platform.mac_ver = lambda *_: ("10.8", ("", "", ""), "x86_64")  # before App Nap, for which ipykernel has a library
    sys.platform = "darwin"


def _sysconfig_data() -> str:
    return f"_sysconfigdata_{sys.abiflags}_linux_{getattr(sys.implementation, '_multiarch', '')}"


class _BuiltForLinux:
    """While one of `NEEDS_LINUX` is imported, the system has its own name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in NEEDS_LINUX or sys.platform == "linux":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            for name in ("create_module", "exec_module"):  # compiled modules may run at either
                setattr(spec.loader, name, _as_on_linux(getattr(spec.loader, name)))
        return spec


def _as_on_linux(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def called(what: Any) -> Any:
        said, sys.platform = sys.platform, "linux"
        try:
            return function(what)
        finally:
            sys.platform = said

    return called
