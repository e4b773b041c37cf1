"""The head that TRL puts in the place of a model's own: it returns the log-probabilities of labels, and no logits."""

import torch

from lockstep.recorder.micro_batch import IGNORED, LOG_PROBS, JoinedMicroBatch
from lockstep.verdict.mean_over import ALIKE


def is_mean(micro_batch: JoinedMicroBatch) -> bool:
    """Whether the gradient at log-probabilities is that of a mean over all tokens.

    The loss that the model returns is such a mean.
    """
    gradient = micro_batch.output_gradients[LOG_PROBS][_shifted_labels(micro_batch) != IGNORED[0]].double()
    is_of_tokens = gradient.numel() > 0 and bool((gradient < 0).all())
    return is_of_tokens and float(gradient.min()) > (1 + ALIKE) * float(gradient.max())


def _shifted_labels(micro_batch: JoinedMicroBatch) -> torch.Tensor:
    shifted = micro_batch.tensors.get("shift_labels")
    return micro_batch.tensors["labels"][:, 1:] if shifted is None else shifted


def log_probs(micro_batch: JoinedMicroBatch, logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the labels, zero where there is none.

    A model of TRL returns these in the place of logits.
    """
    labels = _shifted_labels(micro_batch)
    logits = logits[:, : labels.shape[1]].transpose(1, 2)
    return -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
