"""What is wrong with a recorded step that its ranks show without a reference: in what they must have alike, in clipping, and in their samples."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from lockstep.ground.errors import UserError, printable
from lockstep.ground.words import and_more
from lockstep.recorded.replicas import NOT_REDUCED, Replicas, is_same_norm, shards_of
from lockstep.recorder.called import Called
from lockstep.recorder.recording import Recording
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients
from lockstep.verdict.rows import StepVerdict, Wrong

KINDS = {"weight": "weights", "gradient": "gradients", "unclipped": "gradients before clipping"}

# Standard deviations that rounding may move a norm by, of which there are a few in a run
OF_NOISE = 4


class Ranks:
    """Adds sentences to the verdict. `micro` are the micro batches that count; `streamed`: memory does not hold a whole model."""

    def __init__(self, recording: Recording, verdict: StepVerdict, micro: list[Called], *, streamed: bool):
        self.recording, self.verdict, self.micro, self.streamed = recording, verdict, micro, streamed
        self.ranks = recording.steps[verdict.step - 1]
        self.replicas = Replicas(recording, verdict, micro)
        self.reduced_later = False  # gradients of replicas, by an optimizer itself
        self.unreduced: Wrong | None = None  # what is said of those that were not reduced
        self.odd = 0  # a rank that has others than the first
        self.of_update: list[str] = []  # what is wrong after it
        self.of_clips: list[str] = []  # how ranks clip otherwise, which may be since their gradients differ

    def agreed(self, kind: str) -> Gradients:
        """Whole tensors by name; what replicas disagree in is wrong."""
        found, differ = dict[str, torch.Tensor](), []
        names = self.recording.names(self.verdict.step, kind)
        if kind == "gradient":  # none that an optimizer is given later, if at all
            waiting = self.recording.waiting(self.verdict.step)
            names = [name for name in names if name not in waiting]
        for name in names:
            tensor, odd = self.recording.whole(self.verdict.step, f"{kind}/{name}")
            if not self.streamed:
                found[name] = tensor
            if odd:
                differ.append((name, odd[0]))
        if kind == "gradient" and differ and self._reduces_itself([name for name, _ in differ]):
            self.reduced_later, differ = True, []
        if differ:
            if kind == "gradient":
                # A norm over gradients that are not reduced makes the others differ, too.
                differ = [one for one in differ if not self.replicas.only_clipped_otherwise(*one)] or differ
                self.verdict.differ = [one for one, _ in differ]
            name, self.odd = differ[0]
            where = and_more([f"{one} on rank {odd}" for one, odd in differ])
            why = self.replicas.why(self.odd, name) if kind == "gradient" else ""
            said = Wrong(f"{KINDS[kind]} differ between ranks that hold the same: {where}", why)
            self.verdict.wrong.append(said)
            self.unreduced = said if NOT_REDUCED in why else self.unreduced
        if not self.streamed and not self.reduced_later:
            return found
        return Lazy(names, lambda name: self.whole(self.verdict.step, f"{kind}/{name}"))

    def whole(self, step: int, name: str) -> torch.Tensor:
        """A gradient that an optimizer reduces itself is the mean of those of the replicas."""
        mean = self.reduced_later and name.startswith("gradient/")
        return self.recording.whole(step, name, mean=mean)[0]

    def say_of_unreduced(self, said: str, *, instead: bool = False) -> None:
        """What is known of gradients that were not reduced, to be read after it, or `instead` of it where they were."""
        if self.unreduced:
            wrong = self.verdict.wrong
            place = wrong.index(self.unreduced)
            what = self.unreduced.what
            wrong[place] = found = Wrong(what, said if instead else self.unreduced.removeprefix(what) + said)
            self.unreduced = None if instead else found

    def before_clipping_by_value(self, gradients: Gradients) -> Gradients:
        """The gradients, those that were clipped by value as they were before. Judges what clipping made of them."""
        clips = self.ranks[0].clips
        by_value = [one for one in clips if one.by_value]
        if not by_value:
            return gradients
        if not clips[-1].by_value:
            raise UserError(
                f"the gradient of step {self.verdict.step} was clipped by value and then by a norm, which cannot be judged; clip in one way"
            )
        before = self.agreed("unclipped")
        for name, gradient in before.items():
            bound = min(one.max_norm for one in by_value if one.has(name))
            if not torch.equal(gradients[name], gradient.clamp(-bound, bound)):
                self.verdict.wrong.append(
                    f"gradient/{name} is not what is left of it when elements are clipped to {bound:.7g}"
                )
        self.verdict.notes.append("elements of gradients were clipped: the gradients before are judged")
        return Lazy(gradients, lambda name: before[name] if name in before else gradients[name])

    def norm_of_steps(self, names: Collection[str]) -> float:
        """The norm that these gradients have in this step and in another that was recorded, as after clipping; 0 if none has it."""
        step = self.verdict.step
        own, *others = (
            _norm_and_noise(self.whole(one, f"gradient/{name}") for name in names)
            for one in (step, *(set(range(1, len(self.recording.steps) + 1)) - {step}))
            if set(names) <= set(self.recording.names(one, "gradient"))
        )
        same = (is_same_norm(own[0], norm, OF_NOISE * math.hypot(own[1], noise)) for norm, noise in others)
        return own[0] if any(same) else 0.0

    def clipped_apart(self) -> list[str]:
        """Whether what each rank has of the gradient has one norm, as where each clips by the norm of its shards alone."""
        step = self.verdict.step
        names = [f"gradient/{name}" for name in self.recording.names(step, "gradient")]
        whole = _norm(self.whole(step, name) for name in names)
        norms = [_norm(self.recording.part(rank, step, name) for name in names) for rank in self.ranks]
        if not all(is_same_norm(one, norms[0]) for one in norms) or is_same_norm(whole, norms[0]):
            return []
        return [
            f"shards of the gradient have a norm of {norms[0]:.5g} on each rank, so each was clipped by the norm of its own, and not by that of the whole gradient"
        ]

    def _reduces_itself(self, differ: list[str]) -> bool:
        """Whether an optimizer makes one update of gradients that differ between replicas.

        Weights that are the same afterwards may also be one rank's, so the loop must have called collectives that reduce as much. They may
        also be the same by accident, such as after Adam's first step, which has the signs of the gradient alone: most are by none.
        """
        size, apart = 0, []
        for name in differ:
            updated, odd = self.recording.whole(self.verdict.step, f"updated/{name}")
            size += 0 if odd else updated.numel()
            apart += [f"{name} on rank {odd[0]}"] if odd else []
        if self.ranks[0].reduced < size or 2 * len(apart) >= len(differ):
            return False
        if apart:
            self.of_update.append(
                f"weights differ after the update between ranks that hold the same: {and_more(apart)}"
            )
        return True

    def unlike(self, module: str, ranks: list[int]) -> list[str]:
        """In which attribute the module of one of these ranks differs from that of rank 0, which the reference has."""
        return [
            f"{name.replace(':', '.')} of ranks 0 and {rank} differ, "
            + f"{value} and {self.ranks[rank].attributes[name]}, " * (not isinstance(value, (dict, list)))
            + "so they compute otherwise"
            for rank in ranks
            for name, value in self.ranks[0].attributes.items()
            if name.startswith(f"{module}:") and self.ranks[rank].attributes.get(name, value) != value
        ][:1]

    def judge_launch(self) -> None:
        first = self.ranks[0]
        if first.launched > first.world_size == 1:
            self.verdict.wrong.append(
                f"{first.launched} processes were started, and the script made no process group (torch.distributed.init_process_group): each trains by itself"
            )

    def judge_clips(self) -> None:
        """All ranks clip by the norm of the whole gradient, so by one norm, but for the rounding errors of a sum.

        Of a gradient that was not complete yet, they have other norms for this reason.
        """
        if not any(one.clipped_early is not None for one in self.ranks.values()):
            self.of_clips = list(itertools.islice(self._clips_apart(), 1))
            self.verdict.wrong += self.of_clips

    def _clips_apart(self) -> Iterator[str]:
        (first, mine), *others = (
            (rank, [one for one in about.clips if not one.by_value]) for rank, about in self.ranks.items()
        )
        for rank, clips in others:
            for own, other in zip(mine, clips, strict=False):
                if not math.isfinite(own.norm) and not math.isfinite(other.norm):
                    return  # it is the gradient that is not finite
                if not is_same_norm(own.norm, other.norm):
                    yield f"rank {first} clipped by a norm of {own.norm:.7g}, rank {rank} by {other.norm:.7g}: at least one of them is not that of the whole gradient"
            if len(mine) != len(clips):
                yield f"rank {first} clipped {len(mine)} times, rank {rank} {len(clips)} times"

    def require_returned(self) -> None:
        """Raises UserError where a loss depends on more of the forward pass than what the model returns: no reference knows how."""
        called = next((one for one in self.micro if one.about.around is not None), None)
        if called is not None:
            of = f", such as the output of {called.about.around}" * bool(called.about.around)
            raise UserError(
                f"the loss of micro batch {called.number} of rank {called.ranks[0]} uses tensors of the forward pass that the model does not return{of}: "
                "return them from forward, or let it keep them in an attribute of the module"
            )

    def note_losses(self) -> None:
        """What a loop gives a function that is hardly meant, though one process would compute the same."""
        seen = [(one, loss) for one in self.micro for loss in one.about.losses if loss.odd]
        if seen and self.verdict.step == 1:
            called, loss = seen[0]
            self.verdict.notes.append(
                f"{loss.function} {printable(loss.odd)} (in micro batch {called.number} of rank {called.ranks[0]})"
            )

    def judge_unused(self, unused: list[Called]) -> None:
        first = min(one.number for one in self.micro)
        later = self.recording.steps[1:]
        tried = bool(later) and all(one.used for about in later[-1].values() for one in about.micro_batches)
        before = [one for one in unused if tried and self.verdict.step == 1 and one.number < first]
        if before:
            number = len({one.number for one in before})
            self.verdict.notes.append(
                f"the first {f'{number} calls of the model count' if number > 1 else 'call of the model counts'} for nothing: "
                "taken for a trial, as none in the last step does"
            )
        for called in unused:
            if called in before or self._is_given_later(called):
                continue
            self.verdict.wrong.append(
                f"micro batch {called.number} of rank {called.ranks[0]} does not count: no gradient arrived at what the model returned for it"
            )

    def _is_given_later(self, called: Called) -> bool:
        """Whether a later micro batch is called with what the model returned for this one, as a discriminator is with what a generator made.

        Only where optimizers take turns: in other loops, what is cut off there was to be trained on, such as an earlier piece of a sequence.
        """
        step = self.verdict.step
        if not self.recording.waiting(step):
            return False
        found = self.recording.of_modules(step, called)
        returned = [one for name, of in found.items() if name.startswith("forward/") for _, one in of]
        return any(
            given.is_floating_point() and given.dtype == one.dtype and torch.equal(given, one)
            for later in self.micro
            if later.number > called.number and later.ranks == called.ranks
            for given in later.tensors.values()
            for one in returned
        )

    def judge_skipped(self) -> None:
        """A loop may skip a step, but hardly one before each."""
        skipped = [steps[0].skipped for steps in self.recording.steps]
        windows = [one.skipped for one in self.ranks.values()]
        overflowed = [one.overflowed for one in self.ranks.values()]
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

    def judge_modes(self) -> None:
        """All micro batches are computed in one precision, and a module in one mode on all ranks."""
        used = {(rank, one.number) for one in self.micro for rank in one.ranks}
        first, *others = (
            (f"micro batch {number} of rank {rank}", self.ranks[rank].micro_batches[number].autocast)
            for rank, number in sorted(used)
        )
        other = next((one for one in others if one[1] != first[1]), None)
        if other is not None:
            how, how_other = (
                "without autocast" if one is None else f"in {one}" for one in (first[1], other[1])
            )
            self.verdict.wrong.append(f"{first[0]} is computed {how}, {other[0]} {how_other}")
        of_ranks = [[set(one.evaluated) for one in about.micro_batches] for about in self.ranks.values()]
        for number, modes in enumerate(zip(*of_ranks, strict=False)):
            said = _on_some(modes, ": in evaluation mode on")
            if said:
                self.verdict.wrong.append(f"{said} alone (micro batch {number})")
                return
        if self.verdict.step == 1 and all("" in modes for each in of_ranks for modes in each):
            self.verdict.notes.append(
                "the model is trained in evaluation mode, without dropout: if that is not meant, call model.train() before the loop"
            )

    def note_draws(self) -> None:
        """Ranks whose generators have the same state draw the same random numbers for different samples."""
        drawn = {
            one.ranks[0]: one.random
            for one in self.micro
            if one.random is not None and one.number == 0 and one.piece is None
        }
        same = (
            (one, other)
            for one, other in itertools.combinations(drawn, 2)
            if torch.equal(drawn[one], drawn[other])
        )
        pair = next(same, None) if self.verdict.step == 1 else None
        if pair is not None:
            self.verdict.notes.append(
                f"ranks {pair[0]} and {pair[1]} draw the same random numbers, such as for dropout, since their generators have the same state"
            )

    def untied(self, weights: Gradients) -> bool:
        """Whether tied parameters are no longer one. Raises UserError where others came or went: no reference has them."""
        model = self.recording.skeleton
        own, with_tied = (
            {name for name, _ in model.named_parameters(remove_duplicate=once)} for once in (True, False)
        )
        new, gone = sorted(weights.keys() - own), sorted(own - weights.keys())
        apart = next(
            (rank for rank, one in self.ranks.items() if one.of_model != self.ranks[0].of_model), None
        )
        if apart is not None:
            odd = sorted(self.ranks[apart].of_model ^ self.ranks[0].of_model)[0]
            raise UserError(
                f"ranks 0 and {apart} have different parameters, such as {odd.removeprefix('weight/')}: neither has the whole model, which one process would need"
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

    def frozen_apart(self) -> bool:
        """Whether a parameter requires a gradient on some ranks alone."""
        said = _on_some([set(one.frozen) for one in self.ranks.values()])
        if said:
            self.verdict.wrong.append(f"gradients are required on some ranks alone: not that of {said} alone")
        return bool(said)

    def parted(self) -> bool:
        """Whether ranks that share out what a module returns were called with different micro batches."""
        for called in self.micro:
            parted = self.recording.parted(self.verdict.step, called)
            if parted:
                name, rank = parted
                self.verdict.wrong.append(
                    f"ranks {called.ranks[0]} and {rank} each have a part of what {name} returns, and were called with different micro batches {called.number}"
                )
                return True
        return False

    def clipped_in_parts(self, gradients: Gradients) -> bool:
        """Whether the gradient was clipped before it was complete, or only a part of it."""
        wrong = self.verdict.wrong
        for rank, about in self.ranks.items():
            micro, early = len(about.micro_batches), about.clipped_early
            if early is not None:
                wrong.append(
                    f"rank {rank} clipped after micro batch {early - 1} of {micro}: the gradient was not complete"
                )
                return True
            if any(clip.too_late for clip in about.clips):
                wrong.append(f"rank {rank} clipped after the optimizer's step, so it has no effect")
                return True
            without = sorted(name for name in gradients if not any(one.has(name) for one in about.clips))
            if about.clips and without:
                wrong.append(
                    f"{len(gradients) - len(without)} of {len(gradients)} parameters with a gradient were clipped, and not {without[0]}"
                )
                return True
        return False

    def judge_samples(self) -> None:
        """Ranks that hold the same weights, whole or the same shards, are data-parallel, so they must see different samples."""
        for one, other in itertools.combinations(self.micro, 2):
            if one.first is not other.first and one.has_same(other.tensors, other.about):
                if _are_views(one, other):
                    self.verdict.views = True
                    continue
                self.verdict.wrong.append(
                    f"micro batches {one.number} of rank {one.ranks[0]} and {other.number} of rank {other.ranks[0]} are the same samples"
                )
                return
        twice = next((called for called in self.micro if len(called.ranks) > 1), None)
        if twice is None:
            return
        where = (
            f"ranks {', '.join(map(str, twice.ranks))} were called with the same micro batch {twice.number}"
        )
        why = self._not_divided(twice)
        if why:
            self.verdict.wrong.append(f"{where}, though {why}")
        else:
            self.verdict.notes.append(f"{where}, so they are taken for ranks of a model-parallel group")

    def drawn_apart(self) -> bool:
        """Whether replicas drew random numbers, each its own, over one micro batch: no reference has both, and the samples are not divided."""
        drawn = any(
            called.random is not None and len(called.ranks) > 1 and self._not_divided(called)
            for called in self.micro
        )
        if drawn:
            self.judge_samples()
        return drawn

    def _not_divided(self, twice: Called) -> str:
        """Why the ranks that were called with a micro batch should each have had another; "" if they have parts of one model."""
        first, *others = twice.ranks
        if set(others) & set(self.ranks[first].data_parallel):
            return "FSDP2 divides the samples among them"
        held: dict[str, int] = {}  # the places of weights -> the first rank that has these
        again = ((held.setdefault(shards_of(self.ranks[rank]), rank), rank) for rank in twice.ranks)
        alike = next((pair for pair in again if pair[0] != pair[1]), None)
        if alike is None:
            return ""
        return f"ranks {alike[0]} and {alike[1]} hold the same weights: the samples are not divided among the ranks"


def _are_views(one: Called, other: Called) -> bool:
    """Whether a loss is made of two calls with one batch that draw other random numbers, as for two masks of dropout."""
    random = [called.random for called in (one, other)]
    drawn = random[0] is not None and random[1] is not None and not torch.equal(random[0], random[1])
    drawn |= one.about.dropouts > 0 and other.about.dropouts > 0  # on a GPU
    return drawn and one.ranks == other.ranks and other.about.together


def _on_some(of_ranks: Sequence[set[str]], are: str = " on") -> str:
    """Which names are not in the sets of all ranks, and in those of which ranks the first is; "" if all have the same."""
    differ = sorted(of_ranks[0].union(*of_ranks) - of_ranks[0].intersection(*of_ranks))
    ranks = ", ".join(str(rank) for rank, own in enumerate(of_ranks) if differ and differ[0] in own)
    return f"{and_more(differ)}{are} rank {ranks}" if differ else ""


def _norm(tensors: Iterable[torch.Tensor | None]) -> float:
    return math.hypot(*(float(one.double().norm()) for one in tensors if one is not None))


def _norm_and_noise(tensors: Iterable[torch.Tensor]) -> tuple[float, float]:
    """The norm, and the relative standard deviation that it has as each element was rounded to its dtype, by up to a unit roundoff."""
    square = variance = 0.0
    for tensor in tensors:
        squares = tensor.double().square()
        square += float(squares.sum())
        variance += (torch.finfo(tensor.dtype).eps / 2) ** 2 / 3 * float(squares.square().sum())
    return math.sqrt(square), math.sqrt(variance) / square if square else 0.0
