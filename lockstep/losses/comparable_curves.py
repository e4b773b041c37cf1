"""What must agree before the losses of two runs are compared."""

from lockstep.errors import UserError
from lockstep.record import require_comparable
from lockstep.training.contract import KNOWN_DIFFERENCES, contract_difference, on_any_mesh
from lockstep.training.history import History, not_finite


def require_comparable_curves(baseline: History, other: History, *, same_weights: bool = True) -> None:
    """Raise UserError naming the first thing in which two runs differ that no verdict may overlook.

    Initial weights (`same_weights=False`: may differ), batches, length, configuration and contract. A run that ended in a NaN is
    comparable: it fails.
    """
    names = f"{other.run['label']} and {baseline.run['label']}"
    pair = f"{names} cannot be compared"
    for history in (baseline, other):
        broken = any(not_finite(step) for step in history.steps)
        whole = history.ended == "finished" and len(history.steps) == history.run["num_steps"]
        if not whole and not broken:
            why = history.ended or "it was killed or is still running"
            raise UserError(
                f"{pair}: {history.run['label']} has {len(history.steps)} of {history.run['num_steps']} steps "
                f"({why}); run it again"
            )
    if other.run["num_steps"] != baseline.run["num_steps"]:
        raise UserError(
            f"{pair}: {other.run['num_steps']} steps against {baseline.run['num_steps']}; use the same --debug_steps"
        )
    require_comparable(other, baseline, "losses", names, same_weights=same_weights)
    if baseline.run["architecture"].get(
        "output_router_logits"
    ):  # then the loss has a term that is a mean over micro batches
        batch, wanted = (run.run["config"]["batch_size"] for run in (other, baseline))
        if batch != wanted:
            raise UserError(
                f"{pair}: the balance of a mixture's experts is a mean over micro batches, which have {batch} sequences against {wanted}; "
                "give both the same --dp_size and --batch_size"
            )
    # a run whose first step is not finite has no contract; it fails for that
    if baseline.contract is not None and other.contract is not None:
        contracts = on_any_mesh(baseline.contract), on_any_mesh(other.contract)
        difference = contract_difference(*contracts, KNOWN_DIFFERENCES)
        if difference:
            raise UserError(
                f"{pair}: their effective contracts differ, {difference}; run both with the same options"
            )


def require_control(baseline: History, control: History) -> None:
    """Raise UserError unless `control` is the baseline's run but for its initial weights."""
    again = "make it again with train_ddp.py --noise_control and the baseline's flags"
    try:
        require_comparable_curves(baseline, control, same_weights=False)
    except UserError as error:
        raise UserError(f"{error}; the control run is not the baseline's: {again}") from error
    broken = next((step["step"] for step in control.steps if not_finite(step)), None)
    if broken is not None:
        raise UserError(
            f"{control.run['label']} has a loss or gradient norm in step {broken} that is not finite; lower --learning_rate, or leave the control run out"
        )
    for mine, theirs in zip(control.steps, baseline.steps, strict=True):
        if mine["learning_rate"] != theirs["learning_rate"]:
            raise UserError(
                f"{control.run['label']} has a different learning rate in step {mine['step']} from the baseline's; {again}"
            )
    if control.weights.get("moved") != baseline.weights.get("moved"):
        raise UserError(f"{control.run['label']} trained other tensors than the baseline; {again}")
    if control.weights["initial_sha256"] == baseline.weights["initial_sha256"]:
        raise UserError(
            f"{control.run['label']} started from the baseline's own weights, which were not perturbed; {again}"
        )
