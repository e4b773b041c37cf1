"""The losses that a loop computes by torch's functions from what the model returned.

How much each counts is the gradient that arrives at it.
"""

import functools
import inspect
import math
import sys
import types
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from lockstep.recorder.patches import Undo, replace

# The first parameters of all of them are (input, target). Targets of cross_entropy and nll_loss may be class indices.
FUNCTIONS = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
)
OF_CLASSES = ("cross_entropy", "nll_loss")
SOME = 64  # how many rows of a loss's input are looked at


class Loss:
    """One call of a loss function. `result` is a scalar, or has an element for each element that the loss is of."""

    def __init__(self, name: str, given: dict[str, Any], result: torch.Tensor):
        self.name, self.given = name, given
        # Cloned, as the loop may divide the result in place
        self.result = result.detach().clone()
        self.made_at = _hash_of_callers(sys._getframe())

    def about(self, gradient: torch.Tensor, whole: float | None) -> dict[str, Any]:
        """Return what is recorded of the loss, as of SeenLoss, once a `gradient` has arrived at its result.

        "number" is how many elements count, and "weight" is how much each of them does. Both are 0 if they do not count
        alike. `whole` is the value that the backward pass began at.
        """
        number, weights = self._number_of_elements(), gradient
        if gradient.ndim:
            weights = gradient[gradient != 0]
            are_alike = weights.numel() and bool(
                torch.isclose(weights, weights[0], rtol=1e-5, atol=0.0).all()
            )
            number = weights.numel() if number and are_alike else 0
        elif self.given["reduction"] != "sum" and number:
            weights = gradient.double() / number
        roundoff = torch.finfo(gradient.dtype).eps / 2
        value = float((self.result.double() * gradient).sum())
        target = self.given["target"]
        return {
            "function": self.name,
            "number": number,
            "weight": float(weights.double().mean()) if number else 0.0,
            "roundoff": roundoff,
            "is_whole": whole is not None and math.isclose(value, whole, rel_tol=max(1e-5, 8 * roundoff)),
            "samples": len(target) if target.ndim else 1,
            "one_target": target.is_floating_point()
            and bool(target.numel() and (target.min() > 0.5 or target.max() < 0.5)),
            "is_soft": self.name == "kl_div" or (self.name in OF_CLASSES and target.is_floating_point()),
            "made_at": self.made_at,
            "odd": self._unlikely_input(),
        }

    def _unlikely_input(self) -> str:
        """Return what of the inputs is hardly meant, as words that follow the function's name; "" if nothing is."""
        input, target = self.given["input"].detach(), self.given["target"]
        input_sizes, target_sizes = ([size for size in x.shape if size != 1] for x in (input, target))
        if (
            self.name not in OF_CLASSES
            and input_sizes == target_sizes
            and torch.broadcast_shapes(input.shape, target.shape).numel() > input.numel()
        ):
            return f"compares each of its numbers with each of its targets: their shapes are {tuple(input.shape)} and {tuple(target.shape)}"
        if self.name in OF_CLASSES and input.ndim > 1 and input.numel():
            rows = input[:SOME]
            if self.name == "nll_loss" and bool((rows > 0).all()):
                return "is given values above 0, which cannot be log-probabilities"
            sums = rows.sum(1)
            if bool((rows >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), rtol=1e-2):
                return "is given probabilities, and applies a softmax to them again"
        return ""

    def classes(self) -> torch.Tensor | None:
        """Return the targets if they are class indices, with -1 where a target does not count; else None."""
        target = self.given["target"]
        if self.name not in OF_CLASSES or target.is_floating_point():
            return None
        return target.masked_fill(target == self.given["ignore_index"], -1)

    def _number_of_elements(self) -> int:
        """Return how many elements the loss is a mean or a sum of.

        It is 0 if they do not count alike, or if deprecated options say how they are reduced.
        """
        target = self.given["target"]
        options = ("weight", "pos_weight", "reduce", "size_average")
        if any(self.given.get(option) is not None for option in options) or not target.numel():
            return 0
        if self.name in OF_CLASSES and not target.is_floating_point():
            return int((target != self.given["ignore_index"]).sum())
        if self.name in OF_CLASSES:
            return target.numel() // target.shape[min(1, target.ndim - 1)]
        return (
            len(self.given["input"])
            if self.given["reduction"] == "batchmean"
            else self.given["input"].numel()
        )


# The last of these is called with each loss whose result requires gradients, and with that result.
WATCHING: list[Callable[[Loss, torch.Tensor], None]] = []


def see_losses() -> Undo:
    """Let WATCHING be told of calls of the loss functions, until this is undone.

    Call it before a model is found: in F.cross_entropy(model(x), y), Python looks the function up before it calls the
    model.
    """
    real = {name: getattr(F, name) for name in FUNCTIONS}
    watched = {name: _watched(name, function) for name, function in real.items()}
    script: Callable[..., Any] = torch.jit.script
    signature = inspect.signature(script)

    @functools.wraps(script)
    def compiled(*arguments: Any, **options: Any) -> Any:
        """Let torch.jit.script compile the source of torch's own functions.

        It looks up the names that a class uses where it is called. That is here one frame further up.
        """
        vars(F).update(real)
        bound = signature.bind(*arguments, **options)
        bound.arguments["_frames_up"] = bound.arguments.get("_frames_up", 0) + 1
        try:
            return script(*bound.args, **bound.kwargs)
        finally:
            vars(F).update(watched)

    restore_script = replace(torch.jit, "script", compiled)
    vars(F).update(watched)

    def restore() -> None:
        vars(F).update(real)
        restore_script()

    return restore


def _watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function of torch that tells WATCHING of its calls."""
    signature, is_inside = inspect.signature(real), False

    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal is_inside
        # A mode, such as that of a default device, calls the function a second time, inside of this call.
        if torch.compiler.is_compiling() or is_inside:
            return real(*arguments, **options)
        is_inside = True
        try:
            result = real(*arguments, **options)
        finally:
            is_inside = False
        if type(result) is torch.Tensor and result.requires_grad and WATCHING:
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            if type(bound.arguments["target"]) is torch.Tensor:
                WATCHING[-1](Loss(name, bound.arguments, result), result)
        return result

    return call


def _hash_of_callers(frame: types.FrameType | None) -> int:
    """Return a hash of the lines that led to a frame, without those of torch and Lockstep."""
    lines = []
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "lockstep.")):
            lines.append((frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lineno))
        frame = frame.f_back
    return zlib.crc32(repr(lines).encode())


def value_of(roots: Any, gradients: Any = None) -> float | None:
    """Return the value that a backward pass begins at, if that is one number whose gradient is not given; else None."""
    leaves = tree_leaves(roots)
    root = leaves[0] if len(leaves) == 1 and gradients is None else None
    return float(root.detach()) if type(root) is torch.Tensor and root.numel() == 1 else None
