"""Compare a recording with another of the same training, such as by one process with the whole batch: were both runs given the same?

A run is right if it computes what one process would from what it was given. So two right runs differ only where they were given something
else, which no recording shows by itself: initial weights, samples, masks, settings. These are compared as they are. Of what was
computed, only the gradient of step 1 is compared: later ones follow from other rounding errors.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from lockstep.ground.errors import UserError
from lockstep.ground.words import and_more
from lockstep.recorded import same_samples
from lockstep.recorded.samples import samples_by_step
from lockstep.recorder.micro_batch import JoinedMicroBatch
from lockstep.recorder.module_state import OF_PROCESSES
from lockstep.recorder.recorded_step import Optimizer, StepRecord
from lockstep.recorder.recording import Recording
from lockstep.verdict.distance import distance_of
from lockstep.verdict.rows import RunVerdict, StepVerdict, Wrong

# Entries of a parameter group that say how the optimizer computes, not what it computes
HOW = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr", "adam_w_mode"}
# The relative difference of equal settings: one may be kept in float32.
SINGLE = 1e-6
# Each of the two runs may be as far from the reference as is tolerated of one.
BOTH = 2
# At most so many values of a model are shown.
SHOWN = 3
# At most so many characters of a value are shown.
LONG = 40


def judge(run: RunVerdict, own: Recording, other: Recording, steps: Sequence[StepVerdict]) -> None:
    """Add to `run` where the training that `own` recorded differs from that of `other`, or a note that nothing differs.

    `steps` are the verdicts on the recorded steps of `own`. Raises UserError if the recordings are of different models.
    """
    pair = _Pair(own, other, steps)
    _require_same_model(own, other)
    # Each sentence, and the first step that it is true of
    steps_of: dict[str, int] = {}
    for step in range(1, pair.number + 1):
        for sentence in pair.compare(step):
            steps_of.setdefault(sentence, step)
    for step, sentence in pair.rest_of_run():
        steps_of.setdefault(sentence, step)
    against = f"against {other.folder}"
    run.wrong += [
        Wrong(f"{against}, step {step} differs from that run", f": {why}") for why, step in steps_of.items()
    ]
    run.notes += [f"{against}: {note}" for note in dict.fromkeys(pair.notes)]
    if not steps_of:
        if pair.farthest is not None:
            comparison = f"differs by {pair.farthest:.2g} of what is tolerated"
        else:
            comparison = "is not compared" + ", as the model draws random numbers" * pair.random
        run.notes.append(
            f"{against}: the same weights, samples and settings in {pair.number} steps; the first gradient {comparison}"
        )


def _dtypes(recording: Recording) -> set[str]:
    """Return the dtypes of the weights at the beginning of step 1: a model may have been cast after the recording had begun."""
    blocks = (recording.part(0, 1, f"weight/{name}") for name in recording.names(1, "weight"))
    return {str(block.dtype) for block in blocks if block is not None}


def _require_same_model(own: Recording, other: Recording) -> None:
    shapes, other_shapes = (
        {name: list(parameter.shape) for name, parameter in recording.skeleton.named_parameters()}
        for recording in (own, other)
    )
    for name in shapes | other_shapes:
        if shapes.get(name) != other_shapes.get(name):
            raise UserError(
                f"--against {other.folder} has another model: {name} is {shapes.get(name, 'missing')} here and {other_shapes.get(name, 'missing')} there; "
                "name a recording of the same model"
            )


class _Pair:
    """The two recordings, compared step by step. `ranks` of its methods has, of each recording, the record of every rank of a step."""

    def __init__(self, own: Recording, other: Recording, steps: Sequence[StepVerdict]):
        self.pair, self.steps = (own, other), steps
        self.number = min(len(own.steps), len(other.steps))
        self.notes: list[str] = []
        # The largest distance between first gradients, relative to what is tolerated; None if they are not compared
        self.farthest: float | None = None
        # Whether either run draws random numbers
        self.random = False

    def compare(self, step: int) -> Iterator[str]:
        """Yield what differs in a recorded step, as sentences, in the order in which it has effects."""
        ranks = [recording.steps[step - 1] for recording in self.pair]
        called = [recording.micro_batches(step) for recording in self.pair]
        sentences = []
        if step == 1:
            sentences += [*self._begins_with(ranks)]
        sentences += [
            *same_samples.compare(*called),
            *self._precision(called),
            *_settings(ranks),
            *_clips(ranks),
        ]
        yield from sentences
        if step == 1:
            self.random = any(
                micro_batch.record.drawn or micro_batch.record.generators or micro_batch.record.dropouts
                for micro_batches in called
                for micro_batch in micro_batches
            )
            inputs = [records[0].micro_batches[0].tensors for records in ranks]
            # If gradients cannot be compared, a difference in the model may show in nothing else, so it counts by itself. Values of
            # configurations do not count then: a configuration has more of them than the model reads.
            is_comparable = not (sentences or self.random)
            in_model = [
                *self._model(ranks, configurations=is_comparable),
                *_in_one_run(inputs, "given to the model"),
            ]
            yield from self._gradient(ranks, "; ".join(in_model)) if is_comparable else in_model

    def _begins_with(self, ranks: list[dict[int, StepRecord]]) -> Iterator[str]:
        """Yield what differs before step 1: frozen parameters, the optimizer's state, weights."""
        yield from _in_one_run([records[0].frozen for records in ranks], "frozen")
        kinds = [sorted({_state_kind(name) for name in records[0].places} - {""}) for records in ranks]
        yield from _in_one_run(kinds, "in the optimizer's state before the step")
        for kind in ("weight", *kinds[0]):
            unequal = self._unequal(kind)
            if unequal:
                key = kind.partition("/")[2]
                what = f"values of {key} in the optimizer's state" if key else "weights"
                yield f"it begins with other {what}: {_listed(unequal)}"

    def _unequal(self, kind: str) -> list[tuple[str, float]]:
        """Return (name, relative error) of the tensors that both runs begin with and that differ, in the dtype that has fewer digits."""
        unequal = []
        other_names = set(self.pair[1].names(1, kind))
        for name in self.pair[0].names(1, kind):
            if name in other_names:
                ours, theirs = (recording.whole(1, f"{kind}/{name}")[0] for recording in self.pair)
                if ours.is_floating_point() and theirs.is_floating_point():
                    coarse = max(ours.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps)
                    ours, theirs = ours.to(coarse), theirs.to(coarse)
                if not torch.equal(ours, theirs):
                    unequal.append((name, distance_of(ours, theirs).relative))
        return unequal

    def _precision(self, called: list[list[JoinedMicroBatch]]) -> Iterator[str]:
        """Yield how the dtypes of the computation and of the weights differ."""
        weights = [_dtypes(recording) for recording in self.pair]
        computed = [
            {
                micro_batch.record.autocast or " and ".join(sorted(micro_batch.record.param_dtypes or dtypes))
                for micro_batch in micro_batches
            }
            for micro_batches, dtypes in zip(called, weights, strict=True)
        ]
        for what, (ours, theirs) in {"the model is computed": computed, "weights are": weights}.items():
            if ours != theirs:
                here, there = (" and ".join(sorted(dtypes)) for dtypes in (ours, theirs))
                yield f"{what} in {here}, and in {there} there".replace("torch.", "")

    def _gradient(self, ranks: list[dict[int, StepRecord]], model: str) -> Iterator[str]:
        """Yield how the gradients of step 1 differ, before clipping.

        `model` says how the model itself differs. If gradients differ, that is the reason. Else it has no effect, as the number of
        ranks has none, and is a note.
        """
        tolerated = {row.path: row.tolerated for row in self.steps[0].rows if row.kind == "gradient"}
        names = [recording.names(1, "gradient") for recording in self.pair]
        sentences = _in_one_run(names, "given a gradient")
        yield from sentences
        if sentences or not tolerated:
            return
        too_far, dot, square = list[tuple[str, float]](), 0.0, 0.0
        self.farthest = 0.0
        for name in tolerated:
            factors = [records[0].clipped(name) for records in ranks]
            ours, theirs = (
                recording.whole(1, f"gradient/{name}", mean=True)[0].double() / factor
                for recording, factor in zip(self.pair, factors, strict=True)
            )
            bound = BOTH * tolerated[name] / factors[0]
            distance = float((ours - theirs).norm())
            multiple = distance / bound if bound else math.inf if distance else 0.0
            self.farthest = max(self.farthest, multiple)
            if not multiple <= 1:
                too_far.append((name, distance_of(ours, theirs).relative))
            dot, square = dot + float((ours * theirs).sum()), square + float((theirs * theirs).sum())
        if too_far:
            named = self.steps[0].named
            mean = f"; here it is that of {named.weighting.label}" if named else ""
            times = f"; as a whole it is {dot / square:.6g} times as large" if square else ""
            why = f"; in the model, {model}" if model else ""
            yield f"with the same weights, samples and settings, the gradient differs: {_listed(too_far)}{times}{mean}{why}"
        elif model:
            self.notes.append(f"{model}, and the first gradient is the same")

    def _model(self, ranks: list[dict[int, StepRecord]], *, configurations: bool) -> list[str]:
        """Return how modules differ, as sentences: in class, in mode, and in the values of their attributes.

        `configurations`: also in what configurations have that modules keep, and in what is named after ranks and the like.
        """
        values: list[dict[str, Any]] = [
            {f"{name}:class": type(module).__name__ for name, module in recording.skeleton.named_modules()}
            | records[0].attributes
            | records[0].micro_batches[0].attributes
            | {f"{name}:training": False for name in records[0].micro_batches[0].evaluated}
            for recording, records in zip(self.pair, ranks, strict=True)
        ]
        ours, theirs = values
        unequal = [
            f"{key.replace(':', '.').lstrip('.')} is {_shown(ours.get(key))}, and {_shown(theirs.get(key))} there"
            for key in ours | theirs
            for attribute in [key.partition(":")[2]]
            if configurations or not ("." in attribute or OF_PROCESSES.search(attribute.lower()))
            if not (attribute.startswith("_") or _same(ours.get(key), theirs.get(key)))
        ]
        more = [f"{len(unequal) - SHOWN} more values of the model differ"] if len(unequal) > SHOWN else []
        return [*unequal[:SHOWN], *more]

    def rest_of_run(self) -> Iterator[tuple[int, str]]:
        """Yield (step, sentence) where the learning rate, and where the samples, first differ in the steps that are not recorded."""
        ours, theirs = (recording.whole_run() for recording in self.pair)
        # A run that was killed may have recorded fewer steps on some ranks.
        indices = range(self.number, min(len(steps) for steps in [*ours, *theirs]))
        for index in indices:
            our_rates, their_rates = (sorted({*ranks[0][index].rates}) for ranks in (ours, theirs))
            if not _same(our_rates, their_rates):
                shown = [", ".join(f"{rate:g}" for rate in rates) for rates in (our_rates, their_rates)]
                yield index + 1, f"the learning rate is {shown[0]}, and {shown[1]} there"
                break
        our_samples, their_samples = samples_by_step(ours), samples_by_step(theirs)
        # The hash of a sample is of all its tensors. So hashes can be compared if those of the first step are the same: not of pieces,
        # nor if one run alone has a mask.
        if indices and our_samples[0] == their_samples[0]:
            first = next((index for index in indices if our_samples[index] != their_samples[index]), None)
            if first is not None:
                yield first + 1, "other samples"


