"""The head that TRL puts in the place of a model's own: it returns the log-probabilities of labels, and no logits."""

import torch

from lockstep.dumps.recording import Called
from lockstep.verdict.recorded_loss import ALIKE


def is_mean(gradient: torch.Tensor) -> bool:
    """Whether a gradient at log-probabilities is that of a mean over tokens, as in the loss that the model returns."""
    tokens = gradient[gradient != 0].double()
    return bool((tokens < 0).all()) and float(tokens.min()) > (1 + ALIKE) * float(tokens.max())


def log_probs(called: Called, logits: torch.Tensor) -> torch.Tensor:
    """Those of the labels, zero where there is none: what a model of TRL returns in the place of logits."""
    shifted = called.tensors.get("shift_labels")
    labels = called.tensors["labels"][:, 1:] if shifted is None else shifted
    logits = logits[:, : labels.shape[1]].transpose(1, 2)
    return -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
