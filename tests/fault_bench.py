"""The fault bench: jobs with one fault each are recorded for real, and the first finding must name the fault.

    python -m tests.fault_bench [--engine NAME ...] [--only NAME ...] [--recordings FOLDER] [--again] [--markdown]

One row a fault in `FAULTS`: what its first sentence must say, as words of which each group needs one, and what the
remedy must say in each engine's own words. The jobs without a fault must be accused of nothing. The job is
tests/fault_job.py, on two ranks that it forks, as `fsdplab record` runs any job, and for some faults
tests/fault_trainers.py under torchrun. Recordings are kept in the folder, so that a change of the findings needs no new
ones; `--again` makes them anew.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdplab.profiling.findings import Finding, findings
from fsdplab.records import RunRecord

ROOT = Path(__file__).parents[1]
ENGINES = ("fsdp2", "ddp")
OLDER = "fsdp1"  # some faults are tried with it too
TRAINERS = {"trainer": "trainer", "lightning": "lightning", "lightning-fsdp2": "fsdp2", "deepspeed": "deepspeed"}
ALL_ENGINES = (*ENGINES, OLDER, *TRAINERS)
KEPT = Path(tempfile.gettempdir()) / "fsdplab-fault-bench"
TIME_LIMIT_S = 300


@dataclass(frozen=True)
class Fault:
    """A fault of the job: `says` are groups of words, of each of which the finding's title must have one; `remedy` are
    words that the remedy must have, by engine. Where `accuses` is False, the job has no fault. It is recorded `runs`
    times.
    """

    name: str
    what: str
    says: Sequence[str] = ()
    remedy: Mapping[str, Sequence[str]] = field(default_factory=dict)
    accuses: bool = True
    runs: int = 1

    @property
    def engines(self) -> Sequence[str]:
        """The engines that can have it."""
        return [engine for engine in ALL_ENGINES if engine in self.remedy]


def _both(*words: str, **of_trainers: str) -> Mapping[str, Sequence[str]]:
    """The words for both engines; of a trainer its own, under its name with `_` for `-`."""
    named = {name.replace("_", "-"): (word,) for name, word in of_trainers.items()}
    return {**dict.fromkeys(ENGINES, words), **named}


def _everywhere(word: str) -> Mapping[str, Sequence[str]]:
    return dict.fromkeys((*ENGINES, *TRAINERS), (word,))


FAULTS = (
    Fault("none", "no fault", accuses=False, remedy=_everywhere(""), runs=3),
    Fault("accumulates", "no fault: 4 micro-batches, reduced once", accuses=False, remedy=_both(fsdp1="")),
    Fault("clip-once", "no fault: gradients are clipped together", accuses=False, remedy=_both(fsdp1="")),
    Fault("loader", "a loader that takes 10 ms a sample", ("load",),
          _both("num_workers", trainer="dataloader_num_workers", lightning="num_workers", lightning_fsdp2="num_workers",
                deepspeed="num_workers")),
    Fault("tiny-units", "each layer is a unit", ("small",), {"fsdp2": ("fully_shard", "block")}),
    Fault("one-unit", "the whole model is one unit", ("one unit",),
          {"fsdp2": ("fully_shard",), "fsdp1": ("auto_wrap_policy",)}),
    Fault("small-buckets", "buckets of 50 kB", ("bucket|small",), {"ddp": ("bucket_cap_mb",)}),
    Fault("one-bucket", "a bucket of 1 GB", ("one bucket",), {"ddp": ("bucket_cap_mb",)}),
    Fault("find-unused", "find_unused_parameters without need", ("find_unused_parameters",),
          {"ddp": ("find_unused_parameters=False",)}),
    Fault("broadcast-buffers", "a constant buffer is broadcast in each forward", ("buffers",),
          {"ddp": ("broadcast_buffers=False",)}),
    Fault("reduce-each", "gradients are reduced in each of 4 micro-batches", ("4 times",),
          {"fsdp2": ("set_requires_gradient_sync",), "ddp": ("no_sync",)}),
    Fault("loss-all-reduce", "an all-reduce of the loss in each micro-batch", ("all_reduce", "own"),
          _everywhere("every")),
    Fault("loss-each-step", "an all-reduce of the loss in each step", ("all_reduce", "own"), _both("every")),
    Fault("item-each", "200 numbers of tensors are read a step", (".item()|read",), _both(".item()")),
    Fault("barrier", "a barrier after each step", ("barrier",), _both("barrier")),
    Fault("metrics", "objects are gathered after each step", ("all_gather_object",), _both("every")),
    Fault("broadcast-weights", "weights are broadcast after each step", ("broadcast",), {"ddp": ("broadcast",)}),
    Fault("imbalance", "rank 1 has six times the data", ("Rank 1",), _both("data")),
    Fault("sleepy", "rank 1 sleeps 0.3 s a step", ("Rank 1",), _both("rank 1")),
    Fault("writes", "rank 1 writes a file a step", ("Rank 1",), _both("rank 1")),
    Fault("state-dict", "the state is gathered after each step", ("state dict|state_dict",), _both("every")),
    Fault("checkpoint", "the state is saved after each step", ("saved",),
          _both("every", trainer="save_steps", lightning="every_n_train_steps", lightning_fsdp2="every_n_train_steps",
                deepspeed="every")),
    Fault("average-weights", "whole weights are averaged after each step", ("state_dict|state dict|full_tensor",),
          _both("every")),
    Fault("evaluate", "an evaluation after each step", ("evaluat",),
          _both("evaluat", trainer="eval_steps", lightning="val_check_interval", lightning_fsdp2="val_check_interval",
                deepspeed="Evaluate")),
    Fault("train-false", "an evaluation after each step, by train(False)", ("evaluat",), _both("evaluat")),
    Fault("collect", "three collections of garbage after each step", ("garbage",), _everywhere("gc")),
    Fault("no-prefetch", "no unit is gathered ahead", ("late|ahead|prefetch",),
          {"fsdp2": ("set_modules_to_forward_prefetch",)}),
    Fault("keep", "units stay gathered until the backward", ("gathered|unsharded|reshard",),
          {"fsdp2": ("reshard_after_forward=True",)}),
    Fault("reshard", "units are gathered twice beside large activations", ("twice|again",),
          {"fsdp2": ("reshard_after_forward=False",)}),
    Fault("recompute", "activations are recomputed without need", ("recomput",), _everywhere("checkpoint")),
    Fault("fp32-messages", "messages in fp32 beside products in bf16", ("fp32",),
          {"fsdp2": ("MixedPrecisionPolicy", "bfloat16"), "ddp": ("bf16_compress_hook",)}),
    Fault("loop-optimizer", "an optimizer that steps one tensor after the other", ("optimizer",), _both("fused=True")),
    Fault("threads", "8 threads a rank on few cores", ("threads",), _both("threads")),
    Fault("kept-gradients", "gradients are set to zero and kept", ("radients",), _both("set_to_none")),
    Fault("clip-each", "gradients are clipped one parameter after the other", ("clip|norm",),
          _both("clip_grad_norm_")),
    Fault("validation-loss", "a validation loss after each step, computed with a graph", ("no backward",),
          _both("no_grad")),
    Fault("second-step", "the optimizer steps twice", ("steps 2 times",), _both("optimizer.step()")),
    Fault("eval-mode", "trained in eval mode, with dropout", ("Dropout",), _both("train()")),
    Fault("anomaly", "anomaly detection is on", ("anomaly",), _both("set_detect_anomaly")),
    Fault("deep-copy", "the model is copied after each step", ("copied",), {"ddp": ("AveragedModel",)}),
    Fault("empty-cache", "the allocator's cache is emptied after each step", ("empty_cache",), _both("of the loop")),
    Fault("histograms", "histograms of all parameters after each step", ("reads",), _both("hundredth")),
    Fault("log-norms", "the norm of each gradient is taken after each step", ("Norms",), _both("hundredth")),
    Fault("clip-twice", "gradients are clipped twice", ("clipped again",), _both("Once a step")),
    Fault("item-micro", "the loss of each of 4 micro-batches is read", (".item()|read",), _both(".item()")),
    Fault("prints", "a tensor is printed in each step", (".item()|read|print",), _both(".item()")),
    Fault("fp64", "parameters in fp64", ("fp64",), _both("float()")),
    Fault("keeps-graph", "losses are added up with their graphs", ("Memory grows",), _both("detach")),
    Fault("begin-loader", "the data loader is begun anew in each step", ("begun",), _both("before the loop")),
    Fault("optimizer-checkpoint", "the optimizer's state is saved after each step", ("saved",), _both("every")),
    Fault("static-graph", "find_unused_parameters beside static_graph", ("find_unused_parameters",),
          {"ddp": ("find_unused_parameters=False",)}),
    Fault("two-losses", "backward is called of two losses", ("2 times|last of 2",),
          {"fsdp2": ("set_requires_gradient_sync",), "ddp": ("their sum",)}),
    Fault("reduce-again", "gradients are reduced by hand too", ("all_reduce",), _both("every")),
    Fault("average-in-place", "no fault: each rank averages its own shards", accuses=False, remedy=_both()),
    Fault("waits", "not recognised: every rank waits 0.1 s outside of PyTorch", accuses=False, remedy=_both()),
    Fault("hook-check", "a hook reads a number after each layer", (".item()|read",), _both(".item()")),
    Fault("hook-barrier", "a hook waits for all ranks after each layer", ("barrier",), _both("barrier")),
    Fault("same-data", "every rank has the same data", ("same data",), _both("DistributedSampler")),
    Fault("same-data-dropout", "every rank has the same data, and dropout makes losses differ", ("same data",),
          _both("DistributedSampler")),
    Fault("dropout", "no fault: dropout, and each rank has data of its own", accuses=False, remedy=_both()),
    Fault("tokenises", "the loop tokenises each batch itself", ("prepares each batch",), _both("num_workers")),
    Fault("worker-tokenises", "no fault: a worker tokenises ahead", accuses=False, remedy=_both()),
    Fault("many-groups", "a group of the optimizer for each parameter", ("groups of parameters",), _both("one group")),
    Fault("two-groups", "no fault: matrices alone have weight decay", accuses=False, remedy=_both()),
    Fault("adapters", "adapters are trained in the units of frozen blocks", ("frozen",), {"fsdp1": ("fully_shard",)}),
    Fault("adapters-apart", "no fault: adapters of frozen blocks, whose gradients alone are reduced", accuses=False,
          remedy=_both()),
    Fault("python-thread", "a thread beside the loop runs Python all the time", ("metrics",), _both("process")),
    Fault("sleepy-thread", "no fault: a thread beside the loop that mostly sleeps", accuses=False, remedy=_both()),
    Fault("unwrapped", "the model is called without its wrapper", ("No gradient is reduced",),
          {"ddp": ("model.module(x)",)}),
    Fault("reduce-first", "the first of 4 micro-batches is reduced, and not the last", ("before the last",),
          _both("Reduce in the last")),
    Fault("optimizer-first", "the optimizer is made before the model is sharded", ("without gradients",),
          {"fsdp2": ("after the model is sharded",)}),
    Fault("no-root", "only the blocks are sharded", ("outside of all units",), {"fsdp2": ("fully_shard(model)",)}),
    Fault("head-only", "the optimizer has the head alone, and all gradients are computed", ("no optimizer has",),
          _both("requires_grad_(False)")),
    Fault("no-zero", "gradients are never set to zero", ("never set to zero",), _both("zero_grad()")),
    Fault("zero-first", "gradients are set to zero before the step", ("without gradients",),
          _both("after optimizer.step")),
    Fault("new-optimizer", "the optimizer is made in each step", ("made anew",), _both("before the loop")),
    Fault("one-core", "both ranks are bound to one core", ("bound to 1 core",), _both("taskset")),
    Fault("metric-forward", "a metric by a forward of its own, without a graph", ("without a graph",),
          _both("output.detach()")),
    Fault("sample-by-sample", "a forward for each of 8 samples", ("8 times for each backward",), _both("one batch")),
    Fault("summons", "whole weights are averaged after each step", ("summon_full_params",),
          {"fsdp1": ("every hundredth",)}),
    Fault("retains", "graphs are retained after the backward", ("retain_graph",), _both("without retain_graph")),
    Fault("one-loads", "weights are loaded into the wrapped model, on rank 0 alone", ("different models",),
          {"ddp": ("load_state_dict on every rank",)}),
    Fault("all-load", "no fault: weights are loaded into the wrapped model, on all ranks", accuses=False,
          remedy={"ddp": ()}),
    Fault("own-start", "replicas of shards begin with a seed of their own", ("different models",),
          {"fsdp2": ("manual_seed",)}),
    Fault("one-start", "no fault: replicas of shards begin with one seed", accuses=False, remedy={"fsdp2": ()}),
    Fault("no-warm-up", "a warm-up by an integer division, whose factor is 0", ("learning rate is 0 in 26 of 26",),
          _both("step // warmup")),
    Fault("ended-decay", "a scheduler that is stepped in each of 4 micro-batches", ("learning rate is 0 in",),
          _both("not in each micro-batch")),
    Fault("warm-up", "no fault: a warm-up that begins at 0", accuses=False, remedy=_both()),
    Fault("bf16", "parameters and the optimizer's state in bf16, at a small learning rate", ("lost to rounding",),
          {"fsdp2": ("MixedPrecisionPolicy",), "ddp": ("torch.autocast",)}),
    Fault("bf16-large-rate", "no fault: parameters in bf16, at a rate at which updates arrive", accuses=False,
          remedy=_both()),
    Fault("nan", "a softmax of rows that are masked as a whole", ("NaN",), _both("set_detect_anomaly")),
    Fault("no-grad-part", "half of the blocks run inside of no_grad", ("no gradient but zeros",),
          {"fsdp2": ("torch.no_grad()",), "fsdp1": ("torch.no_grad()",)}),
    Fault("frozen-part", "no fault: half of the blocks run inside of no_grad, and are frozen", accuses=False,
          remedy={"fsdp2": (), "ddp": ()}),
    Fault("dead-experts", "a mask lets no token reach two of the blocks", ("no gradient but zeros",),
          _both("a mask or router")),
    Fault("clips-scaled", "gradients are clipped before they are unscaled", ("before GradScaler unscales",),
          {"ddp": ("scaler.unscale_",)}),
    Fault("unscales", "no fault: gradients are unscaled and clipped", accuses=False, remedy={"ddp": ()}),
    Fault("skips", "a GradScaler skips each step: the root of a distance of 0", ("GradScaler has skipped",),
          {"ddp": ("set_detect_anomaly",)}),
    Fault("no-set-epoch", "the sampler's epoch is never set, in epochs of 7 steps", ("order of the one before",),
          _both("set_epoch(epoch)")),
    Fault("set-epoch", "no fault: the sampler's epoch is set, and a batch is looked at before the loop",
          accuses=False, remedy=_both()),
    Fault("new-group", "a group of processes is made in each step", ("new_group",), _both("before the loop")),
    Fault("sharpness", "no fault: a second backward at weights nearby (SAM)", accuses=False, remedy=_both()),
    Fault("contrastive", "no fault: features are gathered for the loss", accuses=False, remedy=_both()),
    Fault("norms-in-loss", "no fault: the loss has the parameters' norms", accuses=False, remedy={"ddp": ()}),
)  # fmt: skip


# ---- recording


def recording_of(fault: str, engine: str, kept: Path = KEPT, again: bool = False, run: int = 1) -> Path:
    """The folder of a job's record, of the first run or a later one; recorded where it is not there yet."""
    folder = kept / engine / (fault if run == 1 else f"{fault}-{run}")
    if again or not (folder / "run.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        job = _command(fault, engine)
        command = (sys.executable, "-m", "fsdplab", "record", "-q", "--force", "--out", str(folder), "--", *job)
        places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, timeout=TIME_LIMIT_S
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(job)} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return folder


