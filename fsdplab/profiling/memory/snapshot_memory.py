"""What a snapshot of the allocator says of each device: the peak, what was alive at it and which lines made it, and how
much of the reserved memory lies idle in pieces.

The allocator keeps its newest events (`_record_memory_history(max_entries=...)`) and its state at the end. Memory in
use before the first event follows from these two: what is in use at the end, less what the events allocated, plus what
they freed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdplab.common.sizes import percent, size
from fsdplab.profiling.memory.snapshot_file import Block, Event, Frame, Segment, Snapshot

IN_USE = "active_allocated"
AWAITING_FREE = "active_awaiting_free"
UNRECORDED = "allocated before the first recorded event"
_GROWS = ("segment_alloc", "segment_map")
_SHRINKS = ("segment_free", "segment_unmap")

# A category by what stands in the stack of an allocation: the first row one of whose words is in a frame. The kernels
# of a backward pass run in threads of the autograd engine, whose stacks have no line of the model; what a recomputed
# forward allocates has one, and is an activation.
_CATEGORIES = (
    ("optimizer states", ("torch/optim/", "/optimizer.py:", "optimizers/")),
    ("unsharded parameters", (":foreach_all_gather", ":unshard", "_flat_param.py:", ":all_gather_coalesced")),
    ("activations", (":forward", "nn/functional.py:")),
    ("gradients", ("torch::autograd::Engine", "autograd/graph.py:", "_tensor.py:backward", ":foreach_reduce")),
    ("parameters", (":_apply", ":to_empty", ":load_state_dict", ":reset_parameters", ":__init__")),
)
OTHER = "not known"


@dataclass(frozen=True)
class AliveLine:
    """Bytes that were alive at the peak, and the line that allocated them."""

    where: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Moment:
    """Memory after one event: `in_use` by tensors, `reserved` from the driver."""

    time_us: int
    in_use: int
    reserved: int


@dataclass(frozen=True)
class OutOfMemory:
    """A request that failed, and the memory when it did."""

    time_us: int
    asked: int
    in_use: int
    reserved: int
    device_free: int | None
    where: str

    @property
    def unused(self) -> int:
        """Bytes that were reserved and used by nothing when it failed."""
        return self.reserved - self.in_use

    @property
    def in_pieces(self) -> bool:
        """Whether it failed for fragmentation: more was unused than it asked for, so no one piece was large enough."""
        return self.unused >= self.asked


@dataclass(frozen=True)
class DeviceMemory:
    """One device of a snapshot, bytes. `peak` is the most that tensors used at once while events were recorded; without
    events, what they use at the end. `free` is reserved and used by nothing, `largest_free` its largest piece.
    """

    device: int
    in_use: int
    reserved: int
    awaiting_free: int
    free: int
    largest_free: int
    peak: int
    reserved_at_peak: int
    alive: tuple[AliveLine, ...]
    by_category: Mapping[str, int]
    moments: tuple[Moment, ...]
    out_of_memory: OutOfMemory | None

    @property
    def sentence(self) -> str:
        """What fills the device, in one sentence that begins with the fault where there is one."""
        if self.out_of_memory is None:
            how = "at the peak" if self.moments else "when the snapshot was taken"
            return f"{size(self.peak)} were in use {how}, of {size(self.reserved_at_peak)} reserved{self._mostly}."
        failed = self.out_of_memory
        left = ""
        if failed.device_free is not None:
            left = f" and {size(failed.device_free)} were free on the device"
        return (
            f"Out of memory: {size(failed.asked)} were asked for in {failed.where} while {size(failed.in_use)} were in"
            f" use, {size(failed.reserved)} were reserved{left}; at the peak {size(self.peak)} were in"
            f" use{self._mostly}."
        )

    @property
    def _mostly(self) -> str:
        """The largest category and the largest line, with their shares of the peak."""
        if not self.alive:
            return ""
        # both are sorted, the most bytes first
        category = next(iter(self.by_category))
        of_category = ""
        if category != OTHER:
            of_category = f", {percent(self.by_category[category] / self.peak)} of it {category}"
        line = self.alive[0]
        return f"{of_category}; {percent(line.nbytes / self.peak)} was allocated in {line.where}"

    @property
    def fragmentation(self) -> str:
        """How the memory lies that is reserved and used by nothing, and what to do where a request failed beside it.

        The job may have gone on, or freed its tensors, between the failure and the snapshot. So the two are told apart.
        """
        share = self.free / max(1, self.reserved)
        told = (
            f"When the snapshot was taken, {size(self.free)} ({percent(share)}) of the reserved memory were used by"
            f" nothing, the largest piece had {size(self.largest_free)}."
        )
        failed = self.out_of_memory
        # 2 GB were unused, and a request of 1 GB failed: the allocator would have used a piece of that size
        if failed is None or not failed.in_pieces:
            return told
        return (
            f"When the request failed, {size(failed.unused)} ({percent(failed.unused / failed.reserved)}) of the"
            f" reserved memory were used by nothing: enough for the {size(failed.asked)} that were asked for, but in"
            " pieces, or in pools that the request cannot use; set PYTORCH_ALLOC_CONF=expandable_segments:True before"
            f" the job starts. {told}"
        )


def memory_of(snapshot: Snapshot) -> list[DeviceMemory]:
    """Each device that the snapshot knows, in their order."""
    devices = {segment.device for segment in snapshot.segments} | set(snapshot.events)
    return [_device(device, snapshot) for device in sorted(devices)]


def _device(device: int, snapshot: Snapshot) -> DeviceMemory:
    """One device: its state at the end, and its peak from its events."""
    segments = [segment for segment in snapshot.segments if segment.device == device]
    blocks: list[Block] = []
    for segment in segments:
        blocks += segment.blocks
    events = snapshot.events.get(device, ())
    history = _History(segments, blocks, events)
    free = [block.size for block in blocks if block.state not in (IN_USE, AWAITING_FREE)]
    return DeviceMemory(
        device=device,
        in_use=sum(block.nbytes for block in blocks if block.state == IN_USE),
        reserved=sum(segment.size for segment in segments),
        awaiting_free=sum(block.size for block in blocks if block.state == AWAITING_FREE),
        free=sum(free),
        largest_free=max(free, default=0),
        peak=history.peak,
        reserved_at_peak=history.reserved_at_peak,
        alive=tuple(_by_line(history.alive_at_peak)),
        by_category=_by_category(history.alive_at_peak),
        moments=tuple(history.moments),
        out_of_memory=history.out_of_memory,
    )


@dataclass(frozen=True)
class _Allocation:
    """Memory in use, and the stack of its allocation, the innermost frame first."""

    nbytes: int
    frames: tuple[Frame, ...] | None  # None: before the first recorded event, and freed since


class _History:
    """One device's memory through its events."""

    def __init__(self, segments: Sequence[Segment], blocks: Sequence[Block], events: Sequence[Event]) -> None:
        self.moments: list[Moment] = []
        self.out_of_memory: OutOfMemory | None = None
        self._alive = _alive_before(blocks, events)
        self._in_use = sum(allocation.nbytes for allocation in self._alive.values())
        # The segments are those of the end: 10 GB, of which 4 came in the events, were 6 GB at the beginning.
        self._reserved = sum(segment.size for segment in segments) - _growth(events)
        # An allocator that recorded nothing has its peak at the end, which is then the beginning, too.
        self.peak, self.reserved_at_peak = self._in_use, self._reserved
        self.alive_at_peak = list(self._alive.values())
        # the first time through the events finds where the peak is
        highest = self._walk(events, None)
        if highest >= 0:
            # once more up to the peak, instead of a copy of all that is alive at every new height
            self._alive = _alive_before(blocks, events)
            self._walk(events[: highest + 1], highest)
            self.alive_at_peak = list(self._alive.values())

    def _walk(self, events: Sequence[Event], stop: int | None) -> int:
        """Follow the events; the place of the one with the peak, -1 where it is before the first. `stop` is set where
        only what is alive is followed.
        """
        highest = -1
        for place, event in enumerate(events):
            if event.action == "alloc":
                self._alive[event.address] = _Allocation(event.nbytes, event.frames)
            # free_requested comes before it: until then a stream may still use the memory
            elif event.action == "free_completed":
                self._alive.pop(event.address, None)
            if stop is None and self._count(event):
                highest = place
        return highest

    def _count(self, event: Event) -> bool:
        """Note the memory after an event; whether it is the highest so far."""
        # a request that failed changes nothing, and its `nbytes` is what was asked for
        if event.action == "oom":
            where = place_of(event.frames)
            self.out_of_memory = OutOfMemory(
                event.time_us, event.nbytes, self._in_use, self._reserved, event.device_free, where
            )
            return False
        self._in_use += _change(event, ("alloc",), ("free_completed",))
        self._reserved += _change(event, _GROWS, _SHRINKS)
        self.moments.append(Moment(event.time_us, self._in_use, self._reserved))
        if self._in_use <= self.peak:
            return False
        self.peak, self.reserved_at_peak = self._in_use, self._reserved
        return True


