"""A run that hangs: no rank makes progress for some time.

It then ends, with the stacks of all ranks and one line that says where each is.

A thread of each rank watches over the rank. `at` says how far it is, which is progress. A rank that has made none for
`patience()` seconds writes its stacks to standard error and tells the first rank through the store of the process group.
When all ranks have, or some do not answer for as long again, the first rank ends the run.
"""

import contextlib
import itertools
import json
import linecache
import math
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from lockstep.ground import startup
from lockstep.ground.errors import UserError, printable

VARIABLE = "LOCKSTEP_PATIENCE"  # the environment variable: seconds
DEFAULT = 1500.0  # gloo gives up a collective after 1800 seconds, and does not say who is missing
LOOKS = 20  # how often a rank is looked at within that time, but at least once in LONGEST seconds
LONGEST = 5.0
LIBRARIES = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")})
COLLECTIVE = re.compile("/torch/(distributed/|nn/parallel/distributed.py)")  # files that call them


def patience() -> float:
    """The seconds without progress after which a run is ended. Raises UserError unless VARIABLE is a positive number."""
    text = os.environ.get(VARIABLE, str(DEFAULT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(
            f"{VARIABLE}={printable(text, 40)}: must be a number of seconds, more than 0; correct or unset it"
        )
    return seconds


def end_run(line: str) -> NoReturn:
    """End this rank, and so the run: whatever started the ranks ends the others."""
    print(f"{startup.program()}: {printable(line)}", file=sys.stderr, flush=True)
    os._exit(1)


# What the first rank does if the run hangs; under Ray, lockstep/running/under_ray.py sets another
fail: Callable[[str], object] = end_run
_progress = ("", 0.0)  # how far this rank is, and since when by time.monotonic()
_runs = itertools.count()


def at(what: str) -> None:
    """This rank is at `what`, such as "step 2, update": progress."""
    global _progress
    _progress = (what, time.monotonic())


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Around a run, in all ranks of the process group: it ends if it hangs."""
    at("the start")
    done, thread = threading.Event(), threading.get_ident()
    watch = threading.Thread(target=_watch, args=(done, thread, patience(), next(_runs)), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()


def _watch(done: threading.Event, thread: int, seconds: float, run: int) -> None:
    """What the watching thread does, until `done`: tell the first rank when this rank hangs, and on that rank end the run."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    store: Any = None  # with a connection of its own, since a connection serves one operation at a time
    reported, reported_at = None, 0.0
    while not done.wait(min(seconds / LOOKS, LONGEST)):
        progress, now = _progress, time.monotonic()
        what, since = progress
        if now - since < seconds:
            if reported is not None:
                store.set(str(rank), "")
                reported = None
            continue
        if reported != progress:
            frame = sys._current_frames()[thread]
            sys.stderr.write(_stacks(rank, what, now - since))
            sys.stderr.flush()
            if store is None:
                store = _own_store(run)
            store.set(str(rank), json.dumps([what, *_place(frame)]))
            reported, reported_at = progress, now
        if rank == 0:
            answers = [store.get(str(peer)) if store.check([str(peer)]) else b"" for peer in range(size)]
            if all(answers) or now - reported_at > seconds:
                fail(_line([json.loads(text) if text else None for text in answers], seconds))
                return


def _own_store(run: int) -> Any:
    """A store that all ranks share, for this run."""
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"hang{run}", store.clone())


def _stacks(rank: int, what: str, seconds: float) -> str:
    """The stacks of all threads of this rank, for the log."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"rank {rank}: at {what} for {seconds:.0f} s; its threads, the innermost call last:\n"]
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts += [f"{names.get(ident, ident)}:\n", *traceback.format_stack(frame)]
    return "".join(parts)


def _place(top: FrameType) -> tuple[bool, str]:
    """(whether a thread waits for other ranks, the innermost line of its stack that is not a library's)."""
    waits = False
    for depth, (frame, line) in enumerate(traceback.walk_stack(top)):
        file = frame.f_code.co_filename
        source = linecache.getline(file, line).strip()
        # an operator of torch or a wrapper may lie between a collective and its call
        waits |= depth < 3 and (bool(COLLECTIVE.search(file)) or ".wait(" in source)
        # gradients are reduced during the backward pass
        waits |= frame.f_code.co_name == "_engine_run_backward"
        if not file.startswith((*LIBRARIES, "<")):
            return waits, f"{os.path.basename(file)}:{line}, {printable(source, 80)}"
    return waits, "an unknown place"


def _line(answers: list[list | None], seconds: float) -> str:
    """The line that says what each rank is doing. Ranks that do not wait for others come first."""
    ranks: dict[tuple, list[int]] = {}  # () -> those that do not answer
    for rank, answer in enumerate(answers):
        ranks.setdefault(tuple(answer or ()), []).append(rank)
    parts = []
    for state, members in sorted(ranks.items(), key=lambda item: (bool(item[0]) and item[0][1], item[1])):
        is_one = len(members) == 1
        who = f"rank{'s' * (not is_one)} {', '.join(map(str, members))}"
        if not state:
            parts.append(f"{who} {'does' if is_one else 'do'} not answer")
            continue
        what, waits, place = state
        does = ("waits" if is_one else "wait") + " for other ranks" if waits else "is" if is_one else "are"
        parts.append(f"{who} {does} in {what}, at {place}")
    return (
        f"no rank has made progress for {seconds:g} s: {'; '.join(parts)}; all stacks are in the output; "
        f"if the ranks only need more time, set {VARIABLE} to more seconds"
    )