def _in_one_run(names: Sequence[Iterable[str]], what: str) -> list[str]:
    """Return which names are in one run alone, as sentences. `names` has those of both runs, `what` says what they are there."""
    ours, theirs = names
    one_sided = ((set(ours) - set(theirs), "here"), (set(theirs) - set(ours), "there"))
    return [
        f"{and_more(sorted(extra))} {'is' if len(extra) == 1 else 'are'} {what} {side} alone"
        for extra, side in one_sided
        if extra
    ]


def _state_kind(name: str) -> str:
    """Return state/KEY of the name of a tensor of the optimizer's state, "" of any other name."""
    return "/".join(name.split("/")[:2]) if name.startswith("state/") else ""


def _settings(ranks: list[dict[int, StepRecord]]) -> Iterator[str]:
    """Yield which parameters an optimizer holds in one run alone, and which settings differ, with the parameters that have them."""
    ours, theirs = map(_settings_of, ranks)
    yield from _in_one_run([ours, theirs], "held by an optimizer")
    names_of: dict[tuple[str, str, str], list[str]] = {}
    for name in [name for name in ours if name in theirs]:
        for key in [key for key in ours[name] if key in theirs[name]]:
            here, there = ours[name][key], theirs[name][key]
            if not _same(here, there):
                names_of.setdefault((key, _shown(here), _shown(there)), []).append(name)
    for (key, here, there), names in names_of.items():
        whose = "" if len(names) == len(ours) else f" of {and_more(sorted(names))}"
        yield f"{key}{whose} is {here}, and {there} there"


