"""Random numbers of a forward pass, drawn again as the run drew them.

On CPUs, a pass that begins with the state that torch's generator had in the run draws the same numbers, in the same dtypes. What dropout
leaves out follows from the state alone. But what functions such as `torch.randn` draw from it depends on the dtype that they draw in.

Of a run on another device, what dropout modules left out is seen in what they returned: it is zero.
"""

from collections import Counter
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lockstep.dumps.trace import Function, Given, Named
from lockstep.ground.errors import UserError
from lockstep.inputs import shapes
from lockstep.recorder.called import Called

IN_PLACE = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "uniform_"}
FACTORIES = {"rand", "randn"}
# These draw inside, where no mode sees it.
HIDDEN = {"fractional_max_pool2d", "fractional_max_pool3d", "rrelu", "rrelu_"}
LIKE = {"bernoulli", "multinomial", "normal", "poisson", "rand_like", "randn_like"}
DRAWING = IN_PLACE | FACTORIES | LIKE | HIDDEN
INSTEAD = "record a run without dropout and other random numbers in the model"


# Of torch, but written in Python: a mode sees it, and with this, what it calls
GUMBEL_SOFTMAX = FunctionType(
    F.gumbel_softmax.__code__,
    F.gumbel_softmax.__globals__ | {"has_torch_function_unary": lambda _: False},
    argdefs=F.gumbel_softmax.__defaults__,
)


def dropout_is_active(p: float, name: str) -> UserError:
    return UserError(
        f"dropout of {p} is active in {name}, and a CPU, where the reference computes, would drop other elements than the run's device; "
        "record a run without it, or on CPUs"
    )


def dropout_modules(model: torch.nn.Module, evaluated: set[str]) -> dict[str, torch.nn.Dropout]:
    """The dropout modules that drop elements, by name; some modules are `evaluated`. Raises UserError for a model that drops some otherwise."""
    found = {name: one for name, one in model.named_modules() if type(one) is torch.nn.Dropout and one.p > 0}
    settings = shapes.settings_of(model, evaluated)
    settings["p"] = {
        value: [name for name in names if name not in found] for value, names in settings.get("p", {}).items()
    }
    other = shapes.active_dropout(settings)
    if other is not None:
        raise dropout_is_active(*other)
    return found


def require_called(dropping: dict[str, torch.nn.Dropout], calls: Counter[str]) -> None:
    """Raise UserError for a dropout module that is not called: only its probability may be used, such as by attention."""
    silent = next((name for name, one in dropping.items() if one.training and not calls[name]), None)
    if silent is not None:
        raise dropout_is_active(dropping[silent].p, silent)


def is_drawing(function: Function) -> bool:
    """Whether what a function of torch draws depends on the dtype."""
    return getattr(function, "__name__", "") in DRAWING


def drawn_in(dtype: torch.dtype, function: Function, args: Given, kwargs: Named) -> Any:
    """What a function that draws returns in this dtype, as float64. Raises UserError for one that cannot be told the dtype."""
    if function.__name__ in HIDDEN:
        raise UserError(
            f"the model calls {function.__name__}, and the reference would draw other random numbers; {INSTEAD}"
        )

    def narrow(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
            return leaf.detach().to(dtype)
        return dtype if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

    given, named = tree_map(narrow, (args, kwargs))
    if function.__name__ in FACTORIES and named.get("dtype") is None:
        named["dtype"] = dtype
    found = function(*given, **named)
    if function.__name__ in IN_PLACE:
        with torch.no_grad():
            return (*args, *kwargs.values())[0].copy_(found)
    return found.double() if found.is_floating_point() else found


def require_known(called: Called, data_parallel: list[int], dtypes: set[torch.dtype]) -> None:
    """Raise UserError for a micro batch whose random numbers one process cannot draw again.

    `data_parallel` are ranks that share no sample, `dtypes` those of the weights.
    """
    if called.random is None:
        return
    why = ""
    if called.about.compiled:
        why = "by code that torch.compile made"
    elif called.piece is not None or not {*called.ranks[1:]} <= {*data_parallel}:
        why = "by each of several ranks that have parts of its samples or of the model"
    elif torch.float64 in dtypes:
        why = "in float64"
    if why:
        raise UserError(
            f"random numbers were drawn in the forward pass over micro batch {called.number} {why}, and the reference would draw others; {INSTEAD}"
        )
