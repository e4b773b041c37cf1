"""Facts about single tensors in float64: multiples, dropout, rounding. What they are evidence of is for the rules to say."""

import math
from collections.abc import Iterable

import torch

# By precision: how near a measured factor must be to tp, 1/dp, ... to be called that.
NEAR = {"fp32": 1e-3, "autocast": 0.03, "bf16": 0.03}
# Several explanations may fit. One is taken only if every other leaves more than this times its error: less may be chance.
NEARER = 1.05
# The numbers of the first ones are numbers of bfloat16, too.
SIXTEEN_BITS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LOW = (torch.float8_e4m3fn, torch.float8_e5m2, *SIXTEEN_BITS.values())
BY_CHANCE = 6  # standard errors: beyond, it is no chance
SAME_FACTOR = 1e-2  # two measured factors that are as near to each other as this are the same


def multiple_of(own: torch.Tensor, base: torch.Tensor) -> float:
    """Return the best factor c in own = c base (least squares); NaN if `base` is zero or something is not finite."""
    square, along = float((base * base).sum()), float((own * base).sum())
    return along / square if 0 < square < math.inf and math.isfinite(along) else math.nan


def are_equal(tensor: torch.Tensor) -> bool:
    """Whether all elements are the same number."""
    return bool((tensor == tensor.flatten()[0]).all())


def are_one_factor(weights: torch.Tensor, least: float = 0.0) -> bool:
    """Whether all weights are the same, as exactly as factors are measured: in proportion to the largest of them, or to `least`."""
    return float((weights - weights.mean()).abs().max()) <= SAME_FACTOR * max(
        float(weights.abs().max()), least
    )


def name_factor(factor: float, sizes: dict[str, int], near: float) -> list[str]:
    """Return what a factor may be, within `near` (relative): "tp", "1/dp", "accumulation steps", ...; [] if it is none of them."""
    sizes = {name: size for name, size in sizes.items() if size > 1}
    known = {name: float(size) for name, size in sizes.items()}
    if "tp" in sizes and "dp" in sizes:
        known["tp x dp"] = float(sizes["tp"] * sizes["dp"])
    if "tp" in sizes:
        known["sqrt(tp)"] = math.sqrt(sizes["tp"])
    known |= {f"1/{name}" if " x " not in name else f"1/({name})": 1 / value for name, value in known.items()}
    return [name for name, value in known.items() if abs(factor - value) <= near * value]


def shown(factor: float) -> str:
    """Return a factor in four digits, or more if these would say 1."""
    text = f"{factor:.4g}"
    return text if text != "1" else f"{factor:.8g}"


def relative_error(own: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative error (2-norm); 0 if the reference is zero."""
    size = float(reference.norm())
    return float((own - reference).norm()) / size if size else 0.0


def dropped_elements(own: torch.Tensor, reference: torch.Tensor) -> float | None:
    """Return the fraction of elements that dropout has zeroed, whatever their size; None if it is not dropout.

    Dropout zeroes scattered elements, and the others are larger to make up for it. The mask is random, so the fraction of zeros is p
    only by chance. The others must be 1 / (1 - p) times the reference, for a p as near to the fraction as chance allows. Zeros that
    fill rows are no dropout, nor are those of a pattern, which has as many in every row or column.
    """
    is_zeroed = (own == 0) & (reference != 0)
    count, fraction = int(is_zeroed.sum()), float(is_zeroed.double().mean())
    if own.ndim < 2 or count < 10 or not 0.005 <= fraction <= 0.6:
        return None
    sizes = reference[reference != 0].abs()
    chance = float(sizes.std()) / math.sqrt(count)
    if abs(float(reference[is_zeroed].abs().mean() - sizes.mean())) > BY_CHANCE * chance:
        return None  # the smallest or the largest ones
    is_kept = ~is_zeroed & (reference != 0)
    factor = multiple_of(own[is_kept], reference[is_kept])
    error = relative_error(own[is_kept], factor * reference[is_kept]) if math.isfinite(factor) else math.inf
    if not (
        factor > 1
        and error <= SAME_FACTOR
        and abs((1 - 1 / factor) - fraction) <= 5 * math.sqrt(fraction / own.numel())
    ):
        return None
    rows, columns = is_zeroed.flatten(0, -2).double().mean(1), is_zeroed.flatten(0, -2).double().mean(0)
    are_scattered = float(columns.max()) < 1 and float((rows > 0).double().mean()) > min(
        0.5, fraction * own.shape[-1] / 2
    )
    is_pattern = any(map(_are_too_even, (rows, columns), (own.shape[-1], len(rows))))
    return fraction if are_scattered and not is_pattern else None


def _are_too_even(shares: torch.Tensor, number: int) -> bool:
    """Whether the shares of zeros among `number` elements each vary less than those of independent zeros do.

    In units of what independence gives, the sum of their squares is that of chi-squared.
    """
    degrees, mean = len(shares) - 1, float(shares.mean())
    squares = float((shares - mean).square().sum()) * number / (mean * (1 - mean))
    return squares < degrees - BY_CHANCE * math.sqrt(2 * degrees)


def rounded_to(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Return the name of a dtype of 8 or 16 bits if all tensors of these pairs (tensor, its reference) are such numbers; "" if not.

    They must be off by no more than rounding. Many float32 numbers are not all 16-bit numbers by chance. Zeros and ones are, so some
    tensor must have many values.
    """
    dtypes, has_many_values = list(LOW), False
    for own, reference in pairs:  # one at a time: they may be all moments of a model
        error = relative_error(own, reference)
        dtypes = [
            dtype
            for dtype in dtypes
            if error <= max(2.0**-5, torch.finfo(dtype).eps) and bool((own == own.to(dtype).double()).all())
        ]
        if not dtypes:
            return ""
        has_many_values = has_many_values or len(own.unique()) >= 16
    return str(dtypes[0]).removeprefix("torch.") if has_many_values else ""


def order_of_rows(own: torch.Tensor, reference: torch.Tensor) -> list[int]:
    """Return which row of `reference` each row is nearest to; [] unless this is another order of all rows."""
    nearest = torch.cdist(own, reference).argmin(1).tolist()
    return nearest if nearest != list(range(len(nearest))) and len(set(nearest)) == len(nearest) else []
