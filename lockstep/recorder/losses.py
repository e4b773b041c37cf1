"""The losses that a loop computes by torch's functions of what the model returned, and how much each counts: the gradient that arrives at it."""

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

# All begin with (input, target). cross_entropy and nll_loss have classes for targets.
FUNCTIONS = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
)
OF_CLASSES = ("cross_entropy", "nll_loss")
SOME = 64  # rows of what a loss is given that are looked at


class Loss:
    """One call of a function. `result` is a scalar, or has an element for each that the loss is of."""

    def __init__(self, name: str, given: dict[str, Any], result: torch.Tensor):
        self.name, self.given = name, given
        self.result = result.detach().clone()  # which the loop may divide in place
        self.made_at = _lines(sys._getframe())

    def about(self, gradient: torch.Tensor, whole: float | None) -> dict[str, Any]:
        """What is recorded once a gradient has arrived: the function, how many elements count, and how much each does; 0 if not alike.

        `whole` is the value that the backward pass began at.
        """
        number, of_all = self._number(), gradient
        if gradient.ndim:
            of_all = gradient[gradient != 0]
            alike = of_all.numel() and bool(torch.isclose(of_all, of_all[0], rtol=1e-5, atol=0.0).all())
            number = of_all.numel() if number and alike else 0
        elif self.given["reduction"] != "sum" and number:
            of_all = gradient.double() / number
        roundoff = torch.finfo(gradient.dtype).eps / 2
        value = float((self.result.double() * gradient).sum())
        target = self.given["target"]
        return {
            "function": self.name,
            "number": number,
            "weight": float(of_all.double().mean()) if number else 0.0,
            "roundoff": roundoff,
            "is_whole": whole is not None and math.isclose(value, whole, rel_tol=max(1e-5, 8 * roundoff)),
            "samples": len(target) if target.ndim else 1,
            "one_target": target.is_floating_point()
            and bool(target.numel() and (target.min() > 0.5 or target.max() < 0.5)),
            "is_soft": self.name == "kl_div" or (self.name in OF_CLASSES and target.is_floating_point()),
            "made_at": self.made_at,
            "odd": self._odd(),
        }

    def _odd(self) -> str:
        """What the function is given that is hardly meant, to be read after its name; "" for nothing."""
        input, target = self.given["input"].detach(), self.given["target"]
        one, other = ([size for size in each.shape if size != 1] for each in (input, target))
        if (
            self.name not in OF_CLASSES
            and one == other
            and torch.broadcast_shapes(input.shape, target.shape).numel() > input.numel()
        ):
            return f"compares each of its numbers with each of its targets: their shapes are {tuple(input.shape)} and {tuple(target.shape)}"
        if self.name in OF_CLASSES and input.ndim > 1 and input.numel():
            some = input[:SOME]
            if self.name == "nll_loss" and bool((some > 0).all()):
                return "is given numbers above 0, which are no logarithms of probabilities"
            sums = some.sum(1)
            if bool((some >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), rtol=1e-2):
                return "is given probabilities, of which it makes a softmax once more"
        return ""

    def classes(self) -> torch.Tensor | None:
        """The targets, if they are classes: -1 where none counts."""
        target = self.given["target"]
        if self.name not in OF_CLASSES or target.is_floating_point():
            return None
        return target.masked_fill(target == self.given["ignore_index"], -1)

    def _number(self) -> int:
        """How many elements it is a mean or a sum of; 0 where they do not count alike, or old options say how."""
        target = self.given["target"]
        weighed = ("weight", "pos_weight", "reduce", "size_average")
        if any(self.given.get(one) is not None for one in weighed) or not target.numel():
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


# What is told of each call whose result needs gradients, and of that result
WATCHING: list[Callable[[Loss, torch.Tensor], None]] = []


def see_losses() -> Undo:
    """Lets WATCHING be told of the calls. Python looks a function up before it calls the model, in the arguments: so before a model is found."""
    real = {name: getattr(F, name) for name in FUNCTIONS}
    seen = {name: _seen(name, function) for name, function in real.items()}
    script: Callable[..., Any] = torch.jit.script
    signature = inspect.signature(script)

    @functools.wraps(script)
    def compiled(*arguments: Any, **options: Any) -> Any:
        """torch.jit.script compiles what torch's functions are written as. It looks for names of a class where it is called, so here one frame up."""
        vars(F).update(real)
        given = signature.bind(*arguments, **options)
        given.arguments["_frames_up"] = given.arguments.get("_frames_up", 0) + 1
        try:
            return script(*given.args, **given.kwargs)
        finally:
            vars(F).update(seen)

    script_again = replace(torch.jit, "script", compiled)
    vars(F).update(seen)

    def restore() -> None:
        vars(F).update(real)
        script_again()

    return restore


def _seen(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    signature, inside = inspect.signature(real), False

    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal inside
        # A mode, such as of a default device, calls it again
        if torch.compiler.is_compiling() or inside:
            return real(*arguments, **options)
        inside = True
        try:
            result = real(*arguments, **options)
        finally:
            inside = False
        if type(result) is torch.Tensor and result.requires_grad and WATCHING:
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            if type(bound.arguments["target"]) is torch.Tensor:
                WATCHING[-1](Loss(name, bound.arguments, result), result)
        return result

    return call


def _lines(frame: types.FrameType | None) -> int:
    """A hash of the lines of the program that a frame was called from, without those of torch."""
    found = []
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "lockstep.")):
            found.append((frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lineno))
        frame = frame.f_back
    return zlib.crc32(repr(found).encode())


def value_of(roots: Any, gradients: Any = None) -> float | None:
    """What a backward pass begins at, if it is one number, and nothing is said of its gradient."""
    found = tree_leaves(roots)
    one = found[0] if len(found) == 1 and gradients is None else None
    return float(one.detach()) if type(one) is torch.Tensor and one.numel() == 1 else None
