"""Make a model compute in float64: its own code, run in a mode in which float32 means float64.

A model casts to float32 where low precision would hurt: in norms, softmax and loss. Inside `Float64` these casts are to float64, and so
is the default dtype. What does not depend on the weights, such as a rotary table, is an input: it stays as the runs compute it, in
float32.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lockstep.inputs.shapes import use_eager_experts


class Float64(TorchFunctionMode):
    """Inside, torch.float32 means torch.float64."""

    def __enter__(self) -> "Float64":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args, kwargs = (
            tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, given)
            for given in (args, kwargs or {})
        )
        return function(*args, **kwargs)


def make_exact(model: torch.nn.Module, tables: Collection[str]) -> None:
    """Give a model float64 weights, in place; call it inside of `Float64`. `tables` are the modules that stay as they are in the runs."""
    use_eager_experts(model)
    model.double()
    for name in tables:
        _keep_float32(model.get_submodule(name))


def _keep_float32(module: torch.nn.Module) -> None:
    """Let a module compute as outside of the mode; what it returns is then widened."""
    module.float()
    forward = module.forward

    def as_in_a_run(*args: Any, **kwargs: Any) -> Any:
        given, named = _cast((args, kwargs), torch.float64, torch.float32)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch._C.DisableTorchFunction():
                return _cast(forward(*given, **named), torch.float32, torch.float64)
        finally:
            torch.set_default_dtype(default)

    module.forward = as_in_a_run


def _cast(values: Any, here: torch.dtype, there: torch.dtype) -> Any:
    return tree_map(
        lambda leaf: leaf.to(there) if isinstance(leaf, torch.Tensor) and leaf.dtype is here else leaf, values
    )
