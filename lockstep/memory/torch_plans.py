"""What the strategies in plain torch hold: whole replicas, and weights cut over dp by `fully_shard`."""

import math
from dataclasses import replace

from lockstep.inputs.modules import EMBEDDING_WEIGHT, layer_of
from lockstep.memory.plan import END_OF_BACKWARD, LOSS, START, UPDATE, Moment, Plan, Rank, elements, largest

BROADCAST = 250 << 20  # bytes that DDP joins to broadcast its weights (torch.nn.parallel.distributed)


def replicated(rank: Rank) -> Plan:
    """DDP: parameters, moments and buckets of gradients, whole on every rank; `gradient_as_bucket_view` makes no second gradient."""
    size = rank.elements * rank.width
    optimizer = size * rank.moments
    numel = largest(rank.shapes)
    return Plan(
        {
            START: Moment(parameters=size, temporary=max(size, min(size, BROADCAST))),
            LOSS: rank.at_loss(size, size, optimizer),
            END_OF_BACKWARD: rank.at_end(size, size, optimizer),  # the bucket is there before the gradient
            UPDATE: Moment(size, size, optimizer, 0, max(rank.norm(numel), rank.step(numel))),
        },
        rank.built,
    )


def sharded(rank: Rank) -> Plan:
    """FSDP2, each layer a group and the rest another, `reshard_after_forward=False`.

    A parameter is cut in its first dim, and the shards are padded to equal length. Gathered weights stay from forward to backward; a
    group's gradients are whole until they are reduced. With one rank along dp, too, a weight in use is a copy of its shard; nothing is reduced.
    """
    rank, dp = _embedding_backward(rank), rank.config.dp_size
    rows = {name: (math.ceil(shape[0] / dp), *shape[1:]) for name, shape in rank.shapes.items()}
    shard = elements(rows) * rank.width
    gathered = shard * dp
    last = elements({name: shape for name, shape in rows.items() if layer_of(name) < 0}) * rank.width
    in_flight = last * dp if dp > 1 else 0  # what is reduced last: gradients of embedding, norm and head
    optimizer = shard * rank.moments
    numel = largest(rows)
    # Until the last micro batch nothing is reduced, and whole gradients are kept.
    kept = gathered if rank.config.gradient_accumulation_steps > 1 else 0
    # The last layer's weights were gathered into one flat buffer, which is freed when the next group is gathered.
    number = max(map(layer_of, rows))
    layer = {name: shape for name, shape in rows.items() if layer_of(name) == number}
    flat = elements(layer) * dp * rank.width if dp > 1 else 0
    cutting = largest(rank.model) * rank.width if rank.config.tp_size > 1 else last
    return Plan(
        {
            START: Moment(parameters=rank.whole, temporary=cutting),
            LOSS: rank.at_loss(shard + gathered, kept, optimizer, before=flat),
            END_OF_BACKWARD: rank.at_end(
                shard + last * dp, max(shard - last, kept), optimizer, in_flight + last
            ),
            UPDATE: Moment(shard, shard, optimizer, 0, in_flight + max(rank.norm(numel), rank.step(numel))),
        },
        rank.built,
    )


def _embedding_backward(rank: Rank) -> Rank:
    """The gradient of an embedding that is cut over the vocabulary: DTensor makes it whole, and copies this rank's rows. If the head is
    tied to it, its gradient and the sum of the two are there as well.
    """
    if rank.config.tp_size == 1:
        return rank
    whole = math.prod(rank.model[EMBEDDING_WEIGHT]) * rank.width
    tail = whole + rank.of_embedding * (3 if rank.tied else 1)
    return replace(rank, activations=replace(rank.activations, tail=max(rank.activations.tail, tail)))