def _change(event: Event, more: Sequence[str], less: Sequence[str]) -> int:
    """Bytes that an event adds (one of the actions `more`) or takes away (one of `less`)."""
    if event.action in more:
        return event.nbytes
    if event.action in less:
        return -event.nbytes
    return 0


def _growth(events: Sequence[Event]) -> int:
    """By how much all events have grown what is reserved."""
    return sum(_change(event, _GROWS, _SHRINKS) for event in events)


def _alive_before(blocks: Sequence[Block], events: Sequence[Event]) -> dict[int, _Allocation]:
    """What was allocated before the first event, by address: it is freed by an event, or in use at the end, and no
    event before that allocated it.
    """
    alive: dict[int, _Allocation] = {}
    allocated: set[int] = set()
    for event in events:
        if event.action == "alloc":
            allocated.add(event.address)
        # freed, but never seen allocated: older than the first event; an address counts once, since it is used again
        elif event.action == "free_completed" and event.address not in allocated:
            alive[event.address] = _Allocation(event.nbytes, None)
            allocated.add(event.address)
    for block in blocks:
        if block.state in (IN_USE, AWAITING_FREE) and block.address not in allocated:
            alive[block.address] = _Allocation(block.nbytes, block.frames or None)
    return alive


def _by_line(alive: Sequence[_Allocation]) -> list[AliveLine]:
    """Bytes by the line that allocated them, the most first."""
    nbytes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for allocation in alive:
        where = UNRECORDED if allocation.frames is None else place_of(allocation.frames)
        nbytes[where] += allocation.nbytes
        counts[where] += 1
    return [AliveLine(where, total, counts[where]) for where, total in nbytes.most_common()]


