"""Judge each module of a captured run by itself: from the inputs that it had in the run, and the gradient that arrived at it.

One process computes each micro batch twice: in float64, and in the run's dtypes, which is the yardstick. The run's tensors take
the places of those that it computes, so what is wrong is wrong by itself. lockstep/verdict/module_results.py writes the results.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from lockstep.dumps.dump import Dump
from lockstep.dumps.layout import BATCH
from lockstep.dumps.step_file import step_path
from lockstep.inputs.model import build_model, causal_lm_loss
from lockstep.inputs.modules import to_dtype
from lockstep.inputs.samples import IGNORED
from lockstep.recorder.complex_numbers import in_width
from lockstep.verdict.computed import Computed, Passes
from lockstep.verdict.distance import distance_of
from lockstep.verdict.factors import Factors
from lockstep.verdict.float64 import Float64, Told
from lockstep.verdict.gpu_arithmetic import arithmetic_of, as_in_the_run
from lockstep.verdict.judgement import Judgement, is_vector_gradient, zeros_of
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.module_results import ModuleResults, digest_of
from lockstep.verdict.modules import Modules
from lockstep.verdict.normalisation import Sum
from lockstep.verdict.rows import StepVerdict
from lockstep.verdict.scalars import Chosen

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class MicroBatch:
    """One micro batch of a dump: its rows of the dump's tensors."""

    number: int  # in the step, from 0, DP rank by DP rank
    dp_rank: int
    batch: dict[str, torch.Tensor]  # input_ids, labels and further inputs, each (B, S)
    written: dict[str, torch.Tensor]  # forward/NUMBER/MODULE and backward/NUMBER/MODULE
    choices: dict[int, torch.Tensor]  # by the number of the call of topk


