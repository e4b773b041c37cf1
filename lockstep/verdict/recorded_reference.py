"""The recorded model, called again by one process with the micro batches that the run saw: in float64, or as the run computes."""

import contextlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.dumps import tree
from lockstep.dumps.recorder import outputs_of
from lockstep.dumps.recording import Called, Recording
from lockstep.ground.errors import UserError, first_line
from lockstep.inputs import shapes
from lockstep.verdict.float64 import Float64, make_exact
from lockstep.verdict.normalisation import Gradients

IGNORED = (-100, -1)  # labels that count for no token
SAME = 1e-9  # relative: the float64 loss is this mean over tokens


@dataclass
class Computed:
    """What a micro batch gives."""

    gradients: Gradients  # of its loss
    loss: (
        float | None
    )  # None where no labels reach the model: the gradients then follow from the recorded one at the logits
    tokens: int  # that the loss is a mean over; 0 if that is not known
    divisor: float  # of the sum over these tokens, in the loss


class Reference:
    """Computes the loss of a micro batch and its gradient. `exact`: in float64."""

    def __init__(self, recording: Recording, weights: dict[str, torch.Tensor], *, exact: bool):
        self.model, self.exact = recording.build(), exact
        require_no_dropout(self.model)
        for module in self.model.modules():
            if "gradient_checkpointing" in vars(module):  # it would compute again outside of the mode
                vars(module).update(gradient_checkpointing=False)
        if exact:
            tree.give(self.model, {name: weight.double() for name, weight in weights.items()})
            make_exact(self.model, _tables(self.model))
        else:
            dtype = recording.steps[0][0].micro_batches[0].param_dtype
            cast = _dtype(dtype) if dtype else None
            tree.give(
                self.model,
                {name: weight.to(cast or weight.dtype).clone() for name, weight in weights.items()},
            )
        self.parameters = dict(self.model.named_parameters())

    def compute(self, called: Called) -> Computed:
        """Raises UserError if the model cannot be called again, or returns nothing that was trained."""
        self.model.zero_grad(set_to_none=True)
        loss, logits = self._call(called)
        gradients = {
            name: parameter.grad.double()
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        if loss is None:
            return Computed(gradients, None, 0, 0.0)
        loss = loss.detach()
        told = divisor_of(called)
        tokens = tokens_of(called, loss, logits, told)
        return Computed(gradients, float(loss), tokens, told or tokens)

    def _call(self, called: Called) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        given: dict[str, Any] = {**called.about.plain, **called.tensors}
        if "use_cache" in inspect.signature(self.model.forward).parameters:
            given["use_cache"] = False
        if self.exact:  # inputs that are no ids, too
            given = {
                name: value.double()
                if isinstance(value, torch.Tensor) and value.is_floating_point()
                else value
                for name, value in given.items()
            }
        try:
            with self._precision(called):
                loss, logits = outputs_of(self.model(**given))
                if called.about.loss is None:  # the loop did not train on it
                    loss = None
                if loss is not None:
                    loss.backward()
                elif logits is not None and called.logits_gradient is not None:
                    logits.backward(called.logits_gradient.to(logits.dtype))
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            raise UserError(
                f"the recorded model cannot be called again with micro batch {called.number} ({type(error).__name__}: {first_line(error)})"
            ) from error
        if loss is None and (logits is None or called.logits_gradient is None):
            raise UserError(
                "the model returned neither a loss nor logits that have a gradient, so nothing says what was trained; return one of them"
            )
        return loss, logits

    @contextlib.contextmanager
    def _precision(self, called: Called) -> Iterator[None]:
        dtype = called.about.autocast
        if self.exact:
            with Float64():
                yield
        elif dtype is not None:
            with torch.autocast("cpu", _dtype(dtype)):
                yield
        else:
            yield


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


def _tables(model: torch.nn.Module) -> list[str]:
    """Modules without weights but with buffers, such as a rotary table: they stay as they are in the runs."""
    return [
        name
        for name, module in model.named_modules()
        if name and not list(module.children()) and not list(module.parameters()) and list(module.buffers())
    ]


def require_no_dropout(model: torch.nn.Module) -> None:
    """Raise UserError for a model that drops elements in training: the reference would drop others."""
    dropout = shapes.active_dropout(shapes.settings_of(model))
    if dropout:
        raise UserError(
            f"dropout of {dropout[0]} is active in {dropout[1]}, so the reference would drop other elements; record a run without it"
        )


def divisor_of(called: Called) -> float:
    """What the model was told to divide its sum over tokens by; 0 if nothing."""
    told: Any = called.about.plain.get("num_items_in_batch") or called.tensors.get("num_items_in_batch", 0)
    return float(told)


def tokens_of(called: Called, loss: torch.Tensor, logits: torch.Tensor | None, divisor: float) -> int:
    """How many tokens the loss of a micro batch is a mean over; 0 if it is no such mean of a cross-entropy.

    `divisor` is what the model was told to divide by, 0 if nothing. The loss itself says which input has the labels, whether the model shifts them,
    and which label counts for no token.
    """
    if logits is None or logits.ndim < 2:
        return 0
    own = logits.detach().double()
    for labels in called.tensors.values():
        if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
            continue
        for inside, wanted in ((own, labels), (own[..., :-1, :], labels[..., 1:])):
            for ignored in IGNORED:
                tokens = int((wanted != ignored).sum())
                if not tokens or int(wanted[wanted != ignored].min()) < 0:
                    continue
                total = torch.nn.functional.cross_entropy(
                    inside.flatten(0, -2), wanted.flatten(), ignore_index=ignored, reduction="sum"
                )
                if math.isclose(float(total) / (divisor or tokens), float(loss), rel_tol=SAME):
                    return tokens
    return 0
