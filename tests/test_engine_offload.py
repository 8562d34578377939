"""Slices and optimizer state that rest in files or host memory: equal results, less memory, nothing left behind.

Resident memory is the kernel's own count: `smaps` for the pages of a process, `mincore` for what the page cache holds.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from fsdplab import checkpoint
from fsdplab.engine import STRATEGIES, compat, fully_shard, shard, shard_model
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.features import mapped
from fsdplab.engine.features.offload import FileStorage, HostStorage, NVMeOffloadPolicy, end_to_end, storage_of
from fsdplab.engine.features.offloaded_optimizer import offload_optimizer
from tests.test_engine_state import Small, differing, local_of, train, whole

MB = 1 << 20
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="copies between a GPU and page-locked memory: no GPU here"
)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A folder whose files are not memory."""
    if mapped.is_in_memory(tmp_path):
        pytest.skip(f"{tmp_path} is tmpfs; give pytest --basetemp on a drive")
    return tmp_path


# ---- the kernel's counts


def mapped_bytes(folder: Path, count: str = "Rss") -> int:
    """Bytes of this process's mappings of files in `folder`: resident (`Rss`) or all (`Size`)."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            inside = f" {folder}/" in line
        elif inside and first == f"{count}:":
            total += int(line.split()[1]) * 1024
    return total


def cached_bytes(data: torch.Tensor) -> int:
    """Bytes of `data` that the kernel's page cache holds."""
    pages = (ctypes.c_ubyte * -(-data.nbytes // 4096))()
    call = ctypes.CDLL(None, use_errno=True).mincore
    assert call(ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.nbytes), pages) == 0
    return 4096 * sum(page & 1 for page in pages)


def memory_bytes() -> int:
    """Resident bytes of this process that no file on a drive backs: its own, and those it shares with other ranks."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Peak:
    """The most memory, looked at every 2 ms while the block runs."""

    def __enter__(self) -> Peak:
        self.most, self._over = memory_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, memory_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# ---- files in place of memory


def test_pages_come_and_go_and_the_bytes_stay(drive: Path) -> None:
    storage = FileStorage(drive)
    flat = storage.make(40 * MB, "blocks.0")
    assert flat.dtype == torch.uint8 and flat.device.type == "cpu" and not flat.any()
    flat.copy_(expected := torch.randint(0, 255, (40 * MB,), dtype=torch.uint8))
    assert mapped_bytes(drive) == cached_bytes(flat) == 40 * MB, "the counts see what is in memory"
    storage.done_reading(flat)
    assert mapped_bytes(drive) == 0, "pages left this process at once"
    mapped.wait()
    assert cached_bytes(flat) == 0, "written, and dropped from the page cache"
    storage.will_read(flat)
    mapped.wait()
    eventually(lambda: cached_bytes(flat) >= 39 * MB)
    assert mapped_bytes(drive) == 0, "read ahead, not touched"
    assert torch.equal(flat, expected)


def test_the_file_that_followed_last_time_is_read_ahead(drive: Path) -> None:
    storage = FileStorage(drive)
    flats = [storage.make(4 * MB, f"blocks.{index}").fill_(1) for index in range(4)]
    for index in (0, 1, 2, 3, 2, 1, 0):  # a forward and a backward
        storage.will_read(flats[index])
    for read, expected in (((0, 1), 2), ((2, 1), 0)):
        mapped.wait()
        [storage.done_reading(flat) for flat in flats]
        mapped.wait()
        assert not cached_bytes(flats[expected])
        [storage.will_read(flats[index]) for index in read]
        eventually(lambda: cached_bytes(flats[expected]) == 4 * MB)  # noqa: B023


def eventually(condition: Callable[[], bool]) -> None:
    """The drive answers in its own time; ten seconds are enough for any."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "not within ten seconds"
        time.sleep(0.01)


def test_parts_of_a_file_come_and_go_alone(drive: Path) -> None:
    flat = mapped.zeros(drive, 8 * MB, "parts")
    flat.fill_(7)
    mapped.let_go(flat[MB : 3 * MB])
    mapped.wait()
    assert mapped_bytes(drive) == cached_bytes(flat) == 6 * MB
    odd = flat[5 * MB + 5 : 6 * MB + 7]
    mapped.let_go(odd.view(2, -1)[1])
    assert torch.equal(flat, torch.full_like(flat, 7)), "spans that do not begin with a page lose nothing"


def test_keeping_the_cache_leaves_it_to_the_kernel(drive: Path) -> None:
    storage = FileStorage(drive, keep_cached=True)
    flat = storage.make(8 * MB, "u").fill_(1)
    storage.done_reading(flat)
    mapped.wait()
    assert (mapped_bytes(drive), cached_bytes(flat)) == (0, 8 * MB)


def test_a_span_wanted_again_is_not_dropped(drive: Path) -> None:
    flat = mapped.zeros(drive, 8 * MB, "u").fill_(1)
    mapped.let_go(flat)
    mapped.bring_in(flat)
    mapped.wait()
    assert cached_bytes(flat) > 7 * MB, "the kernel may take back a page of its own accord"


def test_tensors_in_memory_are_left_alone(drive: Path) -> None:
    plain = torch.ones(5)
    for empty in (plain, mapped.zeros(drive, 0, "nothing")):
        mapped.bring_in(empty), mapped.let_go(empty)
    assert mapped.file_under(plain) is None and plain.sum() == 5


def test_nothing_is_left_in_the_folder_or_on_the_disk(drive: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    flat = FileStorage(drive).make(64 * MB, "u")
    part = flat[:10]
    assert os.listdir(drive) == [], "a file without a name"
    del flat
    assert mapped_bytes(drive, "Size") == 64 * MB, "a view keeps it"
    del part
    assert mapped_bytes(drive, "Size") == 0 and len(os.listdir("/proc/self/fd")) == descriptors


def holds_and_dies(folder: Path) -> None:
    flat = FileStorage(folder).make(64 * MB, "u").fill_(1)
    assert os.listdir(folder) == [] and mapped_bytes(folder, "Size") == flat.nbytes
    os.kill(os.getpid(), signal.SIGKILL)


def reserved_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_nothing_is_left_after_kill_9(ranks, drive: Path) -> None:
    before = reserved_bytes(drive)
    assert ranks.ends(1, holds_and_dies, drive) == ["died with exit code -9"] and os.listdir(drive) == []
    eventually(lambda: reserved_bytes(drive) < before + 32 * MB)


def test_a_file_system_without_nameless_files_works_too(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def failing_open(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", failing_open)
    flat = FileStorage(drive).make(5, "u")
    assert flat.tolist() == [0] * 5 and os.listdir(drive) == []


# ---- folders and disks that will not do


def test_folders_that_cannot_hold_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, kind in [(tmp_path / "missing", FileNotFoundError), (tmp_path / "file", NotADirectoryError)]:
        with pytest.raises(
            kind, match=f"cannot make a file for a trial in {folder} .*expected an existing folder on a local"
        ):
            FileStorage(folder)


@contextmanager
def somebody_else() -> Iterator[None]:
    """As a user who may not write everywhere: root may."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with (
        somebody_else(),
        pytest.raises(PermissionError, match="that this user may write to; name one in NVMeOffloadPolicy"),
    ):
        FileStorage(tmp_path / "closed")


def test_a_disk_that_is_too_small_is_said_at_once(drive: Path) -> None:
    with pytest.raises(
        OSError, match=rf"no room for the {1 << 60} bytes of unit 'blocks.3' in .*\d+ bytes are free"
    ) as caught:
        FileStorage(drive).make(1 << 60, "blocks.3")
    assert caught.value.errno == errno.ENOSPC


def test_a_limit_on_file_sizes_is_said_at_once(drive: Path) -> None:
    storage, (soft, hard) = FileStorage(drive), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB, hard))
    try:
        with pytest.raises(OSError, match="no room for the 2097152 bytes of unit 'u'") as caught:
            storage.make(2 * MB, "u")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG


@pytest.mark.skipif(not mapped.is_in_memory(Path("/dev/shm")), reason="no tmpfs at /dev/shm")
def test_a_folder_that_is_memory_gets_a_warning(drive: Path) -> None:
    with pytest.warns(UserWarning, match="/dev/shm is a file system of memory .*name a folder on a drive"):
        FileStorage("/dev/shm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FileStorage(drive)


def test_a_drive_that_fails_is_not_silent(drive: Path) -> None:
    flat = mapped.zeros(drive, MB, "unit 'u'").fill_(1)
    descriptor, nowhere = mapped.file_under(flat).descriptor, os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    with pytest.raises(OSError, match="unit 'u' could not be written to .*resume from a checkpoint"):
        mapped.let_go(flat)


# ---- policies


def test_a_policy_names_a_home(drive: Path) -> None:
    device = torch.device("cpu")
    for policy in (None, OffloadPolicy()):
        assert not isinstance(storage_of(policy, device), HostStorage)
    assert type(storage_of(CPUOffloadPolicy(pin_memory=False), device)) is HostStorage
    assert isinstance(storage_of(NVMeOffloadPolicy(drive), device), FileStorage)
    assert isinstance(NVMeOffloadPolicy(str(drive)), OffloadPolicy)
    with pytest.raises(ValueError, match="unknown offload policy 'nvme'; expected CPUOffloadPolicy"):
        storage_of("nvme", device)


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "zero2"])
def test_parameters_kept_whole_are_not_offloaded(drive: Path, strategy: str) -> None:
    for policy in (CPUOffloadPolicy(pin_memory=False), NVMeOffloadPolicy(drive)):
        with pytest.raises(
            ValueError, match=f"{strategy} keeps parameters whole; use full_shard or shard_grad_op, or offload_o"
        ):
            storage_of(policy, torch.device("cpu"), STRATEGIES[strategy])
    storage_of(OffloadPolicy(), torch.device("cpu"), STRATEGIES[strategy])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator pins")
def test_pinning_without_an_accelerator_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="pin_memory=True without an accelerator.*ordinary memory"):
        storage = storage_of(CPUOffloadPolicy(), torch.device("cpu"))
    assert not storage.make(8, "u").is_pinned()
    gradient = torch.ones(3)
    assert storage.take([gradient])[0][0] is gradient, "no copy where nothing has to move"


# ---- an optimizer whose state rests in files

OPTIMIZERS = {
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True, amsgrad=True),
    "adamw in a loop": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),  # has state before the first step
    "two groups": lambda params: torch.optim.AdamW(
        [{"params": params[:2], "lr": 0.01}, {"params": params[2:]}], lr=0.1
    ),
}


def parameters(scale: int = 1) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(30, 100 * scale), (100,), (1,), (50 * scale, 70), (7, 3), (0, 4)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    for index, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=draw)
        param.grad = None if (index + number) % 4 == 1 else gradient  # some have none, in the first step too
    optimizer.step()


def held(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> dict[str, torch.Tensor]:
    """Parameters and state under names."""
    found = {f"{index}": param.detach() for index, param in enumerate(params)}
    for index, param in enumerate(params):
        state = optimizer.state.get(param, {})
        found |= {f"{index} {key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return found


@pytest.mark.parametrize("part_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_step_is_equal_to_the_last_bit(drive: Path, build: Callable, part_bytes: int) -> None:
    ours, theirs = parameters(), parameters()
    offloaded, plain = build(ours), build(theirs)
    assert (
        offload_optimizer(offloaded, NVMeOffloadPolicy(drive), part_bytes=part_bytes, ahead=part_bytes % 3) is offloaded
    )
    rates = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (offloaded, plain)]
    for number in range(5):
        step(offloaded, ours, number), step(plain, theirs, number)
        [rate.step() for rate in rates]
        assert differing(held(offloaded, ours), held(plain, theirs)) == [], f"step {number}"
    rows = [value for name, value in held(offloaded, ours).items() if " " in name and value.dim() and value.numel()]
    assert all(mapped.file_under(value) is not None for value in rows)
    assert isinstance(offloaded, type(plain)) and type(offloaded).__name__ == f"Offloaded{type(plain).__name__}"


def test_state_leaves_memory_and_comes_back_a_part_at_a_time(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.ones(MB)) for _ in range(10)]  # 4 MB each, 8 MB of state
    optimizer = torch.optim.AdamW(params, fused=True)
    offload_optimizer(optimizer, NVMeOffloadPolicy(drive), part_bytes=24 * MB)
    seen, let_go = [], mapped.let_go
    monkeypatch.setattr(mapped, "let_go", lambda *span: (seen.append(mapped_bytes(drive)), let_go(*span)))
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert mapped_bytes(drive) == 0 and mapped_bytes(drive, "Size") == 80 * MB
    mapped.wait()
    assert sum(cached_bytes(value) for param in params for value in optimizer.state[param].values() if value.dim()) == 0
    assert 16 * MB <= max(seen) <= 24 * MB, "no more than a part was ever in memory"


def test_parts_come_in_ahead_of_their_turn(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.ones(8)) for _ in range(4)]
    optimizer = torch.optim.SGD(params, lr=1.0, momentum=0.5)
    offload_optimizer(optimizer, NVMeOffloadPolicy(drive), part_bytes=1, ahead=2)
    log: list[str] = []
    numbers = {param.data_ptr(): index for index, param in enumerate(params)}
    for name in ("bring_in", "let_go"):
        note = lambda span, *_, name=name: (
            log.append(f"{name} {numbers[at]}") if (at := span.data_ptr()) in numbers else None
        )  # noqa: E731
        monkeypatch.setattr(mapped, name, note)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert log == [
        "bring_in 0", "bring_in 1", "bring_in 2", "let_go 0", "bring_in 3", "let_go 1", "let_go 2", "let_go 3",
    ]  # fmt: skip


def test_a_state_dict_travels_to_and_from_a_plain_optimizer(drive: Path) -> None:
    ours, theirs = parameters(), parameters()
    offloaded, plain = OPTIMIZERS["adamw foreach"](ours), OPTIMIZERS["adamw foreach"](theirs)
    step(plain, theirs, 0)
    step(offloaded, ours, 0)
    offload_optimizer(offloaded, NVMeOffloadPolicy(drive))  # state that exists already moves
    assert mapped_bytes(drive, "Size") > 0 and mapped_bytes(drive) == 0
    step(plain, theirs, 1)
    saved, as_it_was = copy.deepcopy(plain.state_dict()), plain.state[theirs[0]]["exp_avg"].clone()
    with torch.no_grad():
        [mine.copy_(its) for mine, its in zip(ours, theirs)]
    offloaded.load_state_dict(saved)
    assert mapped_bytes(drive) == 0, "what was loaded is put away"
    step(offloaded, ours, 2)
    assert torch.equal(saved["state"][0]["exp_avg"], as_it_was), "the dictionary that was loaded is not the live state"
    step(plain, theirs, 2)
    assert differing(held(offloaded, ours), held(plain, theirs)) == []
    plain.load_state_dict(offloaded.state_dict())
    assert differing(held(offloaded, ours), held(plain, theirs)) == []


def test_hooks_and_closures_run_once_a_step(drive: Path) -> None:
    params, calls = parameters(), []
    optimizer = offload_optimizer(torch.optim.AdamW(params), NVMeOffloadPolicy(drive), part_bytes=1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        calls.append("closure")
        sum(param.square().sum() for param in params).backward()
        return 3.5

    assert optimizer.step(closure) == 3.5
    assert calls == ["before", "closure", "after"]


class Counting(torch.optim.SGD):
    """Keeps a counter in its groups, as schedule-free optimizers do."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["weight_decay"] += 1
        super().step(closure)


def test_what_cannot_be_offloaded_is_refused(drive: Path) -> None:
    policy, params = NVMeOffloadPolicy(drive), parameters()
    scheduled = torch.optim.SGD(params, lr=1.0)
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    twice = offload_optimizer(torch.optim.SGD(params, lr=1.0), policy)
    for optimizer, remedy in [
        (torch.optim.LBFGS(params), "LBFGS steps on all parameters together"),
        (scheduled, "SGD.step was replaced .*before you build the scheduler"),
        (twice, "OffloadedSGD: its state is offloaded already"),
        ("adam", "needs a torch.optim.Optimizer, got str"),
    ]:
        with pytest.raises(ValueError, match=remedy):
            offload_optimizer(optimizer, policy)
    plain = torch.optim.SGD(params, lr=1.0)
    for wrong in ({"ahead": -1}, {"part_bytes": 0}):
        with pytest.raises(ValueError, match="ahead must be 0 or more parts and part_bytes 1 or more, got"):
            offload_optimizer(plain, policy, **wrong)
    with pytest.raises(ValueError, match="unknown offload policy"):
        offload_optimizer(plain, OffloadPolicy())
    assert type(plain) is torch.optim.SGD, "a refusal changes nothing"
    counting = offload_optimizer(Counting(params, lr=1.0), policy)
    with pytest.raises(RuntimeError, match="OffloadedCounting changes 'weight_decay' of its param_groups"):
        step(counting, params, 0)
    assert len(counting.param_groups[0]["params"]) == len(params)


def test_an_error_in_a_step_leaves_the_optimizer_whole(drive: Path) -> None:
    params = parameters()
    optimizer = offload_optimizer(torch.optim.AdamW(params, foreach=False), NVMeOffloadPolicy(drive), part_bytes=1)
    step(optimizer, params, 0)
    optimizer.state[params[3]].clear()
    optimizer.state[params[3]]["step"] = torch.tensor(1.0)
    with pytest.raises(KeyError):
        step(optimizer, params, 1)
    (group,) = optimizer.param_groups
    assert group["params"] == params
    del optimizer.state[params[3]]
    step(optimizer, params, 2)


# ---- the engine with offload


def policy_named(name: str, folder: Path) -> OffloadPolicy:
    return {"cpu": CPUOffloadPolicy(pin_memory=False), "nvme": NVMeOffloadPolicy(folder), "none": OffloadPolicy()}[name]


def offloaded_trainee(
    strategy: str, name: str, folder: Path, policy: MixedPrecisionPolicy, seed: int = 0, kind: str = "fused"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, offload = Small(seed), policy_named(name, folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1)) if strategy == "hybrid_shard" else None
    shard_model(model, strategy, mesh=mesh, mp_policy=policy, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{kind: True})
    return model, optimizer if name == "none" else offload_optimizer(optimizer, offload, part_bytes=500)


def of_this_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's slices of all parameters, buffers and optimizer states."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}: {key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: local_of(value) for name, value in found.items()}


def against_memory(strategy: str, folder: Path) -> None:
    """Three steps, offloaded and not, every rank's slices compared after each."""
    for policy in (MixedPrecisionPolicy(), BF16):
        for kind in ("fused", "foreach"):
            plain, its = offloaded_trainee(strategy, "none", folder, policy, kind=kind)
            runs = {name: offloaded_trainee(strategy, name, folder, policy, kind=kind) for name in ("cpu", "nvme")}
            for number in range(3):
                train(plain, its, number)
                expected = of_this_rank(plain, its)
                assert len(expected) > 20, sorted(expected)
                for name, (model, optimizer) in runs.items():
                    train(model, optimizer, number)
                    wrong = differing(of_this_rank(model, optimizer), expected)
                    assert wrong == [], f"{policy} {kind} {name}, step {number}"
            slices = [param.to_local() for param in runs["nvme"][0].parameters()]
            assert all(mapped.file_under(local) is not None for local in slices if local.numel())


def in_turn(strategies: list[str], folder: Path) -> None:
    for strategy in strategies:
        against_memory(strategy, folder)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_equals_the_run_in_memory(ranks, drive: Path, world_size: int) -> None:
    """Every strategy that shards parameters."""
    ranks(world_size, in_turn, ["full_shard", "shard_grad_op", "hybrid_shard"], drive)


def resumed(folder: Path) -> None:
    """Saved offloaded, loaded offloaded and plain, and the other way round."""
    for saves, loads in (("nvme", "nvme"), ("nvme", "none"), ("none", "nvme"), ("cpu", "nvme")):
        model, optimizer = offloaded_trainee("full_shard", saves, folder, MixedPrecisionPolicy())
        train(model, optimizer, 0, 1)
        checkpoint.save(model, optimizer, folder / f"{saves} to {loads}")
        train(model, optimizer, 2, 3)
        other, its = offloaded_trainee("full_shard", loads, folder, MixedPrecisionPolicy(), seed=5)
        train(other, its, 9)
        assert len(differing(whole(other, its), whole(model, optimizer))) > 20
        checkpoint.load(other, its, folder / f"{saves} to {loads}")
        train(other, its, 2, 3)
        assert differing(whole(other, its), whole(model, optimizer)) == [], f"{saves} to {loads}"
        if loads == "nvme":
            rows = [value.to_local() for state in its.state.values() for value in state.values() if value.dim()]
            assert all(mapped.file_under(local) is not None for local in rows if local.numel())


def test_checkpoints_go_in_and_out(ranks, drive: Path) -> None:
    ranks(2, resumed, drive)


class Tower(nn.Module):
    """Eight blocks of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def memory_of(name: str, folder: Path, steps: int = 3) -> dict[str, int]:
    """Bytes at rest and at the peak, beyond what the process had before, after `steps` steps of the tower."""
    before, offload = memory_bytes(), policy_named(name, folder)
    model = shard_model(Tower(), "full_shard", offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if name != "none":
        offload_optimizer(optimizer, offload, part_bytes=8 * MB)
    x = torch.randn(2, 1024)
    for number in range(steps):
        with Peak() as peak:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    mapped.wait()
    rests = [param.to_local() for param in model.parameters()]
    rests += [v.to_local() for state in optimizer.state.values() for v in state.values() if v.dim()]
    files = {rest.untyped_storage().data_ptr(): _everything(rest) for rest in rests if mapped.file_under(rest)}
    cached = sum(map(cached_bytes, files.values()))
    sizes = {"rest": memory_bytes() - before, "peak": peak.most - before, "files": mapped_bytes(folder, "Size")}
    sizes |= {"resident": mapped_bytes(folder), "cached": cached}
    del model, optimizer, rests, files
    assert mapped_bytes(folder, "Size") == 0, "deleting frees the files, without the cyclic collector"
    return sizes


def _everything(view: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage under `view`."""
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())


def without_collector(name: str, folder: Path) -> dict[str, int]:
    mmap_threshold = -3  # of mallopt: larger blocks go back to the system when they are freed, so they can be counted
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 65536) == 1
    gc.disable()
    try:
        return memory_of(name, folder)
    finally:
        gc.enable()


def test_files_take_the_place_of_memory(ranks, drive: Path) -> None:
    """32 MB of parameters and 64 MB of Adam's moments on two ranks: 48 MB a rank."""
    figures = {name: ranks(2, without_collector, name, drive)[0] for name in ("none", "nvme")}
    plain, nvme = figures["none"], figures["nvme"]
    print(figures)
    assert plain["files"] == 0 and 48 * MB <= nvme["files"] < 50 * MB
    assert nvme["resident"] < 8 * MB and nvme["cached"] < 8 * MB, "at rest little more than the last part is in memory"
    assert nvme["rest"] < plain["rest"] - 40 * MB
    assert nvme["peak"] < plain["peak"] - 40 * MB


def one_group_of_each() -> list[str]:
    """Where a number of the host's travels: over this gloo group, and over one that serves CUDA devices alone."""
    only_cuda, kind = dist.ProcessGroup(dist.HashStore(), 0, 2), dist.ProcessGroup.BackendType.CUSTOM
    only_cuda._register_backend(torch.device("cuda"), kind, FakeProcessGroup._create_internal(0, 2))
    host = torch.device("cpu")
    return [compat.device_for(group, host).type for group in (dist.group.WORLD, only_cuda)]


def test_a_norm_travels_on_a_device_of_its_group(ranks) -> None:
    assert ranks(1, one_group_of_each) == [["cpu", "cuda"]]


# ---- gradients that arrive late


class LateStorage(HostStorage):
    """Host memory in which gradients arrive when somebody waits for them, and no earlier."""

    def take(self, gradients: Iterable[torch.Tensor]) -> tuple[Iterable[torch.Tensor], Pending]:
        values = list(gradients)
        landings = end_to_end(values, lambda nbytes: torch.full((nbytes,), 255, dtype=torch.uint8))  # NaNs
        return landings, Pending(lambda: [landing.copy_(value) for landing, value in zip(landings, values)])


class TwoDtypes(nn.Linear):
    """A layer with a scale in bfloat16."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.scale = nn.Parameter(torch.randn(6).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x)) * self.scale.float()


class Mixed(nn.Module):
    """Two blocks of parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(TwoDtypes() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def by_columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


def gradients_of(late: bool, hooks: bool) -> list[list[torch.Tensor]]:
    """Gradients after one, and after two accumulated backwards; with `hooks` as they are when a hook sees them."""
    storage = LateStorage(pin=False) if late else HostStorage(pin=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "storage_of", lambda *_: storage)
        model = Mixed()
        for module in (*model.blocks, model):
            fully_shard(module, shard_placement_fn=by_columns, offload_policy=CPUOffloadPolicy(pin_memory=False))
    seen: list[torch.Tensor] = []
    if hooks:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.to_local().clone()))
    found = []
    for number in range(2):
        model(torch.full((3, 6), 0.1 + dist.get_rank() + number)).square().sum().backward()
        found.append([*seen] if hooks else [parameter.grad.to_local().clone() for parameter in model.parameters()])
    return found


def late_equals_early() -> None:
    for hooks in (False, True):
        for late, early in zip(gradients_of(True, hooks), gradients_of(False, hooks), strict=True):
            assert len(late) == len(early) and all(each.isfinite().all() and each.any() for each in early)
            stale = [number for number, pair in enumerate(zip(late, early)) if not torch.equal(*pair)]
            assert stale == [], f"hooks {hooks}: {len(stale)} of {len(early)} were read before they had arrived"


def test_no_gradient_is_read_before_it_has_arrived(ranks) -> None:
    ranks(2, late_equals_early)


def test_copies_are_awaited_before_the_optimizer_writes_to_shards(ranks) -> None:
    ranks(2, awaits_copies_when_writing_may_begin)


def awaits_copies_when_writing_may_begin() -> None:
    log: list[str] = []

    class Noting(HostStorage):
        def send(self, write: Callable[[torch.Tensor], object], target: torch.Tensor) -> Pending:
            log.append("send")
            return super().send(write, target)

        def await_copies(self) -> None:
            log.append("await")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "storage_of", lambda *_: Noting(pin=False))
        model = shard_model(Mixed(), "full_shard", offload_policy=CPUOffloadPolicy(pin_memory=False))
    x = torch.ones(3, 6)
    with torch.no_grad():
        model(x)
    assert log.count("send") == 2 and log[-1] == "await", "after a forward that no backward follows"
    log.clear()
    loss = model(x).sum()
    assert log == ["send", "send"], "the host goes on to the backward"
    loss.backward()
    assert log.count("send") == 4 and log[-1] == "await"
    log.clear()
    model.state_dict()
    assert "await" in log


