"""What DeepSpeed holds by ZeRO stage and offload (runtime/engine.py, runtime/zero/stage_1_and_2.py and stage3.py of 0.19.8)."""

import math
from dataclasses import replace

from extras.memory.plan import (
    END_OF_BACKWARD,
    LOSS,
    START,
    UPDATE,
    Moment,
    Plan,
    Rank,
    Shapes,
    elements,
    largest,
    most,
)
from lockstep.plan import deepspeed_file, zero
from lockstep.training.optim import decays

# DeepSpeed's own values where the configuration says nothing, in elements (runtime/zero/config.py).
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "sub_group_size": 1_000_000_000,
}
ENGINE_BUCKET = 500_000_000  # elements, without ZeRO (runtime/engine.py)
# Buffers in main memory for what is on a disk (runtime/zero/offload_config.py). Those of the optimizer are each as large as
# the largest sub-group, those of the parameters have PARAMETER_BUFFER elements each.
OPTIMIZER_BUFFERS = 4
PARAMETER_BUFFERS, PARAMETER_BUFFER = 5, 100_000_000
Kept = dict[str, int]  # part of a plan -> bytes


def plan(rank: Rank) -> Plan:
    """The plan of a run. Raises UserError for a combination that DeepSpeed does not have."""
    config = rank.config
    zero.require(config)
    rank = whole_embedding(rank)
    stage = zero.of(config).zero_stage
    section = deepspeed_file.resolved(config, rank.hidden_size)["zero_optimization"]
    sizes = {name: section.get(name, default) for name, default in DEFAULTS.items()}
    buffers = 2 if section.get("overlap_comm") and stage in (1, 2) else 1
    bucket = sizes["reduce_bucket_size"] * rank.width * buffers
    if stage == 0:
        return stage_0(rank)
    return stage_3(rank, sizes, bucket) if stage == 3 else stage_1_and_2(rank, stage, sizes, bucket)


def whole_embedding(rank: Rank) -> Rank:
    """AutoTP cuts the head over the vocabulary, and the embedding only if it is the head."""
    if rank.tied or rank.config.tp_size == 1:
        return rank
    shapes = {**rank.shapes, rank.names.embedding_weight: rank.model[rank.names.embedding_weight]}
    more = (elements(shapes) - rank.elements) * rank.width  # its gradient is made whole
    return replace(
        rank, shapes=shapes, activations=replace(rank.activations, tail=rank.activations.tail + more)
    )


def groups(shapes: Shapes) -> list[Shapes]:
    """The optimizer's groups, each flattened by itself: matrices, and norms with biases (lockstep/training/optim.py)."""
    split = [
        {name: shape for name, shape in shapes.items() if decays(len(shape)) is is_decayed}
        for is_decayed in (True, False)
    ]
    return [group for group in split if group]


def stage_0(rank: Rank) -> Plan:
    """Whole parameters, moments and gradients. To be reduced, gradients are copied into buckets of 500 million elements."""
    size = rank.elements * rank.width
    optimizer, numel = size * rank.moments, largest(rank.shapes)
    buckets = min(rank.elements, ENGINE_BUCKET) * rank.width  # with one DP rank, too
    earlier = size if rank.config.gradient_accumulation_steps > 1 else 0
    return Plan(
        {
            START: Moment(parameters=rank.whole),
            LOSS: rank.at_loss(size, earlier, optimizer),
            END_OF_BACKWARD: most(
                rank.at_end(size, size - rank.of_embedding, optimizer),
                Moment(size, size, optimizer, 0, buckets),
            ),
            UPDATE: Moment(size, size, optimizer, 0, max(rank.norm(numel), rank.step(numel))),
        },
        rank.built,
    )


def partition(group: Shapes, dp: int) -> int:
    """Elements of a rank's share of a flat group, which is padded to a multiple of 2 dp."""
    return 2 * math.ceil(elements(group) / (2 * dp))


