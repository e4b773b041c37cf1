"""Hold a recording against another of the same training, such as one process with the whole batch: were both runs given the same?

A run is right if it computes what one process would from what it was given. So two right runs part only where they were given something
else, which no recording shows by itself: weights to begin with, samples, masks, settings. These are compared as they are. Of what was
computed, only the gradient of step 1 is compared: later ones follow from other rounding errors.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.recorded import samples
from lockstep.recorded.run import RunVerdict, samples_by_step
from lockstep.recorder.called import Called
from lockstep.recorder.recorded_step import Optimizer, Step
from lockstep.recorder.recording import Recording
from lockstep.recorder.state import OF_PROCESSES
from lockstep.verdict.distance import distance_of
from lockstep.verdict.rows import StepVerdict, Wrong

# Entries of an optimizer's group that say how it computes, not what
HOW = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr", "adam_w_mode"}
SINGLE = 1e-6  # relative: settings may be kept in float32
BOTH = 2  # runs, each of which may be as far from the reference as is tolerated of one
SHOWN = 3  # values of a model
LONG = 40  # characters of a value


def judge(run: RunVerdict, own: Recording, other: Recording, steps: Sequence[StepVerdict]) -> None:
    """Adds to `run` why `own`, whose recorded steps have the verdicts `steps`, is not the training of `other`, or that nothing is other.

    Raises UserError if the recordings are of different models.
    """
    pair = _Pair(own, other, steps)
    _require_same_model(own, other)
    said: dict[str, int] = {}  # the first step that it is so in
    for step in range(1, pair.number + 1):
        for sentence in pair.compare(step):
            said.setdefault(sentence, step)
    for step, sentence in pair.rest_of_run():
        said.setdefault(sentence, step)
    against = f"against {other.folder}"
    run.wrong += [
        Wrong(f"{against}, step {step} differs from that run", f": {why}") for why, step in said.items()
    ]
    run.notes += [f"{against}: {note}" for note in dict.fromkeys(pair.notes)]
    if not said:
        if pair.farthest is not None:
            near = f"differs by {pair.farthest:.2g} of what is tolerated"
        else:
            near = "is not compared" + ", as the model draws random numbers" * pair.random
        run.notes.append(
            f"{against}: the same weights, samples and settings in {pair.number} steps; the first gradient {near}"
        )


def _dtypes(recording: Recording) -> set[str]:
    """Of the weights, when step 1 began: a model may have been cast after the recording had begun."""
    blocks = (recording.part(0, 1, f"weight/{name}") for name in recording.names(1, "weight"))
    return {str(one.dtype) for one in blocks if one is not None}


def _require_same_model(own: Recording, other: Recording) -> None:
    shapes, there = (
        {name: list(one.shape) for name, one in each.skeleton.named_parameters()} for each in (own, other)
    )
    for name in shapes | there:
        if shapes.get(name) != there.get(name):
            raise UserError(
                f"--against {other.folder} has another model: {name} is {shapes.get(name, 'missing')} here and {there.get(name, 'missing')} there; "
                "name a recording of the same model"
            )


class _Pair:
    def __init__(self, own: Recording, other: Recording, steps: Sequence[StepVerdict]):
        self.pair, self.steps = (own, other), steps
        self.number = min(len(own.steps), len(other.steps))
        self.notes: list[str] = []
        self.farthest: float | None = None  # of the first gradient, in what is tolerated
        self.random = False  # whether either run draws random numbers

    def compare(self, step: int) -> Iterator[str]:
        """What is not the same in a recorded step, in the order in which it has effects."""
        ranks = [one.steps[step - 1] for one in self.pair]
        called = [one.micro_batches(step) for one in self.pair]
        found = []
        if step == 1:
            found += [*self._begins_with(ranks)]
        found += [*samples.compare(*called), *self._precision(called), *_settings(ranks), *_clips(ranks)]
        yield from found
        if step == 1:
            self.random = any(
                one.about.drawn or one.about.generators or one.about.dropouts
                for each in called
                for one in each
            )
            given = [of[0].micro_batches[0].tensors for of in ranks]
            # Without a gradient to compare, what the model itself has may show in nothing else. A configuration has more than it reads.
            known = not (found or self.random)
            model = [*self._model(ranks, configurations=known), *_in_one(given, "given to the model")]
            yield from self._gradient(ranks, "; ".join(model)) if known else model

    def _begins_with(self, ranks: list[dict[int, Step]]) -> Iterator[str]:
        yield from _in_one([of[0].frozen for of in ranks], "frozen")
        kinds = [sorted({_kind(name) for name in of[0].places} - {""}) for of in ranks]
        yield from _in_one(kinds, "in the optimizer's state before it")
        for kind in ("weight", *kinds[0]):
            off = self._unequal(kind)
            if off:
                key = kind.partition("/")[2]
                what = f"values of {key} in the optimizer's state" if key else "weights"
                yield f"it begins with other {what}: {_listed(off)}"

    def _unequal(self, kind: str) -> list[tuple[str, float]]:
        """(name, relative error) of what both begin with and is not equal, in the dtype that has fewer digits."""
        found = []
        there = set(self.pair[1].names(1, kind))
        for name in self.pair[0].names(1, kind):
            if name in there:
                own, other = (one.whole(1, f"{kind}/{name}")[0] for one in self.pair)
                if own.is_floating_point() and other.is_floating_point():
                    coarse = max(own.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
                    own, other = own.to(coarse), other.to(coarse)
                if not torch.equal(own, other):
                    found.append((name, distance_of(own, other).relative))
        return found

    def _precision(self, called: list[list[Called]]) -> Iterator[str]:
        weights = [_dtypes(one) for one in self.pair]
        computed = [
            {one.about.autocast or one.about.param_dtype or " and ".join(sorted(own)) for one in each}
            for each, own in zip(called, weights, strict=True)
        ]
        for what, (own, other) in {"the model is computed": computed, "weights are": weights}.items():
            if own != other:
                here, there = (" and ".join(sorted(each)) for each in (own, other))
                yield f"{what} in {here}, and in {there} there".replace("torch.", "")

    def _gradient(self, ranks: list[dict[int, Step]], model: str) -> Iterator[str]:
        """The gradient of step 1, before clipping. What the `model` itself has otherwise is the reason, or of no effect, as the number of ranks."""
        tolerated = {
            row.name.removeprefix("gradient/"): row.tolerated
            for row in self.steps[0].rows
            if row.kind == "gradient"
        }
        names = [each.names(1, "gradient") for each in self.pair]
        alone = _in_one(names, "given a gradient")
        yield from alone
        if alone or not tolerated:
            return
        off, products, squares = list[tuple[str, float]](), 0.0, 0.0
        self.farthest = 0.0
        for name in tolerated:
            clipped = [each[0].clipped(name) for each in ranks]
            own, other = (
                one.whole(1, f"gradient/{name}")[0].double() / factor
                for one, factor in zip(self.pair, clipped, strict=True)
            )
            bound = BOTH * tolerated[name] / clipped[0]
            apart = float((own - other).norm())
            share = apart / bound if bound else math.inf if apart else 0.0
            self.farthest = max(self.farthest, share)
            if not share <= 1:
                off.append((name, distance_of(own, other).relative))
            products, squares = products + float((own * other).sum()), squares + float((other * other).sum())
        if off:
            named = self.steps[0].named
            mean = f"; here it is that of {named.weighting.label}" if named else ""
            times = f"; as a whole it is {products / squares:.6g} times as large" if squares else ""
            why = f"; of the model, {model}" if model else ""
            yield f"with the same weights, samples and settings, the gradient is another: {_listed(off)}{times}{mean}{why}"
        elif model:
            self.notes.append(f"{model}, and the first gradient is the same")

    def _model(self, ranks: list[dict[int, Step]], *, configurations: bool) -> list[str]:
        """Values that modules have, and their classes; and those of `configurations` that they keep."""
        values: list[dict[str, Any]] = [
            {f"{name}:class": type(module).__name__ for name, module in recording.skeleton.named_modules()}
            | of[0].attributes
            | of[0].micro_batches[0].attributes
            | {f"{name}:training": False for name in of[0].micro_batches[0].evaluated}
            for recording, of in zip(self.pair, ranks, strict=True)
        ]
        own, other = values
        odd = [
            f"{key.replace(':', '.').lstrip('.')} is {_shown(own.get(key))}, and {_shown(other.get(key))} there"
            for key in own | other
            if configurations or not ("." in key.partition(":")[2] or OF_PROCESSES.search(key.lower()))
            if not (key.partition(":")[2].startswith("_") or _same(own.get(key), other.get(key)))
        ]
        more = [f"{len(odd) - SHOWN} more values of the model are others"] if len(odd) > SHOWN else []
        return [*odd[:SHOWN], *more]

    def rest_of_run(self) -> Iterator[tuple[int, str]]:
        """(step, what is not the same): samples and learning rates of the steps that are not recorded."""
        own, other = (one.whole_run() for one in self.pair)
        steps = range(self.number, min(len(own[0]), len(other[0])))
        for number in steps:
            here, there = (sorted({*of[0][number].rates}) for of in (own, other))
            if not _same(here, there):
                shown = [", ".join(f"{rate:g}" for rate in each) for each in (here, there)]
                yield number + 1, f"the learning rate is {shown[0]}, and {shown[1]} there"
                break
        seen, seen_there = samples_by_step(own), samples_by_step(other)
        # Hashes are of all tensors. So they can be compared if those of the first step are the same: not of pieces, nor where one run alone has a mask.
        if steps and seen[0] == seen_there[0]:
            odd = next((number for number in steps if seen[number] != seen_there[number]), None)
            if odd is not None:
                yield odd + 1, "other samples"


def _in_one(names: Sequence[Iterable[str]], what: str) -> list[str]:
    """Names that are something in one run alone."""
    own, other = names
    alone = ((set(own) - set(other), "here"), (set(other) - set(own), "there"))
    return [
        f"{and_more(sorted(those))} {'is' if len(those) == 1 else 'are'} {what} {where} alone"
        for those, where in alone
        if those
    ]


def _kind(name: str) -> str:
    """state/KEY of a tensor of the optimizer's state."""
    return "/".join(name.split("/")[:2]) if name.startswith("state/") else ""


