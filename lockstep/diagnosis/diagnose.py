"""From the first wrong tensor to its cause. Without evidence for one: what is excluded, and what is odd.

A step runs batch -> forward -> loss -> backward -> gradients -> norm -> moments -> parameters. Everything after the first wrong
tensor is wrong because of it, so only the first wrong stage is examined.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.diagnosis import backward, forward, gradients, odd, update
from lockstep.diagnosis.case import Case, describe
from lockstep.dumps.dump import Dump
from lockstep.plan.contract import ON_RANK
from lockstep.verdict.result import Cause, Diagnosis, Result

CauseRule = Callable[[Case], Cause | None]


@dataclass(frozen=True)
class Stage:
    """A part of a step: the kinds of tensors that it makes, and rules for a first wrong one among them."""

    kinds: tuple[str, ...]
    rules: tuple[CauseRule, ...]  # the first that names a cause counts


STAGES = {
    "batch": Stage(("batch",), forward.BATCH_RULES),
    "forward": Stage(("forward",), forward.FORWARD_RULES),
    "loss": Stage((), backward.LOSS_RULES),
    "backward": Stage(("backward",), backward.BACKWARD_RULES),
    "gradients": Stage(("gradient",), gradients.GRADIENT_RULES),
    "gradient norm": Stage((), update.NORM_RULES),
    "moments": Stage(("exp_avg", "exp_avg_sq"), update.MOMENT_RULES),
    "parameters": Stage(("parameter",), update.PARAMETER_RULES),
    "average": Stage(("average",), update.AVERAGE_RULES),
}
# Stages that are judged by DDP's own distance from the reference: in autocast, a few percent.
BLURRED = ("forward", "backward", "gradients")
OF_UPDATES = ("moments", "parameters")
# Rules that can tell nothing of a later step, in which moments hold more than one gradient.
OF_A_FIRST_STEP = (update.clipped_by_the_recorded_norm, update.not_clipped, update.clipped_by_rank)
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
    """Why a run of a finished comparison failed. It was compared with `reference` and `replays`."""
    configured = result.runs[strategy].configuration
    if not result.runs[strategy].failures:
        causes = [
            Cause(_setting(entry, case=None)[0], f"configured differently: {what}")
            for entry, what in configured.items()
        ]
        return Diagnosis(_once(causes), ["every tensor of every step is right"])
    run = result.runs[strategy]
    if not run.failures_from_batch:
        return Diagnosis(
            excluded=[
                "the computation from the batch on: its errors are those of a correct run, among which this one is too small to be seen"
            ]
        )
    case = Case(result, strategy, reference, replays.get(strategy))
    if case.not_computed:  # evidence may need any tensor of the step, so only this is reported
        more = f" and {len(case.not_computed) - 1} more tensors" if len(case.not_computed) > 1 else ""
        moments = all(name.startswith(("exp_avg/", "exp_avg_sq/")) for name in case.not_computed)
        why = (
            "the optimizer has no state of these parameters: it never stepped them, or holds others in their place"
            if moments
            else "the run has another model, or does not run all of it"
        )
        return Diagnosis([Cause("not computed", f"{case.not_computed[0]}{more}: {why}")])
    stage = _stage(case)
    causes, excluded = _configured_differently(configured, case, stage)
    doubt, (rule, found) = "", _explained(case, stage)
    if found is not None:
        doubt = "" if rule in OF_A_FIRST_STEP else _doubt(case, stage, found)
        causes += [] if doubt else [found]
    return Diagnosis(
        _once(causes), excluded + _excluded(case, stage), odd.oddities(case) + ([doubt] if doubt else [])
    )


def _explained(case: Case, stage: str) -> tuple[CauseRule | None, Cause | None]:
    """(the first rule of a stage that names a cause, the cause). The rules of an update know AdamW and SGD alone."""
    if stage in OF_UPDATES and not case.steps_built_in(case.first.partition("/")[2]):
        return None, None
    found = ((rule, cause) for rule in STAGES[stage].rules if (cause := rule(case)) is not None)
    return next(found, (None, None))


def _doubt(case: Case, stage: str, cause: Cause) -> str:
    """Why a cause is not the whole story; "" if nothing is against it: it must explain the later captured steps, too.

    A later step says nothing if it is right, or if something else in it is wrong first.
    """
    for failure in case.first_of_later_steps():
        later = case.at(failure)
        if _stage(later) != stage:
            continue
        _, other = _explained(later, stage)
        if other is None or other.name != cause.name:
            return f"step {case.step} alone, and not step {later.step}, looks like this: {cause.name}: {cause.evidence}"
    return ""


def _stage(case: Case) -> str:
    if case.first == case.names.logits_gradient or case.first.startswith("loss of"):
        return "loss"
    kind = case.first.split("/")[0]
    kept = "moments" if kind in case.dump.layout.state else kind  # by whatever optimizer
    return next((name for name, stage in STAGES.items() if kind in stage.kinds), kept)


def _setting(entry: str, case: Case | None) -> tuple[str, str]:
    """(the cause that a difference in an entry of the contract is, the first stage that it can break)."""
    entry = entry.partition(ON_RANK)[0]
    name, stage = CONTRACT.get(entry, OTHER_SETTING)
    coupled = case is not None and case.dump.contract["optimizer"] not in ("AdamW", "SGD")
    return name, "moments" if entry == "weight_decay" and coupled else stage


def _configured_differently(
    configured: dict[str, str], case: Case, stage: str
) -> tuple[list[Cause], list[str]]:
    """(differences that can break this stage, as causes; the others, as excluded)."""
    order = list(STAGES)
    causes: list[Cause] = []
    excluded: list[str] = []
    for entry, what in configured.items():
        name, earliest = _setting(entry, case)
        if order.index(earliest) <= order.index(stage):
            causes.append(Cause(name, f"configured differently: {what}"))
        else:
            excluded.append(f"configured differently, but with no effect before a later stage: {what}")
    return causes, excluded


def _once(causes: list[Cause]) -> list[Cause]:
    """The first of each name."""
    names = [cause.name for cause in causes]
    return [cause for number, cause in enumerate(causes) if cause.name not in names[:number]]


def _excluded(case: Case, stage: str) -> list[str]:
    order = list(STAGES)
    before = order if case.first.startswith("loss of") else order[: order.index(stage)]
    said = []
    for what in before:
        rows = [row for row in case.rows.values() if row.kind in STAGES[what].kinds]
        if rows and not any(row.too_far for row in rows):
            small = sum(not row.judged for row in rows)
            unseen = f" ({small} of {len(rows)} tensors too small to judge)" if small else ""
            blurred = case.options["precision"] != "fp32" and what in BLURRED
            within = " within bfloat16's noise" if blurred else ""
            said.append(f"{what}: right{within} in step {case.step}{unseen}")
    if case.first.startswith("forward/"):
        said += _entering(case)
    earlier = "step 1" if case.step == 2 else f"steps 1 to {case.step - 1}"
    return said + ([f"{earlier}: right throughout"] if case.step > 1 else [])


def _entering(case: Case) -> list[str]:
    """The tensors from which the first wrong output is computed, if they were captured and are right."""
    module = case.first.removeprefix("forward/")
    sources = case.dump.layout.sources[module]
    rows = [case.rows.get(f"forward/{name}") for name in sources]
    if not sources or not all(row is not None and row.judged and not row.too_far for row in rows):
        return []
    return [f"{', '.join(map(describe, sources))}: right in step {case.step}"]
