"""Judge the norms that a step's gradient was clipped by: they are compared with those of the reference's gradients."""

import copy
import math
from collections.abc import Mapping

import torch

from lockstep.recorded.causes import Causes
from lockstep.recorder.recorded_step import Clip, StepRecord
from lockstep.verdict.judgement import ZERO
from lockstep.verdict.rows import StepVerdict, Wrong
from lockstep.verdict.scalars import float32_norm_error


def judge(
    verdict: StepVerdict,
    rank: StepRecord,
    whole: Mapping[str, torch.Tensor],
    beside: dict[str, float],
    elsewhere: float,
    causes: Causes,
) -> list[str]:
    """Return what is wrong with each norm, as sentences, and say in the verdict by how much the gradient was clipped.

    `rank` is what a rank recorded of the step. `whole` are the reference's gradients, clipped as the run's were on this rank. `beside`
    are the norms of recorded gradients that are not judged, `elsewhere` is that of other stages of a pipeline, before clipping.
    """
    clips = [clip for clip in rank.clips if not clip.by_value]
    sizes = {name: _Size(tensor) for name, tensor in whole.items() if tensor.numel()} if clips else {}
    # What a norm is of gradients that are zero in exact arithmetic, rounding errors alone decide.
    largest = max((size.rms for size in sizes.values()), default=0.0)
    sizes = {name: size for name, size in sizes.items() if size.rms > ZERO * largest}
    # What earlier clips multiplied each gradient by
    factors = dict.fromkeys([*whole, *beside], 1.0)
    wrong: list[str] = []
    for number, clip in enumerate(clips):
        names = [name for name in factors if clip.has(name)]
        scale = {name: factors[name] / rank.clipped(name) for name in names}
        of_stages = elsewhere * factors[names[0]] if len(names) == len(factors) else 0.0
        wrong += _judge_one(
            verdict,
            "gradient norm" if len(clips) == 1 else f"gradient norm {number}",
            clip,
            [sizes[name].times(scale[name]) for name in names if name in sizes],
            math.hypot(
                clip.beside, of_stages, *(beside[name] * scale[name] for name in names if name in beside)
            ),
            causes,
        )
        factors |= {name: factors[name] * clip.factor for name in names}
    active = [clip for clip in clips if clip.factor < 1]
    if len(active) == 1:
        number = sum(map(active[0].has, whole))
        part = f"{number} of {len(whole)} parameters " if number < len(whole) else ""
        verdict.clipped = f", {part}clipped from a norm of {active[0].norm:.5g} to {active[0].max_norm:.5g}"
    elif active:
        verdict.clipped = f", clipped in {len(active)} of {len(clips)} parts by the norm of each"
    return wrong


def _judge_one(
    verdict: StepVerdict, label: str, clip: Clip, sizes: list["_Size"], beside: float, causes: Causes
) -> list[str]:
    """Return what is wrong with one norm. `sizes` are those of the reference's gradients that it is of, `beside` the norm of all others.

    What a sum in float32 may be off by is tolerated, as libraries sum the norm so.
    """
    if not sizes:
        return []
    unjudged = torch.tensor(beside, dtype=torch.float64)
    norm = float(torch.stack([*(size.norm for size in sizes), unjudged]).norm())
    in_float32 = float(torch.stack([*(size.in_float32 for size in sizes), unjudged.float()]).norm())
    error = float32_norm_error(norm, in_float32, max(size.numel for size in sizes))
    largest = max(size.largest for size in sizes)
    tolerated = error / norm + verdict.tolerated_weights
    # The run may have clipped by the largest element, or by the sum of all elements' sizes.
    for other in (largest, sum(size.sum for size in sizes)):
        if abs(clip.norm - other) <= tolerated * other:
            norm = other
    if not verdict.number(label, clip.norm, norm, tolerated * norm).too_far:
        return []
    times = clip.norm / norm
    message = f"the gradient was clipped by a norm of {clip.norm:.7g}, {times:.5g} times that of the reference's gradient, {norm:.7g}"
    return [Wrong(message, "; it was clipped before scaler.unscale_(optimizer)" * causes.is_scale(times))]


class _Size:
    """The norm of a tensor, also in float32, the largest and the sum of its elements' sizes, and how many it has."""

    def __init__(self, tensor: torch.Tensor):
        self.norm, self.in_float32 = tensor.norm(), tensor.float().norm()
        sizes = tensor.abs()
        self.largest, self.sum, self.numel = float(sizes.max()), float(sizes.sum()), tensor.numel()

    @property
    def rms(self) -> float:
        return float(self.norm) / math.sqrt(self.numel)

    def times(self, factor: float) -> "_Size":
        """Return the size of the tensor times a factor."""
        scaled = copy.copy(self)
        scaled.norm, scaled.in_float32 = self.norm * factor, self.in_float32 * factor
        scaled.largest, scaled.sum = self.largest * abs(factor), self.sum * abs(factor)
        return scaled
