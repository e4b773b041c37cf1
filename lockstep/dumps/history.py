"""The loss history: one JSON file per run, rewritten whole as the run goes on and read strictly.

    {"format": 4, "run": {...}, "contract": {...} | null, "weights": {...} | null,
     "ended": null | "finished" | "why it stopped", "steps": [{"step": 1, "loss": ..., ...}, ...], "sha256": "..."}

The file is first written after the first step: until then an older one stays. `ended` is null while the run goes on, and stays null if it
is killed; the steps up to the last second are in the file. `sha256` is the seal: SHA-256 of the rest as `json.dumps` writes it, so that any damage is found. The fields: lockstep/dumps/history_schema.py.
"""

import hashlib
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.dumps import history_schema
from lockstep.dumps.record import read_sealed
from lockstep.ground.files import write_text

FORMAT = 4
BEGINS = b'{"format": '  # every history file
PARTS = ("run", "contract", "weights", "ended")  # of the file, beside its format, the steps and the seal

SAVE_INTERVAL = 1.0  # seconds; a killed run loses the steps of so much time


@dataclass
class History:
    """One run. Each step is turned into text once."""

    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    contract: dict[str, Any] | None = None
    weights: dict[str, Any] = field(default_factory=dict)  # empty until they are known: null in the file
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

    def add(self, step: dict) -> None:
        self.steps.append(step)

    def save_if_due(self, path: Path) -> None:
        """`save`, but at most once in SAVE_INTERVAL: short steps should not wait for the disk."""
        if time.monotonic() - self._saved >= SAVE_INTERVAL:
            self.save(path)

    def save(self, path: Path) -> None:
        """Write the history so far, sealed. Raises UserError naming the file when the disk is full."""
        self._lines.extend(json.dumps(step) for step in self.steps[len(self._lines) :])
        content = {**{key: getattr(self, key) for key in PARTS}, "weights": self.weights or None}
        head = [f'"format": {FORMAT}', *(f'"{key}": {json.dumps(part)}' for key, part in content.items())]
        sealed = hashlib.sha256(
            f'{{{", ".join(head)}, "steps": [{", ".join(self._lines)}]}}'.encode()
        ).hexdigest()
        parts = [*head, '"steps": [\n' + ",\n".join(self._lines) + "\n]", f'"sha256": "{sealed}"']
        write_text(path, "{" + ",\n".join(parts) + "}\n")
        self._saved = time.monotonic()


def read(path: Path) -> History:
    """Read a history file. Raises UserError if it is not one, was changed, or contradicts itself."""
    content = read_sealed(path, "a loss history", FORMAT, history_schema.REMEDY)
    history_schema.require_consistent(history_schema.parse(content, path), path)
    parts = {**{key: content[key] for key in PARTS}, "weights": content["weights"] or {}}
    return History(steps=content["steps"], **parts)


def not_finite(step: dict) -> bool:
    return not all(math.isfinite(value) for value in (step["loss"], step["grad_norm"], *step["rank_losses"]))
