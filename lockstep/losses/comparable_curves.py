"""What must agree before the losses of two runs are compared."""

from lockstep.errors import UserError
from lockstep.tested import unlike
from lockstep.training.contract import KNOWN_DIFFERENCES, contract_difference, global_batch, on_any_mesh
from lockstep.training.history import History, not_finite

# Entries of the configuration that must agree; strategy, mesh and paths may differ.
SAME = (
    "precision",
    "optimizer",
    "learning_rate",
    "weight_decay",
    "max_grad_norm",
    "gradient_accumulation_steps",
    "seq_length",
)


DEFAULTS = {
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "schedule_steps": 0,
}  # likewise; runs of earlier versions do not have it


def require_comparable_curves(baseline: History, other: History, *, same_weights: bool = True) -> None:
    """Raise UserError naming the first thing in which two runs differ that no verdict may overlook.

    Initial weights (`same_weights=False`: may differ), batches, length, configuration and contract. A run that ended in a NaN is
    comparable: it fails.
    """
    pair = f"{other.run['label']} and {baseline.run['label']} cannot be compared"
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
    if same_weights and other.weights["initial_sha256"] != baseline.weights["initial_sha256"]:
        raise UserError(
            f"{pair}: they started from different weights; give all runs the same --init_weights_path"
        )
    for mine, theirs in zip(other.steps, baseline.steps, strict=False):
        if mine["batch_hash"] != theirs["batch_hash"]:
            raise UserError(
                f"{pair}: step {mine['step']} was trained on different batches; use the same corpus, seed and dp_size x batch_size"
            )
    if other.run["architecture"] != baseline.run["architecture"]:
        raise UserError(f"{pair}: their models differ; use the same --model_name and --num_layers")
    for key in (*SAME, *DEFAULTS):
        value, wanted = (run.run["config"].get(key, DEFAULTS.get(key)) for run in (other, baseline))
        if value != wanted:
            raise UserError(
                f"{pair}: they were configured differently, {key} is {value!r} against {wanted!r}; use the same --{key}"
            )
    batch, wanted = global_batch(other.run["config"]), global_batch(baseline.run["config"])
    if batch != wanted:
        raise UserError(
            f"{pair}: their global batches differ, dp_size x batch_size is {batch} against {wanted}; make them equal"
        )
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
    if other.run["versions"] != baseline.run["versions"]:
        raise UserError(
            f"{pair}: their libraries differ, {unlike(other.run['versions'], baseline.run['versions'])}; run both in the same environment"
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
