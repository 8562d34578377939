"""`fsdplab course build`, `test` and `site`: the editions, for teachers and for CI, and the course as static pages.

The command line starts this as a separate process (`python -m fsdplab.teaching`): it imports no `teaching`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fsdplab.common.arguments import OneLineParser
from fsdplab.common.places import course_folder
from fsdplab.common.pythons import without_package
from fsdplab.common.words import harmless

# nbformat's checker of addresses in many scripts, which jupyterlab brings, takes 1.5 s to import; no notebook needs it
with without_package("rfc3987_syntax"):
    from .authoring.course import CourseError, build_course
    from .authoring.course_run import BOTH, run_course
    from .core.course_state import EDITIONS


_EXAMPLES = """Examples:
  fsdplab course build --edition teacher --out print
  fsdplab course test course-learner
  fsdplab course site pages
  fsdplab course site pages --source my-executed --executed
  fsdplab course site pages --live"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 done, 1 a notebook failed, 2 invalid request (one line on stderr for each reason)."""
    given = sys.argv[1:] if arguments is None else arguments
    asked = parser().parse_args(given or ["--help"])
    try:
        return asked.command(asked)
    except CourseError as error:
        print(harmless(str(error)), file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The flags of the three commands."""
    told = "Build and test the course's editions."
    flags = OneLineParser(prog="fsdplab course", description=told, epilog=_EXAMPLES)
    commands = flags.add_subparsers(required=True, metavar="build | test | site", dest="name")
    build = commands.add_parser(
        "build", epilog=_EXAMPLES, help="write one edition of tagged source notebooks to a folder"
    )
    build.add_argument("--edition", choices=EDITIONS, default="learner", help="default: learner")
    build.add_argument("--out", type=Path, help="folder to write to; default: course-<edition>")
    build.add_argument("--source", type=Path, default=course_folder(), help="folder of sources; default: notebooks")
    build.add_argument("--quiet", action="store_true", help="do not list what was written")
    build.set_defaults(command=_build)
    test = commands.add_parser("test", epilog=_EXAMPLES, help="run a folder of notebooks; sources as both editions")
    test.add_argument("directory", type=Path, nargs="?", default=course_folder(), help="default: notebooks")
    test.add_argument("--edition", choices=EDITIONS, help="run sources in this edition only")
    test.set_defaults(command=_test)
    site = commands.add_parser("site", epilog=_EXAMPLES, help="run the notebooks and write them as static pages")
    site.add_argument("out", type=Path, help="folder to write to")
    site.add_argument("--source", type=Path, default=course_folder(), help="folder of sources; default: notebooks")
    site.add_argument("--executed", action="store_true", help="the sources were run already: take their outputs")
    site.add_argument("--keep", type=Path, help="keep the executed notebooks in this folder, for --executed")
    site.add_argument("--live", action="store_true", help="with a page that plans a job in the browser")
    site.add_argument(
        "--pyodide", metavar="FOLDER|URL",
        help="of --live: a folder of Pyodide's files to copy beside the page, or their address; default: Pyodide's CDN",
    )  # fmt: skip
    site.set_defaults(command=_site)
    return flags


def _build(asked: argparse.Namespace) -> int:
    built = build_course(asked.source, asked.out or Path(f"course-{asked.edition}"), asked.edition)
    for path in () if asked.quiet else built.notebooks:
        print(path)
    return 0


def _test(asked: argparse.Namespace) -> int:
    editions = (asked.edition,) if asked.edition else BOTH
    runs = run_course(asked.directory, lambda run: print(harmless(str(run)), flush=True), editions)
    return 1 if any(run.failure for run in runs) else 0


def _site(asked: argparse.Namespace) -> int:
    # only pages need what converts notebooks
    from .site.build import build_site, check_out
    from .site.execution import executed_in
    from .site.live import pyodide

    if asked.pyodide is not None and not asked.live:
        raise CourseError("--pyodide is for the page that --live makes; give both, or neither")
    live = pyodide(asked.pyodide) if asked.live else None
    if asked.executed:
        site = build_site(asked.source, asked.out, live=live)
    else:
        check_out(asked.out, asked.source, asked.live)
        with executed_in(asked.source, asked.keep, lambda run: print(harmless(str(run)), flush=True)) as executed:
            if executed.failed:
                return 1
            site = build_site(executed.folder, asked.out, executed.where, live)
    print(f"{site.folder / 'index.html'}: {len(site.pages)} pages, {site.nbytes / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
