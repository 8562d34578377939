"""The memory of one device that PyTorch's CUDA allocator recorded (a memory snapshot): what fills its peak, and its
past.
"""

from __future__ import annotations

from fsdplab.common.sizes import percent, size
from fsdplab.common.thinning import downsample
from fsdplab.figures.axis_units import AxisUnit, byte_unit
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.lines import line, peak
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, titled
from fsdplab.profiling.memory.snapshot_memory import OTHER, DeviceMemory

# the allocator reserves segments from the driver and gives tensors blocks of these: in use <= reserved
_IN_USE_COLOUR, _RESERVED_COLOUR = "#4aa3e0", "rgba(128,132,136,0.9)"
_MOST_POINTS = 2_000  # of a line
_AT_THE_PEAK, _AT_THE_FAILURE = "at the peak", "when a request failed"
_UNUSED = "reserved, used by nothing"
CATEGORY_COLOURS = ("#d06aaf", "#43a6e4", "#1e9168", "#e7ce50", "#734a93", "#452726")
COLOURS = {_UNUSED: "#afb3b7", "in use": "#6b7380", "free on the device": "#dde3ed", "asked for": ALARM}


def allocator_peak(memory: DeviceMemory) -> go.Figure:
    """Draw a bar of the reserved memory at the peak: what is in use by category, and what is used by nothing.

    Where a request failed, a second bar of the memory at that instant, what was free on the device, and what was asked
    for.

    Raises ValueError where nothing was in use.
    """
    if not memory.peak:
        raise ValueError(f"nothing was in use on device {memory.device}, so there is no peak to draw")
    ends = {_AT_THE_PEAK: f"<b>{size(memory.peak)}</b> in use, {size(memory.reserved_at_peak)} reserved"}
    if memory.out_of_memory is not None:
        ends[_AT_THE_FAILURE] = f"<b>{size(memory.out_of_memory.asked)}</b> were asked for"
    unit = byte_unit([memory.reserved_at_peak, memory.peak])
    parts = _parts(memory, len(ends), unit)
    axis = f"memory ({unit.symbol})"
    figure = stacked_bars(ends, parts, axis, unit.hover("x"), lambda length: size(length * unit.size))
    # the alternative text names the categories in bytes, as the legend has no numbers
    categories = []
    for name, nbytes in memory.by_category.items():
        categories.append(f"{name} {size(nbytes)}")
    unused = size(_unused_at_peak(memory))
    alt = f"A bar of the reserved memory at the peak: {', '.join(categories)}; {_UNUSED} {unused}."
    conditions = "Recorded by PyTorch's allocator; categories by the stacks of allocations"
    return titled(figure, _finding(memory), conditions, alt, 86 + 43 * len(ends))


def _parts(memory: DeviceMemory, bars: int, unit: AxisUnit) -> list[Part]:
    """Return what fills the one or two bars; what is in none of them is left out.

    Categories are known at the peak alone.
    """
    at_peak = {**memory.by_category, _UNUSED: _unused_at_peak(memory)}
    at_failure = _at_failure(memory)
    parts = []
    # the order of the legend: what is in use comes before what is not
    for place, name in enumerate({**memory.by_category, **at_failure, **at_peak}):
        lengths = [at_peak.get(name, 0), at_failure.get(name, 0)]
        # such as what is free on the device where nobody recorded it
        if not any(lengths):
            continue
        # one length a row: at the peak, and at the failure if there is a second row
        in_unit = [unit.of(nbytes) for nbytes in lengths[:bars]]
        parts.append(Part(name, _colour(name, place), in_unit))
    return parts


def _unused_at_peak(memory: DeviceMemory) -> int:
    return max(0, memory.reserved_at_peak - memory.peak)


def _at_failure(memory: DeviceMemory) -> dict[str, int]:
    """Return the bytes of the device when a request failed; {} where none did."""
    failed = memory.out_of_memory
    if failed is None:
        return {}
    return {
        # the first three are the device, but for what others hold there; what was asked for comes on top
        "in use": failed.in_use,
        _UNUSED: max(0, failed.unused),
        "free on the device": failed.device_free or 0,
        "asked for": failed.asked,
    }


def _colour(name: str, place: int) -> str:
    return COLOURS.get(name) or CATEGORY_COLOURS[place % len(CATEGORY_COLOURS)]


def _finding(memory: DeviceMemory) -> str:
    """Return the title: the request that failed and why, or what fills the peak."""
    device = f"Device {memory.device}"
    failed = memory.out_of_memory
    in_use = f"{size(memory.peak)} in use{_mostly(memory)}"
    if failed is None:
        return f"{device}: {in_use}"
    asked = size(failed.asked)
    if failed.in_pieces:
        return f"{device}: {asked} asked for beside {size(failed.unused)} that were used by nothing, in pieces"
    return f"{device}: no room for {asked} beside {in_use}"


def _mostly(memory: DeviceMemory) -> str:
    """Say what the largest category is; nothing where the stacks do not tell it."""
    category, nbytes = next(iter(memory.by_category.items()), ("", 0))
    if not nbytes or category == OTHER:
        return ""
    share = percent(nbytes / memory.peak)
    return f", {share} of it {category}"


def allocator_timeline(memory: DeviceMemory) -> go.Figure:
    """Draw memory in use and reserved over the time of the recorded events.

    Raises ValueError where the snapshot holds no events.
    """
    if not memory.moments:
        raise ValueError(
            "the snapshot holds no events, so its memory has no past; call"
            " torch.cuda.memory._record_memory_history() before the job begins"
        )
    # of many events, the highest and lowest of each window are kept, and so is the peak
    kept = downsample([moment.in_use for moment in memory.moments], _MOST_POINTS)
    moments = [memory.moments[place] for place in kept]
    start = moments[0].time_us
    times = [(moment.time_us - start) / 1e3 for moment in moments]  # ms
    unit = byte_unit(moment.reserved for moment in moments)
    in_use = [unit.of(moment.in_use) for moment in moments]
    reserved = [unit.of(moment.reserved) for moment in moments]
    highest = max(range(len(in_use)), key=in_use.__getitem__)
    # each holds its level until the next event
    reserved_line = line("reserved from the driver", _RESERVED_COLOUR, times, reserved, 2, line_shape="hv")
    in_use_line = line("in use by tensors", _IN_USE_COLOUR, times, in_use, line_shape="hv", fill="tozeroy")
    dot = peak(times[highest], moments[highest].in_use, unit)
    figure = go.Figure([reserved_line, in_use_line, dot])
    figure.update_xaxes(title_text="time since the first event (ms)")
    figure.update_yaxes(title_text=f"memory ({unit.symbol})", rangemode="tozero")
    # a job that catches the error goes on behind it
    if memory.out_of_memory is not None:
        failed_at = (memory.out_of_memory.time_us - start) / 1e3  # ms
        figure.add_vline(failed_at, line=dict(color=ALARM, width=2, dash="dot"))
    title = f"Device {memory.device}: {size(memory.peak)} in use at the peak"
    conditions = f"Recorded by PyTorch's allocator, {len(memory.moments):,} events"
    alt = f"Memory over time. {title}, {size(memory.reserved_at_peak)} reserved."
    return titled(figure, title, conditions, alt)