def owned(group: Shapes, dp: int) -> int:
    """Elements of the parameters of which a rank's share has any part, for the rank with most.

    DeepSpeed keeps their gradients whole.
    """
    share, begin, by_rank = partition(group, dp), 0, [0] * dp
    for numel in map(math.prod, group.values()):
        for dp_rank in range(begin // share, (begin + numel - 1) // share + 1):
            by_rank[dp_rank] += numel
        begin += numel
    return max(by_rank)


def stage_1_and_2(rank: Rank, stage: int, sizes: dict, bucket: int) -> Plan:
    """Whole parameters as flat groups; of each group a share with its own copy ("master"), moments and gradients.

    At stage 1 every gradient is kept until all are there. The bucket is allocated at its full size with the first gradient,
    however small the model. All-reduced gradients are copied once more, flat.
    """
    config, width, dp = rank.config, rank.width, rank.config.dp_size
    split = groups(rank.shapes)
    shares = [partition(group, dp) for group in split]
    whole, share = sum(shares) * dp * width, sum(shares) * width
    kept = sum(owned(group, dp) for group in split) * width  # gradients of this rank's share
    all_gradients, numel = rank.elements * width, largest(rank.shapes)
    oversized = numel > sizes["reduce_bucket_size"]
    # The gradient, and its flat copy
    filled = 2 * numel * width if oversized else min(bucket, all_gradients)
    state = share * (1 + rank.moments)
    is_offloaded = zero.of(config).offload_optimizer != "none"
    accumulates = config.gradient_accumulation_steps > 1
    host, optimizer, extra = {}, state, 0
    if is_offloaded:  # the master's gradient and a copy of the updated weights are always there
        host = {
            "optimizer": state,
            "gradients": share + (kept if accumulates else 0),
            "temporary": share + numel * width,
        }
        optimizer, extra, kept = 0, numel * width, 0
    earlier = (all_gradients if stage == 1 else kept) if accumulates else 0
    if stage == 1:
        moved = 0 if oversized else filled
        reducing = Moment(whole, all_gradients - moved, optimizer, 0, bucket + max(filled, kept) + extra)
        before = all_gradients - rank.of_embedding
    else:
        reducing = Moment(
            whole, kept if filled < all_gradients else earlier, optimizer, 0, bucket + filled + extra
        )
        before = kept if bucket < all_gradients else earlier
    moments = {
        START: most(
            Moment(parameters=rank.whole),
            Moment(
                parameters=whole, optimizer=0 if is_offloaded else share, temporary=shares[0] * width + extra
            ),
        ),
        LOSS: rank.at_loss(whole, earlier, optimizer, after=bucket + extra),
        END_OF_BACKWARD: most(rank.at_end(whole, before, optimizer, bucket + extra), reducing),
        UPDATE: Moment(
            whole,
            kept,
            optimizer,
            0,
            extra + max(rank.norm(numel), 0 if is_offloaded else shares[0] * width, rank.step(shares[0])),
        ),
    }
    return placed(rank, moments, host, {}, share)


def stage_3(rank: Rank, sizes: dict, bucket: int) -> Plan:
    """Of each parameter a share, with master, moments and gradient; whole parameters while they are used, and small ones always.

    At most `stage3_max_live_parameters` elements are whole at a time. In a model smaller than that, what is gathered in the
    forward pass stays until backward.
    """
    config, width, dp = rank.config, rank.width, rank.config.dp_size
    split = groups(rank.shapes)
    shares = [sum(-(-math.prod(shape) // dp) for shape in group.values()) for group in split]
    share = sum(shares) * width
    small = {
        name: shape
        for name, shape in rank.shapes.items()
        if math.prod(shape) <= sizes["stage3_param_persistence_threshold"]
    }
    resident, numel = elements(small) * width, largest(rank.shapes)
    live = min(rank.elements, max(sizes["stage3_max_live_parameters"], numel)) * width
    gathering = min(rank.elements, max(sizes["stage3_prefetch_bucket_size"], numel)) * width
    sub_group = min(max(shares), max(sizes["sub_group_size"], -(-numel // dp))) * width
    state = share * (1 + rank.moments)
    all_gradients = rank.elements * width
    filled = min(bucket, all_gradients)
    device, host, nvme = offloaded(zero.of(config), share, state, sub_group, width)
    parameters, gradients, optimizer = (
        device.get(part, 0) for part in ("parameters", "gradients", "optimizer")
    )
    moments = {
        START: most(
            Moment(parameters=rank.whole, temporary=numel * width),
            Moment(parameters, gradients, optimizer and share, 0, bucket + 2 * numel * width),
        ),
        LOSS: most(
            rank.at_loss(parameters + live, gradients, optimizer),
            # what was prefetched together is joined parameter by parameter, and freed after the last one
            Moment(parameters + live, gradients, optimizer, rank.activations.layers, gathering),
        ),
        END_OF_BACKWARD: most(
            rank.at_end(parameters + resident + rank.of_embedding, gradients, optimizer),
            Moment(parameters + resident + rank.of_embedding, gradients, optimizer, 0, 2 * filled),
        ),
        UPDATE: Moment(
            parameters + resident,
            gradients,
            optimizer,
            0,
            max(sub_group if optimizer else 0, rank.norm(-(-numel // dp))),
        ),
    }
    steady = {
        name: moment if name == START else replace(moment, temporary=moment.temporary + bucket)
        for name, moment in moments.items()
    }
    return placed(rank, steady, host, nvme, share)


def offloaded(own: zero.Options, share: int, state: int, group: int, width: int) -> tuple[Kept, Kept, Kept]:
    """What stage 3 keeps on the device, in main memory and on a disk: part -> bytes."""
    device, host, nvme = {"parameters": share, "gradients": share, "optimizer": state}, Kept(), Kept()
    if own.offload_optimizer != "none":
        host["gradients"] = 2 * device.pop("gradients")  # those of the flat masters, too
        (nvme if own.offload_optimizer == "nvme" else host)["optimizer"] = device.pop("optimizer")
        if own.offload_optimizer == "nvme":
            host["temporary"] = OPTIMIZER_BUFFERS * group
    if own.offload_param != "none":
        (nvme if own.offload_param == "nvme" else host)["parameters"] = device.pop("parameters")
        if own.offload_param == "nvme":
            host["temporary"] = host.get("temporary", 0) + PARAMETER_BUFFERS * PARAMETER_BUFFER * width
    return device, host, nvme


def placed(
    rank: Rank, moments: dict[str, Moment], host: dict[str, int], nvme: dict[str, int], master: int
) -> Plan:
    """The plan with what is kept in main memory: beside a GPU, or on CPUs in the same place.

    At the start there is no optimizer state but `master`.
    """
    if rank.config.device != "cpu":
        return Plan(moments, rank.built, host, nvme)

    def together(name: str, one: Moment) -> Moment:
        here = {**host, "optimizer": min(host.get("optimizer", 0), master)} if name == START else host
        return replace(one, **{part: getattr(one, part) + count for part, count in here.items()})

    return Plan({name: together(name, moment) for name, moment in moments.items()}, rank.built, nvme=nvme)
