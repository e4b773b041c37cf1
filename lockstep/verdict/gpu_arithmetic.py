"""The arithmetic of a GPU, where that of the CPU that judges is another.

- TF32: products of float32 are computed of operands with 10 bits, if the run asked for it. The yardstick rounds them likewise.
- Autocast: a GPU computes other functions in float32 than a CPU does. The yardstick does as a GPU.
- Sums: tensor cores cut what does not fit, each time they have added 8 products (TF32) or 16 (16 bits). So a sum of K products is too small,
  by about K / 8 or K / 16 quarters of a unit roundoff. And a sum in float32 has its terms one after the other, where a CPU has several sums.

benchmarks/gpu_arithmetic.py measures what these leave on a GPU (results/gpu_arithmetic.md).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.dumps.trace import Function, Given, Named
from lockstep.verdict.factors import NOTHING
from lockstep.verdict.judgement import FLOOR

aten = torch.ops.aten


@dataclass(frozen=True)
class Arithmetic:
    """What a device may leave in a tensor beyond what the yardstick has."""

    factor: float = NOTHING  # in all of it
    floor: float = FLOOR  # unit roundoffs, of a tensor in float32


CPU = Arithmetic()
# In float32, attention alone uses tensor cores: three products for one, which leave at most 7.1e-7. A sum of 4096 products leaves 1.2e-6
# of the tensor's norm, and 2.9e-6 of its largest element.
GPU = Arithmetic(16 * 2.0**-24, 64)
# Sums are divided between blocks of 8192 products at most. So 1e-5 was the most in 16 bits, and 1.7e-5 in TF32.
TENSOR_CORES = Arithmetic(2.0**-15, 64)
# A kernel may round operands otherwise, or not at all, and what has few weights or pixels has few rounding errors: each is at most 2^-11, of both operands.
IN_TF32 = Arithmetic(2.0**-10, 64)


def arithmetic_of(device: str, *, single: bool, tf32: bool = False) -> Arithmetic:
    """`device` is "cuda:0", or "" of an older recording. `single`: the run computes in float32; `tf32`: or in TF32."""
    if not device.startswith("cuda"):
        return CPU
    if single and tf32:
        return IN_TF32
    return GPU if single else TENSOR_CORES


# Functions that autocast computes in float32 on a GPU: torch's ATen/autocast_mode.h
IN_FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow rpow softplus layer_norm native_layer_norm group_norm
frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp interpolate norm normalize cross_entropy
"""
# These, unless they are given a dtype
UNLESS_TOLD = """
prod softmax log_softmax cumprod cumsum linalg_vector_norm vector_norm linalg_matrix_norm matrix_norm linalg_norm sum
"""
# In 16 bits, as what a CPU's autocast also computes so
IN_SIXTEEN_BITS = "addmv addr chain_matmul gru_cell linalg_multi_dot lstm_cell multi_dot mv prelu rnn_relu_cell rnn_tanh_cell"
# In the widest dtype that they are given
IN_THE_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot grid_sample grid_sampler index_put scatter_add tensordot vdot"
)
SINCE = {"rms_norm": (2, 13)}  # versions of torch
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def release_of(version: str) -> tuple[int, ...]:
    """(2, 11) of "2.11.0+cu130"."""
    return tuple(map(int, version.split("+")[0].split(".")[:2]))


class CudaAutocast(TorchFunctionMode):
    """Inside, autocast on the CPU casts as a GPU's does, of a version of torch. The functions of Python are seen, not what these call."""

    def __init__(self, version: str):
        super().__init__()
        numbers = release_of(version)
        self.always = {*IN_FLOAT32.split(), *(name for name, first in SINCE.items() if numbers >= first)}
        self.unless_told = set(UNLESS_TOLD.split())
        self.in_sixteen_bits, self.in_the_widest = {*IN_SIXTEEN_BITS.split()}, {*IN_THE_WIDEST.split()}

    def __torch_function__(
        self, function: Function, _types: object, args: Given = (), kwargs: Named | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and kwargs.get("out") is None:
            name = getattr(function, "__name__", "").removeprefix("__").removesuffix("__")
            dtype = self._dtype_of(name, args, kwargs)
            if dtype is not None:
                args, kwargs = tree_map(partial(_cast, dtype), (args, kwargs))
        return function(*args, **kwargs)

    def _dtype_of(self, name: str, args: Given, kwargs: Named) -> torch.dtype | None:
        """What a GPU's autocast casts a function's arguments to; None: as a CPU's does."""
        told = kwargs.get("dtype") is not None
        if name in self.always or (name in self.unless_told and not told):
            return torch.float32
        if name in self.in_sixteen_bits:
            return torch.get_autocast_dtype("cpu")
        if name in self.in_the_widest:
            dtypes = {one.dtype for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
            return torch.float32 if torch.float32 in dtypes else None
        return None


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dtype in (*SIXTEEN_BITS, torch.float32):
        return leaf.to(dtype)
    return leaf


# What TF32 is used for, and which arguments are multiplied
PRODUCTS: dict[str, dict[Any, tuple[int, ...]]] = {
    "matmul": dict.fromkeys((aten.mm, aten.bmm), (0, 1))
    | dict.fromkeys(
        (aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_), (1, 2)
    ),
    "convolution": {aten.convolution: (0, 1), aten.convolution_backward: (0, 1, 2)},
}
PRODUCTS["recurrent"] = PRODUCTS["matmul"]  # which these are made of on a CPU
CUT = 13  # bits of float32 that TF32 does not have


class Tf32(TorchDispatchMode):
    """Inside, operands of products in float32 are rounded to TF32, to nearest and ties to even, in both passes. `uses`: "matmul", "convolution", "recurrent"."""

    supports_higher_order_operators = True  # such as flex_attention, which is computed as it is

    def __init__(self, uses: list[str]):
        super().__init__()
        self.products = {packet: places for use in uses for packet, places in PRODUCTS[use].items()}

    def __torch_dispatch__(
        self, function: Any, _types: object, args: Given = (), kwargs: Named | None = None
    ) -> Any:
        places = self.products.get(getattr(function, "overloadpacket", None), ())
        if places and all(_is_single(args[place]) for place in places):
            args = tuple(rounded(one) if place in places else one for place, one in enumerate(args))
        return function(*args, **(kwargs or {}))


def _is_single(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.layout is torch.strided


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float32, as TF32 has it."""
    bits = tensor.contiguous().view(torch.int32)
    half = (1 << CUT - 1) - 1 + (bits >> CUT & 1)
    return ((bits + half) >> CUT << CUT).view(torch.float32).reshape(tensor.shape)


@contextlib.contextmanager
def as_on_a_gpu(uses: list[str], version: str) -> Iterator[None]:
    """While the yardstick of a run on a GPU is computed. Attention is made of products where these may be in TF32: which kernel a run had is not known."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(CudaAutocast(version))
        if uses:
            stack.enter_context(without_onednn())
            stack.enter_context(Tf32(uses))
        if "matmul" in uses:
            stack.callback(torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled())
            torch.backends.cuda.enable_flash_sdp(False)  # the CPU's, too
        yield


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Its recurrent layers are one operator, whose products are not seen."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
