"""The updates of a recorded step: which parameters the optimizers hold, what moved, and each against the same optimizer's in float64."""

import contextlib
import importlib
import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lockstep.dumps.recording import Optimizer, Recording
from lockstep.verdict.distance import distance_of, relative
from lockstep.verdict.float64 import Float64
from lockstep.verdict.judgement import LIMIT_OF_UPDATE, Judgement, own_update_tolerance
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.picture import draw
from lockstep.verdict.recorded_rows import StepVerdict

IMPLEMENTATION = ("params", "fused", "foreach", "capturable")  # of a group: how a step is computed, not what
DEEPSPEED_ADAM = ("FusedAdam", "DeepSpeedCPUAdam")
# Of its groups (adam_w_mode, bias_correction)
DEEPSPEED_WAYS = {(True, True): torch.optim.AdamW, (False, True): torch.optim.Adam}
Weights = Mapping[str, torch.Tensor]


def judge(recording: Recording, verdict: StepVerdict, weights: Weights, gradients: Weights) -> None:
    """Adds rows and sentences to the verdict. `weights` are those before the step, whole, `gradients` as the optimizers were given them."""
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
        stale = f"; tensors that it holds and that are not the model's, perhaps from before it was wrapped: {strangers}"
        verdict.wrong.append(
            f"no optimizer holds {and_more(unheld)}, with a gradient{' each' * (len(unheld) > 1)}{stale if strangers else ''}"
        )
    elif not optimizers[0].is_of_deepspeed:
        _judge_others(recording, verdict)
    moved = {name for name in weights if not torch.equal(updated[name], weights[name])}
    if moved & frozen:
        verdict.wrong.append(
            f"{and_more(sorted(moved & frozen))} requires no gradient, but the update changed it"
        )
    if moved - held:
        verdict.wrong.append(
            f"no optimizer holds {and_more(sorted(moved - held))}, but the update changed it"
        )
    _judge_between(recording, verdict)
    for optimizer in optimizers:
        _judge_optimizer(recording, verdict, optimizer, weights, gradients, updated)


def _optimizers(recording: Recording, step: int) -> Iterator[Optimizer]:
    """Those of rank 0, then of the others with the parameters that no rank before holds."""
    known: set[str] = set()
    for rank, one in recording.steps[step - 1].items():
        for optimizer in one.optimizers:
            groups = [
                {**group, "params": [name for name in group["params"] if name and name not in known]}
                for group in optimizer.groups
            ]
            if rank == 0 or any(group["params"] for group in groups):
                yield optimizer.model_copy(update={"groups": groups})
        known |= set(one.held)


def _judge_others(recording: Recording, verdict: StepVerdict) -> None:
    """Parameters beside the model's that its optimizers hold: replicas have one gradient. No more is known of them."""
    ranks = [one.optimizers for one in recording.steps[verdict.step - 1].values()]
    strangers = sum(one.strangers for one in ranks[0])
    if not strangers:
        return
    verdict.leave(
        f"tensors that the optimizers hold and that are none of the model's are not judged: {strangers}"
    )
    for of_ranks in zip(*([pair for one in rank for pair in one.replicas] for rank in ranks), strict=False):
        if len({weights for weights, _ in of_ranks}) == 1 and len({gradient for _, gradient in of_ranks}) > 1:
            verdict.wrong.append(
                "the optimizers hold a parameter that is none of the recorded model's, is the same on all ranks, and has another gradient on each: "
                "it was not reduced"
            )
            return


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


def _judge_between(recording: Recording, verdict: StepVerdict) -> None:
    """What a step ends with, weights and what the optimizer keeps, is what the next one begins with, bit for bit."""
    step = verdict.step
    elsewhere = (
        recording.holders(step - 1) if step > 1 else {}
    )  # ranks that do not hold a parameter are given it later
    changed = sorted(
        {
            name
            for rank, one in recording.steps[step - 1].items()
            for name in one.changed
            if rank in elsewhere.get(name.removeprefix("weight/"), [rank])
        }
    )
    weights, state = (
        [name.removeprefix(kind) for name in changed if name.startswith(kind)]
        for kind in ("weight/", "state/")
    )
    for name in list(weights):
        before, after = (
            recording.whole(number, f"{kind}/{name}")[0]
            for number, kind in ((step - 1, "updated"), (step, "weight"))
        )
        least, most = after.min(), after.max()
        if (least < most or after.numel() == 1) and torch.equal(before.clamp(least, most), after):
            weights.remove(name)
            bounds = " and ".join(f"{one:.5g}" for one in sorted({float(least), float(most)}))
            verdict.notes.append(
                f"{name} was clamped by {bounds} between the update of step {step - 1} and step {step}"
            )
    if weights:
        verdict.wrong.append(
            f"{and_more(weights)} changed between the update of step {step - 1} and step {step}"
        )
    if state:
        verdict.wrong.append(
            f"what the optimizer keeps changed between step {step - 1} and step {step}: {and_more(state)}"
        )


