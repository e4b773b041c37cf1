"""The head that TRL puts in the place of a model's own: it returns the log-probabilities of labels, and no logits."""

import torch

from lockstep.recorder.called import IGNORED, LOG_PROBS, Called
from lockstep.verdict.mean_over import ALIKE


def is_mean(called: Called) -> bool:
    """Whether the gradient at log-probabilities is that of a mean over all tokens, as in the loss that the model returns."""
    tokens = called.arrived[LOG_PROBS][_shifted_labels(called) != IGNORED[0]].double()
    return bool((tokens < 0).all()) and float(tokens.min()) > (1 + ALIKE) * float(tokens.max())


def _shifted_labels(called: Called) -> torch.Tensor:
    shifted = called.tensors.get("shift_labels")
    return called.tensors["labels"][:, 1:] if shifted is None else shifted


def log_probs(called: Called, logits: torch.Tensor) -> torch.Tensor:
    """Those of the labels, zero where there is none: what a model of TRL returns in the place of logits."""
    labels = _shifted_labels(called)
    logits = logits[:, : labels.shape[1]].transpose(1, 2)
    return -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
