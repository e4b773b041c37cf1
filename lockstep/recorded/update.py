"""The updates of a recorded step: which parameters the optimizers hold, what moved, and how far each update is off.

Each update is judged against that of the same optimizer in float64.
"""

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

# How a sentence on weights begins that no optimizer updates
UNHELD = "no optimizer holds "


def judge(
    recording: Recording, verdict: StepVerdict, weights: Weights, gradients: Weights, *, streamed: bool
) -> None:
    """Add rows and sentences to the verdict.

    `weights` are those before the step, whole; `gradients` are as the optimizers were given them. `streamed`: memory
    does not hold a whole model.
    """
    step = verdict.step
    optimizers = list(_optimizers(recording, step))
    updated = Lazy(weights, lambda name: recording.whole(step, f"updated/{name}")[0])
    _judge_settings(recording, verdict)
    again = max((optimizer.again for optimizer in optimizers), default=0)
    if again:
        verdict.wrong.append(
            f"the optimizer steps {again + 1} times with one gradient: optimizer.step() is called again before the next micro batch"
        )
        return
    counts = Counter(recording.steps[step - 1][0].held) | Counter(recording.holders(step).keys())
    held, held_twice = set(counts), sorted(name for name, count in counts.items() if count > 1)
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
    unmoved = sorted(name for name in (held & gradients.keys()) - moved if bool(gradients[name].any()))
    if unmoved:
        verdict.notes.append(f"the update did not change {and_more(unmoved)}, which has a gradient")
    if moved & frozen:
        verdict.wrong.append(
            f"{and_more(sorted(moved & frozen))} requires no gradient, but the update changed it"
        )
    if moved - held:
        verdict.wrong.append(f"{UNHELD}{and_more(sorted(moved - held))}, but the update changed it")
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
    """Whether the optimizer updates copies of the weights that it does not hold. Such an update cannot be judged.

    If it does not, a sentence says that no optimizer holds these weights. `unheld` are their names. `strangers` is
    how many tensors the optimizer holds that are none of the model's.
    """
    # What the update of the copies gives is seen when the next step begins.
    later = recording.steps[verdict.step : verdict.step + 1]
    given = {name for step in later or recording.steps for record in step.values() for name in record.changed}
    largest = _largest_change(recording, given)
    unchanged = [
        name
        for name in unheld
        if (later or not given)
        and f"weight/{name}" not in given
        and bool(gradients[name].any())
        and not _is_rounded_away(weights[name], largest)
    ]
    if strangers and 0 < 2 * len(unchanged) < len(unheld):
        verdict.wrong.append(
            f"{and_more(unchanged)} is not overwritten after the update, though other weights are, from the copies that the optimizer holds"
        )
        return True
    if strangers and not unchanged:
        verdict.leave(
            "the update is not judged: the optimizer holds none of the weights, which are overwritten afterwards, as from copies that it updates"
        )
        return True
    why = f"; tensors that it holds and that are not the model's, perhaps from before it was wrapped: {strangers}"
    message = f"{UNHELD}{and_more(unheld)}, with a gradient{' each' * (len(unheld) > 1)}"
    verdict.wrong.append(Wrong(message, why if strangers else ""))
    return False


def _optimizers(recording: Recording, step: int) -> Iterator[Optimizer]:
    """Yield the optimizers of rank 0, then those of each other rank with the parameters that no rank before holds."""
    known: set[str] = set()
    for rank, record in recording.steps[step - 1].items():
        for optimizer in record.stepping:
            groups = [
                {**group, "params": [name for name in group["params"] if name and name not in known]}
                for group in optimizer.groups
            ]
            if rank == 0 or any(group["params"] for group in groups):
                yield optimizer.model_copy(update={"groups": groups})
        known |= set(record.held)


def _judge_others(recording: Recording, verdict: StepVerdict) -> None:
    """Judge parameters that the model's optimizers hold and that are not the model's: replicas have one gradient.

    No more is known of them.
    """
    records = list(recording.steps[verdict.step - 1].values())
    strangers = sum(optimizer.strangers for optimizer in records[0].optimizers)
    if strangers:
        verdict.leave(
            f"tensors that the optimizers hold and that are none of the model's are not judged: {strangers}"
        )
    # For each rank, hashes of (weights, gradient) of each parameter
    hashes = [
        [pair for optimizer in record.optimizers for pair in optimizer.replicas] + record.other_replicas
        for record in records
    ]
    parameters = [*zip(*hashes, strict=False)]
    # Else each rank has a model of its own, in which a bias of 0 may be alike by chance.
    are_replicas = all(len({weights for weights, _ in of_ranks}) == 1 for of_ranks in parameters)
    for of_ranks in parameters if are_replicas else ():
        if len({gradient for _, gradient in of_ranks}) > 1:
            # Before what is said of clipping, which differs because of this
            place = len(verdict.wrong) if any(NOT_REDUCED in sentence for sentence in verdict.wrong) else 0
            verdict.wrong.insert(
                place,
                "the optimizers hold a parameter that is none of the recorded model's, is the same on all ranks, and has another gradient on each: "
                "it was not reduced",
            )
            return


