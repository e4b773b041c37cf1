"""From the first wrong tensor to its cause. Without evidence for one: what is excluded, and what is odd.

A step runs batch -> forward -> loss -> backward -> gradients -> norm -> moments -> parameters. Everything after the first wrong
tensor is wrong because of it, so only the first wrong stage is examined.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.diagnosis import (
    attention,
    backward,
    context,
    exchanged,
    forward,
    gradients,
    loss,
    moments,
    odd,
    update,
)
from lockstep.diagnosis.case import LEFT, Case, NotCaptured, describe
from lockstep.dumps.dump import Dump
from lockstep.plan.contract import ON_RANK
from lockstep.verdict.result import Cause, Diagnosis, Result

# A rule returns a cause, or None if it has no convincing evidence. Its docstring says what is wrong if it names the cause.
CauseRule = Callable[[Case], Cause | None]


@dataclass(frozen=True)
class Stage:
    """A part of a step: the kinds of tensors that it computes, and the rules for a first wrong tensor among them."""

    kinds: tuple[str, ...]
    rules: tuple[CauseRule, ...]  # the first that names a cause counts


STAGES = {
    "batch": Stage(("batch",), forward.BATCH_RULES),
    "forward": Stage(("forward",), forward.FORWARD_RULES),
    "loss": Stage((), loss.LOSS_RULES),
    "backward": Stage(
        ("backward",),
        (
            *backward.BACKWARD_RULES,
            attention.another_way_back,
            exchanged.outputs_exchanged,
        ),
    ),
    "gradients": Stage(("gradient",), context.GRADIENT_RULES + gradients.GRADIENT_RULES),
    "gradient norm": Stage((), moments.NORM_RULES),
    "moments": Stage(("exp_avg", "exp_avg_sq"), moments.MOMENT_RULES),
    "parameters": Stage(("parameter",), update.PARAMETER_RULES),
    "average": Stage(("average",), update.AVERAGE_RULES),
}
# Stages that are judged by DDP's own distance from the reference: in autocast, a few percent.
BLURRED = ("forward", "backward", "gradients")
OF_UPDATES = ("moments", "parameters")
# Rules that say nothing of later steps, in which moments hold more than one gradient.
OF_A_FIRST_STEP = (moments.clipped_by_the_recorded_norm, moments.not_clipped, moments.clipped_by_rank)
# Entry of the effective contract -> (the cause that a difference in it is, the first stage that it can break)
CONTRACT = {
    "learning_rates": ("learning rate", "parameters"),
    "betas": ("betas", "moments"),
    "weight_decay": ("weight decay", "parameters"),
    "max_grad_norm": ("clipping", "gradient norm"),
    "gradient_accumulation_steps": ("accumulation", "batch"),
    "loss_is_mean_over": ("accumulation", "batch"),
    "tied_embeddings": ("tied weights", "forward"),
    "parameter_dtype": ("precision", "forward"),
    "compute_dtype": ("precision", "forward"),
    "reduction_dtype": ("precision", "gradients"),
    "optimizer_dtype": ("precision", "moments"),
    "embedding_dtype": ("precision", "forward"),
    "average_dtype": ("precision", "average"),
    "dropout": ("random numbers", "forward"),
    "training_mode": ("random numbers", "forward"),
    "module_settings": ("module settings", "forward"),
}
OTHER_SETTING = ("optimizer settings", "moments")


def diagnose(result: Result, strategy: str, reference: Dump, replays: dict[str, Dump]) -> Diagnosis:
    """Return why a run of a finished comparison failed. It was compared with `reference` and `replays`."""
    configured = result.runs[strategy].configuration
    if not result.runs[strategy].failures:
        causes = [
            Cause(_setting(entry, case=None)[0], f"configured differently: {difference}")
            for entry, difference in configured.items()
        ]
        return Diagnosis(_distinct(causes), ["every tensor of every step is right"])
    run = result.runs[strategy]
    if not run.failures_from_batch:
        return Diagnosis(
            odd=[
                "only the module by itself shows it; from the batch on, the errors are those of a correct run, among which this one is too small to be seen"
            ]
        )
    case = Case(result, strategy, reference, replays.get(strategy))
    if case.not_computed:  # evidence may need any tensor of the step, so only this is reported
        more = f" and {len(case.not_computed) - 1} more tensors" if len(case.not_computed) > 1 else ""
        are_moments = all(name.startswith(("exp_avg/", "exp_avg_sq/")) for name in case.not_computed)
        reason = (
            "the optimizer has no state of these parameters: it never stepped them, or holds others in their place"
            if are_moments
            else "the run has another model, or does not run all of it"
        )
        return Diagnosis([Cause("not computed", f"{case.not_computed[0]}{more}: {reason}")])
    stage = _stage(case)
    causes, excluded = _configured_differently(configured, case, stage)
    doubts: list[str] = []
    for rule, cause in _explanations(case, stage):
        doubt = "" if rule in OF_A_FIRST_STEP else _doubt(case, stage, cause)
        if not doubt:
            # Another learning rate scales the updates, too.
            causes += [] if rule is update.scaled and causes else [cause]
            doubts = []
            break
        doubts.append(doubt)
    return Diagnosis(_distinct(causes), excluded + _excluded(case, stage), odd.oddities(case) + doubts[:1])


def _explanations(case: Case, stage: str) -> Iterator[tuple[CauseRule, Cause]]:
    """Yield (rule, the cause that it names) of the rules of a stage that name one.

    The rules of an update are for the built-in AdamW and SGD only, but for those that hold of any.
    """
    rules = STAGES[stage].rules
    if stage in OF_UPDATES:
        wrong = [row.path for kind in STAGES[stage].kinds for row in case.wrong(kind)]
        if not all(map(case.steps_built_in, wrong)):
            rules = tuple(rule for rule in rules if rule in update.RULES_OF_ANY_OPTIMIZER)
    for rule in rules:
        with contextlib.suppress(NotCaptured):  # the rule then says nothing
            cause = rule(case)
            if cause is not None:
                yield rule, cause


def _doubt(case: Case, stage: str, cause: Cause) -> str:
    """Return why a cause is in doubt, as a sentence; "" if it is not.

    It must explain the later captured steps, too. A later step says nothing if it is right, or if another stage is wrong first in it.
    """
    for failure in case.first_of_later_steps():
        later = case.at(failure)
        if _stage(later) != stage:
            continue
        if not any(_are_one(cause, later_cause) for _, later_cause in _explanations(later, stage)):
            return f"step {case.step} alone, and not step {later.step}, looks like this: {cause.name}: {cause.evidence}"
    return ""


def _are_one(cause: Cause, later: Cause) -> bool:
    """Whether two causes have one name, and one value if they have any."""
    if cause.value is None or later.value is None:
        return cause.name == later.name
    return cause.name == later.name and math.isclose(cause.value, later.value, rel_tol=LEFT)


def _stage(case: Case) -> str:
    """Return the stage of the first wrong tensor, a key of STAGES."""
    if case.first == case.names.logits_gradient or case.first.startswith("loss of"):
        return "loss"
    kind = case.first.split("/")[0]
    otherwise = "moments" if kind in case.dump.layout.state else kind  # by whatever optimizer
    return next((name for name, stage in STAGES.items() if kind in stage.kinds), otherwise)


def _setting(entry: str, case: Case | None) -> tuple[str, str]:
    """Return (the cause that a difference in this entry of the contract is, the first stage that it can break)."""
    entry = entry.partition(ON_RANK)[0]
    name, stage = CONTRACT.get(entry, OTHER_SETTING)
    is_coupled = case is not None and case.dump.contract["optimizer"] not in ("AdamW", "SGD")
    return name, "moments" if entry == "weight_decay" and is_coupled else stage


def _configured_differently(
    configured: dict[str, str], case: Case, stage: str
) -> tuple[list[Cause], list[str]]:
    """Return (the differences that can break this stage, as causes; the others, as sentences on what is excluded)."""
    order = list(STAGES)
    causes: list[Cause] = []
    excluded: list[str] = []
    for entry, difference in configured.items():
        name, earliest = _setting(entry, case)
        if order.index(earliest) <= order.index(stage):
            causes.append(Cause(name, f"configured differently: {difference}"))
        else:
            excluded.append(f"configured differently, but with no effect before a later stage: {difference}")
    return causes, excluded


def _distinct(causes: list[Cause]) -> list[Cause]:
    """Return the first cause of each name."""
    names = [cause.name for cause in causes]
    return [cause for number, cause in enumerate(causes) if cause.name not in names[:number]]


def _excluded(case: Case, stage: str) -> list[str]:
    """Return sentences on what is right: earlier stages, the tensors that the first wrong one is computed from, earlier steps."""
    order = list(STAGES)
    before = order if case.first.startswith("loss of") else order[: order.index(stage)]
    # Modules by themselves show errors that are too small to be seen from the batch on.
    wrong_alone = {row.kind for row in case.found.by_themselves if row.step == case.step and row.too_far}
    sentences = []
    for name in before:
        rows = [row for row in case.rows.values() if row.kind in STAGES[name].kinds]
        if rows and not any(row.too_far or row.kind in wrong_alone for row in rows):
            num_unjudged = sum(not row.judged for row in rows)
            unseen = f" ({num_unjudged} of {len(rows)} tensors too small to judge)" if num_unjudged else ""
            is_blurred = case.options["precision"] != "fp32" and name in BLURRED
            within = " within bfloat16's noise" if is_blurred else ""
            sentences.append(f"{name}: right{within} in step {case.step}{unseen}")
    if case.first.startswith("forward/"):
        sentences += _right_sources(case)
    earlier = "step 1" if case.step == 2 else f"steps 1 to {case.step - 1}"
    return sentences + ([f"{earlier}: right throughout"] if case.step > 1 else [])


def _right_sources(case: Case) -> list[str]:
    """Return a sentence on the tensors from which the first wrong output is computed, if they were captured and are right."""
    module = case.first.removeprefix("forward/")
    sources = case.dump.layout.sources[module]
    rows = [case.rows.get(f"forward/{name}") for name in sources]
    if not sources or not all(row is not None and row.judged and not row.too_far for row in rows):
        return []
    return [f"{', '.join(map(describe, sources))}: right in step {case.step}"]
