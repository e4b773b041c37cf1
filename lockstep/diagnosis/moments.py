"""Rules for a first wrong gradient norm or moment. The gradients are right."""

import math
from collections.abc import Callable, Iterator

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import MOMENTS, Case
from lockstep.diagnosis.exchanged import tensors_exchanged
from lockstep.diagnosis.forward import rounded
from lockstep.ground.words import listed
from lockstep.training.optim import decays
from lockstep.verdict.distance import clip_factor
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.result import Cause

SAME_NORM = 1e-5  # two norms that are as near as this (relative) are the same
MOST_FACTORS = 3  # of groups of parameters
FACTOR = 1e-3  # likewise two factors of moments


# The gradient norm


def norm_of_other_gradients(case: Case) -> Cause | None:
    """The recorded norm is that of a part of the gradients, or has a part of them more than once."""
    norm = case.norm
    if norm is None:
        return None
    held, tp, replicated = norm.held, case.mesh.tp, _square_of_replicated(case)
    if tp > 1 and math.isclose(norm.recorded, math.sqrt(held**2 + (tp - 1) * replicated), rel_tol=SAME_NORM):
        ratio = norm.recorded / held
        return Cause(
            "clipping",
            f"the norm is {ratio:.5f} times that of the gradients, as if the parameters that every tp rank holds "
            "were counted tp times",
        )
    for axis in case.mesh.axes:
        for rank, part_norm in _norms_of_parts(case, axis):
            if not math.isclose(part_norm, held, rel_tol=SAME_NORM) and math.isclose(
                norm.recorded, part_norm, rel_tol=SAME_NORM
            ):
                return Cause(
                    "clipping",
                    f"the norm is {norm.recorded / held:.4f} times that of the gradients: it is the norm of "
                    f"{axis} rank {rank}'s {'layers' if axis == 'pp' else 'shards'} alone",
                )
    return None


def norm_after_clipping(case: Case) -> Cause | None:
    """The recorded norm is that of the clipped gradients."""
    norm = case.norm
    if norm is None or abs(case.clip - 1) <= evidence.SAME_FACTOR:
        return None
    if not math.isclose(norm.recorded, clip_factor(case.options, norm.held) * norm.held, rel_tol=FACTOR):
        return None
    return Cause(
        "reported norm",
        f"the norm is that of the gradients after clipping, {norm.recorded:.6g}, not {norm.held:.6g}",
    )


def clipped_by_the_recorded_norm(case: Case) -> Cause | None:
    """The recorded norm is not that of the gradients, and the gradients were clipped by it."""
    norm = case.norm
    if norm is None:
        return None
    expected = clip_factor(case.options, norm.recorded) / clip_factor(case.options, norm.held)
    factor = case.factor(case.judged("exp_avg"))
    if (
        case.step > 1
        or factor is None
        or abs(expected - 1) <= evidence.SAME_FACTOR
        or not math.isclose(factor, expected, rel_tol=FACTOR)
    ):
        return None
    times = case.in_words(norm.recorded / norm.held)
    return Cause(
        "clipping",
        f"the norm is {times} times that of the gradients, and the moments show that it was used to clip them",
    )


def _norms_of_parts(case: Case, axis: str) -> Iterator[tuple[int, float]]:
    """Yield (rank, the norm of what this rank along an axis may hold of the gradients)."""
    if axis == "pp":
        yield from enumerate(norms_by_stage(case))
        return
    norms = norms_by_rank(case, axis)
    yield from enumerate(norms)
    if axis == "dp" and not norms:
        for multiple_of in (1, 2):
            yield from enumerate(norms_of_flat_parts(case, multiple_of))


def norms_of_flat_parts(case: Case, multiple_of: int) -> list[float]:
    """Return the norm of each DP rank's part of the gradients if they are flat: first of decayed parameters, then of all others.

    Both are cut into equal parts, whose length is a multiple of some number of elements. ZeRO cuts them so.
    """
    ranks, shapes = case.mesh.dp, case.dump.layout.parameters
    squares = [0.0] * ranks
    for is_decayed in (True, False):
        names = [name for name, shape in shapes.items() if decays(len(shape)) is is_decayed]
        names = [name for name in names if f"gradient/{name}" in case.rows]
        length = math.ceil(sum(math.prod(shapes[name]) for name in names) / ranks / multiple_of) * multiple_of
        start = 0
        for name in names:
            squared = case.own(f"gradient/{name}").flatten().square()
            for rank in range(ranks):
                part = squared[max(0, rank * length - start) : max(0, (rank + 1) * length - start)]
                squares[rank] += float(part.sum())
            start += len(squared)
    return [math.sqrt(square) for square in squares]


