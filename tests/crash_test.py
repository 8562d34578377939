"""Kills ranks of docs/examples/pretrain.py again and again, and checks what each restart goes on from.

    python -m tests.crash_test --kills 200 --seed 0

Two ranks of a small GPT-2 with dropout are started, and after each kill again: by torchrun (`--torchrun`), or sooner by
tests/forking_starter.py. The moment and the rank are drawn from the seed: while the ranks start and load, while they
train, while a checkpoint is written, while an old one is removed, and on a full disk (a small tmpfs that is filled up;
where none can be mounted, a limit on the size of one rank's files). Now and then the starter is killed too, with all
its ranks, as when a machine is lost; and then now and then the newest checkpoint is damaged before the job starts
again: a flipped bit, a cut file, a removed one.

After each kill the job goes on from the newest checkpoint that is good (judged here by its manifest), a good one is
always there, and every step that is computed again has the same loss, in every digit. At the end SIGTERM ends the job:
no process, no shared memory and no temporary file is left; and a job that nobody disturbed has the same losses.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fsdplab.checkpoint import published
from fsdplab.checkpoint.files import MANIFEST
from tests.examples import EXAMPLES
from tests.leftovers import processes_of

RANKS = 2
# how often, relatively
MOMENTS = {
    "starting": 2, "training": 3, "saving": 4, "removing": 2, "full disk": 2, "machine lost": 1, "damage": 3,
}  # fmt: skip
DAMAGES = ("flipped bit", "cut file", "removed file")
TINY_GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 2,
    "n_positions": 64, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
}  # fmt: skip
DISK_BYTES = 4_000_000  # of the tmpfs: several checkpoints of 0.4 MB
PATIENCE_S = 240.0  # for a restart on a busy machine
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000  # linux/sched.h


class Lost(AssertionError):
    """What the crash test must never see."""


def is_good(checkpoint: Path) -> bool:
    """Whether all files are as the manifest says."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        return all(
            hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError):
        return False


def newest_good(folder: Path) -> int:
    """The newest good checkpoint of a folder; 0 without one. One may be removed while it is looked at."""
    return max((step for step, path in published(folder).items() if is_good(path)), default=0)


def small_disk(folder: Path) -> bool:
    """Mount a small tmpfs on a folder, in a namespace that ends with this process and those it starts; whether it is
    allowed.
    """
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    if libc.unshare(_NEW_MOUNTS) != 0:
        if libc.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]):
        if shutil.which("mount") is None or subprocess.run(["mount", *words], capture_output=True).returncode:
            return False
    return True


