"""Each module of a captured run by itself: computed from the inputs that it had in the run, and from the gradient that arrived at it.

One process computes each micro batch twice, in float64 and in the run's dtypes, which is the yardstick. The run's tensors take the places of
those that it computes, so what is wrong is wrong by itself. lockstep/verdict/alone.py has the file of what is found.
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
from lockstep.inputs.samples import IGNORED
from lockstep.verdict.alone import Alone, digest_of, with_factors
from lockstep.verdict.computed import Computed, Passes
from lockstep.verdict.distance import distance_of
from lockstep.verdict.factors import Factors
from lockstep.verdict.float64 import Float64, Told
from lockstep.verdict.gpu_arithmetic import arithmetic_of, as_on_a_gpu
from lockstep.verdict.judgement import Judgement, is_vector_gradient, zeros_of
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.modules import Modules
from lockstep.verdict.normalisation import Sum
from lockstep.verdict.rows import StepVerdict, judged
from lockstep.verdict.scalars import Chosen

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class MicroBatch:
    """Its rows of the dump's tensors."""

    number: int  # those of a DP rank follow one after the other
    dp_rank: int
    batch: dict[str, torch.Tensor]  # input_ids, labels and further inputs, each (B, S)
    written: dict[str, torch.Tensor]  # forward/NUMBER/MODULE and backward/NUMBER/MODULE
    choices: dict[int, torch.Tensor]  # by the number of the call of topk


class Forced(Passes):
    """Computes micro batches with the run's tensors in the places of the model's own. `exact`: in float64."""

    def __init__(self, model: torch.nn.Module, dump: Dump, *, exact: bool):
        super().__init__(model)
        self.model, self.exact, layout = model, exact, dump.layout
        self.autocast = dump.run["config"]["precision"] == "autocast" and not exact
        self.on_gpu = dump.run["config"]["device"] == "cuda" and not exact
        self.version = dump.run["versions"]["torch"]
        self.names = {choice.call: name for name, choice in layout.choices.items()}
        self.widths = {choice.call: choice.width for choice in layout.choices.values()}
        self.handles = [
            model.get_submodule(module).register_forward_pre_hook(
                functools.partial(self._enter, places), with_kwargs=True
            )
            for module, places in layout.inputs.items()
        ]

    def _arrives(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        self.keep(name, tensor)
        return self.instead(name, tensor)

    def _enter(
        self, places: dict[str, str], _module: torch.nn.Module, arguments: tuple, options: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """What a module is called with, where that is no other module's output."""
        given = {**{str(place): value for place, value in enumerate(arguments)}, **options}
        for place, name in places.items():
            tensor = given.get(place)
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._arrives, f"backward/{self.hooks.number}/{name}"))
                instead = self._arrives(f"forward/{self.hooks.number}/{name}", tensor)
                given[place] = tensor if instead is None else instead
        return tuple(given[str(place)] for place in range(len(arguments))), {
            name: given[name] for name in options
        }

    def remove(self) -> None:
        self.hooks.remove()
        for handle in self.handles:
            handle.remove()

    def compute(self, micro: MicroBatch, share: float, num_labels: int | None) -> Computed:
        """Adds the gradient of `share` times the micro batch's loss, a mean over its tokens or a sum divided by `num_labels`."""
        self.written, self.modules = micro.written, {}
        mode = (Float64 if self.exact else Told)(micro.choices, self.widths)
        self.hooks.begin(micro.number)
        device = as_on_a_gpu([], self.version) if self.on_gpu else contextlib.nullcontext()
        with mode, device, torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = causal_lm_loss(self.model, **micro.batch, num_labels=num_labels)
        self.hooks.end()
        with mode:
            (share * loss).backward()
        return Computed({}, float(loss.detach()), 1.0, {}, self.modules, mode.taken(self.names))

    def gradients(self) -> Lazy:
        """Of the parameters, in float64."""
        found = {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}
        return Lazy(found, lambda name: found[name].double())


def plain_model(dump: Dump) -> "PreTrainedModel":
    """A model that computes in the dtypes of a run, with any weights."""
    config = dump.run["config"]
    model, _ = build_model(
        dump.run["architecture"], seed=0, attn_impl=config["attn_impl"], init_weights_path=None
    )
    model.to(dtype=torch.bfloat16 if config["precision"] == "bf16" else torch.float32)  # type: ignore[call-arg] # a decorator of transformers loses self
    return model


