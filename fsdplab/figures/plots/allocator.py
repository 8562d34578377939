"""The memory of one device through the events that PyTorch's CUDA allocator recorded (a memory snapshot)."""

from __future__ import annotations

from fsdplab.common.sizes import size
from fsdplab.common.thinning import downsample
from fsdplab.figures.lines import line, peak
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, titled
from fsdplab.profiling.memory.snapshot_memory import DeviceMemory

MB = 1e6
_IN_USE_COLOUR, _RESERVED_COLOUR = "#4aa3e0", "rgba(128,132,136,0.9)"
_MOST_POINTS = 2_000  # of a line


def allocator_timeline(memory: DeviceMemory) -> go.Figure:
    """Memory in use and reserved, MB, over the time of the recorded events.

    Raises ValueError where the snapshot holds no events.
    """
    if not memory.moments:
        raise ValueError(
            "the snapshot holds no events, so its memory has no past; call"
            " torch.cuda.memory._record_memory_history() before the job begins"
        )
    kept = downsample([moment.in_use for moment in memory.moments], _MOST_POINTS)
    moments = [memory.moments[place] for place in kept]
    start = moments[0].time_us
    times = [(moment.time_us - start) / 1e3 for moment in moments]
    in_use = [moment.in_use / MB for moment in moments]
    reserved = [moment.reserved / MB for moment in moments]
    highest = max(range(len(in_use)), key=in_use.__getitem__)
    figure = go.Figure(
        [
            line("reserved from the driver", _RESERVED_COLOUR, times, reserved, 2, line_shape="hv"),
            line("in use by tensors", _IN_USE_COLOUR, times, in_use, line_shape="hv", fill="tozeroy"),
            peak(times[highest], in_use[highest]),
        ]
    )
    figure.update_xaxes(title_text="time since the first event (ms)")
    figure.update_yaxes(title_text="memory (MB)", rangemode="tozero")
    if memory.out_of_memory is not None:
        figure.add_vline(times[-1], line=dict(color=ALARM, width=2, dash="dot"))
    title = f"Device {memory.device}: {size(memory.peak)} in use at the peak"
    conditions = f"Recorded by PyTorch's allocator, {len(memory.moments):,} events"
    return titled(figure, title, conditions, f"Memory over time. {title}, {size(memory.reserved_at_peak)} reserved.")