def _command(fault: str, engine: str) -> Sequence[str]:
    if engine in TRAINERS:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        return (sys.executable, *torchrun, "-m", "tests.fault_trainers", "--by", TRAINERS[engine], "--fault", fault)
    return (sys.executable, "-m", "tests.fault_job", "--engine", engine, "--fault", fault)


# ---- judging


@dataclass(frozen=True)
class Judged:
    """What was found of one job."""

    fault: Fault
    engine: str
    first: Finding | None

    @property
    def sentence(self) -> str:
        """The first finding's title."""
        return self.first.title if self.first else "nothing stands out"

    @property
    def is_right(self) -> bool:
        """Whether the first finding names the fault and its remedy; of a job without a fault, whether none is named."""
        if not self.fault.accuses:
            return self.first is None or not self.first.is_fault
        if self.first is None:
            return False
        named = all(_has_one(self.sentence, words) for words in self.fault.says)
        return named and all(word in self.first.remedy for word in self.fault.remedy[self.engine])


def _has_one(sentence: str, words: str) -> bool:
    return any(word.lower() in sentence.lower() for word in words.split("|"))


def judge(fault: Fault, engine: str, kept: Path = KEPT, again: bool = False, run: int = 1) -> Judged:
    """Record a job, where that is needed, and look at its first finding."""
    record = RunRecord.load(recording_of(fault.name, engine, kept, again, run))
    found = findings(record)
    return Judged(fault, engine, found[0] if found else None)