def norms_by_rank(case: Case, axis: str) -> list[float]:
    """Return the norm of what each rank along an axis holds of the gradients; [] if the axis cuts none."""
    squares, is_cut = [0.0] * case.mesh.size(axis), False
    for row in case.rows.values():
        if row.kind != "gradient":
            continue
        if axis not in case.sharded(row.name):
            squares = [square + row.distance.own_norm**2 for square in squares]
            continue
        is_cut = True
        for rank, pieces in enumerate(case.shares(row.name, axis, case.own(row.name))):
            squares[rank] += sum(float(piece.square().sum()) for piece in pieces)
    return [math.sqrt(square) for square in squares] if is_cut else []


def norms_by_stage(case: Case) -> list[float]:
    """Return the norm of the gradients of what each rank along pp has. A tied weight is the first rank's."""
    norms = []
    for stages in case.dump.manifest["contract"]["cuts"]["pp"]["units"]:
        units = {unit for stage in stages for unit in stage}
        squares = [
            row.distance.own_norm**2
            for row in case.rows.values()
            if row.kind == "gradient" and case.names.unit_of(row.path) in units
        ]
        norms.append(math.sqrt(sum(squares)))
    return norms


def _square_of_replicated(case: Case) -> float:
    """Return the squared norm of the gradients of the parameters that every tp rank holds."""
    return sum(
        row.distance.own_norm**2
        for row in case.rows.values()
        if row.kind == "gradient" and case.is_replicated(row.name)
    )


# The moments


def moments_lost(case: Case) -> Cause | None:
    """Both moments are those of a first step."""
    wrong = [row.name for kind in MOMENTS for row in case.wrong(kind)]
    if case.step == 1 or not case.wrong("exp_avg"):
        return None
    if not all(case.explains(name, case.fresh(name)) for name in wrong):
        return None
    return Cause(
        "moments lost",
        f"{listed(wrong)}: they are those of a first step; what they had accumulated is lost{case.unjudged_replicas([case.first])}",
    )


def step_left_out(case: Case) -> Cause | None:
    """All wrong elements of first moments, and those of the parameters, are bit for bit what they were before the step."""
    rows = case.wrong("exp_avg") if case.step > 1 else []
    for row in rows:
        names = (row.name, f"parameter/{row.path}")
        is_unchanged = [case.own(name) == case.own(name, case.step - 1) for name in names]
        if not are_left_out(case, row, is_unchanged[0] & is_unchanged[1]):
            return None
    if not rows:
        return None
    return Cause(
        "update left out",
        f"moments and weights are unchanged bit for bit: {paths(rows)}; the optimizer did not step them",
    )


def are_left_out(case: Case, row: Judgement, is_unchanged: torch.Tensor) -> bool:
    """Whether some elements of a tensor are wrong, and all of these are unchanged."""
    is_wrong = (case.own(row.name) - case.right(row.name)).abs() > row.tolerated_largest
    return bool(is_wrong.any()) and not bool((is_wrong & ~is_unchanged).any())


def other_beta(case: Case) -> Cause | None:
    """All wrong moments are of one kind, and have one other beta: both the old moment and the new gradient have its weights.

    In a first step there is no old one, and this is a mere factor: these moments must be wrong in a later step, too.
    """
    kinds = [kind for kind in MOMENTS if case.wrong(kind)]
    if len(kinds) != 1:
        return None
    kind, betas = kinds[0], []
    later = any(first.startswith(f"{kind}/") for _, _, first, _ in case.first_of_later_steps())
    if not (later if case.step == 1 else have_many_values(case, case.wrong(kind))):
        return None
    for row in case.wrong(kind):
        old, new = case.moment_before(row.name), case.newest(row.name)
        beta = evidence.multiple_of(case.own(row.name) - new, old - new)
        if not 0 <= beta < 1 or not case.explains(row.name, new + beta * (old - new)):
            return None
        betas.append(beta)
    if not all(math.isclose(1 - beta, 1 - betas[0], rel_tol=evidence.SAME_FACTOR) for beta in betas):
        return None
    name = f"beta{1 + list(MOMENTS).index(kind)}"
    sentence = f"{kind} of {paths(case.wrong(kind))}: as with {name} = {betas[0]:.4g}, not {MOMENTS[kind]:g}"
    return Cause("betas", sentence, 1 - betas[0])


