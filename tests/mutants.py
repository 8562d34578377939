"""What the quick tests catch: small breaking changes, one after the other, in a copy of the tree.

    python -m tests.mutants                    # all changes; the whole quick tier where the likely files pass
    python -m tests.mutants --likely           # only the quick tests of the files that are likely to fail
    python -m tests.mutants clipping bubble    # the changes whose names have one of these words

Each change is one line of the package, written differently. The quick tests run until the first that fails: first those
of the files that are likely to notice, then all others. A table says by which test each change was caught. What fails
in `test_architecture.py` (style and types) is no catch, and is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache")
NO_TESTS = 5  # pytest's exit code where no test was chosen


class Mutant(NamedTuple):
    """One line of `file`, below fsdplab/, that reads `after` in place of `before`; `likely`: test files without
    `test_` and `.py`, the cheap ones first.
    """

    area: str
    name: str
    file: str
    before: str
    after: str
    likely: str


MUTANTS = (
    # ---- the engine
    Mutant(
        "engine", "clipping: each rank takes the norm of its own shards", "engine/features/clipping.py",
        "for dimension in key.cut:", "for dimension in key.cut[1:]:",
        "training_step surface_training",
    ),
    Mutant(
        "engine", "accumulation: the last micro-batch replaces the others", "engine/core/param.py",
        "self.unsharded_gradient.add_(gradient)", "self.unsharded_gradient = gradient",
        "training_step engine_numbers surface_training",
    ),
    Mutant(
        "engine", "accumulation: the last reduction replaces the others", "engine/core/param.py",
        "compat.local_of(held).add_(local)", "compat.local_of(held).copy_(local)",
        "training_step engine_numbers surface_training",
    ),
    Mutant(
        "engine", "offloaded optimizer: every part steps all groups", "engine/features/offloaded_optimizer.py",
        'self.param_groups, part.group["params"] = [part.group], part.params',
        'self.param_groups, part.group["params"] = everything, part.params',
        "training_step engine_offload",
    ),
    Mutant(
        "engine", "reshard: unsharded parameters are not freed", "engine/core/memory.py",
        "if not self.plan.keeps_whole and not self.keep_storage:",
        "if self.keep_storage and not self.plan.keeps_whole:",
        "training_step recorded_memory step_program engine_numbers",
    ),
    Mutant(
        "engine", "unshard: parameters that were stepped are not gathered again", "engine/core/step.py",
        "unit.begin_forward(unit in current)", "unit.begin_forward(unit in candidates)",
        "training_step engine_numbers step_program surface_unused",
    ),
    # ---- the planner
    Mutant(
        "planner", "traffic: one micro-batch alone gathers again", "planning/traffic.py",
        "else micro_batches * (1 + again)", "else micro_batches + again",
        "sentence_numbers strategy_table step_program plan",
    ),
    Mutant(
        "planner", "memory: a reduction's buffer has the dtype of gathers", "planning/memory.py",
        "reduction=padded * spec.reduce_bytes,", "reduction=padded * spec.gather_bytes,",
        "sentence_numbers plan_oracle plan",
    ),
    Mutant(
        "planner", "overlap: the replicas' all-reduce waits for the reduce-scatter", "planning/overlap.py",
        '"backward": max(again, across)}', '"backward": again + across}',
        "overlap_roofline sentence_numbers",
    ),
    Mutant(
        "planner", "search: how much longer the cheapest trains is upside down", "planning/search.py",
        "longer = chosen.expected_s / fast.expected_s", "longer = fast.expected_s / chosen.expected_s",
        "sentence_numbers plan_search",
    ),
    Mutant(
        "planner", "bubble: a stage keeps one micro-batch too many", "planning/stages.py",
        "return min(most, count - index) - 1", "return min(most, count - index)",
        "plan_axes plan",
    ),
    # ---- traces
    Mutant(
        "traces", "peers: on a GPU a rank comes when its host issues", "profiling/traces/skew.py",
        'came = "start_ns" if any(each.device == "cuda" for each in analyses) else "issue_ns"', 'came = "issue_ns"',
        "traces_gpu traces",
    ),
    Mutant(
        "traces", "causes: a queue of less than half of what is exposed is no cause", "profiling/traces/account.py",
        '(2 * queued >= exposed, "link_busy"),', '(queued >= exposed, "link_busy"),',
        "traces traces_gpu",
    ),
    Mutant(
        "traces", "steps: a step lasts until the next profiled one", "profiling/traces/steps.py",
        "follows = index + 1 < len(steps) and steps[index + 1][0] == number + 1", "follows = index + 1 < len(steps)",
        "traces_gpu traces_job",
    ),
    Mutant(
        "traces", "bandwidth: busbw is divided by its factor", "profiling/traces/skew.py",
        "return algbw, algbw * bus_factor(kind, ranks)", "return algbw, algbw / bus_factor(kind, ranks)",
        "traces trace_tables",
    ),
    Mutant(
        "traces", "dispatch: gaps below 200 us are computing", "profiling/traces/step_rows.py",
        "DISPATCH_NS = 20_000", "DISPATCH_NS = 200_000",
        "traces trace_tables exposed_parts",
    ),
    # ---- findings
    Mutant(
        "findings", "slow link: how many times the tokens is upside down", "profiling/causes/link.py",
        "{facts.link_s / facts.busy_s:.1f} times", "{facts.busy_s / facts.link_s:.1f} times",
        "sentence_numbers findings sentences step_summary conclusion",
    ),
    Mutant(
        "findings", "claims: what was claimed is left for the next rule", "profiling/step_facts.py",
        "left[index] *= 1.0 - share", "left[index] *= share",
        "findings step_summary sentences sentence_numbers",
    ),
    Mutant(
        "findings", "one communicator: two queues save the longer kind", "profiling/causes/link.py",
        "saved = facts.communication_s - facts.longer_kind_s", "saved = facts.longer_kind_s",
        "findings sentence_numbers sentences step_summary",
    ),
    Mutant(
        "findings", "long step: its excess is not spread over the steps", "profiling/causes/waiting.py",
        "at_most=over[rank, step] / steps)", "at_most=over[rank, step])",
        "sentence_numbers findings step_summary",
    ),
    Mutant(
        "findings", "idle time: its share is that of one cause", "profiling/causes/idle.py",
        '"whole": percent(facts.other_s / facts.step_s)}', '"whole": percent(causes[kind] / facts.step_s)}',
        "sentence_numbers findings step_summary",
    ),
)  # fmt: skip


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the tree, with its compiled files."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(ROOT, Path(folder) / "tree", ignore=LEFT_OUT, symlinks=True))


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    """The tree with one line changed; afterwards as before."""
    path = tree / "fsdplab" / mutant.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.before) != 1:
        raise SystemExit(
            f"{mutant.file} has {mutant.before!r} {source.count(mutant.before)} times; expected once: write the change"
            f" {mutant.name!r} of tests/mutants.py anew"
        )
    path.write_text(source.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")


def quick_tests(tree: Path, files: Sequence[str] = ()) -> str:
    """The first quick test of these files that fails, of all files by default; "" where none fails."""
    command = [sys.executable, "-m", "pytest", "-m", "quick", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += ["--ignore=tests/test_architecture.py", *files]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode in (0, NO_TESTS):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"pytest ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return failed[1]


def likely_files(mutant: Mutant, tree: Path) -> list[str]:
    """The test files that the words of a change name, those that have a quick test."""
    paths = [tree / "tests" / f"test_{word}.py" for word in mutant.likely.split()]
    return [f"tests/{path.name}" for path in paths if path.exists() and "mark.quick" in path.read_text()]


def caught_by(mutant: Mutant, tree: Path, only_likely: bool) -> str:
    """The test that fails where the change is made; "" where none does."""
    with applied(mutant, tree):
        files = likely_files(mutant, tree)
        found = quick_tests(tree, files) if files else ""
        return found if found or only_likely else quick_tests(tree)


def main() -> int:
    """The table; 0 where at least 13 of 15 changes are caught."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="only changes whose names have one of these words")
    parser.add_argument("--likely", action="store_true", help="only the files that are likely to notice")
    asked = parser.parse_args()
    chosen = [each for each in MUTANTS if not asked.words or any(word in each.name for word in asked.words)]
    caught: Counter[str] = Counter()
    with copied_tree() as tree:
        for mutant in chosen:
            begun = time.perf_counter()
            test = caught_by(mutant, tree, asked.likely)
            caught[mutant.area] += bool(test)
            row = f"{mutant.area:9}{'caught' if test else 'NOT CAUGHT':11} {mutant.name}"
            print(f"{row:90} {test} ({time.perf_counter() - begun:.0f} s)", flush=True)
    for area, many in Counter(each.area for each in chosen).items():
        print(f"{area}: {caught[area]} of {many}")
    print(f"{caught.total()} of {len(chosen)} are caught")
    return int(caught.total() < 13 / 15 * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
