"""What a stage of a recorded pipeline is judged with: how the others weigh the micro batches, and what they hand on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lockstep.recorder.hashes import digest
from lockstep.recorder.recording import Recording
from lockstep.verdict.distance import distance_of
from lockstep.verdict.rows import RunVerdict

# The relative difference of two learning rates that are one
SAME = 1e-6
Weights = dict[tuple[int, int], float] | None


@dataclass(frozen=True)
class OtherStages:
    """What other stages recorded of a step.

    `weights` are those of the micro batches in the gradient of the last stage, by (rank, number), as far as they are known; None where
    the last stage itself is judged. `shared` are the parameters that another stage has, too, such as a head that is tied to the
    embedding: their gradients are sums over these stages. `norm` is the norm of the gradients of all other parameters of other stages,
    before clipping.
    """

    weights: Weights
    shared: frozenset[str]
    norm: float


def shared_parameters(stages: list[Recording]) -> list[dict[int, str]]:
    """Return the matrices that several stages have, each as number of a stage -> its name there.

    They begin alike and have the same gradient, as it is reduced over these stages. Stages that begin with the
    same seed may have the same weights, but not the same gradients.
    """
    names_of: dict[tuple[torch.Size, int, int], dict[int, str]] = {}
    for number, stage in enumerate(stages):
        gradients = {*stage.names(1, "gradient")}
        for name, parameter in stage.parameters.items():
            if parameter.ndim > 1 and name in gradients:
                weight, gradient = (stage.whole(1, f"{kind}/{name}")[0] for kind in ("weight", "gradient"))
                if bool(gradient.any()):
                    key = weight.shape, digest(weight), digest(gradient)
                    names_of.setdefault(key, {}).setdefault(number, name)
    return [names for names in names_of.values() if len(names) > 1]


def other_stages(
    stages: list[Recording], number: int, shared: list[dict[int, str]], weights: Weights, step: int
) -> OtherStages:
    """Return what a stage is judged with in a step. `shared` is what `shared_parameters` returns."""
    own = frozenset(names[number] for names in shared if number in names)
    norm = _norm_of_others(stages, number, shared, step) if stages[number].steps[step - 1][0].clips else 0.0
    return OtherStages(weights, own, norm)


def _norm_of_others(stages: list[Recording], number: int, shared: list[dict[int, str]], step: int) -> float:
    """Return the norm of the gradients of other stages before clipping. What several stages have counts once."""
    norms = []
    for other, stage in enumerate(stages):
        if other == number:
            continue
        # Parameters that are counted elsewhere: in the stage that is judged, or in an earlier one
        counted = {
            names[other] for names in shared if other in names and (number in names or min(names) < other)
        }
        clipped = stage.steps[step - 1][0].clipped
        for name in stage.names(step, "gradient"):
            if name not in counted:
                gradient, _ = stage.whole(step, f"gradient/{name}")
                norms.append(float(gradient.double().norm()) / clipped(name))
    return math.hypot(*norms)


def handed_on(before: Recording, after: Recording, step: int) -> Iterator[str]:
    """Yield what is wrong between two stages that follow each other, as sentences.

    A stage is called with what the stage before returned, bit for bit. The gradient there arrives likewise.
    """
    for rank, record in after.steps[step - 1].items():
        for number, micro_batch in enumerate(record.micro_batches):
            if not micro_batch.used:
                continue
            for name, tensor in after.batch(step, rank, number).items():
                gradient = after.part(rank, step, f"backward/{number}/given.{name}")
                if gradient is None:
                    continue
                where = f"micro batch {number} of rank {rank}"
                for what, kind, own in (
                    (f"this stage is called with as {name}", "forward", tensor),
                    (f"arrives at {name} in the stage before", "backward", gradient),
                ):
                    problem = _unlike(before, step, rank, f"{kind}/{number}/returned.", own)
                    if problem:
                        other = (
                            "what the stage before returned"
                            if kind == "forward"
                            else "the gradient that this stage has there"
                        )
                        yield f"in {where}, what {what} is not {other}{problem}"


def judge_whole_run(verdict: RunVerdict, before: Recording, after: Recording) -> None:
    """Judge whether two stages make as many steps, and their learning rates rise and fall alike.

    That the rates are others is a note: layers may have their own.
    """
    rates = [[max(step.rates, default=0.0) for step in stage.whole_run()[0]] for stage in (before, after)]
    steps, steps_after = map(len, rates)
    if steps != steps_after and not (before.errors() or after.errors()):
        verdict.wrong.append(f"this stage made {steps_after} steps, and the stage before {steps}")
        return
    largest, largest_after = (max(of_stage, default=0.0) for of_stage in rates)
    if not (largest and largest_after):
        return
    for number, (one, other) in enumerate(zip(*rates, strict=False), 1):
        if not math.isclose(one / largest, other / largest_after, rel_tol=SAME):
            verdict.wrong.append(
                f"step {number}: the learning rate is {other / largest_after:.5g} of the largest in this stage, and {one / largest:.5g} of it in the stage before"
            )
            return
    if largest != largest_after:
        verdict.notes.append(
            f"the largest learning rate is {largest_after:.6g} in this stage, and {largest:.6g} in the stage before"
        )


def _unlike(before: Recording, step: int, rank: int, prefix: str, tensor: torch.Tensor) -> str | None:
    """Return how a tensor differs from the nearest one of its shape that a stage returned, or that arrived there; None if one is the same.

    The rank of the same number is looked at first. A mesh may have paired others.
    """
    nearest, records = math.inf, before.steps[step - 1]
    for owner in sorted(records, key=lambda other: other != rank):
        for name in records[owner].places:
            other = before.part(owner, step, name) if name.startswith(prefix) else None
            if other is not None and other.shape == tensor.shape:
                if torch.equal(other.to(tensor.dtype), tensor):
                    return None
                nearest = min(nearest, distance_of(tensor, other).relative)
    return " in its shape" if nearest == math.inf else f" (off by {nearest:.1e} at least)"
