"""What a stage of a recorded pipeline is judged with: how the others weigh the micro batches, and what they hand on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lockstep.recorder.recording import Recording
from lockstep.verdict.distance import distance_of

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
    """Return the matrices that several stages begin with alike, each as number of a stage -> its name there."""
    found: list[tuple[torch.Tensor, dict[int, str]]] = []
    for number, stage in enumerate(stages):
        for name, parameter in stage.parameters.items():
            alike = [
                (weight, names)
                for weight, names in found
                if weight.shape == parameter.shape and number not in names
            ]
            if parameter.ndim < 2 or not (alike or number < len(stages) - 1):
                continue
            weight = stage.whole(1, f"weight/{name}")[0]
            names = next((names for other, names in alike if torch.equal(other, weight)), None)
            if names is not None:
                names[number] = name
            elif bool((weight != weight.flatten()[0]).any()):
                found.append((weight, {number: name}))
    return [names for _, names in found if len(names) > 1]


def other_stages(
    stages: list[Recording], number: int, shared: list[dict[int, str]], weights: Weights, step: int
) -> OtherStages:
    """Return what a stage is judged with in a step. `shared` is what `shared_parameters` returns."""
    norms = []
    for other, stage in enumerate(stages):
        # What several stages have counts once.
        counted = {names[other] for names in shared if other in names and min({*names} - {other}) < other}
        counted |= {names[other] for names in shared if other in names and number in names}
        if other != number:
            clipped = stage.steps[step - 1][0].clipped
            for name in stage.names(step, "gradient"):
                if name not in counted:
                    gradient, _ = stage.whole(step, f"gradient/{name}")
                    norms.append(float(gradient.double().norm()) / clipped(name))
    own = frozenset(names[number] for names in shared if number in names)
    return OtherStages(weights, own, math.hypot(*norms))


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
                    problem = _unlike(before, step, rank, f"{kind}/{number}/", own)
                    if problem:
                        other = (
                            "what the stage before returned"
                            if kind == "forward"
                            else "the gradient that this stage has there"
                        )
                        yield f"in {where}, what {what} is not {other}{problem}"


def other_rates(before: Recording, after: Recording) -> list[str]:
    """Return the first step in which two stages have different learning rates, as a sentence; [] if there is none."""
    pairs = zip(before.whole_run()[0], after.whole_run()[0], strict=False)
    for number, (one, other) in enumerate(pairs, 1):
        if one.rates and other.rates and max(one.rates) != max(other.rates):
            return [
                f"step {number}: the largest learning rate is {max(other.rates):.6g} in this stage, and {max(one.rates):.6g} in the stage before"
            ]
    return []


def _unlike(before: Recording, step: int, rank: int, prefix: str, tensor: torch.Tensor) -> str | None:
    """Return how a tensor differs from the nearest one of its shape that a rank recorded; None if one is the same, or none has its shape."""
    nearest = math.inf
    for name, placed in reversed(before.steps[step - 1][rank].places.items()):
        if name.startswith(prefix) and placed.blocks and placed.blocks[0].shape == list(tensor.shape):
            other = before.part(rank, step, name)
            assert other is not None
            if torch.equal(other.to(tensor.dtype), tensor):
                return None
            nearest = min(nearest, distance_of(tensor, other).relative)
    return None if nearest == math.inf else f" (off by {nearest:.1e} at least)"
