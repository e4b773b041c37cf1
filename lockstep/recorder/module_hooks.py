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
from lockstep.recorder.complex_numbers import is_inexact

# A key in the metadata of an autograd function: the name of the module whose output it made
OUTPUT = "lockstep.module"
Keep = Callable[[str, torch.Tensor], None]
Instead = Callable[[str, torch.Tensor], torch.Tensor | None]


def matches(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern as names of files do in a shell: *, ?, [...] and {one,other}."""
    braces = re.search(r"{([^{}]*)}", pattern)
    if braces is None:
        return fnmatchcase(name, pattern)
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return any(matches(name, f"{before}{choice}{after}") for choice in braces[1].split(","))


def module_of(name: str) -> str:
    """Return MODULE of a name such as forward/MICRO_BATCH/MODULE."""
    return name.split("/", 2)[2]


def after_other_hooks(tensor: torch.Tensor, hook: Callable[[torch.Tensor | None], Any]) -> None:
    """Put a hook on the gradient of a tensor that is called last, also after hooks that are put on the tensor later.

    Such later hooks may be the model's, such as one that solves for the gradient of a fixed point, or the loop's.
    """
    if tensor.grad_fn is None:
        tensor.register_hook(hook)
    else:
        before_function(tensor.grad_fn, tensor.output_nr, hook)


def before_function(
    function: Node, place: int, hook: Callable[[torch.Tensor | None], Any]
) -> RemovableHandle:
    """Put a hook on the gradient of output number `place` of an autograd function.

    The hook is given None if a gradient arrives at other outputs alone. If it returns a tensor, that replaces the gradient.
    """

    def of_function(arriving: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        replacement = hook(arriving[place])
        return None if replacement is None else (*arriving[:place], replacement, *arriving[place + 1 :])

    return function.register_prehook(of_function)


class Hook:
    """A hook of a recording. It is not copied or saved with a model.

    A copy of the model has a hook in its place that does nothing. So has a model that is loaded from a file, without Lockstep.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *given: Any) -> Any:
        return self.function(*given)

    def __reduce__(self) -> tuple:
        # sys.audit takes any arguments, and returns None.
        return functools.partial, (sys.audit, "lockstep.no_hook")


