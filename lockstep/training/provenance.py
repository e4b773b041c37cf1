"""What a history and a dump record of a run before it begins, and what the strategy's library was told, in a file beside the history."""

import hashlib
from pathlib import Path
from typing import Any

from lockstep.ground import origin
from lockstep.ground.collective import gather_objects
from lockstep.ground.errors import TrainingFailure
from lockstep.ground.files import write_text
from lockstep.inputs.data import Inputs
from lockstep.plan import initial_weights
from lockstep.plan.config import Config
from lockstep.training.observe import versions


def require_told_alike(about: dict[str, Any]) -> None:
    """Ranks that a launcher starts read a user's file each for itself."""
    if len(set(gather_objects(about.get("told_sha256")))) > 1:
        raise TrainingFailure(
            "ranks were given different configurations of the strategy's library; give the same file on every machine"
        )


def write_told(path: Path, told: str) -> None:
    """Put what the library was told beside the history, in the place of an older run's."""
    if told:
        write_text(path, told)
    else:
        path.unlink(missing_ok=True)


def provenance(config: Config, inputs: Inputs, told: str = "") -> dict[str, Any]:
    """What a history and a dump record of a run before it begins; `told` is what its library is."""
    return {
        **({"told_sha256": hashlib.sha256(told.encode()).hexdigest()} if told else {}),
        "label": config.label,
        "mesh": config.mesh.sizes,
        "config": config.recorded(),
        "architecture": inputs.architecture,
        "architecture_source": inputs.architecture_source,
        "initial_weights": initial_weights.origin(config),
        "corpus_sha256": inputs.batches.corpus.sha256,
        "tokenizer": inputs.batches.corpus.tokenizer_name,
        "num_steps": inputs.num_steps,
        "versions": versions(),
        "origin": origin.about(),
    }
