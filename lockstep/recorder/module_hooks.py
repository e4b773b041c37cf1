"""Hooks on the modules of a recorded model: the output of each, and the gradient that arrives at it."""

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lockstep.dumps.trace import named_outputs
from lockstep.inputs.model import being_recomputed
from lockstep.recorder import wrapped

OUTPUT = "lockstep.module"  # in the metadata of a function: the module whose output it made
Keep = Callable[[str, torch.Tensor], None]
Instead = Callable[[str, torch.Tensor], torch.Tensor | None]


def _nothing(_name: str, _tensor: torch.Tensor) -> None:
    return None


def matches(name: str, pattern: str) -> bool:
    """As of files in a shell: *, ?, [...] and {one,other}."""
    braces = re.search(r"{([^{}]*)}", pattern)
    if braces is None:
        return fnmatchcase(name, pattern)
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return any(matches(name, f"{before}{one}{after}") for one in braces[1].split(","))


def module_of(name: str) -> str:
    """MODULE of forward/MICRO_BATCH/MODULE."""
    return name.split("/", 2)[2]


def after_other_hooks(tensor: torch.Tensor, hook: Callable[[torch.Tensor | None], Any]) -> None:
    """A hook on the gradient of a tensor that is called after those that somebody else puts on it later: of the model, such as one that solves
    for the gradient of a fixed point, or of the loop."""
    if tensor.grad_fn is None:
        tensor.register_hook(hook)
    else:
        before_function(tensor.grad_fn, tensor.output_nr, hook)


def before_function(
    function: Node, place: int, hook: Callable[[torch.Tensor | None], Any]
) -> RemovableHandle:
    """A hook on the gradient of one output of a function. Where none arrives, though at another output, it is given None."""

    def of_function(arriving: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        other = hook(arriving[place])
        return None if other is None else (*arriving[:place], other, *arriving[place + 1 :])

    return function.register_prehook(of_function)


class Hook:
    """A hook of a recording. A copy of the model has none, nor has one that is read from a file, which needs no Lockstep."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *given: Any) -> Any:
        return self.function(*given)

    def __reduce__(self) -> tuple:
        # Takes anything, and returns None
        return functools.partial, (sys.audit, "lockstep.no_hook")


class ModuleHooks:
    """Of the modules whose names match `pattern`, in the training calls of the model between `begin` and `end`.

    `keep(name, tensor)` is given forward/MICRO_BATCH/MODULE and backward/MICRO_BATCH/MODULE. The second call of a module in one forward
    pass is MODULE@2. A gradient may arrive in parts, one for each backward pass: they are given one after the other. What `instead` of the
    same returns, if it is not None, takes the tensor's place in what is computed further, and in what is computed again. `changed` is given
    the modules whose other hooks change what they return.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        pattern: str,
        keep: Keep,
        instead: Instead | None = None,
        changed: set[str] | None = None,
    ):
        self.keep, self.number, self.inside = keep, -1, False
        self.instead = instead or _nothing
        self.calls: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.passed_on: set[str] = set()
        self.returned: dict[int, torch.Tensor] = {}  # by modules of this pass
        modules = {wrapped.clean(name): module for name, module in model.named_modules() if name}
        self.handles = [
            module.register_forward_hook(Hook(functools.partial(self._see, name)))
            for name, module in modules.items()
            if matches(name, pattern)
        ]
        self.bare: dict[str, object] = {}  # what modules with other hooks return, before these
        self.changed = set() if changed is None else changed
        if changed is not None:
            self.handles += [
                module.register_forward_hook(Hook(functools.partial(self._see_bare, name)), prepend=True)
                for name, module in modules.items()
                if len(module._forward_hooks) > matches(name, pattern)
            ]

    def begin(self, number: int) -> None:
        """A forward pass over micro batch `number` of the step begins."""
        self.number, self.inside = number, True
        self.calls.clear()
        self.seen.clear()
        self.passed_on.clear()

    def end(self) -> None:
        """It is over; what is computed again in its backward pass still belongs to it."""
        self.inside = False
        self.calls.clear()
        self.returned.clear()

    def next_call(self, module: str) -> str:
        """The name that the next call of a module in this pass has."""
        return f"{module}@{self.calls[module] + 1}" if self.calls[module] else module

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _arrives(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Of a tensor that the loss does not depend on, DDP says that None arrives.

        What arrives while the model is called, such as where its forces are gradients of an energy, is no gradient of the loss.
        """
        if gradient is None or self.inside:
            return None
        self.keep(name, gradient)
        return self.instead(name, gradient)

    def _see_bare(self, module: str, _module: torch.nn.Module, _arguments: object, output: object) -> None:
        if self.inside and not torch.compiler.is_compiling():
            self.bare[module] = output

    def _see(self, module: str, its_own: torch.nn.Module, _arguments: object, output: object) -> object:
        if torch.compiler.is_compiling() or not (self.inside or being_recomputed()):
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:  # tensors have no values there
            self.seen.add("torch.func")  # nor is it compiled
            return None
        bare = self.bare.pop(module, output)
        if (
            bare is not output
            and type(bare) is type(output) is torch.Tensor
            and bare.dtype == output.dtype
            and not torch.equal(bare, output)
        ):
            self.changed.add(module)
        called = self.next_call(module)
        self.calls[module] += 1
        instead: dict[int, torch.Tensor] = {}
        for name, tensor in named_outputs(called, output):
            chosen = self.inside and not tensor.is_floating_point()  # such as a router's experts
            # The zeros of a dropout's output show what it left out
            chosen |= self.inside and isinstance(its_own, torch.nn.Dropout)
            if name in self.passed_on or not (tensor.requires_grad or chosen) or tensor.is_sparse:
                continue
            # It would have its hook in every pass that follows, too.
            if isinstance(tensor, torch.nn.Parameter):
                continue
            if name not in self.seen and name != called and id(tensor) in self.returned:
                # Such as T5's position bias: what arrives there is its maker's
                self.passed_on.add(name)
                continue
            place = f"forward/{self.number}/{name}"
            other = self.instead(place, tensor)
            if other is not None:
                instead[id(tensor)] = other
            # What is recomputed was recorded before, unless reentrant checkpointing hid it from autograd.
            if name in self.seen:
                continue
            self.seen.add(name)
            self.returned[id(tensor)] = tensor
            if other is not None:
                self.returned[id(other)] = other
            self.keep(place, tensor)
            if tensor.requires_grad:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.metadata.setdefault(OUTPUT, name)  # type: ignore[attr-defined] # a property to mypy
                # Of the module's own tensor: another output of it, such as the scores of a router's logits, may be made of it.
                after_other_hooks(tensor, functools.partial(self._arrives, f"backward/{self.number}/{name}"))
        if not instead:
            return None
        if isinstance(output, tuple):
            return tuple(instead.get(id(one), one) for one in output)
        return instead[id(output)]
