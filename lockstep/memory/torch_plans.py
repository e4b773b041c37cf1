"""What the strategies in plain torch hold: whole replicas, and weights cut over dp by `fully_shard`."""

import math
from dataclasses import replace

from lockstep.errors import UserError
from lockstep.inputs import modules
from lockstep.memory import activations
from lockstep.memory.plan import (
    END_OF_BACKWARD,
    LOSS,
    START,
    UPDATE,
    Moment,
    Plan,
    Rank,
    elements,
    largest,
    most,
)
from lockstep.training import ddp_options, fsdp_options

BROADCAST = 250 << 20  # bytes that DDP joins to broadcast its weights (torch.nn.parallel.distributed)
FIRST_BUCKET = 1 << 20  # bytes of DDP's first bucket, if no size is given
BFLOAT16 = 2  # bytes


def replicated(rank: Rank) -> Plan:
    """DDP: parameters, moments and buckets of gradients, whole on every rank. With `gradient_as_bucket_view` a bucket is the gradient.

    A bucket that is compressed is copied in bfloat16. The copy of the last one is still there when the optimizer steps.
    """
    own = rank.config.own
    size = rank.elements * rank.width
    optimizer = size * rank.moments
    numel = largest(rank.shapes)
    second = 0 if own.get("gradient_as_bucket_view", True) else size  # gradients beside the buckets
    compressed = own.get("compress_gradients", "none") != "none"
    copy = last_bucket(rank, own["bucket_cap_mb"]) // rank.width * BFLOAT16 if compressed else 0
    earlier = second if rank.config.gradient_accumulation_steps > 1 else 0
    before = max(second - rank.of_embedding, 0)
    return Plan(
        {
            START: Moment(parameters=size, temporary=max(size, min(size, BROADCAST))),
            LOSS: rank.at_loss(size, size + earlier, optimizer),
            END_OF_BACKWARD: most(
                rank.at_end(size, size + max(before, earlier), optimizer),  # the bucket is there before
                Moment(size, size + second, optimizer, 0, copy),
            ),
            UPDATE: Moment(size, size + second, optimizer, 0, copy + max(rank.norm(numel), rank.step(numel))),
        },
        rank.built,
    )


def last_bucket(rank: Rank, cap_mb: float) -> int:
    """Bytes of DDP's last bucket, which has the embedding. A bucket is closed by the gradient with which it reaches its size."""
    bucket, limit = 0, FIRST_BUCKET if cap_mb == ddp_options.TORCHS_BUCKET else int(cap_mb * 2**20)
    for shape in reversed(rank.shapes.values()):
        if bucket >= limit:
            bucket, limit = 0, int(cap_mb * 2**20)
        bucket += math.prod(shape) * rank.width
    return bucket


