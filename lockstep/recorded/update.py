"""The updates of a recorded step: which parameters the optimizers hold, what moved, and each against the same optimizer's in float64."""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from lockstep.ground.words import and_more
from lockstep.recorded import between
from lockstep.recorded.optimizer import CannotStep, Replay, Stepped, Weights
from lockstep.recorded.replicas import NOT_REDUCED
from lockstep.recorder.recorded_step import Optimizer
from lockstep.recorder.recording import Recording
from lockstep.verdict.distance import distances_of, relative
from lockstep.verdict.judgement import (
    LIMIT_OF_UPDATE,
    UPDATE_OF_CHANGE,
    Judgement,
    own_update_tolerance,
)
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients
from lockstep.verdict.picture import draw
from lockstep.verdict.rows import StepVerdict, Wrong


def judge(
    recording: Recording, verdict: StepVerdict, weights: Weights, gradients: Weights, *, streamed: bool
) -> None:
    """Adds rows and sentences to the verdict. `weights` are those before the step, whole, `gradients` as the optimizers were given them.

    `streamed`: memory does not hold a whole model.
    """
    step = verdict.step
    optimizers = list(_optimizers(recording, step))
    updated = Lazy(weights, lambda name: recording.whole(step, f"updated/{name}")[0])
    _judge_settings(recording, verdict)
    again = sum(optimizer.again for optimizer in optimizers)
    if again:
        verdict.wrong.append(
            f"the optimizer steps {again + 1} times with one gradient: optimizer.step() is called again before the next micro batch"
        )
        return
    times = Counter(recording.steps[step - 1][0].held) | Counter(recording.holders(step).keys())
    held, held_twice = set(times), sorted(name for name, number in times.items() if number > 1)
    if held_twice:
        verdict.wrong.append(f"{and_more(held_twice)} is held twice by optimizers, so it is updated twice")
    frozen = set(recording.steps[step - 1][0].frozen)
    unheld = sorted(gradients.keys() - held - frozen)
    if unheld:
        strangers = sum(optimizer.strangers for optimizer in optimizers)
        if _are_of_copies(recording, verdict, weights, gradients, unheld, strangers):
            return
    elif not optimizers[0].is_of_deepspeed:
        _judge_others(recording, verdict)
    moved = {name for name in weights if not torch.equal(updated[name], weights[name])}
    still = sorted(name for name in (held & gradients.keys()) - moved if bool(gradients[name].any()))
    if still:
        verdict.notes.append(f"the update did not change {and_more(still)}, which has a gradient")
    if moved & frozen:
        verdict.wrong.append(
            f"{and_more(sorted(moved & frozen))} requires no gradient, but the update changed it"
        )
    if moved - held:
        verdict.wrong.append(
            f"no optimizer holds {and_more(sorted(moved - held))}, but the update changed it"
        )
    between.judge(recording, verdict)
    for optimizer in optimizers:
        _judge_optimizer(recording, verdict, optimizer, weights, gradients, updated, streamed)


def _are_of_copies(
    recording: Recording,
    verdict: StepVerdict,
    weights: Gradients,
    gradients: Gradients,
    unheld: list[str],
    strangers: int,
) -> bool:
    """Whether the optimizer, which does not hold these weights, updates copies of them, which cannot be judged; else it is said that none holds them.

    `strangers` are how many tensors it holds that are none of the model's.
    """
    # What a step's copies give is seen when the next one begins.
    later = recording.steps[verdict.step : verdict.step + 1]
    given = {name for ranks in later or recording.steps for one in ranks.values() for name in one.changed}
    largest = _largest_change(recording, given)
    left = [
        name
        for name in unheld
        if (later or not given)
        and f"weight/{name}" not in given
        and bool(gradients[name].any())
        and not _is_rounded_away(weights[name], largest)
    ]
    if strangers and 0 < 2 * len(left) < len(unheld):
        verdict.wrong.append(
            f"{and_more(left)} is not given another value, though other weights are, as those of the copies that the optimizer holds"
        )
        return True
    if strangers and not left:
        verdict.leave(
            "the update is not judged: the optimizer holds none of the weights, which are then given other values, as those of copies"
        )
        return True
    stale = f"; tensors that it holds and that are not the model's, perhaps from before it was wrapped: {strangers}"
    said = f"no optimizer holds {and_more(unheld)}, with a gradient{' each' * (len(unheld) > 1)}"
    verdict.wrong.append(Wrong(said, stale if strangers else ""))
    return False


def _optimizers(recording: Recording, step: int) -> Iterator[Optimizer]:
    """Those of rank 0, then of the others with the parameters that no rank before holds."""
    known: set[str] = set()
    for rank, one in recording.steps[step - 1].items():
        for optimizer in one.stepping:
            groups = [
                {**group, "params": [name for name in group["params"] if name and name not in known]}
                for group in optimizer.groups
            ]
            if rank == 0 or any(group["params"] for group in groups):
                yield optimizer.model_copy(update={"groups": groups})
        known |= set(one.held)


