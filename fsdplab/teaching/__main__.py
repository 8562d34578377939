"""`fsdplab course`: the editions, for teachers and for CI, the course as static pages, and what a class needs.

The command line starts this as a separate process (`python -m fsdplab.teaching`): it imports no `teaching`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdplab.common.arguments import OneLineParser
from fsdplab.common.files import try_output, write_output
from fsdplab.common.places import course_folder
from fsdplab.common.pythons import without_package
from fsdplab.common.streams import line_for, show_what_can_be_shown
from fsdplab.common.words import harmless

# nbformat's checker of addresses in many scripts, which jupyterlab brings, takes 1.5 s to import; no notebook needs it
with without_package("rfc3987_syntax"):
    from .authoring import progress, tracks
    from .authoring.colab import Published
    from .authoring.course import CourseError, build_course, notebooks_in
    from .authoring.course_run import BOTH, executed_in, run_course
    from .core.course_state import EDITIONS
    from .core.workspace import WorkspaceError


_EXAMPLES = {
    "build": (
        "--edition teacher --out print",
        "--out course --colab OWNER/REPO/blob/main/course --wheel https://example.org/fsdplab-0.2.0-py3-none-any.whl",
    ),
    "test": ("course-learner", "--times mine.csv"),
    "site": ("pages", "pages --keep executed", "pages --source executed --executed", "pages --live"),
    "slides": ("decks --source executed --executed",),
    "tracks": ("", "--times mine.csv"),
    "handouts": ("handouts.html",),
    "progress": ("room-1/*",),
    "leaderboard": ("handed-in --out class.csv",),
}
_SOURCES: dict[str, Any] = dict(type=Path, default=course_folder(), help="folder of sources; default: notebooks")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 done, 1 a notebook failed, 2 invalid request (one line on stderr for each reason)."""
    given = sys.argv[1:] if arguments is None else arguments
    show_what_can_be_shown()
    try:
        asked = parser().parse_args(given or ["--help"])
        status = asked.command(asked)
        sys.stdout.flush()
        return status
    except (CourseError, WorkspaceError) as error:
        lines = str(error).splitlines()
    except OSError as error:
        lines = [line_for(error)]
    for line in lines:
        print(f"fsdplab: {harmless(line)}", file=sys.stderr)
    return 2


