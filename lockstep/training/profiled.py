"""torch's profiler around some steps (--profile): a trace of each rank, and where a step's time goes.

docs/commands.md defines computing, communicating and waiting.
"""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from lockstep.ground.collective import gather_objects, stopping_together
from lockstep.ground.files import write_atomically
from lockstep.training.listeners import Listener
from lockstep.training.strategy import MicroBatch, Strategy

STEP = "lockstep step "
Span = tuple[float, float]  # begin and end


class Profile(Listener):
    """Profiles `steps`, and writes the trace of this rank after the last."""

    def __init__(self, path: Path, steps: range):
        self.path, self.steps = path, steps

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        if step == self.steps[0]:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        self.mark = torch.profiler.record_function(f"{STEP}{step}")
        self.mark.__enter__()

    def end(self, record: dict[str, Any]) -> None:
        self.mark.__exit__(None, None, None)
        if record["step"] == self.steps[-1]:
            self.profiler.stop()
            with stopping_together():
                write_atomically(self.path, self._export)

    def _export(self, path: Path) -> None:
        self.profiler.export_chrome_trace(str(path))
        # The profiler does not report a full disk.
        if not path.read_bytes().rstrip().endswith(b"}"):
            raise OSError(errno.ENOSPC, "the trace is cut off")

    def line(self) -> str:
        """Where the time of a step goes, as a mean over all ranks. Collective."""
        totals, computing, communicating = zip(*gather_objects(times(self.profiler.events())), strict=True)
        total, busy, exposed = sum(totals), sum(computing), len(totals) * min(communicating)
        percentages = (f"{100 * part / total:.0f}%" for part in (busy, exposed, total - busy - exposed))
        milliseconds = 1000 * total / len(totals) / len(self.steps)
        sentence = "steps {} to {} profiled: {:.1f} ms a step, computing {}, communicating {}, waiting {}"
        return sentence.format(self.steps[0], self.steps[-1], milliseconds, *percentages)


def times(events: Sequence[Any]) -> tuple[float, float, float]:
    """Return three times of the rank that has these events of torch's profiler, in seconds inside of the marked steps.

    They are the whole time, that in which it computes, and that in which it communicates and does not compute.
    """
    steps = [event for event in events if event.name.startswith(STEP) and event.device_type == DeviceType.CPU]
    device_events = [event for event in events if event.device_type != DeviceType.CPU] or events
    collectives = [event for event in device_events if _communicates(event.name)]
    # The collectives, and the events that have one inside and wait for it
    waiting = set()
    for event in collectives:
        while event is not None:
            waiting.add(id(event))
            event = event.cpu_parent
    operations = [
        event
        for event in device_events
        if not (id(event) in waiting or event.is_user_annotation or event.name.startswith("autograd::engine"))
    ]
    windows = _spans(steps)
    computing = covered(_spans(operations), windows)
    busy = covered(_spans(operations + collectives), windows)
    return covered(windows, windows), computing, busy - computing


def _communicates(name: str) -> bool:
    return name.startswith("gloo:") or "c10d" in name or "nccl" in name


def _spans(events: Sequence[Any]) -> list[Span]:
    return sorted((event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events)


def covered(spans: list[Span], windows: list[Span]) -> float:
    """How much of the windows is inside of at least one of the spans, which are in order."""
    total = 0.0
    for position, end in windows:
        for low, high in spans:
            low, high = max(low, position), min(high, end)
            if high > low:
                total, position = total + high - low, high
    return total
