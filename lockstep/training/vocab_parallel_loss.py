"""Cross-entropy on vocabulary shards: no rank holds logits for the whole vocabulary.

Rank r holds logits x[:, a_r:b_r]. With m = max x and Z = sum exp(x - m), both reduced over the TP group,

    loss_t = log Z_t + m_t - x[t, label_t],      d loss_t / d x[t, v] = exp(x[t, v] - m_t) / Z_t - [v = label_t]

so three all-reduces of one number per token replace a gather of (T, V) logits (Megatron-LM, arXiv 1909.08053,
section 3). Everything is computed in float32, whatever the dtype of the logits.
"""

from typing import Any

import torch
import torch.distributed as dist

from lockstep.inputs.samples import IGNORED

# Tokens handled at a time: the float32 copy of their logits stays in the cache.
_ROWS = 16


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        first_id: int,
        group: dist.ProcessGroup,
        num_labels: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """Return the mean loss, or the sum divided by num_labels; float32, shape ().

        logits (T, V_local), labels (T,) global ids, first_id a_r.
        """
        num_tokens, local_vocab = logits.shape
        maximum = logits.amax(dim=-1).float()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)

        probabilities = torch.empty_like(logits, dtype=torch.float32)
        sums = torch.empty_like(maximum)
        for start in range(0, num_tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            torch.sub(logits[rows], maximum[rows, None], out=probabilities[rows]).exp_()
            torch.sum(probabilities[rows], dim=-1, out=sums[rows])

        local_labels = labels - first_id
        is_local = (local_labels >= 0) & (local_labels < local_vocab)
        local_labels = local_labels.clamp(0, local_vocab - 1)
        target = logits.gather(-1, local_labels[:, None]).squeeze(-1).float()
        sums_and_target = torch.stack([sums, torch.where(is_local, target, 0.0)])
        dist.all_reduce(sums_and_target, group=group)
        sums, target = sums_and_target

        ctx.save_for_backward(probabilities, sums, local_labels, is_local, labels)
        ctx.logits_dtype = logits.dtype
        ctx.counted = num_tokens if num_labels is None else num_labels
        losses = (sums.log() + maximum - target).masked_fill(labels == IGNORED, 0.0)
        return losses.mean() if num_labels is None else losses.sum() / num_labels

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities, sums, local_labels, is_local, labels = ctx.saved_tensors
        num_tokens = len(sums)
        scales = (grad_loss / ctx.counted / sums).masked_fill(labels == IGNORED, 0.0)
        gradient = torch.empty_like(probabilities, dtype=ctx.logits_dtype)
        tokens = torch.arange(num_tokens, device=sums.device)
        # They are not yet divided by Z, so 1 is Z.
        probabilities[tokens, local_labels] -= sums * is_local
        for start in range(0, num_tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            torch.mul(probabilities[rows], scales[rows, None], out=probabilities[rows])
            gradient[rows] = probabilities[rows]
        return gradient, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_id: int,
    group: dist.ProcessGroup,
    num_labels: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Mean cross-entropy over all tokens, equal on every rank of `group`; with `num_labels` the sum divided by it.

    logits (..., V_local) are this rank's shard, which begins at vocabulary id `first_id`; labels (...) are global
    ids; only with `num_labels` may some be -100: their tokens have no loss. May be differentiated once: backward reuses the buffer of
    probabilities.
    """
    return _VocabParallelCrossEntropy.apply(
        logits.flatten(0, -2), labels.flatten(), first_id, group, num_labels
    )
