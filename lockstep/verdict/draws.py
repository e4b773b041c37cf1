"""Random numbers of a forward pass, drawn again as the run drew them.

On CPUs, a pass that begins with the state that torch's generator had in the run draws the same numbers, in the same dtypes. What dropout
leaves out follows from the state alone. But what functions such as `torch.randn` draw from it depends on the dtype that they draw in.

Of a run on another device, the recording says which elements each call of dropout kept.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lockstep.dumps.trace import Function, Given, Named
from lockstep.ground.errors import UserError
from lockstep.recorder.micro_batch import JoinedMicroBatch

IN_PLACE = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "uniform_"}
FACTORIES = {"normal", "rand", "randn"}
# These draw inside, where no mode sees it
HIDDEN = {"fractional_max_pool2d", "fractional_max_pool3d", "rrelu", "rrelu_"}
LIKE = {"bernoulli", "multinomial", "poisson", "rand_like", "randn_like"}
DRAWING = IN_PLACE | FACTORIES | LIKE | HIDDEN
ATTENTION = {"scaled_dot_product_attention"}
OTHER_DROPOUT = {"alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # with dropout between layers
Keep = Callable[[int, torch.Size], torch.Tensor | None]
INSTEAD = "record a run without dropout and other random numbers in the model"


# torch's function is written in Python, and a mode sees it as a whole. Of this copy, the mode sees the calls inside.
GUMBEL_SOFTMAX = FunctionType(
    F.gumbel_softmax.__code__,
    F.gumbel_softmax.__globals__ | {"has_torch_function_unary": lambda _: False},
    argdefs=F.gumbel_softmax.__defaults__,
)


# Likewise, where the mode must give the dropout inside what it kept in the run
ATTENTION_OF_HEADS = FunctionType(
    F.multi_head_attention_forward.__code__,
    F.multi_head_attention_forward.__globals__ | {"has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def dropout_is_active(p: float, name: str) -> UserError:
    return UserError(
        f"dropout of {p} is active in {name}, and a CPU, where the reference computes, would leave out other elements than the run's device; record a run without it, on CPUs, "
        'or one that calls torch.nn.functional.dropout, which is recorded, as attention does by attn_implementation="eager" in transformers'
    )


def other_dropouts(own: int, recorded: int) -> UserError:
    return UserError(
        f"the reference calls dropout {own} times, and {recorded} calls were seen in the run, on whose device other elements are left out than on a CPU; "
        "record a run without dropout, on CPUs, or without torch.compile"
    )


def dropped(keep: Keep, call: int, args: Given, kwargs: Named) -> torch.Tensor | None:
    """Return the result of one call of dropout, given what it kept in the run; None if it drops nothing.

    `call` is its number, from 0. Raises UserError if it is not known what the call kept.
    """
    bound = inspect.signature(F.dropout).bind(*args, **kwargs)
    bound.apply_defaults()
    tensor, p, training, inplace = bound.arguments.values()
    if not training or p == 0:
        return None
    kept = keep(call, tensor.shape)
    if kept is None:
        raise dropout_is_active(p, f"call {call + 1} of dropout")
    # A GPU multiplies in float32, and rounds once
    wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    result = (wide * kept / (1 - p if p < 1 else 1)).to(tensor.dtype)
    return tensor.copy_(result) if inplace else result


def require_no_dropout(function: Function, args: Given, kwargs: Named) -> None:
    """Raise UserError for a function with active dropout inside: another device drops other elements."""
    name, p = getattr(function, "__name__", ""), 0.0
    if name in ATTENTION:
        values = [*args[4:5], *(value for key, value in kwargs.items() if key == "dropout_p"), 0.0]
        p = values[0]
    elif name in OTHER_DROPOUT and isinstance(function, FunctionType):
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        p = bound.arguments["p"] if bound.arguments["training"] else 0.0
    elif name in RECURRENT:
        index = next(index for index, arg in enumerate(args) if isinstance(arg, float))
        num_layers, p, training = args[index - 1 : index + 2]
        p = p if training and num_layers > 1 else 0.0
    if p > 0:
        raise dropout_is_active(p, name)


def is_drawing(function: Function) -> bool:
    """Whether a function of torch draws random numbers that depend on the dtype."""
    return getattr(function, "__name__", "") in DRAWING


def drawn_in(dtype: torch.dtype, function: Function, args: Given, kwargs: Named, wide: torch.dtype) -> Any:
    """Return what a drawing function returns in this dtype, as `wide`, the dtype that a pass computes in.

    Raises UserError for a function that cannot be told the dtype.
    """
    if function.__name__ in HIDDEN:
        raise UserError(
            f"the model calls {function.__name__}, and the reference would draw other random numbers; {INSTEAD}"
        )

    def narrow(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype == wide:
            return leaf.detach().to(dtype)
        return dtype if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

    narrow_args, narrow_kwargs = tree_map(narrow, (args, kwargs))
    # `torch.normal` of tensors draws in their dtype.
    has_dtype = narrow_kwargs.get("dtype") is not None or any(
        isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in (*args, *kwargs.values())
    )
    if function.__name__ in FACTORIES and not has_dtype:
        narrow_kwargs["dtype"] = dtype
    drawn = function(*narrow_args, **narrow_kwargs)
    if function.__name__ in IN_PLACE:
        with torch.no_grad():
            return (*args, *kwargs.values())[0].copy_(drawn)
    return drawn.to(wide) if drawn.is_floating_point() else drawn


def require_known(micro_batch: JoinedMicroBatch, data_parallel: list[int], dtypes: set[torch.dtype]) -> None:
    """Raise UserError for a micro batch whose random numbers one process cannot draw again.

    `data_parallel` are ranks that share no sample, `dtypes` those of the weights.
    """
    if micro_batch.generator_state is None:
        return
    reason = ""
    if micro_batch.record.compiled:
        reason = "by code that torch.compile made"
    elif micro_batch.piece is not None or not {*micro_batch.ranks[1:]} <= {*data_parallel}:
        reason = "by each of several ranks that have parts of its samples or of the model"
    elif torch.float64 in dtypes and len(dtypes) > 1:
        reason = "by a model with weights in float64 and others"
    if reason:
        raise UserError(
            f"random numbers were drawn in the forward pass over micro batch {micro_batch.number} {reason}, and the reference would draw others; {INSTEAD}"
        )