def _examples(*names: str) -> str:
    """Return the examples of some commands, as they stand below a help text."""
    lines = ["Examples:"]
    for name in names:
        lines += [f"  fsdplab course {name} {rest}".rstrip() for rest in _EXAMPLES[name]]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the flags of the commands."""
    description = "Build and test the course's editions; pages, timings, handouts and progress for a class."
    flags = OneLineParser(prog="fsdplab course", description=description, epilog=_examples(*_EXAMPLES))
    commands = flags.add_subparsers(
        required=True, metavar="build | test | site | slides | tracks | handouts | progress | leaderboard", dest="name"
    )

    def command(name: str, run: Callable[[argparse.Namespace], int], does: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, description=f"{does[0].upper()}{does[1:]}.", epilog=_examples(name), help=does)
        made.set_defaults(command=run)
        return made

    build = command("build", _build, "write one edition of tagged source notebooks to a folder")
    build.add_argument("--edition", choices=EDITIONS, default="learner", help="default: learner")
    build.add_argument("--out", type=Path, help="folder to write to; default: course-<edition>")
    build.add_argument("--source", **_SOURCES)
    build.add_argument(
        "--colab",
        metavar="OWNER/REPO/blob/BRANCH/FOLDER",
        help="where you will publish the folder on GitHub: each notebook gets a badge that opens it in Colab",
    )
    build.add_argument("--wheel", metavar="URL", help="of --colab: the address of the wheel that a first cell installs")
    build.add_argument("--quiet", action="store_true", help="do not list what was written")
    test = command("test", _test, "run a folder of notebooks; sources as both editions")
    test.add_argument("directory", type=Path, nargs="?", default=course_folder(), help="default: notebooks")
    test.add_argument("--edition", choices=EDITIONS, help="run sources in this edition only")
    test.add_argument("--times", type=Path, help="write what each notebook took to this CSV file, for `tracks`")
    site = command("site", _site, "run the notebooks and write them as static pages")
    site.add_argument("out", type=Path, help="folder to write to")
    site.add_argument("--source", **_SOURCES)
    site.add_argument("--executed", action="store_true", help="the sources were run already: take their outputs")
    site.add_argument("--keep", type=Path, help="keep the executed notebooks in this folder, for --executed")
    site.add_argument(
        "--live", action="store_true", help="with the strategy lab and the planner, which run in the browser"
    )
    site.add_argument(
        "--pyodide",
        metavar="FOLDER|URL",
        help="of --live: a folder of Pyodide's files to copy beside the pages, or an address; default: Pyodide's CDN",
    )
    decks = command("slides", _slides, "run the notebooks and write them as slides, a file each")
    decks.add_argument("out", type=Path, help="folder to write to")
    decks.add_argument("--source", **_SOURCES)
    decks.add_argument("--executed", action="store_true", help="the sources were run already: take their outputs")
    time = command("tracks", _tracks, "minutes and machine time of notebooks and tracks")
    time.add_argument("--source", **_SOURCES)
    time.add_argument("--times", type=Path, help="a CSV file of `course test --times`; default: data/course_times.csv")
    sheets = command("handouts", _handouts, "write one page to print, a sheet a lesson")
    sheets.add_argument("out", type=Path, nargs="?", default=Path("handouts.html"), help="default: handouts.html")
    sheets.add_argument("--source", **_SOURCES)
    done = command("progress", _progress, "what each learner of a class has passed")
    done.add_argument("folders", type=Path, nargs="*", default=[Path()], help="where learners work; default: here")
    board = command("leaderboard", _leaderboard, "try every learner's fully_shard (notebook 20) and write a table")
    board.add_argument("folder", type=Path, help="learners' files: ada/my_fsdp/20.fully_shard.py, or ada.py")
    board.add_argument("--out", type=Path, default=Path("leaderboard.csv"), help="default: leaderboard.csv")
    return flags


def _build(asked: argparse.Namespace) -> int:
    change = None
    if asked.colab or asked.wheel:
        if not (asked.colab and asked.wheel):
            raise CourseError(
                "--colab and --wheel go together: the notebooks' folder on GitHub, and the wheel's address"
            )
        change = Published.at(asked.colab, asked.wheel).notebook
    built = build_course(asked.source, asked.out or Path(f"course-{asked.edition}"), asked.edition, change)
    if not asked.quiet:
        for path in built.notebooks:
            print(path)
    return 0


def _test(asked: argparse.Namespace) -> int:
    editions = (asked.edition,) if asked.edition else BOTH
    if asked.times:
        try_output(asked.times)  # before the notebooks run for minutes
    runs = run_course(asked.directory, lambda run: print(harmless(str(run)), flush=True), editions)
    if asked.times:
        tracks.write_times(asked.times, runs, asked.directory)
    return 1 if any(run.failure for run in runs) else 0


def _tracks(asked: argparse.Namespace) -> int:
    print("\n".join(tracks.table_of(tracks.costs(asked.source, asked.times))))
    return 0


def _handouts(asked: argparse.Namespace) -> int:
    from .site.handouts import handouts

    write_output(asked.out, handouts(asked.source))
    print(f"{asked.out}: open it in a browser and print it")
    return 0


def _progress(asked: argparse.Namespace) -> int:
    numbers = [path.name[:2] for path in notebooks_in(course_folder())]
    exercises = progress.exercises(numbers)
    learners = []
    for name, workspace in progress.workspaces_in(asked.folders):
        learners.append(progress.learner(name, workspace, exercises))
    print(harmless("\n".join(progress.table_of(learners, exercises))))
    return 0


def _site(asked: argparse.Namespace) -> int:
    # only pages need what converts notebooks
    from .site.build import build_site, check_out
    from .site.live import pyodide
    from .site.stills import add_stills_to_files

    if asked.pyodide is not None and not asked.live:
        raise CourseError("--pyodide is for the pages that --live makes; give both, or neither")
    live = pyodide(asked.pyodide) if asked.live else None
    if asked.executed:
        site = build_site(asked.source, asked.out, live=live)
    else:
        check_out(asked.out, asked.source, asked.live)
        with executed_in(asked.source, asked.keep, lambda run: print(harmless(str(run)), flush=True)) as executed:
            if executed.failed:
                return 1
            add_stills_to_files(executed.folder)  # what --keep keeps has them too
            site = build_site(executed.folder, asked.out, executed.where, live)
    print(f"{site.folder / 'index.html'}: {len(site.pages)} pages, {site.nbytes / 1e6:.1f} MB")
    _say_what_lacks(site.without_picture)
    return 0


def _slides(asked: argparse.Namespace) -> int:
    from .site.build import build_decks, check_out

    if asked.executed:
        decks = build_decks(asked.source, asked.out)
    else:
        check_out(asked.out, asked.source)
        with executed_in(asked.source, None, lambda run: print(harmless(str(run)), flush=True)) as executed:
            if executed.failed:
                return 1
            decks = build_decks(executed.folder, asked.out)
    print(f"{decks.folder}: {len(decks.pages)} decks, {decks.nbytes / 1e6:.1f} MB")
    _say_what_lacks(decks.without_picture)
    return 0


def _say_what_lacks(without_picture: int) -> None:
    """Say on stderr why figures have no picture, where some have none."""
    from .site.stills import WITHOUT_BROWSER, browser

    if not without_picture:
        return
    why = WITHOUT_BROWSER if browser() is None else "the browser could not draw them: pages show their words instead"
    print(f"{without_picture} figures have no picture: {why}", file=sys.stderr)


def _leaderboard(asked: argparse.Namespace) -> int:
    from .lessons.nb20_own_fully_shard.leaderboard import Row, handed_in, leaderboard, write  # its checks load torch

    if not asked.folder.is_dir() or not handed_in(asked.folder):
        raise CourseError(
            f"{asked.folder} holds no ada/my_fsdp/20.fully_shard.py and no ada.py; give the class's folder"
        )
    try_output(asked.out)

    def show(row: Row) -> None:
        stopped = f"; {row.stopped_by}" if row.stopped_by else ""
        print(harmless(f"{row.learner}: {row.stages} of 6 stages{stopped}"), flush=True)

    rows = leaderboard(asked.folder, show)
    write(rows, asked.out)
    print(f"{asked.out}: {len(rows)} learners")
    return 0


if __name__ == "__main__":
    sys.exit(main())