def _largest_change(recording: Recording, given: set[str]) -> float:
    """Return the largest change of a weight between the first two steps; infinite if none was given other values.

    What rounding may have added to a change does not count. `given` has the names of tensors that were given other values.
    """
    changes = []
    for name in given:
        if name.startswith("weight/"):
            before, after = (recording.whole(step, name)[0] for step in (1, 2))
            rounding = torch.finfo(before.dtype).eps / 2 * before.abs()
            changes.append(float(((after - before).abs() - rounding).max()))
    return max(changes, default=math.inf)


def _is_rounded_away(weight: torch.Tensor, change: float) -> bool:
    """Whether a change of this size is less than half an ulp of each element, such as of a norm in bfloat16."""
    return change < torch.finfo(weight.dtype).eps / 4 * float(weight.abs().min())


def _judge_settings(recording: Recording, verdict: StepVerdict) -> None:
    """Judge whether ranks that update the same parameters have the same settings."""
    for optimizers in zip(
        *(record.optimizers for record in recording.steps[verdict.step - 1].values()), strict=False
    ):
        for groups in zip(*(optimizer.groups for optimizer in optimizers), strict=False):
            differing = [
                key for key in sorted(groups[0]) if any(group.get(key) != groups[0][key] for group in groups)
            ]
            if differing and "params" not in differing:
                values = ", ".join(str(group.get(differing[0])) for group in groups)
                verdict.wrong.append(f"the optimizer's {differing[0]} differs between ranks: {values}")
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
    class_name = optimizer.kind.partition(":")[2]
    names = [name for group in optimizer.groups for name in group["params"] if name in gradients]
    try:
        replay = Replay(
            recording, verdict.step, optimizer, weights, gradients, _clipped_later(recording, verdict.step)
        )
        updates = _Updates(recording, verdict.step, replay, updated)
        judgements = updates.judge(names, streamed)
    except CannotStep as error:
        verdict.leave(f"the update of {class_name} is not judged: {error}")
        return
    if updates.odd:
        verdict.wrong.append(
            f"what {class_name} keeps has another dtype than in one process: {and_more(sorted(updates.odd))}"
        )
    for what, is_update in (("of what the optimizer keeps", False), ("updates", True)):
        rows = [row for row in judgements if (row.kind == "update") is is_update]
        verdict.rows += rows
        wrong = [row for row in rows if row.too_far]
        if wrong:
            worst = max(wrong, key=lambda row: row.multiple)
            off, tolerated = (
                relative(norm, worst.distance.change) for norm in (worst.distance.error, worst.tolerated)
            )
            message = f"{len(wrong)} of {len(rows)} {what} are not {class_name}'s with its recorded settings, most of all {worst.name.removeprefix('update/')}: "
            verdict.wrong.append(
                Wrong(f"{message}off by {off:.1e} of the change, tolerated {tolerated:.1e}{worst.times}")
            )