class Forced(Passes):
    """Computes micro batches with the run's tensors in the places of the model's own. `exact`: in float64."""

    def __init__(self, model: torch.nn.Module, dump: Dump, *, exact: bool):
        super().__init__(model)
        self.model, self.exact, layout = model, exact, dump.layout
        self.in_float32 = dump.run["config"]["precision"] == "fp32" and not exact
        self.autocast = dump.run["config"]["precision"] == "autocast" and not exact
        self.run = dump.run
        self.names = {choice.call: name for name, choice in layout.choices.items()}
        self.widths = {choice.call: choice.width for choice in layout.choices.values()}
        self.handles = [
            model.get_submodule(module).register_forward_pre_hook(
                functools.partial(self._enter, places), with_kwargs=True
            )
            for module, places in layout.inputs.items()
        ]

    def _arrives(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Keep a tensor, and return the run's that takes its place; None if there is none."""
        self.keep(name, tensor)
        return self.instead(name, tensor)

    def _enter(
        self, places: dict[str, str], _module: torch.nn.Module, arguments: tuple, options: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Return a module's arguments, with the run's tensors in the places of those that are no other module's output."""
        by_place = {**{str(place): value for place, value in enumerate(arguments)}, **options}
        for place, name in places.items():
            tensor = by_place.get(place)
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._arrives, f"backward/{self.hooks.number}/{name}"))
                replacement = self._arrives(f"forward/{self.hooks.number}/{name}", tensor)
                by_place[place] = tensor if replacement is None else replacement
        return tuple(by_place[str(place)] for place in range(len(arguments))), {
            name: by_place[name] for name in options
        }

    def remove(self) -> None:
        self.hooks.remove()
        for handle in self.handles:
            handle.remove()

    def compute(self, micro: MicroBatch, share: float, num_labels: int | None) -> Computed:
        """Return the results of a micro batch, and add the gradient of `share` times its loss to that of the parameters.

        The loss is a mean over the micro batch's tokens, or a sum divided by `num_labels`.
        """
        self.written, self.modules = micro.written, {}
        # Where float32 is what was asked for, the weights cannot be multiplied with what a run computed in 16 bits all the same.
        if self.in_float32:
            self.written = {name: in_width(x, torch.float32) for name, x in micro.written.items()}
        mode = (Float64 if self.exact else Told)(micro.choices, self.widths)
        self.hooks.begin(micro.number)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)
        with mode, self._of_device(), autocast:
            loss = causal_lm_loss(self.model, **micro.batch, num_labels=num_labels)
        self.hooks.end()
        with mode, self._of_device():
            (share * loss).backward()
        return Computed({}, float(loss.detach()), 1.0, {}, self.modules, mode.taken(self.names))

    def _of_device(self) -> contextlib.AbstractContextManager[None]:
        """The arithmetic of the run's device, for a yardstick."""
        run = self.run
        if self.exact:
            return contextlib.nullcontext()
        return as_in_the_run(run["config"]["device"], run["threads"], [], run["versions"])

    def gradients(self) -> Lazy:
        """Return the gradients of the parameters, in float64."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return Lazy(gradients, lambda name: gradients[name].double())


def model_of(dump: Dump) -> "PreTrainedModel":
    """Return a model that computes in the dtypes of a run, with any weights."""
    config = dump.run["config"]
    model, _ = build_model(
        dump.run["architecture"], seed=0, attn_impl=config["attn_impl"], init_weights_path=None
    )
    to_dtype(model, torch.bfloat16 if config["precision"] == "bf16" else torch.float32)
    return model


def judge(
    dump: Dump, reference: Dump, reference_model: torch.nn.Module, yardstick_model: torch.nn.Module
) -> ModuleResults:
    """Judge the modules of all steps of a dump by themselves.

    `reference` is the reference's dump, with the weights before step 1 and the gradients of a free pass. `reference_model` is in
    float64 (lockstep/verdict/float64.py), `yardstick_model` in the run's dtypes.
    """
    reference_pass, yardstick_pass = (
        Forced(reference_model, dump, exact=True),
        Forced(yardstick_model, dump, exact=False),
    )
    rows: list[Judgement] = []
    choices: list[Chosen] = []
    for step in dump.steps:
        before = reference if step == 1 else dump
        weights = [f"parameter/{name}" for name in dump.layout.parameters]
        inputs = [f"batch/{name}" for name in dump.samples.inputs]
        # A run that lacks tensors fails without this
        if before.has(step - 1, *weights) and dump.has(step, *inputs):
            step_rows, step_choices = _judge_step(
                dump, before, reference, step, reference_pass, yardstick_pass
            )
            rows += step_rows
            choices += step_choices
    for forced in (reference_pass, yardstick_pass):
        forced.remove()
    return ModuleResults(dump=digest_of(dump), rows=rows, choices=choices)


def _judge_step(
    dump: Dump, before: Dump, reference: Dump, step: int, reference_pass: Forced, yardstick_pass: Forced
) -> tuple[list[Judgement], list[Chosen]]:
    """Return the rows and the choices of one step. `before` has the weights before it."""
    for forced in (reference_pass, yardstick_pass):
        forced.model.zero_grad(set_to_none=True)
    pairs = zip(reference_pass.model.named_parameters(), yardstick_pass.model.named_parameters(), strict=True)
    with torch.no_grad():
        for (name, reference_weight), (_, yardstick_weight) in pairs:
            weight = before.tensor(step - 1, f"parameter/{name}")
            reference_weight.copy_(weight)
            yardstick_weight.copy_(weight)
    config = dump.run["config"]
    precision = config["precision"]
    arithmetic = arithmetic_of(config["device"], single=precision == "fp32")
    factors = Factors(len(dump.steps), arithmetic.factor)
    verdict = StepVerdict(step, arithmetic, lowered=[precision] * (precision != "fp32"))
    modules = Modules(verdict, factors, scaled=False, whose="DP rank")
    labels = dump.tensor(step, "batch/labels")
    num_labels = int((labels != IGNORED).sum()) if dump.samples.counted else None
    _, per_rank = _sizes(dump)
    share = 1.0 if num_labels else 1 / (per_rank * config["dp_size"])
    for micro_batch in _micro_batches(dump, step):
        reference_result, yardstick_result = (
            forced.compute(micro_batch, share, num_labels) for forced in (reference_pass, yardstick_pass)
        )
        own = {name: [(micro_batch.dp_rank, tensor)] for name, tensor in micro_batch.written.items()}
        modules.add(micro_batch.number, [micro_batch.dp_rank], own, reference_result, yardstick_result)
    trained = [name for name in dump.layout.model.trained if dump.has(step, f"gradient/{name}")]
    observed = Lazy(trained, lambda name: dump.tensor(step, f"gradient/{name}"))
    reference_gradients = Sum(observed, [reference_pass.gradients()], torch.ones(1))
    gradients = verdict.judged(
        observed,
        reference_gradients,
        yardstick_pass.gradients(),
        kind="gradient/",
        factors=factors,
        zeros=_zeros(reference, step, trained, precision),
    )
    return modules.with_factors(gradients), modules.chosen


def _zeros(reference: Dump, step: int, trained: list[str], precision: str) -> set[str]:
    """Return the names of the gradients that are zero in exact arithmetic, as those of biases may be.

    Of a step that the reference does not have, none are known.
    """
    entries = reference.steps[step]["tensors"] if step in reference.steps else {}
    names = (f"gradient/{name}" for name in trained)
    vectors = (name for name in names if name in entries and is_vector_gradient(name, entries[name]))
    tensors = {name: reference.tensor(step, name) for name in vectors}
    return zeros_of(
        {name: distance_of(tensor, tensor) for name, tensor in tensors.items()}, entries, precision
    )


def _sizes(dump: Dump) -> tuple[int, int]:
    """Return (samples in a micro batch, micro batches of a DP rank). Those of a pipeline are its schedule's.

    Each rounds its part of a gradient, and the parts may all but cancel.
    """
    config, parts = dump.run["config"], dump.micro_batches_of_schedule
    return config["batch_size"] // parts, config["gradient_accumulation_steps"] * parts


def _micro_batches(dump: Dump, step: int) -> Iterator[MicroBatch]:
    """Yield the micro batches of a step, read from the dump one after the other."""
    layout, config = dump.layout, dump.run["config"]
    batch_size, per_rank = _sizes(dump)
    with safe_open(step_path(dump.folder, step), framework="pt") as file:
        for number in range(per_rank * config["dp_size"]):
            rows = slice(number * batch_size, (number + 1) * batch_size)
            written = {}
            for name in dump.steps[step]["tensors"]:
                kind, _, module = name.partition("/")
                if kind not in ("forward", "backward") or module not in layout.outputs:
                    continue
                if layout.outputs[module][0] == BATCH:
                    tensor = file.get_slice(name)[rows]
                else:
                    tensor = file.get_tensor(name)  # the same for all micro batches
                written[f"{kind}/{number}/{module}"] = (
                    tensor.flatten(0, 1) if module in layout.flat else tensor
                )
            yield MicroBatch(
                number,
                number // per_rank,
                {name: file.get_slice(f"batch/{name}")[rows] for name in dump.samples.inputs},
                written,
                {
                    choice.call: choice.of(written[f"forward/{number}/{name}"])
                    for name, choice in layout.choices.items()
                    if f"forward/{number}/{name}" in written
                },
            )