def _judge_others(recording: Recording, verdict: StepVerdict) -> None:
    """Parameters beside the model's that its optimizers hold: replicas have one gradient. No more is known of them."""
    ranks = list(recording.steps[verdict.step - 1].values())
    strangers = sum(one.strangers for one in ranks[0].optimizers)
    if strangers:
        verdict.leave(
            f"tensors that the optimizers hold and that are none of the model's are not judged: {strangers}"
        )
    held = [
        [pair for one in rank.optimizers for pair in one.replicas] + rank.other_replicas for rank in ranks
    ]
    alike = [*zip(*held, strict=False)]
    # Else each rank has a model of its own, in which a bias of 0 may be alike by chance.
    are_replicas = all(len({weights for weights, _ in of_ranks}) == 1 for of_ranks in alike)
    for of_ranks in alike if are_replicas else ():
        if len({gradient for _, gradient in of_ranks}) > 1:
            # Before the clipping that it makes differ
            place = len(verdict.wrong) if any(NOT_REDUCED in one for one in verdict.wrong) else 0
            verdict.wrong.insert(
                place,
                "the optimizers hold a parameter that is none of the recorded model's, is the same on all ranks, and has another gradient on each: "
                "it was not reduced",
            )
            return


def _largest_change(recording: Recording, given: set[str]) -> float:
    """Of the weights that were given other values between the first two steps, but for what rounding them may have added; infinite if none was."""
    found = []
    for name in given:
        if name.startswith("weight/"):
            before, after = (recording.whole(step, name)[0] for step in (1, 2))
            rounding = torch.finfo(before.dtype).eps / 2 * before.abs()
            found.append(float(((after - before).abs() - rounding).max()))
    return max(found, default=math.inf)


def _is_rounded_away(weight: torch.Tensor, change: float) -> bool:
    """Whether a change of this size is less than half an ulp of each element, such as of a norm in bfloat16."""
    return change < torch.finfo(weight.dtype).eps / 4 * float(weight.abs().min())


def _judge_settings(recording: Recording, verdict: StepVerdict) -> None:
    """Ranks that update the same parameters do so alike."""
    for optimizers in zip(
        *(one.optimizers for one in recording.steps[verdict.step - 1].values()), strict=False
    ):
        for groups in zip(*(one.groups for one in optimizers), strict=False):
            differ = [
                key for key in sorted(groups[0]) if any(one.get(key) != groups[0][key] for one in groups)
            ]
            if differ and "params" not in differ:
                values = ", ".join(str(one.get(differ[0])) for one in groups)
                verdict.wrong.append(f"the optimizer's {differ[0]} differs between ranks: {values}")
                return


def _judge_optimizer(
    recording: Recording,
    verdict: StepVerdict,
    optimizer: Optimizer,
    weights: Weights,
    gradients: Weights,
    updated: Weights,
    streamed: bool,
) -> None:
    name = optimizer.kind.partition(":")[2]
    own = [one for group in optimizer.groups for one in group["params"] if one in gradients]
    try:
        replay = Replay(
            recording, verdict.step, optimizer, weights, gradients, _clipped_later(recording, verdict.step)
        )
        updates = _Updates(recording, verdict.step, replay, updated)
        found = updates.judge(own, streamed)
    except CannotStep as error:
        said = f"the update of {name} is not judged: {error}"
        if said not in verdict.unseen:  # of another rank's share
            verdict.leave(said)
        return
    if updates.odd:
        verdict.wrong.append(
            f"what {name} keeps has another dtype than in one process: {and_more(sorted(updates.odd))}"
        )
    for what, of_updates in (("of what the optimizer keeps", False), ("updates", True)):
        rows = [row for row in found if (row.kind == "update") is of_updates]
        verdict.rows += rows
        wrong = [row for row in rows if row.too_far]
        if wrong:
            worst = max(wrong, key=lambda row: row.multiple)
            off, allowed = (
                relative(one, worst.distance.change) for one in (worst.distance.error, worst.tolerated)
            )
            said = f"{len(wrong)} of {len(rows)} {what} are not {name}'s with its recorded settings, most of all {worst.name.removeprefix('update/')}: "
            verdict.wrong.append(
                Wrong(f"{said}off by {off:.1e} of the change, tolerated {allowed:.1e}{worst.times}")
            )


