"""Hooks that a model's own code has put on its modules. Those of libraries and of the loop are none of the model's."""

import contextlib
import inspect
import types
from typing import Any

import torch

from lockstep.recorder import functions
from lockstep.recorder.tree import Describing, Unnamed
from lockstep.recorder.wrapped import clean


def own_hooks(model: torch.nn.Module, left_out: list[str]) -> list[list[Any]]:
    """Return the hooks that the model's own code has put on its modules, as of a model that keeps a hidden output.

    They are methods of its modules, and functions that are defined inside of these. Each is [the module that has the hook, how it is
    registered, the hook as JSON]. `left_out` is what the tree leaves out; hooks that use any of it, such as a file, are not returned.
    """
    describing = Describing(model)
    unrecorded = {entry.partition(":")[0] for entry in left_out}
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    hooks: list[list[Any]] = []
    for name, module in model.named_modules():
        for register, by_number, with_keywords in (
            ("register_forward_pre_hook", module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            ("register_forward_hook", module._forward_hooks, module._forward_hooks_with_kwargs),
        ):
            for number, hook in by_number.items():
                if number in with_keywords or not _is_own(hook, kinds):
                    continue
                known = (
                    [hook.__self__]
                    if isinstance(hook, types.MethodType)
                    else functions.enclosed(hook).values()
                )
                owners = [describing.modules[id(value)] for value in known if id(value) in describing.modules]
                read = {f"{owner}.{key}" for owner in owners for key in hook.__code__.co_names}
                with contextlib.suppress(Unnamed):
                    value = describing.value(hook, name)
                    if unrecorded.isdisjoint(read) and not describing.attributes:
                        hooks.append([clean(name), register, value])
    return hooks


def _is_own(hook: Any, kinds: set[type]) -> bool:
    """Whether a hook is a method of a module, or a function that is defined inside of one of these classes."""
    if isinstance(hook, types.MethodType):
        return inspect.getattr_static(type(hook.__self__), hook.__name__, None) is hook.__func__
    return functions.is_nameless(hook) and any(
        hook.__module__ == kind.__module__ and hook.__qualname__.startswith(f"{kind.__qualname__}.")
        for kind in kinds
    )