def _by_category(alive: Sequence[_Allocation]) -> dict[str, int]:
    """Bytes by category, the most first; `OTHER` where no frame tells."""
    nbytes: dict[str, int] = defaultdict(int)
    for allocation in alive:
        nbytes[_category_of(allocation.frames or ())] += allocation.nbytes
    return dict(sorted(nbytes.items(), key=lambda item: -item[1]))


def _category_of(frames: Sequence[Frame]) -> str:
    """The category of an allocation, by the first row of `_CATEGORIES` that its stack fits."""
    # the order of the rows decides, not that of the frames: `:forward` inside of `torch/optim/` is optimizer state
    lines = [f"{frame.file}:{frame.function}" for frame in frames]
    for category, words in _CATEGORIES:
        if any(word in line for line in lines for word in words):
            return category
    return OTHER


def place_of(frames: Sequence[Frame]) -> str:
    """The line that a user looks for: the innermost one of Python outside of torch, else the innermost one."""
    if not frames:
        return "a place that was not recorded"
    python = [frame for frame in frames if frame.file.endswith(".py")]
    # of the innermost frame outwards: C++ of the allocator, Python of torch, then the line that a user wrote
    own = [frame for frame in python if "/torch/" not in f"/{frame.file}" and "site-packages" not in frame.file]
    frame = [*own, *python, *frames][0]
    file_and_folder = "/".join(frame.file.split("/")[-2:])
    return str(Frame(file_and_folder, frame.line, frame.function))
