"""A model that holds the weights of one unit at a time: a layer, or an embedding or a linear map outside of layers.

Outside of its unit's calls, a weight is a single NaN, expanded to the weight's shape. A unit reads its weights when it
is called. Its backward pass first recomputes its forward pass from its inputs (torch.utils.checkpoint), so its activations
are not kept either.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lockstep.inputs import checkpoints
from lockstep.inputs.model import being_recomputed
from lockstep.recorder.complex_numbers import is_inexact

CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)  # of units
# Where a parameter is: its module, its key there, and the parameter itself
Place = tuple[torch.nn.Module, str, torch.nn.Parameter]
Context = Callable[[], contextlib.AbstractContextManager[None]]
ALONE = (torch.nn.Embedding, torch.nn.Linear)  # units wherever they are


def units_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the units of a model: modules that have weights, none of them inside of another."""
    units = []
    for child in model.children():
        if not (isinstance(model, CONTAINERS) or type(child) in ALONE):
            units += units_of(child)
        elif any(True for _ in child.parameters()):
            units.append(child)
    return units


def _absent(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what stands for a weight outside of its unit's calls: NaN in its shape, which takes no memory."""
    return torch.full((), torch.nan, dtype=dtype).expand(weight.shape)


def _weights_in(unit: torch.nn.Module) -> list[Place]:
    return [
        (module, key, weight)
        for module in unit.modules()
        for key, weight in module._parameters.items()
        if weight is not None and is_inexact(weight)
    ]


class Streamed:
    """Makes the units of a model read their weights from `weights` when they are called.

    The model has no weights yet; it is changed in place. `again` is called before a unit computes. It returns a function
    that makes the context in which the unit can be recomputed alike: a backward pass is outside of the forward pass's modes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        weights: Mapping[str, torch.Tensor],
        again: Callable[[], Context],
    ):
        self.weights, self.again = weights, again
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        # By the id of a parameter: how many calls use it now
        self.inside: Counter[int] = Counter()
        self.present: dict[int, torch.Tensor] = {}
        self.model, self.units = model, units_of(model)
        for unit in self.units:
            self._stream(unit)

    def outside(self, dtype_of: Callable[[str, torch.dtype], torch.dtype]) -> dict[str, torch.Tensor]:
        """Return the weights that the model has outside of its units' calls, by name.

        Those of a unit are NaN there. `dtype_of` gives their dtype, by the name and the dtype of the parameter.
        """
        in_units = {id(weight) for unit in self.units for *_, weight in _weights_in(unit)}
        return {
            name: _absent(weight, dtype_of(name, weight.dtype))
            if id(weight) in in_units
            else self.weights[name]
            for name, weight in self.model.named_parameters()
        }

    def _stream(self, unit: torch.nn.Module) -> None:
        forward = unit.forward
        places = _weights_in(unit)

        def loaded(*args: Any, **kwargs: Any) -> Any:
            with self._loaded_weights(places):
                return forward(*args, **kwargs)

        def streamed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return loaded(*args, **kwargs)
            recomputation = self.again()

            @checkpoints.own
            def computed(*args: Any, **kwargs: Any) -> Any:
                with recomputation() if being_recomputed() else contextlib.nullcontext():
                    return loaded(*args, **kwargs)

            return checkpoint(computed, *args, use_reentrant=False, **kwargs)

        unit.forward = streamed

    @contextlib.contextmanager
    def _loaded_weights(self, places: list[Place]) -> Iterator[None]:
        for module, key, weight in places:
            if not self.inside[id(weight)]:
                self.present[id(weight)] = self._read(weight)
            self.inside[id(weight)] += 1
            if weight.requires_grad:
                weight.data = self.present[id(weight)]
            else:
                # Of such a parameter, autograd keeps the object, not the data that it has at the time.
                module._parameters[key] = torch.nn.Parameter(self.present[id(weight)], requires_grad=False)
        try:
            yield
        finally:
            for module, key, weight in places:
                self.inside[id(weight)] -= 1
                module._parameters[key] = weight
                if not self.inside[id(weight)]:
                    del self.present[id(weight)]
                    weight.data = _absent(weight, weight.dtype)

    def _read(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        # In a mode in which float32 means float64, a file could not be read.
        with torch._C.DisableTorchFunction():
            return self.weights[self.names[id(parameter)]]