# ---- on a GPU


@needs_gpu
def test_state_of_gpu_parameters_rests_in_host_memory(drive: Path) -> None:
    for policy in (CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False), NVMeOffloadPolicy(drive)):
        ours, theirs = ([nn.Parameter(param.detach().cuda()) for param in parameters(20)] for _ in range(2))
        offloaded, plain = torch.optim.AdamW(ours, fused=True), torch.optim.AdamW(theirs, fused=True)
        offload_optimizer(offloaded, policy, part_bytes=100_000)
        for number in range(5):
            for mine, its in zip(ours, theirs):
                mine.grad = torch.randn_like(mine)
                its.grad = mine.grad.clone()
            offloaded.step(), plain.step()
            rows = {name: value for name, value in held(offloaded, ours).items() if " exp" in name}
            assert all(value.device.type == "cpu" for value in rows.values())
            ready = {name: value.cuda() for name, value in held(offloaded, ours).items()}
            expected = {name: value.cuda() for name, value in held(plain, theirs).items()}
            assert differing(ready, expected) == [], f"{policy}, step {number}"


@needs_gpu
@pytest.mark.parametrize("pin", [True, False])
def test_gradients_land_in_host_memory(pin: bool) -> None:
    gradients = [torch.randn(1000, device="cuda"), torch.randn(3, 5, device="cuda", dtype=torch.bfloat16)]
    landings, copying = HostStorage(pin).take(gradients)
    copying.wait()
    for landing, gradient in zip(landings, gradients, strict=True):
        assert landing.is_pinned() is pin and torch.equal(landing, gradient.cpu())
