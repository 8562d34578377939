"""What fsdplab's own modules do not find on Windows: they get stand-ins for Python's modules that lack it.

Only theirs do. Python's own modules take other ways on Windows, which are not here.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import platform
from types import ModuleType
from typing import Any

MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline", "curses"}
NAMES = {
    "os": (
        "O_CLOEXEC O_DIRECTORY O_DSYNC O_NDELAY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC P_ALL P_PGID P_PID"
        " WCONTINUED WCOREDUMP WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED WNOHANG WSTOPSIG WTERMSIG"
        " WUNTRACED chown chroot confstr ctermid fchdir fchmod fchown fork forkpty fpathconf fstatvfs getegid"
        " geteuid getgid getgrouplist getgroups getloadavg getpgid getpgrp getpriority getsid getuid initgroups"
        " killpg lchown lockf major minor mkfifo mknod nice openpty pathconf posix_spawn posix_spawnp pread preadv"
        " pwrite pwritev readv register_at_fork sched_yield sendfile setegid seteuid setgid setgroups setpgid"
        " setpriority setregid setreuid setsid setuid statvfs sync sysconf tcgetpgrp tcsetpgrp ttyname uname wait"
        " wait3 wait4 writev RTLD_GLOBAL RTLD_LAZY RTLD_LOCAL RTLD_NOLOAD RTLD_NOW"
    ),
    "signal": (
        "SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGSYS SIGTRAP"
        " SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK"
        " SIG_UNBLOCK alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait"
    ),
    "select": "poll POLLERR POLLHUP POLLIN POLLNVAL POLLOUT POLLPRI",
    "socket": "AF_UNIX CMSG_LEN CMSG_SPACE recv_fds send_fds",
    "time": "clock_gettime clock_gettime_ns CLOCK_MONOTONIC CLOCK_REALTIME CLOCK_PROCESS_CPUTIME_ID tzset",
    "mmap": (
        "MADV_DONTNEED MADV_FREE MADV_NORMAL MADV_RANDOM MADV_SEQUENTIAL MADV_WILLNEED MAP_ANON MAP_ANONYMOUS"
        " MAP_PRIVATE MAP_SHARED PROT_EXEC PROT_READ PROT_WRITE"
    ),
    "sys": "abiflags getdlopenflags setdlopenflags",
    "ctypes": "",
}


def take_away() -> None:
    """Give fsdplab's modules stand-ins, from their next import of Python's modules on."""
    plain = builtins.__import__
    instead = {"sys": {"platform": "win32"}, "os": {"name": "nt"}, "ctypes": {"CDLL": _library}}
    stand_ins = {name: _StandIn(name, names, instead.get(name, {})) for name, names in NAMES.items()}

    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        ours = str((globals or {}).get("__name__")).partition(".")[0] == "fsdplab"
        if ours and not level and name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        found = plain(name, globals, locals, fromlist, level)
        return stand_ins.get(found.__name__, found) if ours else found

    builtins.__import__ = import_
    platform.system = lambda: "Windows"


class _StandIn(ModuleType):
    """A module without some of its names, and with others in the place of its own."""

    def __init__(self, name: str, lacks: str, instead: dict[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(_real=importlib.import_module(name), _lacks=set(lacks.split()), _instead=instead)

    def __getattr__(self, name: str) -> Any:
        if name in self._lacks:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self._instead[name] if name in self._instead else getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._real)} - self._lacks)


def _library(name: Any, *arguments: Any, **named: Any) -> ctypes.CDLL:
    if name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")  # as on Windows
    return ctypes.CDLL(name, *arguments, **named)
