"""The schema of a loss history, and the fields that must agree with each other."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from lockstep.dumps import record
from lockstep.ground.errors import UserError
from lockstep.ground.schemas import (
    Count,
    Finite,
    MayBreakDown,
    Name,
    NotNegative,
    Sha256,
    Strict,
    Whole,
    validate,
)

REMEDY = "run its training again"
LARGEST = 3.5e38  # no float32 is larger, so no loss is


def _float32(value: float) -> float:
    if LARGEST < abs(value) < math.inf:
        raise ValueError("too large for a float32")
    return value


def _norm(value: float) -> float:
    if value < 0:
        raise ValueError("a norm cannot be negative")
    return value


Loss = Annotated[MayBreakDown, AfterValidator(_float32)]
Norm = Annotated[MayBreakDown, AfterValidator(_norm)]


class Step(Strict):
    """One step, from 1. Losses in nats, seconds of wall clock."""

    step: Count
    loss: Loss  # mean over dp ranks (of the mean over tokens, of the mean over micro batches)
    rank_losses: Annotated[list[Loss], Field(min_length=1)]  # one per dp rank
    grad_norm: Norm  # of the whole model's averaged gradient, before clipping
    learning_rate: NotNegative
    tokens: Count  # of the global batch
    independent_tokens: Annotated[Finite, Field(ge=1)] | None = (
        None  # of those, by their rounding errors (lockstep/inputs/data.py)
    )
    seconds: NotNegative
    batch_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    group_norms: dict[Name, Norm] | None = None  # of the gradient of each group of parameters (--group_norms)


class PeakMemory(Strict):
    kind: Name
    bytes_by_rank: list[Whole]
    reserved_by_rank: list[Whole] | None = None  # on GPUs


class HeldOut(Strict):
    """The final weights on the sequences that were not trained on, computed by rank 0 in float32."""

    sequences: Count
    loss: Loss  # nats per token
    accuracy: Annotated[Finite, Field(ge=0, le=1)]  # how often the next token is the most likely one


class Run(record.Run):
    peak_memory: PeakMemory | None = None  # of a run that finished
    held_out: HeldOut | None = None  # of a run that finished, with --held_out
    collectives: dict[Name, Count] | None = (
        None  # operation -> calls of rank 0 in the last step, if they were counted
    )


class Weights(Strict):
    """Hashes of all weights together, and the names of those that moved. The last two only of a run that finished."""

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


def parse(content: dict, path: object) -> File:
    """The content of a loss history. Raises UserError for the first field that is missing, unknown or of another type."""
    return validate(File, content, path, REMEDY)


def require_consistent(file: File, path: object) -> None:
    """Raise UserError if fields of the history contradict each other."""
    problem = (
        _run_problem(file.run) or _progress_problem(file) or _weights_problem(file) or _step_problem(file)
    )
    if problem:
        raise UserError(f"{path}: {problem}; {REMEDY}")


def _run_problem(run: Run) -> str:
    if run.peak_memory and len(run.peak_memory.bytes_by_rank) != run.config.num_workers:
        return f"peak_memory is of {len(run.peak_memory.bytes_by_rank)} ranks, there are {run.config.num_workers}"
    return next(record.contradictions(run.model_dump()), "")


def _progress_problem(file: File) -> str:
    done, finished = len(file.steps), file.ended == "finished"
    if done > file.run.num_steps or (finished and done < file.run.num_steps):
        return f"it has {done} of {file.run.num_steps} steps, but says that it {'finished' if finished else 'goes on'}"
    if done and file.weights is None or (finished or done > 1) and file.contract is None:
        return f"{done} steps were trained, but it has no {'weights' if file.weights is None else 'contract'}"
    if finished != (file.weights is not None and file.weights.moved is not None):
        return "the weights that moved are recorded when a run has finished, and not before"
    return ""


def _weights_problem(file: File) -> str:
    weights = file.weights
    if weights is None:
        return ""
    if (weights.final_sha256 is None) != (weights.moved is None):
        return "only one of final_sha256 and moved is there"
    if weights.moved is None:
        return ""
    if bool(weights.moved) != (weights.final_sha256 != weights.initial_sha256):
        return f"{len(weights.moved)} weights moved, but initial and final sha256 say otherwise"
    stranger = next(iter(sorted(set(weights.moved) - _updated(file.contract))), None)
    if stranger:
        return f"moved has {stranger}, which is in no optimizer group of its contract"
    return "" if weights.moved == sorted(set(weights.moved)) else "moved is not a sorted list of names"


def _updated(contract: dict[Name, Any] | None) -> set[str]:
    """The parameters in the optimizer's groups, by the contract's entry weight_decay (rate -> names). No model is built for it."""
    groups = (contract or {}).get("weight_decay")
    members = groups.values() if isinstance(groups, dict) else ()
    return {name for names in members if isinstance(names, list) for name in names if isinstance(name, str)}


def _step_problem(file: File) -> str:
    config = file.run.config
    tokens = config.dp_size * config.batch_size * config.gradient_accumulation_steps * config.seq_length
    for position, step in enumerate(file.steps, start=1):
        if step.step != position:
            return f"step {position} is missing"
        if step.tokens != tokens:
            return f"step {position} has {step.tokens} tokens; its configuration makes it {tokens}"
        if len(step.rank_losses) != config.dp_size:
            return f"step {position} has {len(step.rank_losses)} rank losses; dp_size is {config.dp_size}"
        if not is_mean(step.loss, step.rank_losses):
            return f"step {position} has a loss of {step.loss!r}, which is not the mean of its rank losses"
        broken = not all(math.isfinite(value) for value in (step.loss, step.grad_norm, *step.rank_losses))
        if broken and (position < len(file.steps) or file.ended == "finished"):
            return f"step {position} is not finite, but the run went on"
    return ""


def is_mean(loss: float, rank_losses: list[float]) -> bool:
    """Whether `loss` is the mean, up to the rounding errors of a float64 sum in any order; not finite if one of them is not."""
    mean = sum(rank_losses) / len(rank_losses)
    if not math.isfinite(mean):
        return not math.isfinite(loss)
    return abs(loss - mean) <= 2.0**-52 * sum(
        map(abs, rank_losses)
    )  # two sums of n terms, n unit roundoffs (2^-53) each
