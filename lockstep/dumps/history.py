"""The loss history: one JSON file per run, rewritten whole as the run goes on and read strictly.

    {"format": N, "run": {...}, "contract": {...} | null, "weights": {...} | null,
     "ended": null | "finished" | "why it stopped", "steps": [{"step": 1, "loss": ..., ...}, ...], "sha256": "..."}

The file is first written after the first step. Until then an older one stays. `ended` is null while the run goes on, and stays null if
it is killed; the steps up to the last second are then in the file. `sha256` is the seal: SHA-256 of the rest as `json.dumps` writes it,
so that any damage is found. The classes below have the fields.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lockstep.dumps import header
from lockstep.dumps.header import read_sealed
from lockstep.ground.errors import UserError
from lockstep.ground.files import write_text
from lockstep.ground.schemas import (
    Count,
    Finite,
    Name,
    NotNegative,
    Sha256,
    Strict,
    Whole,
    validate,
)
from lockstep.plan.config import tokens_per_step

FORMAT = 5
BEGINS = b'{"format": '  # the first bytes of every history file
# Entries of the file beside its format, the steps and the seal
PARTS = ("run", "contract", "weights", "ended")

SAVE_INTERVAL = 1.0  # seconds; a run that is killed loses the steps of this time


@dataclass
class History:
    """The history of one run. Each step is turned into text once."""

    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    contract: dict[str, Any] | None = None
    # Empty until they are known: null in the file
    weights: dict[str, Any] = field(default_factory=dict)
    ended: str | None = None
    _lines: list[str] = field(default_factory=list, repr=False)
    _saved: float = field(default=-math.inf, repr=False)  # time.monotonic() of the last save

    @property
    def initial_sha256(self) -> str:
        return self.weights["initial_sha256"]

    @property
    def batch_hashes(self) -> dict[int, str]:
        """Step -> hash of its global batch."""
        return {step["step"]: step["batch_hash"] for step in self.steps}

    def save_if_due(self, path: Path) -> None:
        """Save the history, but at most once in SAVE_INTERVAL: short steps should not wait for the disk."""
        if time.monotonic() - self._saved >= SAVE_INTERVAL:
            self.save(path)

    def save(self, path: Path) -> None:
        """Write the history so far, sealed. Raises UserError naming the file when the disk is full."""
        self._lines.extend(json.dumps(step) for step in self.steps[len(self._lines) :])
        content = {**{key: getattr(self, key) for key in PARTS}, "weights": self.weights or None}
        head = [f'"format": {FORMAT}', *(f'"{key}": {json.dumps(part)}' for key, part in content.items())]
        digest = hashlib.sha256(
            f'{{{", ".join(head)}, "steps": [{", ".join(self._lines)}]}}'.encode()
        ).hexdigest()
        parts = [*head, '"steps": [\n' + ",\n".join(self._lines) + "\n]", f'"sha256": "{digest}"']
        write_text(path, "{" + ",\n".join(parts) + "}\n")
        self._saved = time.monotonic()


def read(path: Path) -> History:
    """Read a history file. Raises UserError if it is none, is damaged, or contradicts itself."""
    content = read_sealed(path, "a loss history", FORMAT, REMEDY)
    for problem in _contradictions(validate(File, content, path, REMEDY)):
        raise UserError(f"{path}: {problem}; {REMEDY}")
    parts = {**{key: content[key] for key in PARTS}, "weights": content["weights"] or {}}
    return History(steps=content["steps"], **parts)


REMEDY = "run its training again"


class Step(header.Step):
    """One step; steps count from 1."""

    step: Count
    learning_rate: NotNegative
    tokens: Count  # of the global batch
    seconds: NotNegative  # of wall clock
    group_norms: dict[Name, header.Norm] | None = (
        None  # of the gradient of each group of parameters (--group_norms)
    )


class PeakMemory(Strict):
    kind: Name
    bytes_by_rank: list[Whole]
    reserved_by_rank: list[Whole] | None = None  # on GPUs


class HeldOut(Strict):
    """The final weights on the sequences that were not trained on, computed by rank 0 in float32."""

    sequences: Count
    loss: header.Loss  # nats per token
    # How often the next token is the most likely one
    accuracy: Annotated[Finite, Field(ge=0, le=1)]


class Run(header.Run):
    peak_memory: PeakMemory | None = None  # of a run that finished
    held_out: HeldOut | None = None  # of a run that finished, with --held_out
    collectives: dict[Name, Count] | None = (
        None  # operation -> calls of rank 0 in the last step, if they were counted
    )


class Weights(Strict):
    """Hashes of all weights together, and the names of those that changed. Only a finished run has the last two fields."""

    initial_sha256: Sha256
    final_sha256: Sha256 | None = None
    moved: list[Name] | None = None


class File(Strict):
    """The whole file. `sha256` is the seal of all the rest."""

    format: int
    run: Run
    contract: dict[Name, Any] | None
    weights: Weights | None
    ended: Annotated[str, Field(min_length=1, max_length=65536)] | None
    steps: list[Step]
    sha256: Sha256


def _contradictions(file: File) -> Iterator[str]:
    """Yield sentences about fields of a history that contradict each other."""
    run, done, finished, weights = file.run, len(file.steps), file.ended == "finished", file.weights
    if run.peak_memory and len(run.peak_memory.bytes_by_rank) != run.config.num_workers:
        yield f"peak_memory is of {len(run.peak_memory.bytes_by_rank)} ranks, there are {run.config.num_workers}"
    yield from header.contradictions(run.model_dump())
    if done > run.num_steps or (finished and done < run.num_steps):
        yield f"it has {done} of {run.num_steps} steps, but says that it {'finished' if finished else 'goes on'}"
    if done and weights is None or (finished or done > 1) and file.contract is None:
        yield f"{done} steps were trained, but it has no {'weights' if weights is None else 'contract'}"
    if finished != (weights is not None and weights.moved is not None):
        yield "the weights that moved are recorded when a run has finished, and not before"
    if weights is not None and (weights.final_sha256 is None) != (weights.moved is None):
        yield "only one of final_sha256 and moved is there"
    if weights is not None and weights.moved is not None:
        if bool(weights.moved) != (weights.final_sha256 != weights.initial_sha256):
            yield f"{len(weights.moved)} weights moved, but initial and final sha256 say otherwise"
        for unknown in sorted(set(weights.moved) - _updated(file.contract)):
            yield f"moved has {unknown}, which is in no optimizer group of its contract"
        if weights.moved != sorted(set(weights.moved)):
            yield "moved is not a sorted list of names"
    yield from _contradictions_of_steps(file)


def _updated(contract: dict[Name, Any] | None) -> set[str]:
    """Return the parameters in the optimizer's groups, by the contract's entry weight_decay (rate -> names).

    No model is built for it.
    """
    groups = (contract or {}).get("weight_decay")
    members = groups.values() if isinstance(groups, dict) else ()
    return {name for names in members if isinstance(names, list) for name in names if isinstance(name, str)}


def _contradictions_of_steps(file: File) -> Iterator[str]:
    config = file.run.config
    tokens = tokens_per_step(vars(config))
    for position, step in enumerate(file.steps, start=1):
        if step.step != position:
            yield f"step {position} is missing"
        if step.tokens != tokens:
            yield f"step {position} has {step.tokens} tokens; its configuration makes it {tokens}"
        if len(step.rank_losses) != config.dp_size:
            yield f"step {position} has {len(step.rank_losses)} rank losses; dp_size is {config.dp_size}"
        if not header.is_mean(step.loss, step.rank_losses):
            yield f"step {position} has a loss of {step.loss!r}, which is not the mean of its rank losses"
        if not header.is_finite(vars(step)) and (position < len(file.steps) or file.ended == "finished"):
            yield f"step {position} is not finite, but the run went on"