def _settings(ranks: list[dict[int, Step]]) -> Iterator[str]:
    own, other = map(_settings_of, ranks)
    yield from _in_one([own, other], "held by an optimizer")
    odd: dict[tuple[str, str, str], list[str]] = {}
    for name in own.keys() & other.keys():
        for key in own[name].keys() & other[name].keys():
            here, there = own[name][key], other[name][key]
            if not _same(here, there):
                odd.setdefault((key, _shown(here), _shown(there)), []).append(name)
    for (key, here, there), names in odd.items():
        of = "" if len(names) == len(own) else f" of {and_more(sorted(names))}"
        yield f"{key}{of} is {here}, and {there} there"


def _settings_of(ranks: dict[int, Step]) -> dict[str, dict[str, Any]]:
    """Of each parameter that an optimizer holds on some rank, the settings that it has there."""
    found: dict[str, dict[str, Any]] = {}
    for about in ranks.values():
        for optimizer in about.stepping:
            for group in optimizer.groups:
                settings = {key: value for key, value in group.items() if key not in HOW}
                settings["the optimizer"] = _name_of(optimizer, group)
                for name in filter(None, group["params"]):
                    found.setdefault(name, settings)
    return found


def _name_of(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Of its class. Whether Adam decays weights apart is a setting, also in kernels of Adam with other names."""
    name = optimizer.kind.rpartition(":")[2]
    if name not in ("Adam", "AdamW") and "adam_w_mode" not in group:
        return name
    apart = group.get("decoupled_weight_decay", group.get("adam_w_mode", name == "AdamW"))
    return "AdamW" if apart else "Adam"


def _clips(ranks: list[dict[int, Step]]) -> Iterator[str]:
    bounds = [sorted({one.max_norm for one in of[0].clips if not one.too_late}) for of in ranks]
    if not _same(*bounds):
        here, there = (", ".join(f"{one:g}" for one in each) or "no bound" for each in bounds)
        yield f"gradients are clipped to {here}, and to {there} there"


def _same(one: Any, other: Any) -> bool:
    """Of JSON; numbers but for their last digits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (one, other))
    return math.isclose(one, other, rel_tol=SINGLE) if numbers else one == other


def _shown(value: Any) -> str:
    """A value of a recording's JSON, as people write it."""
    if isinstance(value, dict) and len(value) == 1:
        return _shown(next(iter(value.values())))
    text = f"({', '.join(map(_shown, value))})" if isinstance(value, list) else str(value)
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def _listed(off: list[tuple[str, float]]) -> str:
    name, apart = off[0]
    more = f", and {len(off) - 1} more" if len(off) > 1 else ""
    return f"{name} by a relative {apart:.1e}{more}"
