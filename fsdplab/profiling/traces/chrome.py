"""Chrome traces as PyTorch's profiler writes them, event by event, so that a file of a gigabyte needs no gigabyte of
memory.

`json.load` of a 100 MB trace takes ten times its size. Here a window of text slides over the file and one event at a
time is decoded from it; what is around the events (ranks, devices, the clock's base) is kept as `metadata`. PyTorch of
2021 and newer; plain or gzipped, with a byte-order mark or without; an object with `traceEvents`, or the bare list of
events of older exporters. Every kind of bad file is a `TraceError` with its remedy. A pipe and a device are refused
before they are read, and a file that no profiler writes is refused where it begins to be one: a gzip file that unpacks
to a thousand times its size, a long run of blanks, or many megabytes that are no events.
"""

from __future__ import annotations

import codecs
import gc
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.common.errors import UserError
from fsdplab.common.files import check_is_file

LATEST_NS = 2**62  # sums of two times fit 64 bits
_UTF_8 = codecs.getincrementaldecoder("utf-8-sig")  # looked up here: a rank that is forked later has it
_WINDOW = 1 << 20
_LONGEST = 16 << 20  # no value of a trace is longer, nor all that is around its events; else it is damaged
_LEAST_UNPACKED, _MOST_UNPACKED = 16 << 20, 100  # bytes, and their ratio to packed ones: a trace has 15 to 30
_AT_ONCE = 1 << 18
_OPENING = 6  # characters with which every event of a file begins: `{"ph":`
_BETWEEN = re.compile(r"[\s,]*")
_BLANKS = b" \t\r\n,"
_NEXT_EVENT = re.compile(r'\}\s*,\s*\{\s*"(ph|name|cat|pid|ts)"\s*:')
_SPACE = re.compile(r"\s*")
_AGAIN = "export it again with prof.export_chrome_trace(...), or copy it again from where it was made"


class TraceError(UserError, RuntimeError):
    """A trace file is missing, damaged, empty, not a trace, or without events to analyse; one line, with the remedy."""


class OddEvent(ValueError):
    """What no profiler writes, in words for a reader."""


def _bad(path: Path, what: str) -> TraceError:
    return TraceError(f"{path} {what}; {_AGAIN}.")


@contextmanager
def as_trace_error(path: Path) -> Iterator[None]:
    """What is of another type than the profiler's raises a TraceError."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        words = str(error) if isinstance(error, OddEvent) else _in_short(error)
        raise TraceError(
            f"{path} holds something that PyTorch's profiler does not write ({words}); export the trace again."
        ) from None


def _in_short(error: Exception) -> str:
    """An error's type and words on one line of at most 100 characters."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= 100 else f"{words[:100]}..."


@dataclass
class Damaged:
    """Events that are no JSON, which are left out: how many of `events`, and where the first one stands.

    Profilers of some versions write a name as it is, with quotes in it (kineto#1459): with `with_stack=True`, functions
    of torch.compile have such names.
    """

    number: int = 0
    of_python: int = 0
    events: int = 0
    first_at: int = 0
    first: str = ""

    def sentence(self) -> str:
        """What to say of them; "" where there are none."""
        if not self.number:
            return ""
        return (
            f"{self.number} of the trace's events are left out, since they are no JSON: the first one, at character"
            f" {self.first_at}, is {self.first!r}; the profiler wrote quotes into a name: record again with"
            " with_stack=False, or with a newer PyTorch"
        )


class ChromeTrace:
    """One trace file: iterate over it for its events (dicts as in the file); `metadata` is whole once the iteration has
    ended.

    >>> sum(event["name"] == "aten::mm" for event in ChromeTrace("rank0.pt.trace.json.gz"))      # doctest: +SKIP
    48
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.damaged = Damaged()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            check_is_file(self.path)
            with self.path.open("rb") as file:
                yield from _Reader(self.path, file, self.metadata, self.damaged).events()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _bad(self.path, f"is a truncated or damaged gzip file ({error})") from None
        except RecursionError:
            raise _bad(self.path, "holds a value nested too deeply to be a profiler's") from None
        except OSError as error:
            why = error.strerror or error
            raise TraceError(
                f"{self.path} cannot be read ({why}); give the path of a *.pt.trace.json or .json.gz file."
            ) from None

    @property
    def base_ns(self) -> int:
        """Added to an event's time to get `time.time_ns()`; 0 for files with absolute times (before PyTorch 2.3)."""
        base = self.metadata.get("baseTimeNanoseconds") or 0
        if type(base) is not int or not 0 <= base < LATEST_NS:
            raise _bad(self.path, f"has the clock's base {base!r:.40}, expected nanoseconds")
        return base