def table(judged: Sequence[Judged]) -> str:
    """The bench's table as Markdown."""
    lines = ["| fault | engine | first sentence | right |", "| --- | --- | --- | --- |"]
    for each in judged:
        sentence = each.sentence.replace("|", "\\|")
        lines.append(f"| {each.fault.what} | {each.engine} | {sentence} | {'yes' if each.is_right else '**no**'} |")
    return "\n".join(lines)


def chosen(engines: Sequence[str], only: Sequence[str] | None) -> Iterator[tuple[Fault, str, int]]:
    """Each job of these engines, with the number of its run; `only` those of these faults."""
    for fault in FAULTS:
        for engine in fault.engines:
            if engine in engines and (not only or fault.name in only):
                yield from ((fault, engine, run) for run in range(1, fault.runs + 1))


def tell(judged: Judged) -> None:
    """Print a job's first sentence and its remedy."""
    verdict = "right" if judged.is_right else "WRONG"
    print(f"{verdict}  {judged.engine:5}  {judged.fault.name}: {judged.sentence}", flush=True)
    print(f"                -> {judged.first.remedy[:160] if judged.first else ''}", flush=True)


def main() -> None:
    """Run the bench, and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ALL_ENGINES, nargs="*", default=list(ENGINES))
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--recordings", type=Path, default=KEPT)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    judged = []
    for fault, engine, run in chosen(options.engine, options.only):
        judged.append(judge(fault, engine, options.recordings, options.again, run))
        if not options.markdown:
            tell(judged[-1])
    if options.markdown:
        print(table(judged))
    right = sum(each.is_right for each in judged)
    print(f"\n{right} of {len(judged)} jobs: the first sentence is right")


if __name__ == "__main__":
    main()