def last_gradients(case: Case) -> Cause | None:
    """The wrong moments have the gradient of the step before in the place of this step's, with the clipping of either."""
    if case.step == 1:
        return None
    norm = case.found.norm_of(case.step - 1)
    for clip in {case.clip, case.clip if norm is None else norm.clip}:
        if _are_moments_of(case, lambda path: clip * case.own(f"gradient/{path}", case.step - 1)):  # noqa: B023 - called here
            names = paths(case.wrong("exp_avg"))
            return Cause("stale gradients", f"the moments of {names} have the gradient of the step before")
    return None


def clipped_one_by_one(case: Case) -> Cause | None:
    """Each gradient is clipped by its own norm, and not by that of all."""
    factors: list[float] = []

    def clipped(path: str) -> torch.Tensor:
        # The factor is measured: float32 norms of many elements are off by more than moments may be.
        gradient, name, beta = case.own(f"gradient/{path}"), f"exp_avg/{path}", MOMENTS["exp_avg"]
        added = case.own(name) - beta * case.moment_before(name)
        factor = evidence.multiple_of(added, (1 - beta) * gradient)
        expected = clip_factor(case.options, case.rows[f"gradient/{path}"].distance.own_norm)
        factors.append(factor if math.isclose(factor, expected, rel_tol=FACTOR) else math.nan)
        return factors[-1] * gradient

    # One factor may have another cause.
    if not _are_moments_of(case, clipped) or max(factors) - min(factors) <= FACTOR:
        return None
    return Cause("clipping", f"each gradient is clipped by its own norm: {paths(case.wrong('exp_avg'))}")


def _are_moments_of(case: Case, gradient_of: Callable[[str], torch.Tensor]) -> bool:
    """Whether all wrong moments have this gradient of their parameter in the place of the run's own. Some first moments must be wrong."""
    for kind, beta in MOMENTS.items():
        for row in case.wrong(kind):
            gradient = gradient_of(row.path)
            new = gradient if kind == "exp_avg" else gradient.square()
            if not case.explains(row.name, beta * case.moment_before(row.name) + (1 - beta) * new):
                return False
    return bool(case.wrong("exp_avg"))


def have_many_values(case: Case, rows: list[Judgement]) -> bool:
    """Whether some tensors have several elements. One number is a multiple of any other."""
    return any(math.prod(case.dump.layout.parameters[row.path]) > 1 for row in rows)


def paths(rows: list[Judgement]) -> str:
    return listed([row.path for row in rows])


def not_clipped(case: Case) -> Cause | None:
    """In a first step, the moments are those of the gradients as they were before clipping."""
    first, second = case.factor(case.judged("exp_avg")), case.factor(case.judged("exp_avg_sq"))
    if case.step > 1 or first is None or second is None or abs(case.clip - 1) <= evidence.SAME_FACTOR:
        return None
    if case.names_of(first) != ["1/clip factor"]:  # it may be a number of ranks as well
        return None
    if math.isclose(first * case.clip, 1, rel_tol=FACTOR) and math.isclose(
        second, first**2, rel_tol=2 * FACTOR
    ):
        return Cause(
            "clipping",
            f"the moments are those of gradients that were not clipped: {first:.4g} times too large",
        )
    return None


def clipped_by_rank(case: Case) -> Cause | None:
    """In a first step, each tp rank's shards are clipped by the norm of what that rank holds."""
    if case.step > 1 or case.mesh.tp == 1 or not case.wrong("exp_avg"):
        return None
    by_rank = norms_by_rank(case, "tp")
    factors = [clip_factor(case.options, norm) / case.clip for norm in by_rank]
    if (
        not factors
        or max(factors) - min(factors) <= SAME_NORM
        or min(abs(factor - 1) for factor in factors) <= SAME_NORM
    ):
        return None
    for row in (row for row in case.wrong("exp_avg") if "tp" in case.sharded(row.name)):
        tensors = case.own(row.name), case.fresh(row.name)
        pairs = zip(*(case.shares(row.name, "tp", tensor) for tensor in tensors), strict=True)
        for factor, (own_pieces, fresh_pieces) in zip(factors, pairs, strict=True):
            own, fresh = (
                torch.cat([piece.flatten() for piece in pieces]) for pieces in (own_pieces, fresh_pieces)
            )
            if not evidence.relative_error(own, factor * fresh) <= row.tolerated / row.distance.norm:
                return None
    shown = ", ".join(f"{factor:.4g}" for factor in factors)
    return Cause(
        "clipping",
        f"the tp ranks' moments are {shown} times what they should be: each clipped by its own norm",
    )