def _settings_of(ranks: dict[int, StepRecord]) -> dict[str, dict[str, Any]]:
    """Return, by name, the settings of each parameter that an optimizer holds on some rank."""
    settings_of: dict[str, dict[str, Any]] = {}
    for record in ranks.values():
        for optimizer in record.stepping:
            for param_group in optimizer.groups:
                settings = {key: value for key, value in param_group.items() if key not in HOW}
                settings["the optimizer"] = _name_of(optimizer, param_group)
                for name in filter(None, param_group["params"]):
                    settings_of.setdefault(name, settings)
    return settings_of


def _name_of(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Return the name of an optimizer's class.

    Whether Adam decouples the weight decay is a setting, also of kernels of Adam with other names. So these are "Adam" or "AdamW".
    """
    name = optimizer.kind.rpartition(":")[2]
    if name not in ("Adam", "AdamW") and "adam_w_mode" not in group:
        return name
    is_decoupled = group.get("decoupled_weight_decay", group.get("adam_w_mode", name == "AdamW"))
    return "AdamW" if is_decoupled else "Adam"


def _clips(ranks: list[dict[int, StepRecord]]) -> Iterator[str]:
    """Yield how the bounds differ that gradients are clipped to."""
    bounds = [sorted({clip.max_norm for clip in records[0].clips if not clip.too_late}) for records in ranks]
    if not _same(*bounds):
        here, there = (", ".join(f"{norm:g}" for norm in norms) or "no bound" for norms in bounds)
        yield f"gradients are clipped to {here}, and to {there} there"


def _same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; numbers may differ in their last digits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    are_numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (one, other))
    return math.isclose(one, other, rel_tol=SINGLE) if are_numbers else one == other


def _shown(value: Any) -> str:
    """Return a value of a recording's JSON as people write it, and no more than its first `LONG` characters."""
    if isinstance(value, dict) and len(value) == 1:
        return _shown(next(iter(value.values())))
    text = f"({', '.join(map(_shown, value))})" if isinstance(value, list) else str(value)
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def _listed(off: list[tuple[str, float]]) -> str:
    """Return the first name with its relative error, and how many more names there are."""
    name, error = off[0]
    more = f", and {len(off) - 1} more" if len(off) > 1 else ""
    return f"{name} by a relative {error:.1e}{more}"
