"""Statements about single tensors in float64: multiples, dropout, rounding. The rules say what they mean."""

import math
from collections.abc import Iterable

import torch

# By precision: how near a measured factor must be to tp, 1/dp, ... to be called that.
NEAR = {"fp32": 1e-3, "autocast": 0.03, "bf16": 0.03}
SAME_FACTOR = 1e-2  # how near to each other two measured factors must be to be one


def multiple_of(own: torch.Tensor, base: torch.Tensor) -> float:
    """The best factor c in own = c base; NaN if `base` is zero or something is not finite."""
    square, along = float((base * base).sum()), float((own * base).sum())
    return along / square if 0 < square < math.inf and math.isfinite(along) else math.nan


def name_factor(factor: float, sizes: dict[str, int], near: float) -> list[str]:
    """What a factor may be: "tp", "1/dp", "accumulation steps", ...; [] if it is not `near` (relative) any of them."""
    sizes = {name: size for name, size in sizes.items() if size > 1}
    known = {name: float(size) for name, size in sizes.items()}
    if "tp" in sizes and "dp" in sizes:
        known["tp x dp"] = float(sizes["tp"] * sizes["dp"])
    if "tp" in sizes:
        known["sqrt(tp)"] = math.sqrt(sizes["tp"])
    known |= {f"1/{name}" if " x " not in name else f"1/({name})": 1 / value for name, value in known.items()}
    return [name for name, value in known.items() if abs(factor - value) <= near * value]


def relative_error(own: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of several pieces together; 0 where the reference is zero."""
    error = sum(float((a - b).square().sum()) for a, b in zip(own, exact, strict=True))
    size = sum(float(b.square().sum()) for b in exact)
    return math.sqrt(error / size) if size else 0.0


def dropped_elements(own: torch.Tensor, exact: torch.Tensor) -> float | None:
    """The share of elements that dropout has zeroed: scattered, and the rest larger to make up for it. Else None.

    The mask is random, so the share of zeros is p only by chance. The rest must be 1 / (1 - p) times the reference for a p as near
    to the share as chance allows. Zeros that fill rows are no dropout.
    """
    zeros = (own == 0) & (exact != 0)
    count, share = int(zeros.sum()), float(zeros.double().mean())
    if own.ndim < 2 or count < 10 or not 0.005 <= share <= 0.6:
        return None
    rest = ~zeros & (exact != 0)
    factor = multiple_of(own[rest], exact[rest])
    left = relative_error([own[rest]], [factor * exact[rest]]) if math.isfinite(factor) else math.inf
    if not (
        factor > 1
        and left <= SAME_FACTOR
        and abs((1 - 1 / factor) - share) <= 5 * math.sqrt(share / own.numel())
    ):
        return None
    rows, columns = zeros.flatten(0, -2).double().mean(1), zeros.flatten(0, -2).double().mean(0)
    scattered = float(columns.max()) < 1 and float((rows > 0).double().mean()) > min(
        0.5, share * own.shape[-1] / 2
    )
    return share if scattered else None


def are_rounded_to_bfloat16(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether all tensors of some pairs (tensor, its reference) are bfloat16 numbers, off by no more than rounding to bfloat16.

    Many float32 numbers are not all bfloat16 numbers by chance. Zeros and ones are, so some tensor must have many values.
    """
    telling = False
    for own, exact in pairs:
        if not bool((own == own.bfloat16().double()).all()) or not relative_error([own], [exact]) <= 2.0**-5:
            return False
        telling = telling or len(own.unique()) >= 16
    return telling
