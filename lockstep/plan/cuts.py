"""How an axis divides the work of a run: what the checks before a start, the contract and the capture ask of it.

A strategy's spec has a `lockstep.plan.config.Cut` for each axis that divides something inside of a sample or of the model: cp its
positions, pp its layers. For pp a model is a sequence of units: the embedding, the layers, the head with the norm before it. A stage has
some consecutive ones. Nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.ground.errors import UserError
from lockstep.inputs import modules
from lockstep.plan.config import Config, Cut
from lockstep.plan.mesh import balanced_share, runs, share

Pieces = list[tuple[int, int]]  # (start, length) of each


@dataclass(frozen=True)
class Positions:
    """cp: every rank has some pieces of each sequence. `pieces_of(length, rank, size)` are those of one rank."""

    pieces_of: Callable[[int, int, int], Pieces]
    each: int  # equal pieces that a rank has

    def require(self, config: Config, architecture: dict) -> None:
        number = self.each * config.cp_size
        if config.seq_length % number:
            raise UserError(
                f"--cp_size {config.cp_size}: --seq_length {config.seq_length} cannot be cut into {number} equal pieces; "
                f"choose a multiple of {number}"
            )
        if architecture["model_type"] not in modules.LIKE_LLAMA:
            raise UserError(
                f"--cp_size {config.cp_size}: attention over the positions of all ranks is known for models that are built like Llama, and "
                f"{config.model_name} is not; choose another model"
            )
        if config.attn_impl != "sdpa":
            raise UserError(
                f"--cp_size {config.cp_size} --attn_impl {config.attn_impl}: attention over the positions of all ranks is computed by sdpa; "
                "leave --attn_impl out"
            )

    def expected(self, config: Config, architecture: dict) -> list[list[list[int]]]:
        """[start, length] of the runs of consecutive positions that each rank has."""
        ranks = (self.pieces_of(config.seq_length, rank, config.cp_size) for rank in range(config.cp_size))
        return [runs([start + i for start, length in pieces for i in range(length)]) for pieces in ranks]


BALANCED = Positions(balanced_share, each=2)
CONTIGUOUS = Positions(lambda length, rank, size: [share(length, rank, size)], each=1)


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
    _, per_rank, runs_back = SCHEDULES[schedule]
    last = per_rank * pp_size - 1
    return [rank] if per_rank == 1 else [rank, last - rank if runs_back else rank + pp_size]


def rank_of(schedule: str, stage: int, pp_size: int) -> int:
    """The rank along pp that has a stage."""
    return next(rank for rank in range(pp_size) if stage in stages_of(schedule, rank, pp_size))


def units_of(stage: int, stages: int, num_layers: int) -> list[str | int]:
    """The units of a stage, layers by their number. All stages have equally many, but the first may have one more each."""
    units = [modules.EMBEDDING, *range(num_layers), modules.HEAD]
    size, rest = divmod(len(units), stages)
    start = stage * size + min(stage, rest)
    return units[start : start + size + (stage < rest)]


class Layers:
    """pp: every rank has some of the layers, and works on micro batches by a schedule. The strategy has FSDP's options for it."""

    def of(self, config: Config) -> tuple[str, int]:
        """The schedule, and the number of micro batches that it cuts a batch into."""
        return config.own["pp_schedule"], config.own["pp_microbatches"] or config.batch_size

    def require(self, config: Config, architecture: dict) -> None:
        size, (schedule, microbatches) = config.pp_size, self.of(config)
        stages = num_stages(schedule, size)
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
        if config.gradient_accumulation_steps > 1 and config.own["gradient_sync"] != "every":
            raise UserError(
                f"--pp_size {size} --gradient_accumulation_steps {config.gradient_accumulation_steps}: torch's schedules reduce "
                "gradients at the end of every batch; add --gradient_sync every"
            )
        if config.own["wrap"] == "model" or config.own["prefetch"]:
            raise UserError(
                f"--pp_size {size}: --wrap model and --prefetch are for a rank with all layers; leave them out"
            )

    def expected(self, config: Config, architecture: dict) -> dict[str, Any]:
        size, (schedule, microbatches) = config.pp_size, self.of(config)
        num_layers, stages = architecture["num_hidden_layers"], num_stages(schedule, size)
        stages_by_rank = (stages_of(schedule, rank, size) for rank in range(size))
        return {
            "schedule": schedule,
            "microbatches": microbatches,
            "units": [[units_of(stage, stages, num_layers) for stage in own] for own in stages_by_rank],
        }


LAYERS = Layers()


def of(config: Config) -> dict[str, Cut]:
    """Axis -> its cut, of the axes with more than one rank."""
    cuts = {"cp": BALANCED, **config.spec.cuts}
    return {axis: cuts[axis] for axis in config.mesh.axes if axis in cuts}


def require(config: Config, architecture: dict) -> None:
    """Raise UserError for a run that an axis cannot divide."""
    for cut in of(config).values():
        cut.require(config, architecture)


def positions(config: Config, rank: int) -> Pieces:
    """The pieces of each sequence that a rank along cp has."""
    cut = of(config).get("cp")
    if cut is None:
        return [(0, config.seq_length)]
    assert isinstance(cut, Positions)
    return cut.pieces_of(config.seq_length, rank, config.cp_size)
