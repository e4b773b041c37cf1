"""Why the gradients of ranks that hold the same parameters differ."""

import math

from lockstep.recorder.called import Called
from lockstep.recorder.recorded_step import Step
from lockstep.recorder.recording import Recording
from lockstep.verdict.rows import StepVerdict

NOT_REDUCED = "were not reduced"
SAME_NORM = 1e-5  # relative: ranks may add up the parts of a norm in another order


class Replicas:
    """Of a recorded step. `micro` are the micro batches that count."""

    def __init__(self, recording: Recording, verdict: StepVerdict, micro: list[Called]):
        self.recording, self.verdict, self.micro = recording, verdict, micro
        self.ranks = recording.steps[verdict.step - 1]

    def why(self, rank: int, name: str) -> str:
        """Why the gradients of a rank, as that of a parameter, differ from those of the first that holds the same, to be read after it."""
        about, first = self.ranks[rank], self._first_alike(rank, name)
        numbers = len(first.micro_batches), len(about.micro_batches)
        if numbers[0] != numbers[1]:
            return f"; rank {first.rank} stepped after {numbers[0]} micro batches, rank {rank} after {numbers[1]}"
        if self.only_clipped_otherwise(name, rank):
            clips = zip(
                *([clip for clip in one.clips if clip.has(name)] for one in (first, about)), strict=False
            )
            pair = next((pair for pair in clips if pair[0].factor != pair[1].factor), None)
            if pair is None:
                clipped, other_rank = (first.rank, rank) if first.clips else (rank, first.rank)
                return f"; rank {clipped} clipped them, rank {other_rank} did not"
            one, other = pair
            if is_same_norm(one.norm, other.norm):
                return f"; they were clipped to different norms, {one.max_norm:.7g} and {other.max_norm:.7g}"
            return f"; they were clipped by different norms, {one.norm:.7g} and {other.norm:.7g}"
        own, of_first = (
            self.recording.part(one, self.verdict.step, f"gradient/{name}") for one in (rank, first.rank)
        )
        if own is not None and of_first is not None and own.shape == of_first.shape:
            same = (own == of_first) & (own != 0)
            if 2 * int(same.sum()) > int(own.count_nonzero()):
                return f"; most elements of the first are the same on ranks {first.rank} and {rank}, so it was changed after it was reduced"
        times = self._scaled(first.rank, rank)
        if times is not None:
            return f"; those of rank {rank} are {times:.6g} times as large, so they were changed after they were reduced"
        together = any({first.rank, rank} <= set(called.ranks) for called in self.micro)
        of_one_model = self._shares_a_model(first, about)
        if of_one_model and not together:
            return f"; ranks {first.rank} and {rank} have parts of one model, and were called with different micro batches"
        inside = (
            ": these have parts of one model, so a sum in the backward pass may be missing" * of_one_model
        )
        return f"; they {NOT_REDUCED} over ranks {first.rank} and {rank}, or not all of them{inside}"

    def _scaled(self, first: int, rank: int) -> float | None:
        """How many times larger the gradients of one rank are that differ from another's, before clipping; None if it is not one factor."""
        ratios, elements = list[float](), 0
        for name in self.verdict.differ:
            one, other = (
                self.recording.part(of, self.verdict.step, f"gradient/{name}") for of in (first, rank)
            )
            if one is None or other is None or one.shape != other.shape:
                return None
            if not (one.any() and other.any()):
                return None
            one = one.double() / self.ranks[first].clipped(name)
            other = other.double() / self.ranks[rank].clipped(name)
            ratio = float((one * other).sum() / one.square().sum())
            if not float((other - ratio * one).norm()) <= SAME_NORM * float(other.norm()):
                return None
            ratios.append(ratio)
            elements += one.numel()
        same = bool(ratios) and max(ratios) - min(ratios) <= SAME_NORM * abs(ratios[0])
        return ratios[0] if same and elements > 1 else None

    def _first_alike(self, rank: int, name: str) -> Step:
        """The first other rank that holds the same of a gradient."""
        about, key = self.ranks[rank], f"gradient/{name}"
        alike = (one for one in self.ranks.values() if one.places.get(key) == about.places[key])
        return next(one for one in (*alike, self.ranks[0]) if one is not about)

    def only_clipped_otherwise(self, name: str, rank: int) -> bool:
        """Whether what a rank and the first other one have of a gradient differs by their factors of clipping."""
        first = self._first_alike(rank, name).rank
        if self.ranks[first].clipped(name) == self.ranks[rank].clipped(name):
            return False
        before = []
        for one in (first, rank):
            part = self.recording.part(one, self.verdict.step, f"gradient/{name}")
            if part is None:
                return False
            before.append(part.double() / self.ranks[one].clipped(name))
        if before[0].shape != before[1].shape:
            return False
        return float((before[0] - before[1]).norm()) <= SAME_NORM * float(before[0].norm())

    @staticmethod
    def _shares_a_model(first: Step, about: Step) -> bool:
        """Whether two ranks hold different shards, which FSDP2 did not make."""
        if about.rank in first.data_parallel:
            return False
        place = [one.data_parallel.index(one.rank) if one.data_parallel else 0 for one in (first, about)]
        return place[0] == place[1] and shards_of(first) != shards_of(about)


def shards_of(about: Step) -> str:
    """Where the weights of a rank lie in the whole ones."""
    return str([(name, places) for name, places in about.places.items() if name.startswith("weight/")])


def is_same_norm(one: float, other: float, noise: float = 0.0) -> bool:
    """`noise` is what rounding may make of them, relative."""
    return math.isclose(one, other, rel_tol=SAME_NORM + noise)