class _Updates:
    """What an optimizer made of parameters in a step, and its state afterwards.

    The state is known if the next step, which begins with it, was recorded, too.
    """

    def __init__(self, recording: Recording, step: int, replay: Replay, updated: Weights):
        self.recording, self.step, self.replay, self.updated = recording, step, replay, updated
        self.odd: set[str] = set()  # state in another dtype than the optimizer's class makes
        # Names of the recorded state before and after the update
        self.before, self.after = (
            set(recording.names(number, "state")) if number <= len(recording.steps) else set()
            for number in (step, step + 1)
        )

    def judge(self, names: list[str], streamed: bool) -> list[Judgement]:
        """Return rows of the updates of these parameters. Raises CannotStep.

        Each parameter is stepped alone, which takes little memory, and suffices for torch's classes. If that is too
        far, or fails, the update may need the others, as a norm of all does: then all are stepped at once.
        `streamed`: memory does not hold them.
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
                "the step may need all parameters at once, for which memory does not suffice: give the judge more (--memory)"
            )
        return self._judge(names)

    def _judge(self, names: list[str]) -> list[Judgement]:
        """Return rows of the updates of parameters that are stepped together.

        Where a step takes signs, rounding errors may change one. So the update may also be that of gradients and
        state that are off by rounding errors.
        """
        reference, yardstick = (self.replay.step(names, exact=is_exact) for is_exact in (True, False))
        rows = self._rows(names, [reference], yardstick)
        if not any(row.too_far for row in rows):
            return rows
        tensors = [
            tensor for name in names for tensor in (yardstick.value(name), *yardstick.state(name).values())
        ]
        moved = UPDATE_OF_CHANGE * max(
            torch.finfo(tensor.dtype).eps / 2 for tensor in tensors if tensor.is_floating_point()
        )
        others = [self.replay.step(names, exact=True, moved=by) for by in (moved, -moved)]
        return self._rows(names, [reference, *others], yardstick)

    def _rows(self, names: list[str], references: list[Stepped], yardstick: Stepped) -> list[Judgement]:
        rows = []
        for name in names:
            states = [stepped.state(name) for stepped in references]
            values = [stepped.value(name) for stepped in references]
            own, weight, yardstick_value = (
                self.updated[name],
                self.replay.weights[name],
                yardstick.value(name),
            )
            if not all(math.isfinite(float(w.sum())) for w in values) and bool(own.isfinite().all()):
                raise CannotStep("in float64, its step gives numbers that are not finite")
            error_of_powers = self._error_of_powers(references[0], name)
            rows.append(
                _row(self.step, f"update/{name}", own, weight, values, yardstick_value, error_of_powers)
            )
            for key, yardstick_value in yardstick.state(name).items():
                is_known = f"{key}/{name}" in self.after and key in states[0]
                if not is_known or not yardstick_value.is_floating_point() or not yardstick_value.ndim:
                    continue
                own = self.recording.whole(self.step + 1, f"state/{key}/{name}")[0]
                if own.dtype is not yardstick_value.dtype:
                    self.odd.add(f"{key}/{name}, {own.dtype} for {yardstick_value.dtype}")
                if own.shape != yardstick_value.shape:
                    continue
                before = torch.zeros_like(own)
                if f"{key}/{name}" in self.before:
                    before = self.recording.whole(self.step, f"state/{key}/{name}")[0]
                rows.append(
                    _row(
                        self.step,
                        f"{key}/{name}",
                        own,
                        before,
                        [state[key] for state in states],
                        yardstick_value,
                    )
                )
        return rows

    def _error_of_powers(self, stepped: Stepped, name: str) -> float:
        """Return the relative error of a parameter's change where the powers of betas are in float32, else 0.

        Powers of tensors are taken in float32.
        """
        optimizer, settings, state = self.replay.optimizer, stepped.settings(name), stepped.state(name)
        powers_are_tensors = optimizer.compiled or any(group.get("capturable") for group in optimizer.groups)
        if "betas" in settings and "step" in state and (self.replay.in_float32 or powers_are_tensors):
            return _error_of_powers(settings, state, 2 * powers_are_tensors)
        return 0.0


def _row(
    step: int,
    name: str,
    own: torch.Tensor,
    before: torch.Tensor,
    references: list[torch.Tensor],
    yardstick: torch.Tensor,
    more: float = 0.0,
) -> Judgement:
    """Return the row of an updated tensor: `own` against the first of `references`, the same update in float64.

    `yardstick` is the same update in the run's own dtype. `before` is the tensor before the update. Where the first of `references`
    and the others go in different directions, `own` may be anything between them. `more` is tolerated of the change.
    """
    if len(references) == 1:
        distance, yardstick_distance = distances_of([own, yardstick], references[0], before)
    else:
        distance, yardstick_distance = (
            distances_of([tensor], _between(tensor, before, references), before)[0]
            for tensor in (own, yardstick)
        )
    roundoff = torch.finfo(own.dtype).eps / 2
    tolerated = own_update_tolerance(distance, yardstick_distance, LIMIT_OF_UPDATE, roundoff).plus(
        distance.shown.times(more)
    )
    row = Judgement(step, name, distance, *tolerated)
    if row.too_far:
        row.picture = draw(own, _between(own, before, references), *tolerated)
    return row


def _between(own: torch.Tensor, before: torch.Tensor, references: list[torch.Tensor]) -> torch.Tensor:
    """Return the reference of what was updated: the first of `references`.

    Where these go in different directions from `before`, it is what is nearest to `own` between them.
    """
    least, most = (
        functools.reduce(extreme, references).double() for extreme in (torch.minimum, torch.maximum)
    )
    turns = (least < before) & (before < most)
    return references[0].double().where(~turns, own.double().clamp(least, most))


def _error_of_powers(options: dict[str, Any], kept: dict[str, torch.Tensor], more: int = 0) -> float:
    """Return the relative error of a change, where the powers of betas are in float32.

    DeepSpeed's Adams make them by multiplication, once a step. `more` is 2 where a beta is rounded before, and its power.
    """
    steps, roundoff = int(kept["step"]), torch.finfo(torch.float32).eps / 2
    # Optimizers with a third beta, such as AdEMAMix, do not correct its average.
    first, second, *_ = (
        (steps - 1 + more) * roundoff * beta**steps / (1 - beta**steps)
        for beta in map(float, options["betas"])
    )
    return first + second / 2


def _clipped_later(recording: Recording, step: int) -> float:
    """Return the factor of a clipping between the recorded gradients and the update, as DeepSpeed does it."""
    factors = [clip.factor for clip in recording.steps[step - 1][0].clips if clip.later]
    return math.prod(factors)