def and_more(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _judge_optimizer(
    recording: Recording,
    verdict: StepVerdict,
    optimizer: Optimizer,
    weights: Weights,
    gradients: Weights,
    updated: Weights,
) -> None:
    """Every parameter, and what is kept of it if the next step was recorded, too: that begins with it."""
    kind, name = class_of(optimizer), optimizer.kind.partition(":")[2]
    if kind is None:
        verdict.notes.append(
            f"the update of {name} is not judged: it is no optimizer of torch that steps without the loop's loss"
        )
        return
    step = verdict.step
    clipped = _clipped_later(recording, step)
    kept = set(recording.names(step + 1, "state")) if step < len(recording.steps) else set()
    # Powers of betas are then taken of tensors, in float32
    of_tensors = optimizer.compiled or any(group.get("capturable") for group in optimizer.groups)
    updates, states = [], []
    for own, options in _settings(kind, optimizer):
        if own not in gradients:
            continue
        state = {
            key: recording.whole(step, f"state/{key}/{own}")[0] for key in _state_keys(recording, step, own)
        }
        exact, near = (
            stepped(kind, options, weights[own], gradients[own].to(dtype) * clipped, state, dtype)
            for dtype in (torch.float64, torch.float32)
        )
        of_powers = 0.0
        if "betas" in options and (optimizer.is_of_deepspeed or of_tensors):
            of_powers = _error_of_powers(options, exact[1], 2 * of_tensors)
        updates.append(_row(step, f"update/{own}", updated[own], weights[own], exact[0], near[0], of_powers))
        for key, right in exact[1].items():
            if f"{key}/{own}" not in kept or not right.is_floating_point() or not right.ndim:
                continue
            found = recording.whole(step + 1, f"state/{key}/{own}")[0]
            if found.shape == right.shape:
                before = state.get(key, torch.zeros_like(found))
                states.append(_row(step, f"{key}/{own}", found, before, right, near[1][key]))
    for rows, what in ((states, "of what the optimizer keeps"), (updates, "updates")):
        verdict.rows += rows
        wrong = [row for row in rows if row.too_far]
        if wrong:
            worst = max(wrong, key=lambda row: row.multiple)
            off, allowed = (
                relative(one, worst.distance.change) for one in (worst.distance.error, worst.tolerated)
            )
            verdict.wrong.append(
                f"{len(wrong)} of {len(rows)} {what} are not {name}'s with its recorded settings, most of all {worst.name.removeprefix('update/')}: "
                f"off by {off:.1e} of the change, tolerated {allowed:.1e}"
            )


def _row(
    step: int,
    name: str,
    own: torch.Tensor,
    before: torch.Tensor,
    exact: torch.Tensor,
    near: torch.Tensor,
    more: float = 0.0,
) -> Judgement:
    """What was updated, against the same update in float64; in float32 is the yardstick. `more` is tolerated of the change."""
    found, yardstick = (distance_of(one, exact.double(), before.double()) for one in (own, near.double()))
    roundoff = torch.finfo(own.dtype).eps / 2
    tolerated = own_update_tolerance(found, yardstick, LIMIT_OF_UPDATE, roundoff).plus(
        found.shown.times(more)
    )
    row = Judgement(step, name, found, *tolerated)
    if row.too_far:
        row.picture = draw(own, exact.double(), *tolerated)
    return row


def class_of(optimizer: Optimizer) -> Any:
    """The optimizer of torch that it is, or that DeepSpeed's computes as; None for any other."""
    module, _, name = optimizer.kind.partition(":")
    if name in DEEPSPEED_ADAM and optimizer.is_of_deepspeed:
        ways = {(one.get("adam_w_mode"), one.get("bias_correction")) for one in optimizer.groups}
        return next((kind for way, kind in DEEPSPEED_WAYS.items() if ways == {way}), None)
    if not module.startswith("torch.optim") or name == "LBFGS":
        return None
    return getattr(importlib.import_module(module), name)


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


def _settings(kind: type, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """(parameter, what the optimizer is made with for it)."""
    accepted = inspect.signature(kind).parameters
    rounds = optimizer.is_of_deepspeed  # its kernels are given float32 numbers
    for group in optimizer.groups:
        options = {
            key: _number(value, rounds)
            for key, value in group.items()
            if key in accepted and key not in IMPLEMENTATION
        }
        for name in group["params"]:
            if name:
                yield name, options


def _number(value: Any, rounds: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_number(one, rounds) for one in value)
    return float(torch.tensor(value)) if rounds and isinstance(value, float) else value


def _state_keys(recording: Recording, step: int, name: str) -> list[str]:
    """What is kept of a parameter, by the first rank that keeps anything of it."""
    for one in recording.steps[step - 1].values():
        keys = [key.split("/") for key in one.places if key.startswith("state/")]
        found = [key for _, key, *rest in keys if "/".join(rest) == name]
        if found:
            return found
    return []


def stepped(
    kind: Any,
    options: dict[str, Any],
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the parameter after one step of the optimizer, whole, computed in `dtype`; what the optimizer then keeps)."""
    exactly = (
        Float64() if dtype is torch.float64 else contextlib.nullcontext()
    )  # Muon computes in bfloat16 by itself
    parameter = torch.nn.Parameter(weight.to(dtype).clone())
    parameter.grad = gradient.to(dtype)
    if kind is torch.optim.SparseAdam:  # which updates the rows that have a gradient
        parameter.grad = parameter.grad.to_sparse(1)
    optimizer = kind([parameter], **options)
    optimizer.state[parameter] = {
        key: value.clone() if key == "step" else value.to(dtype).clone() for key, value in state.items()
    }
    with exactly:
        optimizer.step()
    kept = {key: value for key, value in optimizer.state[parameter].items() if torch.is_tensor(value)}
    return parameter.detach(), kept
