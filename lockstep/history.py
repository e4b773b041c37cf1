"""The loss history: one JSON file per run, rewritten whole after every step, read strictly.

    {"format": 1, "run": {...}, "contract": {...} | null, "ended": null | "finished" | "why it stopped",
     "weights": {...}, "steps": [{"step": 1, "loss": ..., ...}, ...]}

`ended` is null while the run goes on, and stays null when it is killed: what was reached is still there.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import UserError
from lockstep.files import write_text

FORMAT = 1
BEGINS = b'{"format": '  # every history file
STEP_FIELDS = {
    "step": int,  # from 1
    "loss": float,  # mean over dp ranks (of the mean over tokens, of the mean over micro batches)
    "rank_losses": list,  # one per dp rank
    "grad_norm": float,  # of the whole model's averaged gradient, before clipping
    "learning_rate": float,
    "tokens": int,  # of the global batch
    "seconds": float,
    "batch_hash": str,
}

RUN_FIELDS = ("label", "config", "architecture", "num_steps", "versions")


CONTROL = "control"  # the name of the run that shows how far rounding alone takes the loss


def path_of(folder: Path, run: str) -> Path:
    """Where the history of a strategy's run lies, or that of the control run."""
    return folder / f"loss_{run}.json"


@dataclass
class History:
    """One run. `save` is cheap enough for every step: each step is turned into text once."""

    run: dict
    steps: list[dict] = field(default_factory=list)
    contract: dict | None = None
    weights: dict | None = None
    ended: str | None = None
    _lines: list[str] = field(default_factory=list, repr=False)

    def add(self, step: dict) -> None:
        self.steps.append(step)

    def save(self, path: Path) -> None:
        self._lines.extend(json.dumps(step) for step in self.steps[len(self._lines) :])
        parts = [
            f'"format": {FORMAT}',
            *(f'"{key}": {json.dumps(getattr(self, key))}' for key in ("run", "contract", "weights", "ended")),
            '"steps": [\n' + ",\n".join(self._lines) + "\n]",
        ]
        write_text(path, "{" + ",\n".join(parts) + "}\n")


def read(path: Path) -> History:
    """Read a history file. Raises UserError saying what is wrong with it: not JSON, not ours, a step missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable history file ({error}); run its training again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a loss history of format {FORMAT}; run its training again with this version")
    try:
        missing = next((key for key in RUN_FIELDS if key not in content["run"]), None)
        if missing or not isinstance(content["weights"], (dict, type(None))):
            raise UserError(f"{path}: says nothing of {missing or 'its weights'}; run its training again with this version")
        history = History(
            run=dict(content["run"]),
            steps=list(content["steps"]),
            contract=content["contract"],
            weights=content["weights"],
            ended=content["ended"],
        )
        for position, step in enumerate(history.steps, start=1):
            for key, kind in STEP_FIELDS.items():
                value = step[key]
                if not isinstance(value, kind) and not (kind is float and isinstance(value, int)):
                    raise UserError(f"{path}: step {position} has {key} = {value!r}; run its training again")
            if step["step"] != position:
                raise UserError(f"{path}: step {position} is missing; run its training again")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: incomplete history file (no {error}); run its training again") from error
    return history


def not_finite(step: dict) -> bool:
    return not all(math.isfinite(value) for value in (step["loss"], step["grad_norm"], *step["rank_losses"]))
