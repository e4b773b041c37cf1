"""The norms that a step's gradient was clipped by, against those of the reference's gradients."""

import copy
import math
from collections.abc import Mapping

import torch

from lockstep.recorded.causes import Causes
from lockstep.recorder.recorded_step import Clip, Step
from lockstep.verdict.rows import StepVerdict, Wrong
from lockstep.verdict.scalars import float32_norm_error


def judge(
    verdict: StepVerdict,
    rank: Step,
    whole: Mapping[str, torch.Tensor],
    beside: dict[str, float],
    causes: Causes,
) -> list[str]:
    """What is wrong with each norm, in sentences. `whole` are the reference's gradients, clipped as the run's were on this rank.

    `beside` are the norms of recorded gradients that are not judged.
    """
    clips = [one for one in rank.clips if not one.by_value]
    sizes = {name: _Size(tensor) for name, tensor in whole.items() if tensor.numel()} if clips else {}
    until_then = dict.fromkeys([*whole, *beside], 1.0)
    wrong: list[str] = []
    for number, clip in enumerate(clips):
        own = [name for name in until_then if clip.has(name)]
        scale = {name: until_then[name] / rank.clipped(name) for name in own}
        wrong += _judge_one(
            verdict,
            "gradient norm" if len(clips) == 1 else f"gradient norm {number}",
            clip,
            [sizes[name].times(scale[name]) for name in own if name in sizes],
            math.hypot(clip.beside, *(beside[name] * scale[name] for name in own if name in beside)),
            causes,
        )
        until_then |= {name: until_then[name] * clip.factor for name in own}
    short = [one for one in clips if one.factor < 1]
    if len(short) == 1:
        verdict.clipped = f", clipped from a norm of {short[0].norm:.5g} to {short[0].max_norm:.5g}"
    elif short:
        verdict.clipped = f", clipped in {len(short)} of {len(clips)} parts by the norm of each"
    return wrong


def _judge_one(
    verdict: StepVerdict, label: str, clip: Clip, sizes: list["_Size"], beside: float, causes: Causes
) -> list[str]:
    """Libraries sum the norm in float32."""
    if not sizes:
        return []
    others = torch.tensor(beside, dtype=torch.float64)
    right = float(torch.stack([*(one.norm for one in sizes), others]).norm())
    summed = float(torch.stack([*(one.in_float32 for one in sizes), others.float()]).norm())
    in_float32 = float32_norm_error(right, summed, max(one.numel for one in sizes))
    largest = max(one.largest for one in sizes)
    tolerated = in_float32 / right + verdict.tolerated_weights
    if abs(clip.norm - largest) <= tolerated * largest:
        right = largest  # clipped by the largest element
    if not verdict.number(label, clip.norm, right, tolerated * right).too_far:
        return []
    times = clip.norm / right
    said = f"the gradient was clipped by a norm of {clip.norm:.7g}, {times:.5g} times that of the reference's gradient, {right:.7g}"
    return [Wrong(said, "; it was clipped before scaler.unscale_(optimizer)" * causes.is_scale(times))]


class _Size:
    """Of a tensor: its norm, also in float32, its largest element and its number of elements."""

    def __init__(self, tensor: torch.Tensor):
        self.norm, self.in_float32 = tensor.norm(), tensor.float().norm()
        self.largest, self.numel = float(tensor.abs().max()), tensor.numel()

    def times(self, factor: float) -> "_Size":
        scaled = copy.copy(self)
        scaled.norm, scaled.in_float32 = self.norm * factor, self.in_float32 * factor
        scaled.largest = self.largest * abs(factor)
        return scaled