@dataclass
class Job:
    """The starter (torchrun, or one that forks) with its ranks, and all that they printed."""

    words: list[str]
    environment: dict[str, str]
    lines: list[str] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    repeated: int = 0
    left_out: int = 0

    def start(self) -> None:
        self.starter = subprocess.Popen(
            self.words, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.starter.stdout:
            self.lines.append(line.rstrip())
            self.left_out += "is left out" in line
            if found := re.match(r"step (\d+) loss (\S+)", line):
                step, loss = int(found[1]), found[2]
                self.repeated += step in self.losses
                if self.losses.setdefault(step, loss) != loss:
                    self.problems.append(f"step {step} had the loss {self.losses[step]}, and after a restart {loss}")

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that live, in the order in which they were started."""
        return dict(enumerate(sorted(_children(self.starter.pid))))

    def until(self, come: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not come():
            if time.monotonic() > deadline:
                raise Lost(f"{what} did not come within {PATIENCE_S:.0f} s:\n" + "\n".join(self.lines[-40:]))
            time.sleep(0.01)

    def began(self, after: int) -> int | None:
        """The step from which ranks went on that were started after so many lines."""
        steps = [found[1] for line in self.lines[after:] if (found := re.match(r"begin (\d+) on", line))]
        return int(steps[-1]) if steps else None


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@dataclass
class Crashes:
    """One crash test: the job, where it writes, and what was seen."""

    folder: Path
    chance: random.Random
    on_small_disk: bool
    job: Job
    start_s: float  # within which a start is killed
    kills: Counter = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    unfinished: int = 0  # kills that left a half-written checkpoint
    damages: Counter = field(default_factory=Counter)

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def checkpoints(self) -> Path:
        return self.disk / "checkpoints"

    def once(self) -> None:
        """Wait for the moment, kill, and see what the job goes on from."""
        (moment,) = self.chance.choices(list(MOMENTS), list(MOMENTS.values()))
        victim, late_s = self.chance.randrange(RANKS), self.chance.random()
        if self.chance.random() < 0.5:
            newest = max(published(self.checkpoints), default=0)
            self.job.until(lambda: max(published(self.checkpoints), default=0) > newest, "a checkpoint")
        lines = len(self.job.lines)
        getattr(self, f"_until_{moment.replace(' ', '_')}")(victim, late_s)
        newest = newest_good(self.checkpoints)
        if moment in ("machine lost", "damage"):
            newest = self._kill_all(damage=moment == "damage")
        elif victim in (ranks := self.job.ranks()):
            lines = len(self.job.lines)
            os.kill(ranks[victim], signal.SIGKILL)
        self.unfinished += any(self.checkpoints.glob(".step-*"))
        self._free_disk()
        self._check_goes_on(moment, newest, lines)
        self.kills[moment] += 1

    # ---- moments

    def _until_starting(self, victim: int, late_s: float) -> None:
        """The ranks that run now are replaced, so that the kill falls into the start of the next ones."""
        now = self.job.ranks()
        for pid in now.values():
            os.kill(pid, signal.SIGKILL)
        self.job.until(lambda: (new := self.job.ranks()).get(victim) not in (None, now.get(victim)), "new ranks")
        time.sleep(self.start_s * late_s)

    def _until_training(self, victim: int, late_s: float) -> None:
        time.sleep(2 * late_s)

    def _until_saving(self, victim: int, late_s: float) -> None:
        self.job.until(lambda: list(self.checkpoints.glob(".step-*")), "a save")
        time.sleep(0.1 * late_s)

    def _until_removing(self, victim: int, late_s: float) -> None:
        """A new one has just been published, so that the oldest is removed now."""
        newest = max(published(self.checkpoints), default=0)
        self.job.until(lambda: max(published(self.checkpoints), default=0) > newest, "a checkpoint")
        time.sleep(0.005 * late_s)

    def _until_full_disk(self, victim: int, late_s: float) -> None:
        lines = len(self.job.lines)
        if not self.on_small_disk:
            resource.prlimit(self.job.ranks()[victim], resource.RLIMIT_FSIZE, (int(100_000 * late_s),) * 2)

        def refused() -> bool:
            self._fill_disk()  # again, since the job may just have removed an old checkpoint
            return any("was not saved" in line for line in self.job.lines[lines:])

        self.job.until(refused, "a save that fails")
        time.sleep(late_s)

    def _fill_disk(self) -> None:
        if self.on_small_disk:
            with suppress(OSError), (self.disk / "filler").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(10_000))

    _until_machine_lost = _until_damage = _until_training

    def _free_disk(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)

    def _kill_all(self, damage: bool) -> int:
        """Kill the starter first, so that it starts none again; returns the newest good step that is left."""
        ranks = self.job.ranks()
        for pid in (self.job.starter.pid, *ranks.values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.job.starter.wait()
        self.job.reader.join()
        self.job.until(lambda: not processes_of(self.folder), "the end of the ranks")
        if damage and len(published(self.checkpoints)) > 1:
            self._damage(published(self.checkpoints)[newest_good(self.checkpoints)])
        newest = newest_good(self.checkpoints)
        if not newest and published(self.checkpoints):
            raise Lost(f"no good checkpoint is left of {list(published(self.checkpoints))}")
        self.job.start()
        return newest

    def _damage(self, checkpoint: Path) -> None:
        """One file of a checkpoint, drawn from the seed."""
        path = self.chance.choice(sorted(checkpoint.iterdir()))
        kind, content = self.chance.choice(DAMAGES), bytearray(path.read_bytes())
        if kind == "removed file":
            path.unlink()
        elif kind == "cut file":
            path.write_bytes(content[: self.chance.randrange(len(content))])
        else:
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(content)
        self.damages[kind] += 1

    # ---- checks

    def _check_goes_on(self, moment: str, newest: int, lines: int) -> None:
        start = time.monotonic()
        self.job.until(lambda: self.job.began(lines) is not None or self.job.problems, "a restart")
        self.waits_s.append(time.monotonic() - start)
        began = self.job.began(lines)
        if began is not None and began < newest:
            self.job.problems.append(f"after {moment} it went on from {began}, though {newest} was good")
        self.job.until(lambda: any(f"step {began + 1} " in line for line in self.job.lines[lines:]), "a step")
        if self.job.problems:
            raise Lost("\n".join(self.job.problems))

    def end(self) -> str:
        """SIGTERM, and what is left."""
        self.job.starter.send_signal(signal.SIGTERM)
        self.job.starter.wait(PATIENCE_S)
        self.job.reader.join(10)
        if self.job.problems:
            raise Lost("\n".join(self.job.problems))
        left = [*processes_of(self.folder), *map(str, (self.folder / "tmp").iterdir())]
        left += [path.name for path in self.checkpoints.iterdir() if path.name.startswith(".")]
        if not newest_good(self.checkpoints):
            raise Lost("no good checkpoint is left")
        steps = [int(found[1]) for line in self.job.lines if (found := re.match(r"step (\d+) ", line))]
        last = max(published(self.checkpoints))
        if left or last != steps[-1]:
            raise Lost(f"left behind: {left}; the last checkpoint is of step {last}, the last step {steps[-1]}")
        kinds = ", ".join(f"{name} {count}" for name, count in self.kills.items())
        damages = ", ".join(f"{name} {count}" for name, count in self.damages.items()) or "none"
        waits = sorted(self.waits_s)
        return (
            f"{self.kills.total()} kills ({kinds}; {self.unfinished} left a half-written checkpoint): 0 lost. {last}"
            f" steps, {self.job.repeated} computed again with equal losses; back within {waits[len(waits) // 2]:.1f} s"
            f" (median), {waits[-1]:.1f} s (longest). Damages: {damages}; {self.job.left_out} checkpoints set aside."
        )

    def check_undisturbed(self) -> str:
        """The same job in one piece, in a folder of its own, has the same losses."""
        last = max(self.job.losses)
        words = list(self.job.words)
        words[words.index("--checkpoints") + 1] = str(self.folder / "undisturbed")
        whole = Job([*words, "--save-every=1000000"], self.job.environment)
        whole.start()
        try:
            whole.until(lambda: last in whole.losses or whole.starter.poll() is not None, f"step {last}")
        finally:
            whole.starter.send_signal(signal.SIGTERM)
            whole.starter.wait(PATIENCE_S)
            whole.reader.join(10)
        differing = [step for step, loss in self.job.losses.items() if whole.losses.get(step) != loss]
        if differing:
            raise Lost(f"the losses of {len(differing)} steps differ from those of a job in one piece: {differing[:9]}")
        return f" All {last} losses are those of a job that nobody disturbed."


def crash(kills: int, seed: int, folder: Path, by_torchrun: bool = False) -> str:
    """Run the crash test in an empty folder; a report in one sentence. Raises `Lost`."""
    (folder / "disk").mkdir()
    (folder / "tmp").mkdir()
    (folder / "text.txt").write_bytes(Path(__file__).read_bytes())
    (folder / "config.json").write_text(json.dumps(TINY_GPT2))
    on_small_disk = small_disk(folder / "disk")
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", f"--log-dir={os.devnull}")
    starter = (*torchrun, f"--max-restarts={10 * kills}") if by_torchrun else ("tests.forking_starter", str(RANKS))
    words = [
        sys.executable, "-m", *starter, str(EXAMPLES / "pretrain.py"),
        "--config", str(folder), "--data", str(folder / "text.txt"), "--sequence-length=16",
        "--batch-size=4", "--micro-batch-size=2", "--steps=1000000", "--save-every=4",
        "--checkpoints", str(folder / "disk" / "checkpoints"),
    ]  # fmt: skip
    there = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
    there["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see pretrain.py
    there |= {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    crashes = Crashes(
        folder, random.Random(seed), on_small_disk, Job(words, {**os.environ, **there}), 8.0 if by_torchrun else 2.0
    )
    shared = set(os.listdir("/dev/shm"))
    crashes.job.start()
    try:
        crashes.job.until(lambda: crashes.job.began(0) is not None, "the first start")
        for _ in range(kills):
            crashes.once()
            print(f"{crashes.kills.total()} {crashes.job.lines[-1]}", file=sys.stderr, flush=True)
        report = crashes.end() + crashes.check_undisturbed()
    finally:
        for pid in (crashes.job.starter.pid, *crashes.job.ranks().values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        crashes.job.starter.wait()
    if new := [name for name in set(os.listdir("/dev/shm")) - shared if str(crashes.job.starter.pid) in name]:
        raise Lost(f"shared memory is left: {new}")
    return f"{report} Full disk: {'a tmpfs' if on_small_disk else 'a limit on the size of files'}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true", help="restart by torchrun: 10 s of computing for each kill")
    parser.add_argument("--json", type=Path, help="file for the report")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = crash(args.kills, args.seed, Path(folder), args.torchrun)
    print(report)
    if args.json:
        args.json.write_text(json.dumps({"kills": args.kills, "seed": args.seed, "report": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