class ModuleHooks:
    """Hooks on the modules whose names match `pattern`, for training calls of the model between `begin` and `end`.

    `keep(name, tensor)` is called with outputs, as forward/MICRO_BATCH/MODULE, and with the gradients that arrive there,
    as backward/MICRO_BATCH/MODULE. The second call of a module in one forward pass is MODULE@2. A gradient may arrive in
    parts, one for each backward pass; `keep` is then called with each part.

    `instead(name, tensor)` is called with the same. If it returns a tensor, that replaces the other one in what is
    computed further, and in what is computed again.

    The names of modules whose other hooks change what they return are added to `changed`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        pattern: str,
        keep: Keep,
        instead: Instead = lambda *_: None,
        changed: set[str] | None = None,
    ):
        self.keep, self.number, self.inside = keep, -1, False
        self.instead = instead
        self.calls: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.passed_on: set[str] = set()
        self.returned: dict[int, torch.Tensor] = {}  # by modules in this pass; by id
        modules = {wrapped.clean(name): module for name, module in model.named_modules() if name}
        self.handles = [
            module.register_forward_hook(Hook(functools.partial(self._see, name)))
            for name, module in modules.items()
            if matches(name, pattern)
        ]
        # What modules with other hooks returned, before these hooks
        self.bare: dict[str, object] = {}
        self.changed = set() if changed is None else changed
        if changed is not None:
            self.handles += [
                module.register_forward_hook(Hook(functools.partial(self._see_bare, name)), prepend=True)
                for name, module in modules.items()
                if len(module._forward_hooks) > matches(name, pattern)
            ]

    def begin(self, number: int) -> None:
        """Begin a forward pass over micro batch `number` of the step."""
        self.number, self.inside = number, True
        self.calls.clear()
        self.seen.clear()
        self.passed_on.clear()

    def end(self) -> None:
        """End the forward pass. What is recomputed in its backward pass still belongs to it."""
        self.inside = False
        self.calls.clear()
        self.returned.clear()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _arrives(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Keep a gradient that arrives at a module's output. Return what replaces it, or None.

        For a tensor that the loss does not depend on, DDP lets None arrive. What arrives while the model is called is no
        gradient of the loss, such as where the model's forces are gradients of an energy.
        """
        if gradient is None or self.inside:
            return None
        self.keep(name, gradient)
        return self.instead(name, gradient)

    def _see_bare(
        self, module_name: str, _module: torch.nn.Module, _arguments: object, output: object
    ) -> None:
        """Note what a module returned, before its other hooks are called."""
        if self.inside and not torch.compiler.is_compiling():
            self.bare[module_name] = output

    def _see(self, module_name: str, module: torch.nn.Module, arguments: tuple, output: object) -> object:
        """Keep what a module returned, and put a hook on its gradient.

        Return the output with the tensors that `instead` gives; None if it gives none.
        """
        if torch.compiler.is_compiling() or not (self.inside or being_recomputed()):
            return None
        # In torch.func, tensors have no values.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            # So that the model is not taken for a compiled one, in which no hook is called
            self.seen.add("torch.func")
            return None
        bare_output = self.bare.pop(module_name, output)
        if (
            bare_output is not output
            and type(bare_output) is type(output) is torch.Tensor
            and bare_output.dtype == output.dtype
            and not torch.equal(bare_output, output)
        ):
            self.changed.add(module_name)
        self.calls[module_name] += 1
        number = self.calls[module_name]
        call_name = f"{module_name}@{number}" if number > 1 else module_name
        replacements: dict[int, torch.Tensor] = {}
        for name, tensor in named_outputs(call_name, output):
            # What is not of floating point is kept, too, such as which experts a router chose.
            is_choice = self.inside and not is_inexact(tensor)
            # The zeros of a dropout's output show which elements it dropped.
            is_choice |= self.inside and isinstance(module, torch.nn.Dropout)
            if name in self.passed_on or not (tensor.requires_grad or is_choice) or tensor.is_sparse:
                continue
            # A hook on a parameter would be called in every later pass, too.
            if isinstance(tensor, torch.nn.Parameter):
                continue
            if name not in self.seen and name != call_name and id(tensor) in self.returned:
                # Another module made this tensor, such as T5's position bias. The gradient there is recorded as that
                # module's.
                self.passed_on.add(name)
                continue
            forward_name = f"forward/{self.number}/{name}"
            replacement = self.instead(forward_name, tensor)
            if replacement is not None:
                replacements[id(tensor)] = replacement
            # What is recomputed was recorded before, unless reentrant checkpointing hid it from autograd.
            if name in self.seen:
                continue
            self.seen.add(name)
            self.returned[id(tensor)] = tensor
            if replacement is not None:
                self.returned[id(replacement)] = replacement
            self.keep(forward_name, tensor)
            # What a module returns as it was given it, such as nn.Identity, has the gradient of all its uses.
            is_given = any(tensor is given for given in arguments)
            is_passed_on = is_given and not getattr(module, "inplace", False)
            if tensor.requires_grad and not is_passed_on:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.metadata.setdefault(OUTPUT, name)  # type: ignore[attr-defined] # a property to mypy
                # The hook is on the module's own tensor, not on what replaces it: another output of the module may be
                # computed from it, such as the scores from a router's logits.
                after_other_hooks(tensor, functools.partial(self._arrives, f"backward/{self.number}/{name}"))
        if not replacements:
            return None
        if isinstance(output, tuple):
            return tuple(replacements.get(id(element), element) for element in output)
        return replacements[id(output)]
