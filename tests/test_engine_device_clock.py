"""The times of CUDA events as `time.time_ns()`: as exact hours after the start as at first, on a clock that drifts.

The device is one of float32 milliseconds, as CUDA's: its events are recorded here, and no GPU is needed.
"""

from __future__ import annotations

import struct
import time
from contextlib import nullcontext

import pytest
import torch

from fsdplab.engine.transport import streams

HOUR_NS = 3600 * 10**9
DEVICE = torch.device("cuda", 0)


class Device:
    """A device whose clock is `now_ns`; what the host's clock says follows from its `drift`."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now_ns, self.drift, self.synchronised = 0, drift, 0

    def host_ns(self) -> int:
        return int(self.now_ns * (1 + self.drift))

    def event(self, **_: object) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_ns = device, 0

    def record(self) -> None:
        self.at_ns = self.device.now_ns

    def synchronize(self) -> None:
        self.device.synchronised += 1

    def elapsed_time(self, end: Event) -> float:
        return struct.unpack("f", struct.pack("f", (end.at_ns - self.at_ns) / 1e6))[0]


def with_device(monkeypatch: pytest.MonkeyPatch, drift: float = 0.0) -> Device:
    device = Device(drift)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(time, "time_ns", device.host_ns)
    return device


def recorded(device: Device, after_ns: int) -> Event:
    device.now_ns += after_ns
    event = device.event()
    event.record()
    return event


@pytest.mark.parametrize("hours", [0, 1, 100])
def test_microseconds_are_told_apart_hours_after_the_start(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    device = with_device(monkeypatch, drift=20e-6)
    clock = streams.DeviceClock(DEVICE)
    clock.when(recorded(device, 1000))()
    device.now_ns += hours * HOUR_NS
    told = [clock.when(recorded(device, 10_000)) for _ in range(3)]
    last = device.host_ns()
    device.now_ns += 10**9  # a second later the step is over
    first, second, third = (each() for each in told)
    assert abs(second - first - 10_000) < 200 and abs(third - second - 10_000) < 200
    assert abs(third - last) < 30_000, "a second of drift, not hours of it"


def test_the_host_waits_once_for_all_events_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = with_device(monkeypatch)
    clock = streams.DeviceClock(DEVICE)
    for steps in (1, 2):
        told = [clock.when(recorded(device, 1000)) for _ in range(50)]
        assert device.synchronised == steps - 1, "none while the step runs"
        assert [each() for each in told] == sorted(each() for each in told)
        assert device.synchronised == steps


def test_float32_milliseconds_from_an_hour_ago_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = with_device(monkeypatch)
    start, one, two = recorded(device, 0), recorded(device, HOUR_NS), recorded(device, 10_000)
    assert start.elapsed_time(one) == start.elapsed_time(two), "10 us apart, and no difference to see"


# ---- how long a stream waits


class Recorder:
    """A stream and its events on a clock that a test moves."""

    def __init__(self):
        self.now, self.done = 0.0, 0.0

    def wait_event(self, event):
        self.now = max(self.now, self.done)  # ms

    def event(self, enable_timing=False):
        recorder, made = self, type("Event", (), {})()
        made.record = lambda stream: setattr(made, "at", recorder.now)
        made.elapsed_time = lambda other: other.at - made.at
        return made


@pytest.mark.parametrize(("begins", "done", "waits"), [(2.0, 5.0, 3_000_000), (6.0, 5.0, 0)])
def test_a_stream_tells_how_long_it_waited(monkeypatch, begins, done, waits):
    stream = Recorder()
    stream.now, stream.done = begins, done
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    wait = streams._StreamWait(torch.device("cuda", 0), stream.event(), timed=True)
    assert wait.nanoseconds() == 0  # nobody has waited yet
    wait()
    assert wait.nanoseconds() == waits
