"""Which layers each rank along pp has, and in which order it works on them. Nothing here imports torch.

A model is a row of units: the embedding, the layers, the head with the norm before it. A stage is a run of them.
"""

from typing import Any

from lockstep.ground.errors import UserError
from lockstep.inputs import modules
from lockstep.plan.config import Config

# --pp_schedule -> (its name in torch, the number of stages of each rank, whether the second stages run back from the last rank)
SCHEDULES = {
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "loopedbfs": ("LoopedBFS", 2, False),
    "interleaved1f1b": ("Interleaved1F1B", 2, False),
    "interleavedzerobubble": ("InterleavedZeroBubble", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
    "dualpipev": ("DualPipeV", 2, True),
}


def num_stages(schedule: str, pp_size: int) -> int:
    return SCHEDULES[schedule][1] * pp_size


def stages_of(schedule: str, rank: int, pp_size: int) -> list[int]:
    """The stages of a rank along pp, in order."""
    _, each, back = SCHEDULES[schedule]
    last = each * pp_size - 1
    return [rank] if each == 1 else [rank, last - rank if back else rank + pp_size]


def rank_of(schedule: str, stage: int, pp_size: int) -> int:
    """The rank along pp that has a stage."""
    return next(rank for rank in range(pp_size) if stage in stages_of(schedule, rank, pp_size))


def units_of(stage: int, stages: int, num_layers: int) -> list[str | int]:
    """The units of a stage, layers by their number: equally many, the first stages have one more."""
    units = [modules.EMBEDDING, *range(num_layers), modules.HEAD]
    each, more = divmod(len(units), stages)
    start = stage * each + min(stage, more)
    return units[start : start + each + (stage < more)]


def require(config: Config, architecture: dict, schedule: str, microbatches: int) -> None:
    """Raise UserError for a pipeline that this model or batch cannot have."""
    size, stages = config.pp_size, num_stages(schedule, config.pp_size)
    if architecture["model_type"] not in modules.LIKE_LLAMA:
        raise UserError(
            f"--pp_size {size}: stages are known for models that are built like Llama, and {config.model_name} is not; choose another model"
        )
    units = architecture["num_hidden_layers"] + 2
    if stages > units:
        raise UserError(
            f"--pp_size {size} --pp_schedule {schedule}: {stages} stages, and the model has {units} parts to share out (its layers, "
            f"embedding and head); lower --pp_size, or choose a schedule with one stage a rank"
        )
    if config.batch_size % microbatches:
        raise UserError(
            f"--pp_microbatches {microbatches} does not divide --batch_size {config.batch_size}; choose a divisor"
        )
    if schedule == "1f1b" and microbatches < stages:
        raise UserError(
            f"--pp_size {size} --pp_schedule {schedule}: {microbatches} micro batches, and it needs at least {stages}, one for each stage; "
            "raise --batch_size or --pp_microbatches, or choose --pp_schedule gpipe"
        )
    rounds = max(1, microbatches // size)  # of a rank's micro batches
    if schedule.startswith("interleaved") and microbatches % rounds:
        raise UserError(
            f"--pp_size {size} --pp_schedule {schedule}: {microbatches} micro batches cannot be done in {rounds} equal rounds; "
            "make --pp_microbatches (or --batch_size) a multiple of --pp_size"
        )
    if SCHEDULES[schedule][2] and architecture.get("tie_word_embeddings", False):
        raise UserError(
            f"--pp_schedule {schedule}: it has embedding and head on one rank, in two FSDP modules, which would break their tie; "
            "choose another schedule, or a model without tied embeddings"
        )
    if SCHEDULES[schedule][2] and microbatches < stages:
        raise UserError(
            f"--pp_schedule {schedule} --pp_microbatches {microbatches}: it needs at least {stages}, one for each stage; "
            "raise --batch_size or --pp_microbatches"
        )


def expected(config: Config, architecture: dict, schedule: str, microbatches: int) -> dict[str, Any]:
    """What `Pipeline.contract` must find in the live objects."""
    layers, stages = architecture["num_hidden_layers"], num_stages(schedule, config.pp_size)
    own = (stages_of(schedule, rank, config.pp_size) for rank in range(config.pp_size))
    return {
        "schedule": schedule,
        "microbatches": microbatches,
        "units": [[units_of(stage, stages, layers) for stage in of_rank] for of_rank in own],
    }
