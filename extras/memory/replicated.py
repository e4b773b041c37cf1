"""What whole replicas hold: DDP, and strategies of one's own that are like it."""

import math

from extras.memory.plan import (
    BFLOAT16,
    END_OF_BACKWARD,
    LOSS,
    START,
    UPDATE,
    Moment,
    Plan,
    Rank,
    largest,
    most,
)
from lockstep.plan import ddp

# Bytes that DDP joins to broadcast its weights (torch.nn.parallel.distributed)
BROADCAST = 250 << 20
FIRST_BUCKET = 1 << 20  # bytes of DDP's first bucket, if no size is given


def plan(rank: Rank) -> Plan:
    """The plan of DDP: parameters, moments and buckets of gradients, whole on every rank.

    With `gradient_as_bucket_view` a bucket is the gradient. A bucket that is compressed is copied in bfloat16. The copy of
    the last one is still there when the optimizer steps.
    """
    options = rank.config.own
    size = rank.elements * rank.width
    optimizer = size * rank.moments
    numel = largest(rank.shapes)
    second = 0 if options.get("gradient_as_bucket_view", True) else size  # gradients beside the buckets
    compressed = options.get("compress_gradients", "none") != "none"
    copy = last_bucket(rank, options["bucket_cap_mb"]) // rank.width * BFLOAT16 if compressed else 0
    earlier = second if rank.config.gradient_accumulation_steps > 1 else 0
    before = max(second - rank.of_embedding, 0)
    return Plan(
        {
            START: Moment(parameters=size, temporary=max(size, min(size, BROADCAST))),
            LOSS: rank.at_loss(size, size + earlier, optimizer),
            END_OF_BACKWARD: most(
                # The bucket is there before its gradients
                rank.at_end(size, size + max(before, earlier), optimizer),
                Moment(size, size + second, optimizer, 0, copy),
            ),
            UPDATE: Moment(size, size + second, optimizer, 0, copy + max(rank.norm(numel), rank.step(numel))),
        },
        rank.built,
    )


def last_bucket(rank: Rank, cap_mb: float) -> int:
    """Bytes of DDP's last bucket, which has the embedding.

    A bucket is closed by the gradient with which it reaches its size.
    """
    bucket, limit = 0, FIRST_BUCKET if cap_mb == ddp.TORCHS_BUCKET else int(cap_mb * 2**20)
    for shape in reversed(rank.shapes.values()):
        if bucket >= limit:
            bucket, limit = 0, int(cap_mb * 2**20)
        bucket += math.prod(shape) * rank.width
    return bucket
