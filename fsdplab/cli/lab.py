"""Opens the course in JupyterLab, and runs the course's own tools and the check of a GPU, each in a separate process.

The process has a session of its own, so that Ctrl-C in a terminal reaches this process alone, which passes it on once.
It ends with this process, even after `kill -9`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from fsdplab.cli.errors import interrupted, refuse
from fsdplab.common.places import course_folder, how_to_install
from fsdplab.common.processes import asked_to_end, kept_waiting
from fsdplab.common.pythons import run_of, with_this_checkout

_SETTINGS = Path(__file__).with_name("jupyter")


def open_lab(notebooks: Path | None, browser: bool, port: int | None, edition: str) -> int:
    """Start JupyterLab on the notebooks of the folder, or else on those of the course, and wait for its exit code."""
    if edition not in ("learner", "teacher"):
        refuse(f"--edition is {edition!r}; expected learner (exercises to solve) or teacher (with solutions)")
    place = notebooks or course_folder()
    if not place.is_dir() or not any(place.rglob("*.ipynb")):
        refuse(f"no notebooks in {place}; run this in a clone of the repository, or give --notebooks FOLDER")
    if importlib.util.find_spec("jupyterlab") is None:
        refuse(f"JupyterLab is not installed; run: {how_to_install('lab')}")
    if port is not None:
        _check_free(port)
    first = ""
    if notebooks is None and edition == "learner":
        place, first = learner_edition(place)
    command = [str(place)]
    if first:
        command.append(f"--LabApp.default_url=/lab/tree/{first}")
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # in containers, where Jupyter refuses root
        command.append("--allow-root")
    if port is not None:
        # without retries: the port that was asked for, or an error
        command += [f"--port={port}", "--ServerApp.port_retries=0"]
    _use_settings_of_the_course()
    # on SIGTERM JupyterLab ends its kernels; on SIGINT it would ask a question, on SIGHUP die
    instead: dict[int, int] = {signal.SIGINT: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
    return run_module("jupyterlab", command, instead)


def _use_settings_of_the_course() -> None:
    """Add the settings in `jupyter/` to JupyterLab's, after those of the learner.

    They turn off its question about news, which would cover a corner of the page.
    """
    known = os.environ.get("JUPYTER_CONFIG_PATH")
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, [known, str(_SETTINGS)]))


def _check_free(port: int) -> None:
    """Refuse a port that is in use or not permitted, because JupyterLab would silently take another one."""
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed a moment ago is free
            trial.bind(("127.0.0.1", port))
    except OSError as error:
        refuse(f"--port {port} cannot be used ({error.strerror}); give another one, or none for JupyterLab's choice")


def learner_edition(sources: Path) -> tuple[Path, str]:
    """Build `course-learner/` here from the sources, the first time; a learner's work in it is never overwritten.

    Return the folder and the notebook to open with: the first one where the course is new, none where a learner comes
    back.
    """
    place = Path("course-learner")
    if any(place.glob("*.ipynb")):
        return place, ""
    if run_course(["build", "--quiet", "--source", str(sources), "--out", str(place)]):
        refuse(f"the learner edition could not be built in {place.resolve()}; see the reason above")
    notebooks = sorted(path.name for path in place.glob("*.ipynb"))
    print(f"Your course: {place}{os.sep}, {len(notebooks)} notebooks; what you write in them stays there.")
    print("Ctrl-C in this terminal ends JupyterLab.", flush=True)
    return place, notebooks[0] if notebooks else ""


def run_course(arguments: list[str]) -> int:
    """Run `fsdplab course ...` in a separate process: the command line imports no `teaching`."""
    if importlib.util.find_spec("IPython") is None:
        refuse(f"the course needs the notebook tools; run: {how_to_install('lab')}")
    return run_module("fsdplab.teaching", arguments)


# ---- modules in processes of their own


def run_module(module: str, arguments: Sequence[str], instead: Mapping[int, int] | None = None) -> int:
    """Run `python -m module ...` and return its exit code; 128 + n where signal n killed it.

    SIGINT, SIGTERM and SIGHUP are passed on, as the signal that `instead` maps them to. A module that they end
    without an exit code of its own exits as an interrupted command does.
    """
    received: list[int] = []
    command = run_of("fsdplab.sessions.launch.parent_death", str(os.getpid()), module, *arguments)
    with kept_waiting():  # until the module can take them: while Python starts, Ctrl-C would be a traceback
        process = subprocess.Popen(
            command, env=with_this_checkout(os.environ), stdin=subprocess.DEVNULL, start_new_session=True
        )

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal((instead or {}).get(number, number))

    with asked_to_end(hand_on):
        code = process.wait()
    # it was asked to end and did: its own good end, Ctrl-C's, or the end by the signal itself
    by_signal = {0, -signal.SIGINT, 128 + signal.SIGINT, *(-number for number in received)}
    if received and code in by_signal:
        interrupted(received[0])
    return code if code >= 0 else 128 - code
