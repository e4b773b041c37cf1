"""What FSDP2 holds: weights cut over dp by `fully_shard`, and gathered group by group.

Each layer is a group; embedding, norm and head are another, the root. With --wrap model there is the root alone. A
parameter is cut in its first dim, and the shards are padded to equal length. A group is gathered into one flat buffer and
copied from there into its parameters. In forward the buffer is kept until the next group is gathered
(comm_ctx.all_gather_state of torch/distributed/fsdp/_fully_shard). In backward the layers that come next are gathered ahead,
one of them unless --prefetch says more. A group's gradients are whole until they are reduced, and the flat input of the
reduction is kept until the next group's. HSDP sums the shards of gradients in place. With --precision mixed what is
gathered, and its gradients, are bfloat16; they are reduced in float32. On CPUs what is offloaded is where it was.
"""

import math
from dataclasses import dataclass, replace

from extras.memory import activations
from extras.memory.plan import (
    BFLOAT16,
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
from lockstep.ground.errors import UserError
from lockstep.plan import fsdp


def plan(rank: Rank) -> Plan:
    """The plan of FSDP. Raises UserError for offload on a GPU, and for dimensions whose activations are not known."""
    config = rank.config
    if fsdp.of(config).sequence_parallel:
        raise UserError("what a rank holds with --sequence_parallel is not known; leave it out of the plan")
    if fsdp.of(rank.config).cpu_offload and rank.config.device != "cpu":
        raise UserError("what --cpu_offload keeps on a GPU is not known; leave it out, or add --device cpu")
    sizes = sizes_of(rank)
    shard = sizes.shard
    # Layers are cut first, one by one; when the root is cut, their whole weights are gone.
    cutting = max(sizes.layer_shard, shard - sizes.layers * sizes.layer_reduced)
    if rank.config.tp_size > 1:
        cutting = largest(rank.model) * rank.width
    update = max(rank.norm(sizes.largest), rank.step(sizes.largest))
    return Plan(
        {
            START: Moment(parameters=rank.whole, temporary=cutting),
            LOSS: most(*in_forward(sizes), *between(sizes), *in_backward(sizes)),
            END_OF_BACKWARD: most(*at_end(sizes)),
            UPDATE: Moment(shard, shard, sizes.optimizer, 0, update),
        },
        rank.built,
    )


@dataclass(frozen=True)
class Sizes:
    """Bytes on a rank. With --wrap model the layers have no groups, and all that is a group's is 0."""

    own: fsdp.Options
    measured: activations.Activations
    layers: int
    optimizer: int
    shard: int  # of all parameters
    root_shard: int
    layer_shard: int
    root: int  # gathered, or its gradients
    root_flat: int  # the buffer that it is gathered into
    root_reduced: int  # its gradients in the dtype that they are reduced in
    only_flat: int  # that buffer with --wrap model, where it stays until the loss; else 0
    # Of a layer, what `root`, `root_flat` and `root_reduced` are of the root
    layer: int
    layer_flat: int
    layer_reduced: int
    layer_gradients: int  # what a layer whose backward is done leaves
    left: int  # gathered weights of a layer between its forward and its backward
    whole_kept: int  # gradients of the micro batches before the last: whole
    shards_kept: int  # or reduced
    head: int  # the gradient of a head that is not tied, which comes before the layers'
    copied: int  # by gloo, which reduces a copy of the root's gradients
    largest: int  # elements of the largest shard

    @property
    def resident(self) -> int:
        """The shards, and the root, which is gathered from forward to the end of backward."""
        return self.shard + self.root

    @property
    def kept(self) -> int:
        return self.whole_kept or self.shards_kept


def sizes_of(rank: Rank) -> Sizes:
    config, options = rank.config, fsdp.of(rank.config)
    mixed = config.precision == "mixed"
    width, computed = rank.width, BFLOAT16 if mixed else rank.width
    measured = activations.of(
        replace(config, precision="bf16") if mixed else config, rank.architecture, whole_layers=True
    )
    dp = config.dp_size // options.dp_replicate
    shards = {name: (math.ceil(shape[0] / dp), *shape[1:]) for name, shape in rank.shapes.items()}
    layers = max(map(rank.names.layer_of, shards)) + 1
    whole = dp * elements(shards)
    of_layer = dp * elements({name: shards[name] for name in shards if rank.names.layer_of(name) == 0})
    by_layer = options.wrap == "layer"
    in_group = of_layer if by_layer else 0
    root = whole - layers * in_group
    reshard = options.reshard_after_forward
    # Until the last micro batch nothing is reduced, and whole gradients are kept. Or those of each micro batch are reduced,
    # and their shards are kept.
    accumulates = config.gradient_accumulation_steps > 1
    keeps_whole = accumulates and options.gradient_sync == "last"
    head = 0 if rank.tied or keeps_whole else math.prod(rank.shapes[rank.names.head_weight]) * computed
    return Sizes(
        own=options,
        measured=_with_embedding(rank, measured, computed),
        layers=layers,
        optimizer=whole // dp * width * rank.moments,
        shard=whole // dp * width,
        root_shard=root // dp * width,
        layer_shard=in_group // dp * width,
        root=root * computed,
        root_flat=root * computed if dp > 1 else 0,
        only_flat=root * computed if dp > 1 and not by_layer else 0,
        root_reduced=root * width,
        layer=in_group * computed,
        layer_flat=in_group * computed if dp > 1 else 0,
        layer_reduced=in_group * width,
        layer_gradients=in_group // dp * width if by_layer else of_layer * computed,
        left=in_group * computed // (1 if reshard is False else reshard) if reshard is not True else 0,
        whole_kept=whole * width if keeps_whole else 0,
        shards_kept=whole // dp * width if accumulates and not keeps_whole else 0,
        head=head,
        copied=root * width if dp > 1 and config.device == "cpu" else 0,
        largest=largest(shards),
    )


def in_forward(sizes: Sizes) -> list[Moment]:
    """The root's group in use, then each layer with the buffers that --prefetch gathers ahead."""
    prefetch, measured, layers = sizes.own.prefetch, sizes.measured, sizes.layers
    first = sizes.root_flat + sizes.layer_flat * max(prefetch, 1)
    moments = [Moment(sizes.resident, sizes.kept, sizes.optimizer, 0, first)]
    for number in range(1, layers + 1):
        weights = sizes.layer + (number - 1) * sizes.left
        weights += sizes.layer_flat * (1 + min(prefetch, layers - number)) or sizes.only_flat
        saved = measured.layers - (layers - number) * measured.layer
        moments.append(Moment(sizes.resident, sizes.kept, sizes.optimizer, saved, weights))
    return moments


def between(sizes: Sizes) -> list[Moment]:
    """The loss, with the last group's buffer, and the backward of the head.

    For the latter the root is gathered again if it was resharded.
    """
    measured = sizes.measured
    again = sizes.root_flat if sizes.own.reshard_after_forward else 0
    head = measured.head - measured.saved
    return [
        Moment(
            sizes.resident + sizes.layers * sizes.left,
            sizes.kept,
            sizes.optimizer,
            measured.saved,
            measured.forward - measured.saved + (sizes.layer_flat or sizes.only_flat),
        ),
        Moment(
            sizes.resident + gathered(sizes, sizes.layers + 1) - sizes.layer,
            sizes.kept,
            sizes.optimizer,
            measured.saved,
            max(head, again),
        ),
    ]


def in_backward(sizes: Sizes) -> list[Moment]:
    """Each layer, from the first to the last; before a layer's own, the backward of those after it is done."""
    moments = []
    for number in range(1, sizes.layers + 1):
        done = sizes.layers - number
        activations_left = sizes.measured.top - done * sizes.measured.layer
        moments.append(
            Moment(
                sizes.resident + gathered(sizes, number),
                gradients(sizes, done),
                sizes.optimizer,
                0,
                activations_left + (sizes.layer_reduced if done else 0),
            )
        )
    return moments


def at_end(sizes: Sizes) -> list[Moment]:
    """Backward of the embedding, and the reduction of the root: its gradients, whole; the input of the reduction; its output."""
    measured = sizes.measured
    embedding = max(measured.tail, measured.bottom + gathered(sizes, 1)) + sizes.layer_reduced
    reduction = max(sizes.root_reduced if sizes.whole_kept else sizes.root, sizes.copied + sizes.root_shard)
    return [
        Moment(sizes.resident, gradients(sizes, sizes.layers), sizes.optimizer, 0, embedding),
        Moment(
            sizes.shard,
            max(sizes.shard - sizes.root_shard, sizes.shards_kept),
            sizes.optimizer,
            0,
            sizes.root_reduced + reduction,
        ),
    ]


def gathered(sizes: Sizes, number: int) -> int:
    """Weights of so many layers in backward, of which the last is in use and those before it are gathered ahead."""
    if sizes.own.reshard_after_forward is False:
        return number * sizes.layer
    ahead = min(max(sizes.own.prefetch, 1), number - 1)
    return sizes.layer + ahead * sizes.layer_flat + (number - 1) * sizes.left


def gradients(sizes: Sizes, done: int) -> int:
    """Gradients when so many layers have theirs, without those of the layer in progress, the embedding and a tied head."""
    if sizes.whole_kept:
        return sizes.whole_kept - done * (sizes.layer_reduced - sizes.layer_shard)
    return sizes.shards_kept or done * sizes.layer_gradients + sizes.head


def _with_embedding(rank: Rank, measured: activations.Activations, width: int) -> activations.Activations:
    """The activations with the gradient of an embedding that is cut over the vocabulary.

    DTensor makes it whole, and copies this rank's rows. If the head is tied to it, its gradient and the sum of the two are
    there as well.
    """
    if rank.config.tp_size == 1:
        return measured
    whole = math.prod(rank.model[rank.names.embedding_weight]) * width
    tail = whole + rank.of_embedding // rank.width * width * (3 if rank.tied else 1)
    return replace(measured, tail=max(measured.tail, tail))
