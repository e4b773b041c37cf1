"""Random numbers of a forward pass, drawn again as the run drew them.

A pass that begins with the state that torch's generator had in the run draws the same numbers, in the same dtypes. What dropout leaves
out follows from the state alone. But what functions such as `torch.randn` draw from it depends on the dtype that they draw in.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from lockstep.dumps.recording import Called
from lockstep.ground.errors import UserError

IN_PLACE = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "uniform_"}
FACTORIES = {"rand", "randn"}
# These draw inside, where no mode sees it.
HIDDEN = {"fractional_max_pool2d", "fractional_max_pool3d", "gumbel_softmax", "rrelu", "rrelu_"}
LIKE = {"bernoulli", "multinomial", "normal", "poisson", "rand_like", "randn_like"}
DRAWING = IN_PLACE | FACTORIES | LIKE | HIDDEN
INSTEAD = "record a run without dropout and other random numbers in the model"


def is_drawing(function: Callable[..., Any]) -> bool:
    """Whether what a function of torch draws depends on the dtype."""
    return getattr(function, "__name__", "") in DRAWING


def drawn_in(
    dtype: torch.dtype, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
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
            return args[0].copy_(found)
    return found.double() if found.is_floating_point() else found


def require_known(called: Called, data_parallel: list[int]) -> None:
    """Raise UserError for a micro batch whose random numbers one process cannot draw again. `data_parallel` are ranks that share no sample."""
    if called.random is None:
        return
    why = ""
    if called.about.compiled:
        why = "by code that torch.compile made"
    elif called.piece is not None or not {*called.ranks[1:]} <= {*data_parallel}:
        why = "by each of several ranks that have parts of its samples or of the model"
    elif any(one.dtype == torch.float64 for one in called.tensors.values()):
        why = "in float64"
    if why:
        raise UserError(
            f"random numbers were drawn in the forward pass over micro batch {called.number} {why}, and the reference would draw others; {INSTEAD}"
        )
