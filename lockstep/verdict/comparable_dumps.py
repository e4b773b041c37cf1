"""Conditions for comparing dumps: the same experiment, the same settings, references that agree with themselves."""

import math

from lockstep.dumps.dump import Dump
from lockstep.dumps.header import configuration, require_comparable
from lockstep.dumps.manifest import REMEDY
from lockstep.ground.errors import UserError
from lockstep.inputs.data import global_batch_hash, window_hashes
from lockstep.inputs.samples import IGNORED
from lockstep.plan.contract import (
    KNOWN_DIFFERENCES,
    contract_differences,
    expected_contract,
    of_optimizer,
    on_any_mesh,
)
from lockstep.plan.rates import rate_of

SUMMED = 1e-9  # relative difference that two float64 sums of the same numbers may have


def require_comparable_dumps(one: Dump, other: Dump, *, same_steps: bool = True) -> None:
    """Raise UserError naming the first difference that makes a comparison of two dumps meaningless.

    A reference may have more steps than the other dump. `same_steps=False` compares only the steps that both have.
    """
    folders = f"{one.folder} and {other.folder}"
    problem = f"{folders} cannot be compared"
    require_comparable(one, other, "tensors", folders)
    if one.layout != other.layout:
        raise UserError(
            f"{problem}: their models have different tensors; capture both with the same --model_name and --attn_impl"
        )
    steps, other_steps = (sorted(filter(None, dump.steps)) for dump in (one, other))
    if same_steps and not (set(steps) <= set(other_steps) if other.exact else steps == other_steps):
        raise UserError(
            f"{problem}: steps {', '.join(map(str, steps))} against {', '.join(map(str, other_steps))}; capture the same steps"
        )


def configuration_differences(baseline: Dump, dump: Dump) -> dict[str, str]:
    """Return the settings in which the effective contracts of two runs differ, as entry -> sentence.

    The baseline itself is compared with what its own configuration demands.
    """
    expected, rates = (
        baseline.contract,
        {step: entry["learning_rate"] for step, entry in baseline.steps.items()},
    )
    if dump is baseline:
        config = configuration(dump.run)
        expected = expected_contract(
            config,
            dump.run["architecture"],
            dump.layout.model,
            of_optimizer(dump.contract),
            int((dump.tensor(1, "batch/labels") != IGNORED).sum()) if config.samples.counted else None,
        )
        rates = {step: rate_of(dump.run["config"], step, dump.run["num_steps"]) for step in dump.steps}
    differences = contract_differences(on_any_mesh(expected), on_any_mesh(dump.contract), KNOWN_DIFFERENCES)
    for step in sorted(dump.steps):
        rate = dump.steps[step]["learning_rate"]
        if rate != rates.get(step, rate) and "learning_rates" not in differences:
            differences["learning_rates"] = f"learning rate of step {step} is {rate}, not {rates[step]}"
    return differences


def require_its_batch(reference: Dump, step: int) -> None:
    """Raise UserError unless the batch that a reference was called with is the one whose hash it records."""
    names = (name for name in reference.expected(step) if name.startswith("batch/"))
    batch = tuple(reference.tensor(step, name) for name in names)
    if global_batch_hash(window_hashes([batch])) != reference.steps[step]["batch_hash"]:
        raise UserError(f"{reference.folder}: step {step}: its batch_hash is not that of its batch; {REMEDY}")


def require_norm(reference: Dump, step: int, held: float) -> None:
    """Raise UserError unless the gradient norm that a reference records is `held`, that of its gradients."""
    recorded = reference.steps[step]["grad_norm"]
    if not math.isclose(recorded, held, rel_tol=SUMMED):
        raise UserError(
            f"{reference.folder}: step {step} records a gradient norm of {recorded:.9g}, its gradients have {held:.9g}; {REMEDY}"
        )