class _Updates:
    """What an optimizer made of parameters in a step, and what it then keeps of them, if the next step was recorded, too: that begins with it."""

    def __init__(self, recording: Recording, step: int, replay: Replay, updated: Weights):
        self.recording, self.step, self.replay, self.updated = recording, step, replay, updated
        self.odd: set[str] = set()  # what is kept in another dtype than the class makes
        self.before, self.after = (
            set(recording.names(number, "state")) if number <= len(recording.steps) else set()
            for number in (step, step + 1)
        )

    def judge(self, names: list[str], streamed: bool) -> list[Judgement]:
        """One parameter at a time, which takes little memory, and suffices for torch's classes.

        If that is too far, or fails, the update may need the others, as a norm of all does: then all at once. `streamed`: memory does not
        hold them. Raises CannotStep.
        """
        rows: list[Judgement] = []
        try:
            for name in names:
                rows += self._judge([name])
            if self.replay.is_of_torch or not any(row.too_far for row in rows):
                return rows
        except CannotStep:
            if streamed:
                raise
        if streamed:
            raise CannotStep(
                "memory does not hold all parameters, which it may need: give the judge more (--memory)"
            )
        return self._judge(names)

    def _judge(self, names: list[str]) -> list[Judgement]:
        """Where a step has signs in it, rounding errors may turn one: it may do what it does for gradients and state that are off by them."""
        exact, near = (self.replay.step(names, exact=one) for one in (True, False))
        rows = self._rows(names, [exact], near)
        if not any(row.too_far for row in rows):
            return rows
        kept = [one for name in names for one in (near.parameters[name], *near.state(name).values())]
        moved = UPDATE_OF_CHANGE * max(
            torch.finfo(one.dtype).eps / 2 for one in kept if one.is_floating_point()
        )
        others = [self.replay.step(names, exact=True, moved=by) for by in (moved, -moved)]
        return self._rows(names, [exact, *others], near)

    def _rows(self, names: list[str], exact: list[Stepped], near: Stepped) -> list[Judgement]:
        rows = []
        for name in names:
            states = [one.state(name) for one in exact]
            values = [one.parameters[name].detach() for one in exact]
            own, weight, plain = self.updated[name], self.replay.weights[name], near.parameters[name].detach()
            if not all(math.isfinite(float(one.sum())) for one in values) and bool(own.isfinite().all()):
                raise CannotStep("in float64, its step gives numbers that are not finite")
            of_powers = self._error_of_powers(exact[0], name)
            rows.append(_row(self.step, f"update/{name}", own, weight, values, plain, of_powers))
            for key, plain in near.state(name).items():
                known = f"{key}/{name}" in self.after and key in states[0]
                if not known or not plain.is_floating_point() or not plain.ndim:
                    continue
                own = self.recording.whole(self.step + 1, f"state/{key}/{name}")[0]
                if own.dtype is not plain.dtype:
                    self.odd.add(f"{key}/{name}, {own.dtype} for {plain.dtype}")
                if own.shape != plain.shape:
                    continue
                before = torch.zeros_like(own)
                if f"{key}/{name}" in self.before:
                    before = self.recording.whole(self.step, f"state/{key}/{name}")[0]
                rows.append(
                    _row(self.step, f"{key}/{name}", own, before, [one[key] for one in states], plain)
                )
        return rows

    def _error_of_powers(self, stepped: Stepped, name: str) -> float:
        """Of tensors, they are taken in float32."""
        optimizer, settings, state = self.replay.optimizer, stepped.settings(name), stepped.state(name)
        of_tensors = optimizer.compiled or any(group.get("capturable") for group in optimizer.groups)
        if "betas" in settings and "step" in state and (self.replay.in_float32 or of_tensors):
            return _error_of_powers(settings, state, 2 * of_tensors)
        return 0.0


def _row(
    step: int,
    name: str,
    own: torch.Tensor,
    before: torch.Tensor,
    exact: list[torch.Tensor],
    near: torch.Tensor,
    more: float = 0.0,
) -> Judgement:
    """What was updated, against the same update in float64. In the run's own dtype, it is the yardstick.

    Where the first of `exact` and others go in different directions, it may be anything between them. `more` is tolerated of the change.
    """
    if len(exact) == 1:
        found, yardstick = distances_of([own, near], exact[0], before)
    else:
        found, yardstick = (
            distances_of([one], _between(one, before, exact), before)[0] for one in (own, near)
        )
    roundoff = torch.finfo(own.dtype).eps / 2
    tolerated = own_update_tolerance(found, yardstick, LIMIT_OF_UPDATE, roundoff).plus(
        found.shown.times(more)
    )
    row = Judgement(step, name, found, *tolerated)
    if row.too_far:
        row.picture = draw(own, _between(own, before, exact), *tolerated)
    return row


def _between(own: torch.Tensor, before: torch.Tensor, exact: list[torch.Tensor]) -> torch.Tensor:
    """The reference of what was updated: the first of `exact`, or where these go in different directions, what is nearest between them."""
    least, most = (functools.reduce(one, exact).double() for one in (torch.minimum, torch.maximum))
    turns = (least < before) & (before < most)
    return exact[0].double().where(~turns, own.double().clamp(least, most))


def _error_of_powers(options: dict[str, Any], kept: dict[str, torch.Tensor], more: int = 0) -> float:
    """The relative error of a change, where the powers of betas are in float32.

    DeepSpeed's Adams make them by multiplication, once a step. `more` is 2 where a beta is rounded before, and its power.
    """
    times, roundoff = int(kept["step"]), torch.finfo(torch.float32).eps / 2
    first, second = (
        (times - 1 + more) * roundoff * beta**times / (1 - beta**times)
        for beta in map(float, options["betas"])
    )
    return first + second / 2


def _clipped_later(recording: Recording, step: int) -> float:
    """The factor of a clipping between the recorded gradients and the update, as DeepSpeed does it."""
    factors = [clip.factor for clip in recording.steps[step - 1][0].clips if clip.later]
    return math.prod(factors)
