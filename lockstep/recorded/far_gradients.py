"""What to say of the gradients of a recorded step that are too far from the reference."""

import math
import statistics
from collections.abc import Collection

import torch

from lockstep.ground.words import and_more
from lockstep.recorded.ranks import Ranks
from lockstep.verdict import normalisation
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients
from lockstep.verdict.rows import StepVerdict, Wrong, described

# A gradient that is rounded to a dtype, and then reduced, may be off by this many machine epsilons of the dtype.
ROUNDED = 4
# A gradient was not zeroed between steps if adding the previous step's gradient leaves at most this share of the
# residual.
KEPT = 0.1


def judge_kept(
    rows: list[Judgement],
    rank_checks: Ranks,
    gradients: Gradients,
    columns: list[Gradients],
    clipped: dict[str, float],
) -> None:
    """Judge whether the gradients that are too far contain the gradient of the step before, or are that.

    `columns` are the gradients of the micro batches' losses in float64, `clipped` the factors of clipping.
    """
    verdict = rank_checks.verdict
    previous = verdict.step - 1
    wrong = [row.path for row in rows if row.too_far]
    if previous == 0 or not wrong or not set(wrong) <= set(rank_checks.recording.names(previous, "gradient")):
        return
    far = Lazy(wrong, lambda name: gradients[name])
    kept = Lazy(wrong, lambda name: rank_checks.whole(previous, f"gradient/{name}"))
    without, with_it = (
        normalisation.fit(far, sources, clipped, losses=len(columns))
        for sources in (columns, [*columns, kept])
    )
    if with_it.typical < KEPT * without.typical:
        alone = normalisation.fit(far, [kept])
        is_late = alone.typical < KEPT * without.typical
        times = float((alone if is_late else with_it).weights[-1])
        of_some = f" of {and_more(wrong)}" if len(wrong) < len(rows) else ""
        verdict.wrong.insert(
            0,
            f"the gradient{of_some} is {times:.4g} times that of step {previous}, and has nothing of its own micro batches: it comes one step late"
            if is_late
            else f"the gradient{of_some} has {times:.4g} times that of step {previous} in it: it was not set to zero",
        )


def rounding(
    rank_checks: Ranks, rows: list[Judgement], gradients: Gradients, clipped: dict[str, float]
) -> str:
    """Return that the gradient was rounded to 16 bits after the backward pass, if these rows show it; else "".

    `clipped` are the factors of clipping.
    """
    # The median: a gradient that all but cancels is farther off, and 16 bits have no smaller number for it.
    wrong = [row for row in rows if row.kind == "gradient" and row.too_far]
    error = statistics.median(row.distance.relative for row in wrong) if wrong else math.inf
    # Clipping comes after the rounding, and so does a scaler that takes its scale off.
    scale = rank_checks.micro[0].record.scale
    rounded = Lazy(gradients, lambda name: gradients[name] * (scale / clipped[name]))
    for dtype in (torch.bfloat16, torch.float16):
        if any(grad.dtype == dtype for grad in gradients.values()):
            continue
        # Signs, too, are numbers of 16 bits, so the error must be small.
        is_near = error <= ROUNDED * torch.finfo(dtype).eps
        if is_near and all(g.allclose(g.to(dtype).to(g.dtype), 3e-7, 0) for g in rounded.values()):
            verb = "kept" if rank_checks.verdict.lowered else "computed"
            return (
                f"all elements of the gradient are numbers of {dtype}, though it is {verb} in float32: it was rounded after the backward pass, "
                "as where its reduction is in 16 bits"
            )
    return ""


def say(verdict: StepVerdict, hooked: Collection[str], counted: str) -> None:
    """Say which gradients are too far from the sum of the micro batches'.

    `hooked` are parameters that have hooks. `counted` says how much micro batches count in the worst gradient.
    """
    rows = [row for row in verdict.rows if row.kind == "gradient"]
    wrong = [row for row in rows if row.too_far]
    if wrong:
        worst = max(wrong, key=lambda row: row.multiple)
        others = [row.path for row in wrong if row is not worst]
        also = f"; also {and_more(others)}" if 0 < len(others) <= 2 else ""
        name = worst.path
        hook = "; register_hook has put a hook on it" * (name in hooked)
        verb, most = ("is", "") if len(wrong) == 1 else ("are", "most of all ")
        alone = next((row for row in verdict.alone if row.name == worst.name), None)
        description = described(worst, alone)
        verdict.wrong.append(
            Wrong(
                f"{len(wrong)} of {len(rows)} gradients {verb} too far from the reference, {most}{name}: {description}{hook}{counted}{also}"
            )
        )