def decayed_gradients(case: Case) -> Cause | None:
    """The gradients in all wrong moments have a multiple of the weights added, as with weight decay that is not decoupled."""
    factors: list[float] = []

    def decayed(path: str) -> torch.Tensor:
        gradient, before = case.clip * case.own(f"gradient/{path}"), case.before(path)
        factors.append(evidence.multiple_of(_newest(case, path) - gradient, before))
        return gradient + factors[-1] * before

    if not _are_moments_of(case, decayed) or not _are_one(factors):
        return None
    rows = case.wrong("exp_avg")
    varied = [row for row in rows if not evidence.are_equal(case.before(row.path))]
    if not _show_in_both(case) or not have_many_values(case, varied):
        return None
    return Cause(
        "weight decay",
        f"the gradients in the moments of {paths(rows)} have {factors[0]:.4g} times the weights added",
    )


def scaled_gradients(case: Case) -> Cause | None:
    """The gradients in all wrong moments are the run's own times one factor, which is not that of clipping; or times few factors."""
    factors: list[float] = []

    def scaled(path: str) -> torch.Tensor:
        gradient = case.own(f"gradient/{path}")
        factors.append(evidence.multiple_of(_newest(case, path), gradient))
        return factors[-1] * gradient

    rows = case.wrong("exp_avg")
    if not _show_in_both(case) or not _are_moments_of(case, scaled) or not have_many_values(case, rows):
        return None
    different = sorted({float(f"{factor:.4g}") for factor in factors})
    if len(different) > MOST_FACTORS:
        return None
    if min(different) <= 0:
        return None
    shown = " or ".join(map(str, different))
    sentence = f"the gradients in the moments of {paths(rows)} are {shown} times those that were recorded"
    if len(different) == 1 and case.norm is not None:
        # Moments are exact in any precision.
        names = evidence.name_factor(factors[0] / case.clip, case.sizes, evidence.NEAR["fp32"])
        bound, norm = case.options["max_grad_norm"], case.norm.used
        if not names and bound > norm > 0 and _are_one([*factors, bound / norm]):
            return Cause(
                "clipping", f"{sentence}, which is the bound of clipping / the norm, though that is above 1"
            )
        if names and case.clip < 1:
            times = f"{factors[0] / case.clip:.4g} = {' or '.join(names)}"
            sentence += f": {times} times what clipping leaves of them, by {case.clip:.4g}"
            return Cause("gradient scale", sentence)
    if case.clip < 1:
        return Cause("clipping", f"{sentence}, not {case.clip:.4g}, by which they must be clipped")
    return Cause("gradient scale", sentence)


def _show_in_both(case: Case) -> bool:
    """Whether second moments are wrong wherever first ones are, as they are if the gradients are other ones."""
    first, second = ({row.path for row in case.wrong(kind)} for kind in MOMENTS)
    return first <= second


def _newest(case: Case, path: str) -> torch.Tensor:
    """Return the gradient that was added to a first moment."""
    beta, name = MOMENTS["exp_avg"], f"exp_avg/{path}"
    return (case.own(name) - beta * case.moment_before(name)) / (1 - beta)


def _are_one(factors: list[float]) -> bool:
    return all(math.isclose(factor, factors[0], rel_tol=evidence.SAME_FACTOR) for factor in factors)


NORM_RULES = (norm_of_other_gradients, norm_after_clipping, clipped_by_the_recorded_norm)
MOMENT_RULES = (
    rounded,
    moments_lost,
    step_left_out,
    last_gradients,
    not_clipped,
    clipped_by_rank,
    clipped_one_by_one,
    other_beta,
    decayed_gradients,
    scaled_gradients,
    tensors_exchanged,
)
