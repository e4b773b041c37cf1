"""The arithmetic of a run's device, where it differs from that of the CPU that judges.

- TF32: products of float32 are computed from operands with 10 bits, if the run asked for it. The yardstick rounds them likewise.
- Autocast: a GPU computes other functions in float32 than a CPU does. The yardstick does as a GPU does.
- Sums: tensor cores cut what does not fit, each time they have added 8 products (TF32) or 16 (16 bits). So a sum of K products is
  too small, by about K / 8 or K / 16 quarters of a unit roundoff. And a GPU adds the terms of a sum in float32 one after the
  other, where a CPU has several sums.
- Threads: each thread of a CPU sums a part by itself. So a kernel that sums in 16 bits has an error that depends on their number
  (docs/findings.md).

benchmarks/gpu_arithmetic.py measures what these leave on a GPU (results/gpu_arithmetic.md).
"""

import contextlib
from collections.abc import Iterator, Mapping
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
    """The errors that a device may leave in a tensor beyond those of the yardstick."""

    factor: float = NOTHING  # less one, on all of the tensor
    floor: float = FLOOR  # unit roundoffs, of a tensor in float32


CPU = Arithmetic()
# In float32, only attention uses tensor cores: three products for one, which leave at most 7.1e-7. A sum of 4096 products leaves
# 1.2e-6 of the tensor's norm, and 2.9e-6 of its largest element.
GPU = Arithmetic(16 * 2.0**-24, 64)
# Sums are divided into blocks of 8192 products at most. So 1e-5 was the most in 16 bits, and 1.7e-5 in TF32.
TENSOR_CORES = Arithmetic(2.0**-15, 64)
# A kernel may round operands otherwise, or not at all. A tensor with few weights or pixels has few rounding errors, each of at
# most 2^-11, of both operands.
IN_TF32 = Arithmetic(2.0**-10, 64)


def arithmetic_of(device: str, *, single: bool, tf32: bool = False) -> Arithmetic:
    """Return the arithmetic of a run's device.

    `device` is a name such as "cuda:0", or "" in an older recording. `single`: the run computes in float32; `tf32`: or in TF32.
    """
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
# Likewise, unless they are given a dtype
UNLESS_TOLD = """
prod softmax log_softmax cumprod cumsum linalg_vector_norm vector_norm linalg_matrix_norm matrix_norm linalg_norm sum
"""
# Functions that it computes in 16 bits, besides those that a CPU's autocast does, too
IN_SIXTEEN_BITS = "addmv addr chain_matmul gru_cell linalg_multi_dot lstm_cell multi_dot mv prelu rnn_relu_cell rnn_tanh_cell"
# Functions that it computes in the widest dtype that they are given
IN_THE_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot grid_sample grid_sampler index_put scatter_add tensordot vdot"
)
SINCE = {"rms_norm": (2, 13)}  # functions in float32, and the version of torch since which they are
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def release_of(version: str) -> tuple[int, ...]:
    """Return the release of a version: (2, 11) of "2.11.0+cu130"."""
    return tuple(map(int, version.split("+")[0].split(".")[:2]))


class CudaAutocast(TorchFunctionMode):
    """Inside, autocast on the CPU casts as a GPU's does in this version of torch.

    Only functions that Python code calls are seen, not those that these call in turn.
    """

    def __init__(self, version: str):
        super().__init__()
        release = release_of(version)
        self.always = {*IN_FLOAT32.split(), *(name for name, since in SINCE.items() if release >= since)}
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
        """Return the dtype that a GPU's autocast casts a function's arguments to; None if it does as a CPU's."""
        has_dtype = kwargs.get("dtype") is not None
        if name in self.always or (name in self.unless_told and not has_dtype):
            return torch.float32
        if name in self.in_sixteen_bits:
            return torch.get_autocast_dtype("cpu")
        if name in self.in_the_widest:
            dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            return torch.float32 if torch.float32 in dtypes else None
        return None


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dtype in (*SIXTEEN_BITS, torch.float32):
        return leaf.to(dtype)
    return leaf


# What TF32 is used for: operators, and the places of the arguments that they multiply
PRODUCTS: dict[str, dict[Any, tuple[int, ...]]] = {
    "matmul": dict.fromkeys((aten.mm, aten.bmm), (0, 1))
    | dict.fromkeys(
        (aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_), (1, 2)
    ),
    "convolution": {aten.convolution: (0, 1), aten.convolution_backward: (0, 1, 2)},
}
# On a CPU, recurrent layers are made of matrix products
PRODUCTS["recurrent"] = PRODUCTS["matmul"]
CUT = 13  # bits of float32 that TF32 does not have


class Tf32(TorchDispatchMode):
    """Inside, operands of products in float32 are rounded to TF32, to nearest and ties to even, in both passes.

    `uses` are any of "matmul", "convolution" and "recurrent".
    """

    # Such as flex_attention, which is computed as it is
    supports_higher_order_operators = True

    def __init__(self, uses: list[str]):
        super().__init__()
        self.products = {packet: places for use in uses for packet, places in PRODUCTS[use].items()}

    def __torch_dispatch__(
        self, function: Any, _types: object, args: Given = (), kwargs: Named | None = None
    ) -> Any:
        places = self.products.get(getattr(function, "overloadpacket", None), ())
        if places and all(_is_single(args[place]) for place in places):
            args = tuple(rounded(arg) if place in places else arg for place, arg in enumerate(args))
        return function(*args, **(kwargs or {}))


def _is_single(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.layout is torch.strided


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor, rounded to TF32: to nearest, ties to even."""
    bits = tensor.contiguous().view(torch.int32)
    half = (1 << CUT - 1) - 1 + (bits >> CUT & 1)
    return ((bits + half) >> CUT << CUT).view(torch.float32).reshape(tensor.shape)


@contextlib.contextmanager
def as_in_the_run(device: str, threads: int, uses: list[str], versions: Mapping[str, str]) -> Iterator[None]:
    """Inside, compute as on the device of a run, for its yardstick: as on a GPU, or on as many threads of the CPU; 0: not known."""
    if device.startswith("cuda"):
        with as_on_a_gpu(uses, versions["torch"]):
            yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def as_on_a_gpu(uses: list[str], version: str) -> Iterator[None]:
    """Inside, compute as a GPU does, for the yardstick of a run on one. `uses` are those of `Tf32`, `version` is that of torch.

    Where products may be in TF32, attention is made of products, because it is not known which kernel the run had.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(CudaAutocast(version))
        if uses:
            stack.enter_context(without_onednn())
            stack.enter_context(Tf32(uses))
        if "matmul" in uses:
            stack.callback(torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled())
            # Turns the CPU's off, too
            torch.backends.cuda.enable_flash_sdp(False)
        yield


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Turn oneDNN off. Its recurrent layers are one operator, whose products are not seen."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)