def judge(dump: Dump, reference: Dump, exact_model: torch.nn.Module, near_model: torch.nn.Module) -> Alone:
    """All steps of a dump. `reference` has the weights before step 1, and the gradients of a free pass; `exact_model` is in float64 (lockstep/verdict/float64.py)."""
    exact, plain = Forced(exact_model, dump, exact=True), Forced(near_model, dump, exact=False)
    rows: list[Judgement] = []
    choices: list[Chosen] = []
    for step in dump.steps:
        before = reference if step == 1 else dump
        weights = [f"parameter/{name}" for name in dump.layout.parameters]
        inputs = [f"batch/{name}" for name in dump.samples.inputs]
        # A run that lacks tensors fails
        if before.has(step - 1, *weights) and dump.has(step, *inputs):
            found, chosen = _judge_step(dump, before, reference, step, exact, plain)
            rows += found
            choices += chosen
    for one in (exact, plain):
        one.remove()
    return Alone(dump=digest_of(dump), rows=rows, choices=choices)


def _judge_step(
    dump: Dump, before: Dump, reference: Dump, step: int, exact: Forced, plain: Forced
) -> tuple[list[Judgement], list[Chosen]]:
    for one in (exact, plain):
        one.model.zero_grad(set_to_none=True)
    both = zip(exact.model.named_parameters(), plain.model.named_parameters(), strict=True)
    with torch.no_grad():
        for (name, right_weight), (_, near_weight) in both:
            weight = before.tensor(step - 1, f"parameter/{name}")
            right_weight.copy_(weight)
            near_weight.copy_(weight)
    config = dump.run["config"]
    precision = config["precision"]
    arithmetic = arithmetic_of(config["device"], single=precision == "fp32")
    factors = Factors(len(dump.steps), arithmetic.factor)
    modules = Modules(StepVerdict(step, arithmetic), precision, factors, scaled=False, whose="DP rank")
    labels = dump.tensor(step, "batch/labels")
    counted = int((labels != IGNORED).sum()) if dump.samples.counted else None
    share = 1.0 if counted else 1 / (config["gradient_accumulation_steps"] * config["dp_size"])
    for micro in _micro_batches(dump, step):
        right, near = (one.compute(micro, share, counted) for one in (exact, plain))
        own = {name: [(micro.dp_rank, tensor)] for name, tensor in micro.written.items()}
        modules.add(micro.number, [micro.dp_rank], own, right, near)
    trained = [name for name in dump.layout.model.trained if dump.has(step, f"gradient/{name}")]
    observed = Lazy(trained, lambda name: dump.tensor(step, f"gradient/{name}"))
    whole = Sum(observed, [exact.gradients()], torch.ones(1))
    gradients = judged(
        step,
        observed,
        whole,
        plain.gradients(),
        precision,
        arithmetic=arithmetic,
        kind="gradient/",
        factors=factors,
        zeros=_zeros(reference, step, trained, precision),
    )
    return with_factors([*modules.rows.values(), *gradients], factors), modules.chosen


def _zeros(reference: Dump, step: int, trained: list[str], precision: str) -> set[str]:
    """Gradients that are zero in exact arithmetic: those of biases may be. Those of a step that the reference has not are not known."""
    entries = reference.steps[step]["tensors"] if step in reference.steps else {}
    names = (f"gradient/{name}" for name in trained)
    vectors = (name for name in names if name in entries and is_vector_gradient(name, entries[name]))
    tensors = {name: reference.tensor(step, name) for name in vectors}
    return zeros_of({name: distance_of(one, one) for name, one in tensors.items()}, entries, precision)


def _micro_batches(dump: Dump, step: int) -> Iterator[MicroBatch]:
    """Read from the dump one after the other."""
    layout, config = dump.layout, dump.run["config"]
    size, per_rank = config["batch_size"], config["gradient_accumulation_steps"]
    with safe_open(step_path(dump.folder, step), framework="pt") as file:
        for number in range(per_rank * config["dp_size"]):
            rows = slice(number * size, (number + 1) * size)
            written = {}
            for name in dump.steps[step]["tensors"]:
                kind, _, module = name.partition("/")
                if kind not in ("forward", "backward") or module not in layout.outputs:
                    continue
                if layout.outputs[module][0] == BATCH:
                    tensor = file.get_slice(name)[rows]
                else:
                    tensor = file.get_tensor(name)  # the same for all
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
