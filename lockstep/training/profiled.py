"""torch's profiler around some steps (--profile): a trace of each rank, and where a step's time goes.

docs/commands.md defines computing, communicating and waiting.
"""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from lockstep.ground.collective import gather_objects, stopping_together
from lockstep.ground.files import write_atomically
from lockstep.training.listeners import Fed, Listener
from lockstep.training.strategy import Strategy

STEP = "lockstep step "
Span = tuple[float, float]  # begin and end


class Times(NamedTuple):
    """Of one rank in all profiled steps, in seconds."""

    total: float
    computing: float
    communicating: float  # and not computing


class Profile(Listener):
    """Profiles the steps that it listens to, and writes the trace of this rank after the `last`."""

    def __init__(self, path: Path, last: int):
        self.path, self.last, self.steps = path, last, list[int]()

    def begin(self, strategy: Strategy, step: int, fed: Sequence[Fed]) -> None:
        if not self.steps:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        self.steps.append(step)
        self.mark = torch.profiler.record_function(f"{STEP}{step}")
        self.mark.__enter__()

    def end(self, record: dict[str, Any]) -> None:
        self.mark.__exit__(None, None, None)
        if record["step"] == self.last:
            self.profiler.stop()
            with stopping_together():
                write_atomically(self.path, self._export)

    def _export(self, path: Path) -> None:
        self.profiler.export_chrome_trace(str(path))
        if not path.read_bytes().rstrip().endswith(b"}"):  # it says nothing of a full disk
            raise OSError(errno.ENOSPC, "the trace is cut off")

    def line(self) -> str:
        """Where the time of a step goes, as a mean over all ranks. Collective."""
        everyone = [Times(*each) for each in gather_objects(tuple(times(self.profiler.events())))]
        total, computing = (sum(column) / len(everyone) for column in list(zip(*everyone, strict=True))[:2])
        communicating = min(each.communicating for each in everyone)
        parts = {
            "computing": computing,
            "communicating": communicating,
            "waiting": total - computing - communicating,
        }
        shares = ", ".join(f"{name} {100 * part / total:.0f}%" for name, part in parts.items())
        count = len(self.steps)
        return (
            f"steps {self.steps[0]} to {self.last} profiled: {1000 * total / count:.1f} ms a step, {shares}"
        )


def times(events: Sequence[Any]) -> Times:
    """How long the rank that has these events of torch's profiler computes and communicates inside of the marked steps."""
    steps = [event for event in events if event.name.startswith(STEP) and event.device_type == DeviceType.CPU]
    device = [event for event in events if event.device_type != DeviceType.CPU]
    ours = [event for event in device or events if event not in steps]
    collectives = [event for event in ours if _communicates(event.name)]
    around = set()  # events with a collective inside: they wait for it
    for event in collectives:
        while (event := event.cpu_parent) is not None:
            around.add(id(event))
    operations = [
        event
        for event in ours
        if not _communicates(event.name)
        and not event.is_user_annotation
        and not event.name.startswith("autograd::engine")
        and id(event) not in around
    ]
    windows = _spans(steps)
    computing = covered(_spans(operations), windows)
    both = covered(_spans(operations + collectives), windows)
    return Times(sum(end - begin for begin, end in windows), computing, both - computing)


def _communicates(name: str) -> bool:
    return name.startswith("gloo:") or "c10d" in name or "nccl" in name


def _spans(events: Sequence[Any]) -> list[Span]:
    return sorted((event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events)


def covered(spans: list[Span], windows: list[Span]) -> float:
    """How much of the windows is inside of at least one of the spans, which are in order."""
    total = 0.0
    for at, end in windows:
        for low, high in spans:
            low, high = max(low, at), min(high, end)
            if high > low:
                total, at = total + high - low, high
    return total
