"""A model of which one unit at a time has its weights: a layer, or an embedding or a linear map outside of layers.

Elsewhere a weight is one NaN in the weight's shape. A unit reads its weights when it is called. Its backward pass first computes its forward
pass again, from its inputs (torch.utils.checkpoint), so of what it computes in between nothing is kept either.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lockstep.inputs.model import being_recomputed

CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)  # of units
# Of a parameter: its module, and its key there
Place = tuple[torch.nn.Module, str, torch.nn.Parameter]
Context = Callable[[], contextlib.AbstractContextManager[None]]
ALONE = (torch.nn.Embedding, torch.nn.Linear)  # units wherever they are


def units_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that have weights, none of them inside of another."""
    found = []
    for child in model.children():
        if not (isinstance(model, CONTAINERS) or type(child) in ALONE):
            found += units_of(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def _absent(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What stands for a weight outside of its unit: its shape, and no memory."""
    return torch.full((), torch.nan, dtype=dtype).expand(weight.shape)


def _weights_in(unit: torch.nn.Module) -> list[Place]:
    return [
        (module, key, one)
        for module in unit.modules()
        for key, one in module._parameters.items()
        if one is not None and one.is_floating_point()
    ]


class Streamed:
    """Lets the units of a model that has no weights yet take them from `weights`, in place.

    Before a unit computes, `again` gives what it has to be in when it computes the same again: a backward pass leaves modes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        weights: Mapping[str, torch.Tensor],
        again: Callable[[], Context],
    ):
        self.weights, self.again = weights, again
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.inside: Counter[int] = Counter()  # calls that use a parameter now
        self.present: dict[int, torch.Tensor] = {}
        self.model, self.units = model, units_of(model)
        for unit in self.units:
            self._stream(unit)

    def outside(self, dtype_of: Callable[[torch.dtype], torch.dtype]) -> dict[str, torch.Tensor]:
        """The weights that the model has outside of its units' calls; `dtype_of` is that of one of units, by its own."""
        in_units = {id(one) for unit in self.units for *_, one in _weights_in(unit)}
        return {
            name: _absent(one, dtype_of(one.dtype)) if id(one) in in_units else self.weights[name]
            for name, one in self.model.named_parameters()
        }

    def _stream(self, unit: torch.nn.Module) -> None:
        forward = unit.forward
        own = _weights_in(unit)

        def loaded(*args: Any, **kwargs: Any) -> Any:
            with self._weights(own):
                return forward(*args, **kwargs)

        def streamed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return loaded(*args, **kwargs)
            again = self.again()

            def computed(*args: Any, **kwargs: Any) -> Any:
                with again() if being_recomputed() else contextlib.nullcontext():
                    return loaded(*args, **kwargs)

            return checkpoint(computed, *args, use_reentrant=False, **kwargs)

        unit.forward = streamed

    @contextlib.contextmanager
    def _weights(self, places: list[Place]) -> Iterator[None]:
        for module, key, one in places:
            if not self.inside[id(one)]:
                self.present[id(one)] = self._read(one)
            self.inside[id(one)] += 1
            if one.requires_grad:
                one.data = self.present[id(one)]
            else:  # of such a parameter autograd keeps the object, not what it has at the time
                module._parameters[key] = torch.nn.Parameter(self.present[id(one)], requires_grad=False)
        try:
            yield
        finally:
            for module, key, one in places:
                self.inside[id(one)] -= 1
                module._parameters[key] = one
                if not self.inside[id(one)]:
                    del self.present[id(one)]
                    one.data = _absent(one, one.dtype)

    def _read(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        with (
            torch._C.DisableTorchFunction()
        ):  # in a mode in which float32 means float64, a file could not be read
            return self.weights[self.names[id(parameter)]]