def nanoseconds(microseconds: float | int) -> int:
    """Microseconds of a trace as whole nanoseconds, exact as far as the file is: 4.25 -> 4250."""
    if type(microseconds) is int:
        return microseconds * 1000
    # as one product, 1.7e15 microseconds would be rounded to multiples of 256 ns
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def is_gzipped(path: Path) -> bool:
    """Whether a file's first bytes are gzip's, whatever its name says; OSError for a pipe or a device."""
    check_is_file(path)
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for cycles of garbage while millions of objects are made that hold none: it takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _end(found: re.Match[str] | None) -> int:
    """Where a match ends that is never None: its pattern fits nothing too."""
    assert found is not None
    return found.end()


class _Reader:
    """The window of text, and where in it the next value begins; `stored` is the file as it lies on the disk."""

    def __init__(self, path: Path, stored: io.BufferedReader, metadata: dict[str, Any], damaged: Damaged) -> None:
        self._path = path
        self._stored = stored
        self._metadata = metadata
        self._damaged_events = damaged
        self._file = gzip.GzipFile(fileobj=stored) if is_gzipped(path) else stored
        self._text = ""
        self._at = 0  # in the window
        self._passed = 0  # characters before the window
        self._unpacked = 0  # bytes read so far
        self._around = 0  # characters of what is around the events
        self._decode = _UTF_8(errors="replace").decode
        self._json = json.JSONDecoder(strict=False).raw_decode

    def events(self) -> Iterator[dict[str, Any]]:
        first = self._next()
        # the bare list of older exporters
        if first == "[":
            yield from self._list()
        elif first == "{":
            yield from self._object()
        elif first:
            raise self._bad(f"is no Chrome trace: it begins with {self._text[:20]!r}, a trace begins with '{{' or '['")
        else:
            raise self._bad("is empty")

    def _object(self) -> Iterator[dict[str, Any]]:
        has_events = False
        self._at += 1
        while (mark := self._next()) != "}":
            if mark == ",":
                self._at += 1
                continue
            self._require(mark, '"')
            key = self._value()
            self._require(self._next(), ":")
            self._at += 1
            if key == "traceEvents" and self._next() == "[":
                has_events = True
                yield from self._list()
            else:
                # everything but the events is small: a larger value is damage, or another kind of file
                before = self._passed + self._at
                self._metadata[key] = self._value()
                self._around += self._passed + self._at - before
                if self._around > _LONGEST:
                    raise self._bad(
                        f"holds more than {_LONGEST:,} characters around its events, which no profiler writes"
                    )
        if not has_events:
            names = ", ".join(list(self._metadata)[:5]) or "nothing"
            raise self._bad(
                f"is JSON without a list `traceEvents` (it holds {names}), so no profiler wrote it as a trace"
            )

    def _require(self, mark: str, expected: str) -> None:
        if mark != expected:
            raise self._damaged() if mark else self._truncated()

    def _list(self) -> Iterator[dict[str, Any]]:
        """The events of the list that begins here. The hot loop: everything it needs is local."""
        self._at += 1
        decode, between = self._json, _BETWEEN.match
        while True:
            # fast path first: it decodes many events together, and gives nothing where it cannot
            while whole := self._at_once():
                self._damaged_events.events += len(whole)
                yield from whole
            # one by one up to what the window cuts in two, which raises JSONDecodeError
            text, at = self._text, self._at
            try:
                while True:
                    at = _end(between(text, at))
                    event, at = decode(text, at)
                    if type(event) is dict:
                        yield event
            except (json.JSONDecodeError, StopIteration):
                self._at = at
            if text[at : at + 1] == "]":
                self._at += 1
                self._check_damaged()
                return
            # either the event is damaged, or the window ends inside it
            if not self._leave_out():
                self._more()

    def _leave_out(self) -> bool:
        """Pass over the event that begins here, if the window holds its end and it is still no JSON."""
        if self._text[self._at : self._at + 1] != "{":
            return False
        # the seam to the next event, by the keys with which events begin
        following = _NEXT_EVENT.search(self._text, self._at)
        if following is None:
            return False
        event = self._text[self._at : following.start() + 1]
        damaged = self._damaged_events
        if not damaged.number:
            damaged.first_at = self._passed + self._at
            damaged.first = " ".join(event.split())[:80]
        damaged.number += 1
        damaged.of_python += '"python_function"' in event
        self._at = following.start() + 1
        return True

    def _check_damaged(self) -> None:
        """One event of a hundred may be damaged, and any number of those that are read by nobody."""
        damaged = self._damaged_events
        if damaged.number - damaged.of_python > max(1, damaged.events // 100):
            raise self._bad(f"is damaged at character {damaged.first_at}: {damaged.first[:40]!r} is no JSON")

    def _at_once(self) -> list[dict[str, Any]]:
        """The events up to the last whole one of the window as far as it can be guessed, decoded together: four times
        as fast as one by one. Nothing where the guess is wrong: what was cut is no list of values.
        """
        text, between = self._text, _BETWEEN.match
        begin = _end(between(text, self._at))
        _, end = self._decoded(text, begin)
        if end < 0:
            return []
        following = _end(between(text, end))
        seam = text[end - 1 : following + _OPENING]  # an event's end, what is between, how the next one begins
        # the last place that looks as the first seam does: up to there whole events are expected
        cut = text.rfind(seam, following, begin + _AT_ONCE) + 1
        if cut < following:
            return []
        # a name may hold the seam's text too: then this is no JSON, and nothing is taken
        whole = f"[{text[begin:cut]}]"
        events, end = self._decoded(whole, 0)
        if end < len(whole):
            return []
        self._at = cut
        return [event for event in events if type(event) is dict]

    def _next(self) -> str:
        """The next character that is not space, not taken; "" at the end of the file."""
        while True:
            self._at = _end(_SPACE.match(self._text, self._at))
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        self._next()
        while True:
            value, end = self._decoded(self._text, self._at)
            if 0 <= end < len(self._text):  # a number at the window's end may go on
                self._at = end
                return value
            self._more()

    def _decoded(self, text: str, at: int) -> tuple[Any, int]:
        """The value that begins there and its end; the end is -1 where the text holds no whole value."""
        try:
            return self._json(text, at)
        except (json.JSONDecodeError, StopIteration):
            return None, -1

    def _more(self) -> None:
        """Read more text, or raise an error if the file ends here."""
        if len(self._text) - self._at > _LONGEST:
            raise self._damaged()
        if not self._fill():
            raise self._truncated()

    def _fill(self) -> bool:
        # a value longer than the window is decoded anew each time: doubling what is held keeps that cheap
        piece = self._file.read(max(_WINDOW, len(self._text) - self._at))
        self._unpacked += len(piece)
        if self._unpacked > max(_LEAST_UNPACKED, _MOST_UNPACKED * self._stored.tell()):
            raise self._bad(f"unpacks to more than {_MOST_UNPACKED} times its size, which no profiler's trace does")
        if len(piece) == _WINDOW and not piece.strip(_BLANKS):
            raise self._bad(f"holds {_WINDOW:,} blanks and commas in a row, which no profiler writes")
        # what was decoded leaves the window, which keeps the value that is cut in two
        self._passed += self._at
        self._text = self._text[self._at :] + self._decode(piece, final=not piece)
        self._at = 0
        return bool(piece)

    def _bad(self, what: str) -> TraceError:
        return _bad(self._path, what)

    def _truncated(self) -> TraceError:
        return self._bad("ends in the middle of a value: it is truncated, or its process was stopped while it wrote")

    def _damaged(self) -> TraceError:
        shown = self._text[self._at : self._at + 20]
        return self._bad(f"is damaged at character {self._passed + self._at}: {shown!r} is no JSON")