def sharded(rank: Rank) -> Plan:
    """FSDP2: each layer a group, and embedding, norm and head another ("root"); with --wrap model there is the root only.

    A parameter is cut in its first dim, and the shards are padded to equal length. A group is gathered into one flat buffer and copied
    from there into its parameters. In forward the buffer is kept until the next group is gathered (comm_ctx.all_gather_state of
    torch/distributed/fsdp/_fully_shard). In backward the layers that come next are gathered ahead, one of them unless --prefetch says more.
    A group's gradients are whole until they are reduced, and the flat input of the reduction is kept until the next group's. HSDP sums
    the shards of gradients in place. With --precision mixed what is gathered, and its gradients, are bfloat16; they are reduced in float32.
    On CPUs what is offloaded is where it was.
    """
    config, own = rank.config, fsdp_options.of(rank.config)
    if own.cpu_offload and config.device != "cpu":
        raise UserError("what --cpu_offload keeps on a GPU is not known; leave it out, or add --device cpu")
    mixed = config.precision == "mixed"
    width, computed = rank.width, BFLOAT16 if mixed else rank.width
    measured = activations.of(
        replace(config, precision="bf16") if mixed else config, rank.architecture, whole_layers=True
    )
    rank = _embedding_backward(replace(rank, activations=measured), computed)
    measured = rank.activations

    dp = config.dp_size // own.dp_replicate
    rows = {name: (math.ceil(shape[0] / dp), *shape[1:]) for name, shape in rank.shapes.items()}
    layers = max(map(rank.names.layer_of, rows)) + 1
    of_layer = dp * elements({name: rows[name] for name in rows if rank.names.layer_of(name) == 0})
    all_of_them = dp * elements(rows)
    in_groups = own.wrap == "layer"
    root = all_of_them - layers * of_layer if in_groups else all_of_them
    shard, optimizer = all_of_them // dp * width, all_of_them // dp * width * rank.moments
    root_shard, layer_shard = root // dp * width, of_layer // dp * width if in_groups else 0
    whole_root, layer = root * computed, of_layer * computed  # gathered, and their gradients
    flat = layer if dp > 1 and in_groups else 0  # a buffer that a layer is gathered into
    flat_root = whole_root if dp > 1 else 0
    ahead = max(own.prefetch, 1)
    reducing = of_layer * width if in_groups else 0
    # Until the last micro batch nothing is reduced, and whole gradients are kept; or their reduced shards, of each micro batch.
    accumulates = config.gradient_accumulation_steps > 1
    whole_kept = accumulates and own.gradient_sync == "last"
    reduced = shard if accumulates and not whole_kept else 0
    head = math.prod(rank.shapes[modules.HEAD_WEIGHT]) * computed if not rank.tied and not whole_kept else 0

    def gathered(number: int) -> int:
        """Weights of so many layers, of which the last is in use, in backward."""
        if not in_groups:
            return 0
        if own.reshard_after_forward is False:
            return number * layer
        left = 0 if own.reshard_after_forward is True else layer // own.reshard_after_forward
        return layer + min(ahead, number - 1) * flat + (number - 1) * left

    def forward(number: int) -> int:
        """The same in forward: the buffers of the layer itself, and of those that --prefetch gathers ahead."""
        if not in_groups:
            return flat_root
        if own.reshard_after_forward is False:
            left = layer
        else:
            left = 0 if own.reshard_after_forward is True else layer // own.reshard_after_forward
        return layer + (number - 1) * left + flat * (1 + min(own.prefetch, layers - number))

    def gradients(done: int) -> int:
        """Gradients when so many layers have theirs, other than of the layer in progress, of the embedding and of a tied head."""
        if whole_kept:
            return all_of_them * width - done * (of_layer * width - layer_shard if in_groups else 0)
        return reduced or (done * (layer_shard if in_groups else layer) + head)

    def in_layer(number: int) -> Moment:
        done = layers - number
        return Moment(
            shard + whole_root + gathered(number),
            gradients(done),
            optimizer,
            0,
            measured.top - done * measured.layer + (reducing if done else 0),
        )

    kept = all_of_them * width if whole_kept else reduced
    in_use = forward(layers) - (flat if in_groups else flat_root)
    after_forward = in_use if own.reshard_after_forward is False else in_use - (layer if in_groups else 0)
    if own.reshard_after_forward not in (True, False):  # of the last layer, too, and of the root
        after_forward += (layer if in_groups else 0) // own.reshard_after_forward
    rest = gradients(layers)
    gloo = root * width if dp > 1 and config.device == "cpu" else 0  # gloo reduces a copy
    numel = largest(rows)
    cutting = (
        largest(rank.model) * width
        if config.tp_size > 1
        else max(layer_shard, shard - layers * (of_layer * width if in_groups else 0))
    )
    return Plan(
        {
            START: Moment(parameters=rank.whole, temporary=cutting),
            LOSS: most(
                Moment(shard + whole_root, kept, optimizer, 0, flat_root + ahead * flat),
                *(
                    Moment(
                        shard + whole_root,
                        kept,
                        optimizer,
                        measured.layers - (layers - number) * measured.layer,
                        forward(number),
                    )
                    for number in range(1, layers + 1)
                ),
                Moment(
                    shard + whole_root + after_forward,
                    kept,
                    optimizer,
                    measured.saved,
                    measured.forward - measured.saved + (flat if in_groups else flat_root),
                ),
                Moment(
                    shard + whole_root + (gathered(layers + 1) - layer if in_groups else 0),
                    kept,
                    optimizer,
                    measured.saved,
                    max(
                        measured.head - measured.saved, flat_root if own.reshard_after_forward else 0
                    ),  # the root is gathered again
                ),
                *(in_layer(number) for number in range(1, layers + 1)),
            ),
            END_OF_BACKWARD: most(
                Moment(
                    shard + whole_root,
                    rest,
                    optimizer,
                    0,
                    max(measured.tail, measured.bottom + gathered(1)) + reducing,
                ),
                # the root's gradients, whole; the input of the reduction; its output
                Moment(
                    shard,
                    max(shard - root_shard, reduced),
                    optimizer,
                    0,
                    root * width + max(root * (width if whole_kept else computed), gloo + root_shard),
                ),
            ),
            UPDATE: Moment(shard, shard, optimizer, 0, max(rank.norm(numel), rank.step(numel))),
        },
        rank.built,
    )


def _embedding_backward(rank: Rank, width: int) -> Rank:
    """The gradient of an embedding that is cut over the vocabulary: DTensor makes it whole, and copies this rank's rows. If the head is
    tied to it, its gradient and the sum of the two are there as well.
    """
    if rank.config.tp_size == 1:
        return rank
    whole = math.prod(rank.model[rank.names.embedding_weight]) * width
    tail = whole + rank.of_embedding // rank.width * width * (3 if rank.tied else 1)
    return replace(rank, activations=replace(rank.activations, tail=max(rank.activations.tail, tail)))
