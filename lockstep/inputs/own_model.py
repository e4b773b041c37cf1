"""A model of the user's own: a function in a file that returns a torch.nn.Module.

The module is called with input_ids and labels, each (B, S), the labels already shifted by one. It returns the mean loss over all
positions that have a label, which is not -100: as a scalar, as `.loss` of an object, under "loss" in a dict, or as the one scalar of a
tuple, as in (logits, loss).
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from lockstep.ground import user_file
from lockstep.ground.errors import TrainingFailure, UserError, first_line
from lockstep.inputs import modules
from lockstep.inputs.samples import IGNORED

OPTION = "--model"


class _Returned(NamedTuple):
    """What the module returns: a tuple, in which FSDP2 looks for tensors, as it does not in every object."""

    loss: torch.Tensor


def architecture_of(text: str) -> dict:
    """What is recorded of the model: the function, the file's SHA-256 and the number of tokens that its first embedding knows."""
    return {"model_type": text, "sha256": user_file.sha256(text, OPTION), "vocab_size": _vocab_size(text)}


def _vocab_size(text: str) -> int:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = build(text)
    embedding = model.get_submodule(modules.find(model).embedding)
    if not isinstance(embedding, torch.nn.Embedding):
        raise UserError(
            f"{OPTION} {text}: the module has no torch.nn.Embedding, whose size would say which tokens it takes"
        )
    return embedding.num_embeddings


def build(text: str) -> torch.nn.Module:
    """The module, in training mode, with a forward method that takes what transformers' models take. Raises UserError."""
    make_model = user_file.load(text, OPTION)
    try:
        model = make_model()
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        raise UserError(f"{OPTION} {text}: the function failed ({first_line(error)})") from error
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            f"{OPTION} {text}: the function returned {type(model).__name__}, not a torch.nn.Module"
        )
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    unready = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if unready is not None:
        raise UserError(
            f"{OPTION} {text}: {unready} has no shape yet; give the size of its input, in the place of a lazy module"
        )
    forward = model.forward

    def as_transformers_calls(
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> _Returned:
        if position_ids is not None:
            raise TrainingFailure(
                f"{OPTION} {text}: it is called with ids and labels alone, and this mesh cuts the positions"
            )
        loss = _loss_of(forward(input_ids, labels), text)
        if num_items_in_batch is not None:
            loss = loss * ((labels != IGNORED).sum() / num_items_in_batch)
        return _Returned(loss)

    model.forward = as_transformers_calls
    return model.train()


def _loss_of(result: Any, text: str) -> torch.Tensor:
    """The loss in what a module returned. Raises TrainingFailure."""
    candidates = list(result) if isinstance(result, tuple | list) else [result]
    if isinstance(result, dict):
        candidates = [result.get("loss")]
    elif hasattr(result, "loss"):
        candidates = [result.loss]
    scalars = [value for value in candidates if isinstance(value, torch.Tensor) and value.ndim == 0]
    if len(scalars) != 1:
        raise TrainingFailure(
            f"{OPTION} {text}: the module returned no loss; return a scalar, an object with .loss, or a tuple with one scalar"
        )
    return scalars[0]
