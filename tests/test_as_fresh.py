"""A forked rank is as a fresh process of its caller: it sees what a rank of torchrun sees, whatever the caller has
changed since its starter began.

What may differ is listed here, and nothing else may.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdplab.sessions.launch import warm
from tests.as_fresh import FIXED, RANKS, STARTS, TAKEN_OVER

pytestmark = pytest.mark.skipif(warm.why_not() is not None, reason=f"no warm starts here: {warm.why_not()}")

# Torchrun tells its ranks more; how a rank was started is in two variables, and the process that started it in a third.
OF_TORCHRUN = ("TORCHELASTIC_", "MASTER_", "ROLE_", "GROUP_WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
OF_THE_START = ("FSDPLAB_RANKS_STORE", "FSDPLAB_NOT_FORKED", "FSDPLAB_AGENT_PID")
MAY_DIFFER = {
    "draws",  # every rank draws numbers of its own
    "hash",  # a seed of the starter's own, which its ranks share: the interned strings of a process keep their hashes
    "filters of warnings",  # the starter has imported more, and imports add some
    "flags/utf8_mode",  # where the locale is C, Python chooses UTF-8 for a rank, or for torchrun and so for its ranks
    # Beside these, which nothing here shows: numpy computes on one thread, and the name of the process in `ps` is the
    # starter's, as is its priority for disks.
}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` is `{"a/b": 1}`."""
    if not isinstance(value, dict):
        return {name: value}
    return {path: each for key in value for path, each in flat(value[key], f"{name}/{key}".lstrip("/")).items()}


def seen_after(changes: list[str], folder: Path) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """Whether the starter was the same, and what the ranks of either start saw, of a caller with these changes."""
    own = ("PYTHONUNBUFFERED", "PYTHONHASHSEED")  # of whoever runs the tests
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(
        [sys.executable, "-m", "tests.as_fresh", str(folder), " ".join(changes), *changes],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    texts = {
        start: [(folder / f"{start}-{rank}.json").read_text("utf-8", errors="surrogateescape") for rank in range(RANKS)]
        for start in STARTS
    }
    return done.stdout.strip(), {start: [flat(json.loads(each)) for each in texts[start]] for start in STARTS}


def differences(forked: dict[str, Any], started: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By name what a forked rank saw, and one of torchrun; without what may differ."""
    of_one = {f"environment/{name}" for name in OF_THE_START} | MAY_DIFFER
    names = [name for name in forked | started if name not in of_one]
    return {
        name: (forked.get(name), started.get(name))
        for name in names
        if forked.get(name) != started.get(name)
        and not name.startswith(tuple(f"environment/{each}" for each in OF_TORCHRUN))
    }


def some(of: dict[str, Any], seed: int) -> list[str]:
    draw = random.Random(seed)
    return draw.sample(list(of), k=len(of) * 3 // 4)


CASES = {
    "none": ([], "the same starter"),
    "all that is taken over": (list(TAKEN_OVER), "the same starter"),
    "some that is taken over": (some(TAKEN_OVER, 1), "the same starter"),
    "all that is fixed": (list(FIXED), "another starter"),
    **{f"any {seed}": (some(TAKEN_OVER | FIXED, seed), "another starter") for seed in (2, 3)},
}


@pytest.mark.parametrize("change", FIXED)
def test_what_a_process_reads_at_its_start_needs_another_starter(change: str, tmp_path: Path) -> None:
    code = (
        "import os, random, sys\nfrom pathlib import Path\nfrom fsdplab.sessions.launch.inherited import fixed\n"
        "from tests.as_fresh import FIXED\nbefore = fixed(os.environ)\nassert fixed(os.environ) == before\n"
        "FIXED[sys.argv[1]](random.Random(1), Path(sys.argv[2]))\nassert fixed(os.environ) != before"
    )
    subprocess.run([sys.executable, "-c", code, change, str(tmp_path)], check=True, timeout=60)


@pytest.mark.parametrize("case", sorted(CASES, key="all that is taken over".__ne__))
def test_a_forked_rank_sees_what_a_rank_of_torchrun_sees(case: str, tmp_path: Path) -> None:
    changes, starter = CASES[case]
    same, seen = seen_after(changes, tmp_path)
    assert same == starter
    for forked, started in zip(seen["warm"], seen["torchrun"]):
        assert not differences(forked, started), changes
        assert set(started["filters of warnings"]) <= set(forked["filters of warnings"])
    draws = [number for ranks in seen.values() for rank in ranks for number in rank["draws"]]
    assert len(set(draws)) == len(draws), "no two ranks draw the same"
    if not changes:
        hashes = {start: len({rank["hash"] for rank in ranks}) for start, ranks in seen.items()}
        assert hashes == {"warm": 1, "torchrun": RANKS}, "docs/speed.md: only new Pythons have a seed each"
