"""Judge the weights and gradients of the ranks of a recorded step, and how they were clipped, without a reference."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.recorded.replicas import NOT_REDUCED, Replicas, is_same_norm
from lockstep.recorder.micro_batch import JoinedMicroBatch
from lockstep.recorder.recording import Recording
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients
from lockstep.verdict.rows import StepVerdict, Wrong

KINDS = {"weight": "weights", "gradient": "gradients", "unclipped": "gradients before clipping"}

# Rounding moves a norm by at most so many standard deviations, as there are a few norms in a run.
OF_NOISE = 4


class Ranks:
    """Judges the ranks of a step, and adds sentences to the verdict.

    `micro` are the micro batches that count. `streamed`: memory does not hold a whole model.
    """

    def __init__(
        self, recording: Recording, verdict: StepVerdict, micro: list[JoinedMicroBatch], *, streamed: bool
    ):
        self.recording, self.verdict, self.micro, self.streamed = recording, verdict, micro, streamed
        self.ranks = recording.steps[verdict.step - 1]
        self.replicas = Replicas(recording, verdict, micro)
        # Whether an optimizer reduces the gradients of replicas itself
        self.reduced_later = False
        # The sentence about gradients that were not reduced
        self.unreduced: Wrong | None = None
        # A rank whose gradients or weights differ from those of the first
        self.odd = 0
        # What is wrong after the update
        self.update_problems: list[str] = []
        # How ranks clip otherwise, which may be because their gradients differ
        self.clip_problems: list[str] = []

    def agreed(self, kind: str) -> Gradients:
        """Return the whole tensors of a kind of `KINDS`, by name, and judge whether replicas have the same."""
        tensors, differ = dict[str, torch.Tensor](), []
        names = self.recording.names(self.verdict.step, kind)
        if kind == "gradient":
            # Leave out gradients that an optimizer is given later, if at all.
            waiting = self.recording.waiting(self.verdict.step)
            names = [name for name in names if name not in waiting]
        for name in names:
            tensor, odd_ranks = self.recording.whole(self.verdict.step, f"{kind}/{name}")
            if not self.streamed:
                tensors[name] = tensor
            if odd_ranks:
                differ.append((name, odd_ranks[0]))
        if kind == "gradient" and differ and self._optimizer_reduces([name for name, _ in differ]):
            self.reduced_later, differ = True, []
        if differ:
            if kind == "gradient":
                # A norm over gradients that are not reduced makes the others differ, too.
                differ = [d for d in differ if not self.replicas.only_clipped_otherwise(*d)] or differ
                self.verdict.differ = [name for name, _ in differ]
            name, self.odd = differ[0]
            where = and_more([f"{parameter} on rank {rank}" for parameter, rank in differ])
            why = self.replicas.why(self.odd, name) if kind == "gradient" else ""
            message = Wrong(f"{KINDS[kind]} differ between ranks that hold the same: {where}", why)
            self.verdict.wrong.append(message)
            self.unreduced = message if NOT_REDUCED in why else self.unreduced
        if not self.streamed and not self.reduced_later:
            return tensors
        return Lazy(names, lambda name: self.whole(self.verdict.step, f"{kind}/{name}"))

    def whole(self, step: int, name: str) -> torch.Tensor:
        """Return a whole tensor. A gradient that an optimizer reduces itself is the mean of those of the replicas."""
        mean = self.reduced_later and name.startswith("gradient/")
        return self.recording.whole(step, name, mean=mean)[0]

    def say_of_unreduced(self, said: str, *, instead: bool = False) -> None:
        """Add `said` to the sentence about gradients that were not reduced, if there is one.

        `instead`: put it in the place of the end of that sentence, as they were reduced.
        """
        if self.unreduced:
            wrong = self.verdict.wrong
            place = wrong.index(self.unreduced)
            what = self.unreduced.what
            wrong[place] = new = Wrong(what, said if instead else self.unreduced.removeprefix(what) + said)
            self.unreduced = None if instead else new

    def before_clipping_by_value(self, gradients: Gradients) -> Gradients:
        """Return the gradients as they were before they were clipped by value, and judge what clipping made of them.

        Raises UserError for gradients that were then clipped by a norm.
        """
        clips = self.ranks[0].clips
        by_value = [clip for clip in clips if clip.by_value]
        if not by_value:
            return gradients
        if not clips[-1].by_value:
            raise UserError(
                f"the gradient of step {self.verdict.step} was clipped by value and then by a norm, which cannot be judged; clip in one way"
            )
        before = self.agreed("unclipped")
        for name, gradient in before.items():
            bound = min(clip.max_norm for clip in by_value if clip.has(name))
            if not torch.equal(gradients[name], gradient.clamp(-bound, bound)):
                self.verdict.wrong.append(
                    f"gradient/{name} is not what is left of it when elements are clipped to {bound:.7g}"
                )
        self.verdict.notes.append("elements of gradients were clipped: the gradients before are judged")
        return Lazy(gradients, lambda name: before[name] if name in before else gradients[name])

    def norm_of_steps(self, names: Collection[str]) -> float:
        """Return the norm that these gradients have both in this step and in another recorded one; 0 if there is none.

        Gradients that the loop itself clipped have the same norm in several steps.
        """
        step = self.verdict.step
        own, *others = (
            _norm_and_noise(self.whole(number, f"gradient/{name}") for name in names)
            for number in (step, *(set(range(1, len(self.recording.steps) + 1)) - {step}))
            if set(names) <= set(self.recording.names(number, "gradient"))
        )
        same = (is_same_norm(own[0], norm, OF_NOISE * math.hypot(own[1], noise)) for norm, noise in others)
        return own[0] if any(same) else 0.0

    def clipped_apart(self) -> list[str]:
        """Return a sentence if the shards of all ranks have one norm, as where each clips by the norm of its own."""
        step = self.verdict.step
        names = [f"gradient/{name}" for name in self.recording.names(step, "gradient")]
        whole = _norm(self.whole(step, name) for name in names)
        norms = [_norm(self.recording.part(rank, step, name) for name in names) for rank in self.ranks]
        if not all(is_same_norm(norm, norms[0]) for norm in norms) or is_same_norm(whole, norms[0]):
            return []
        return [
            f"shards of the gradient have a norm of {norms[0]:.5g} on each rank, so each was clipped by the norm of its own, and not by that of the whole gradient"
        ]

    def _optimizer_reduces(self, differ: list[str]) -> bool:
        """Whether an optimizer makes one update of gradients that differ between replicas. `differ` has their names.

        The weights are then the same after the update. They may also be those of one rank, so the loop must
        have called collectives that reduce as many elements. Some may be the same by accident, such as after
        Adam's first step, which has the signs of the gradient alone. So most of them must be the same.
        """
        size, apart = 0, []
        for name in differ:
            updated, odd_ranks = self.recording.whole(self.verdict.step, f"updated/{name}")
            size += 0 if odd_ranks else updated.numel()
            apart += [f"{name} on rank {odd_ranks[0]}"] if odd_ranks else []
        if self.ranks[0].reduced < size or 2 * len(apart) >= len(differ):
            return False
        if apart:
            self.update_problems.append(
                f"weights differ after the update between ranks that hold the same: {and_more(apart)}"
            )
        return True

    def unlike(self, module: str, ranks: list[int]) -> list[str]:
        """Return a sentence on an attribute of a module that one of these ranks does not have as rank 0; [] if none.

        The reference has the attributes of rank 0.
        """
        return [
            f"{name.replace(':', '.')} of ranks 0 and {rank} differ, "
            + f"{value} and {self.ranks[rank].attributes[name]}, " * (not isinstance(value, (dict, list)))
            + "so they compute otherwise"
            for rank in ranks
            for name, value in self.ranks[0].attributes.items()
            if name.startswith(f"{module}:") and self.ranks[rank].attributes.get(name, value) != value
        ][:1]

    def judge_clips(self) -> None:
        """Judge whether all ranks clip by the same norms: those of whole gradients, but for the rounding errors of a sum.

        If a gradient was clipped before it was complete, the norms differ for this reason, and are not
        judged.
        """
        if not any(record.clipped_early is not None for record in self.ranks.values()):
            self.clip_problems = list(itertools.islice(self._differing_clips(), 1))
            self.verdict.wrong += self.clip_problems

    def _differing_clips(self) -> Iterator[str]:
        """Yield a sentence for each clip by a norm that differs between the first rank and another."""
        (first, mine), *others = (
            (rank, [c for c in record.clips if not c.by_value]) for rank, record in self.ranks.items()
        )
        for rank, clips in others:
            for own, other in zip(mine, clips, strict=False):
                # It is the gradient that is not finite.
                if not math.isfinite(own.norm) and not math.isfinite(other.norm):
                    return
                if not is_same_norm(own.norm, other.norm):
                    yield f"rank {first} clipped by a norm of {own.norm:.7g}, rank {rank} by {other.norm:.7g}: at least one of them is not that of the whole gradient"
            if len(mine) != len(clips):
                yield f"rank {first} clipped {len(mine)} times, rank {rank} {len(clips)} times"

    def judge_skipped(self) -> None:
        """Judge whether steps were skipped. A loop may skip a step, but hardly one before each."""
        skipped = [records[0].skipped for records in self.recording.steps]
        windows = [record.skipped for record in self.ranks.values()]
        overflowed = [record.overflowed for record in self.ranks.values()]
        if len(set(overflowed)) > 1:
            self.verdict.wrong.insert(
                0,
                f"GradScalers skipped {', '.join(map(str, overflowed))} steps on the ranks before this one: each looks at its own gradients alone",
            )
        elif any(overflowed):
            self.verdict.notes.append(
                f"steps that a GradScaler skipped before this one, as gradients were not finite: {overflowed[0]}"
            )
        if len(set(windows)) > 1:
            self.verdict.wrong.insert(
                0,
                f"ranks skipped {', '.join(map(str, windows))} steps before this one: each sets gradients to zero, after clipping, for itself",
            )
        elif all(skipped):
            self.verdict.wrong.append(
                "before each step, gradients are clipped and then set to zero: the micro batches before count for nothing"
            )
        elif skipped[self.verdict.step - 1]:
            self.verdict.notes.append(
                "gradients were clipped and then set to zero before this step: a step was skipped"
            )

    def untied(self, weights: Gradients) -> bool:
        """Whether tied parameters are no longer one.

        Raises UserError if parameters came or went since the recording began, or differ between ranks: no
        reference has them.
        """
        model = self.recording.skeleton
        names, with_tied = (
            {name for name, _ in model.named_parameters(remove_duplicate=once)} for once in (True, False)
        )
        new, gone = sorted(weights.keys() - names), sorted(names - weights.keys())
        odd_rank = next(
            (
                rank
                for rank, record in self.ranks.items()
                if record.shapes.keys() != self.ranks[0].shapes.keys()
            ),
            None,
        )
        if odd_rank is not None:
            odd = min(self.ranks[odd_rank].shapes.keys() ^ self.ranks[0].shapes.keys())
            raise UserError(
                f"ranks 0 and {odd_rank} have different parameters, such as {odd}: neither has the whole model, which one process would need"
            )
        if gone or set(new) - with_tied:
            raise UserError(
                f"the model has other parameters than when the recording began, such as {(gone + new)[0]}; begin it when the model is complete"
            )
        if new:
            self.verdict.wrong.append(
                f"{new[0]} is a parameter of its own, though it was tied when the recording began"
            )
        return bool(new)

    def clipped_in_parts(self, gradients: Gradients) -> bool:
        """Whether the gradient was clipped before it was complete, after the update, or only in part."""
        wrong = self.verdict.wrong
        for rank, record in self.ranks.items():
            number, early = len(record.micro_batches), record.clipped_early
            if early is not None:
                wrong.append(
                    f"rank {rank} clipped after micro batch {early - 1} of {number}: the gradient was not complete"
                )
                return True
            if any(clip.too_late for clip in record.clips):
                wrong.append(f"rank {rank} clipped after the optimizer's step, so it has no effect")
                return True
            clipped = {name for name in gradients if any(clip.has(name) for clip in record.clips)}
            # Another optimizer may have a later loss.
            later = {
                name
                for clip in record.clips
                for name in clip.without_gradient
                if not any(
                    name in optimizer.held and not clipped.isdisjoint(optimizer.held)
                    for optimizer in record.optimizers
                )
            }
            without = sorted(gradients.keys() - clipped - later)
            if record.clips and without:
                wrong.append(
                    f"{len(gradients) - len(without)} of {len(gradients)} parameters with a gradient were clipped, and not {without[0]}"
                )
                return True
        return False


def _norm(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the norm of all these tensors together."""
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors if tensor is not None))


def _norm_and_noise(tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Return (the norm of all these tensors together, its relative standard deviation).

    Each element was rounded to its dtype, by up to a unit roundoff.
    """
    square = variance = 0.0
    for tensor in tensors:
        squares = tensor.double().square()
        square += float(squares.sum())
        variance += (torch.finfo(tensor.dtype).eps / 2) ** 2 / 3 * float(squares.square().sum())
    return math.sqrt(square), math.sqrt(variance) / square if square else 0.0
