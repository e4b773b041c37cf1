"""Context parallelism: every rank along cp computes its own positions of each sequence, and attends to all earlier ones.

    o_i = softmax(scale * q_i K^T + M_i) V        q_i: the rank's own positions; K, V: gathered over cp; M: the causal mask

as in Llama 3 (arXiv 2407.21783, section 3.3.2). torch's own `context_parallel` passes keys and values around in a ring, and has no
operator for CPUs (torch 2.13). A position attends to all before it, so a rank has an early and a late piece of each sequence
(`lockstep.plan.mesh.balanced_share`): then all ranks have equal work.

The loss of a rank is the mean over its own positions. All ranks have equally many, so the mean over ranks is the mean over tokens.
"""

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from lockstep.ground.collective import gather_objects
from lockstep.inputs import modules
from lockstep.plan.cuts import BALANCED, Positions
from lockstep.plan.mesh import runs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The attention function: its name in transformers' registry, and the attention implementation that it computes with
NAME = "context_parallel"
KERNEL = "sdpa"


class OwnPositions:
    """The positions of each sequence of `seq_length` that this rank of a group has."""

    def __init__(self, group: dist.ProcessGroup, cut: Positions, seq_length: int):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.pieces = cut.pieces_of(seq_length, self.rank, self.size)
        ranges = [torch.arange(start, start + length) for start, length in self.pieces]
        # `seen` are those of the last forward pass.
        self.positions = self.seen = torch.cat(ranges)

    def cut(
        self, input_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cut ids and labels (B, S) to this rank's positions; returns these (1, S / cp), too. Labels are already shifted."""
        positions = self.seen = self.positions.to(input_ids.device)
        return input_ids[:, positions], labels[:, positions], positions[None]

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Average over the group, in place, losses that are means over equally many positions each. Collective."""
        dist.all_reduce(loss, group=self.group)
        loss /= self.size
        return loss

    def contract(self) -> list[list[list[int]]]:
        """[start, length] of the runs of positions that each rank was called with. Collective."""
        return gather_objects(runs(self.seen.tolist()), self.group)


class ContextParallel(OwnPositions):
    """Makes a model, in place, attend to the positions of all ranks of the group."""

    def __init__(self, model: "PreTrainedModel", group: dist.ProcessGroup, seq_length: int):
        from transformers import AttentionInterface

        super().__init__(group, BALANCED, seq_length)
        AttentionInterface.register(NAME, attend)
        model.set_attn_implementation(NAME)
        names = modules.names_in(model)
        for layer in model.get_submodule(names.layers).children():
            cast(Any, layer.get_submodule(names.attention)).context = self

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Gather keys or values (N, ..., S / cp, D) of this rank's positions to (N, ..., S, D) of all, in order. Collective."""
        gathered = _Gather.apply(local, self.group).chunk(self.size)
        early, late = zip(*(shard.chunk(2, -2) for shard in gathered), strict=True)
        return torch.cat([*early, *reversed(late)], -2)

    def mask(self, start: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Whether each position of a piece attends to each position up to the piece's end: (length, start + length) bool."""
        return _causal(start, length, window, device)


# Every layer asks for the same masks.
@functools.lru_cache(maxsize=8)
def _causal(start: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    query = torch.arange(start, start + length, device=device)[:, None]
    key = torch.arange(start + length, device=device)
    allowed = key <= query
    return allowed if window is None else allowed & (query - key < window)


def allowed(further: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
    """Whether each of these positions attends to each position of its sequence: (B, 1, len(positions), S) bool.

    This is the layout of transformers' masks.

    `further` is an `attention_mask` (B, S), or `position_ids` (B, S) that begin again where another document does.
    """
    ((name, values),) = further.items()
    visible = values.bool()[:, None, None, :]
    if name == "position_ids":
        document = (values.diff(prepend=values[:, :1] - 1) != 1).cumsum(1)
        visible = document[:, None, positions, None] == document[:, None, None, :]
    return visible & (torch.arange(values.shape[1], device=values.device) <= positions[:, None])


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: query (B, H, S / cp, D), key and value (B, H_kv, S / cp, D) -> (B, S / cp, H, D)."""
    context = cast(ContextParallel, module.context)
    key, value = context.whole(torch.stack([key, value])).unbind()
    outputs, given_mask = [], attention_mask
    for number, ((start, length), q) in enumerate(zip(context.pieces, query.chunk(2, -2), strict=True)):
        # Later keys would be masked, so they are left out.
        end = start + length
        mask = context.mask(start, length, sliding_window, q.device)
        if given_mask is not None:
            mask = mask & given_mask.chunk(2, -2)[number][..., :end]
        outputs.append(
            scaled_dot_product_attention(
                q,
                key[..., :end, :],
                value[..., :end, :],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, -2).transpose(1, 2).contiguous(), None


class _Gather(torch.autograd.Function):
    """Gathers x (N, ...) of every rank to (size * N, ...). Backward sums the gradients that all ranks have for this rank's x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        dist.all_gather_single(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A sum in bfloat16 would be rounded once per rank.
        wide = gradient.float().contiguous()
        return reduce_scatter(wide, ctx.group).to(gradient.dtype), None


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum x (size * N, ...) over ranks; returns this rank's (N, ...) of the sum. Collective."""
    shard = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_single(shard, x, group=group)
    return shard
