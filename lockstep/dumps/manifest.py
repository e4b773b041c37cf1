"""The manifest of a dump: its schema, the entries that must agree, and the checksum that shows random damage.

A run has steps 1 to n. A reference also has step 0, the initial parameters. A replay has steps 2 to n, or 1 to n.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.dumps import header
from lockstep.dumps.layout import Layout
from lockstep.ground.errors import UserError, printable
from lockstep.ground.files import write_text
from lockstep.ground.schemas import Finite, MayBreakDown, Name, Sha256, Size, Strict, Whole, validate
from lockstep.plan import rates
from lockstep.plan.contract import IF_ASKED, ON_RANK, expected_contract, of_optimizer
from lockstep.plan.mesh import Axis, Mesh

FORMAT = 8
MANIFEST = "manifest.json"
REFERENCE_LABEL = "float64 reference"
REMEDY = "capture again"

# Entries of the contract that comparisons ignore, so nothing else would notice a wrong one. Other entries that comparisons ignore may
# differ from the configuration in a dump of a planted bug.
HELD_AGAINST_CONFIGURATION = ("activation_checkpointing", "compiled")

Step = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Word = Annotated[int, Field(ge=0, lt=2**64)]


class TensorEntry(Strict):
    dtype: Literal["F64", "F32", "BF16", "I64"]
    shape: Annotated[list[Size], Field(max_length=8)]
    sharded: dict[Axis, Annotated[int, Field(ge=0, lt=8)]]  # mesh axis -> the dim that it cuts
    checksum: Word


class Tensors(Strict):
    tensors: dict[Name, TensorEntry]
    replicas_differ: dict[Name, Annotated[list[Whole], Field(min_length=1)]]


class Trained(Tensors, header.Step):
    learning_rate: Annotated[Finite, Field(gt=0)]
    started_from: Sha256 | None = None
    # Of a replay that steps an optimizer: whether the optimizer itself asks for bfloat16 or float16
    lowered: bool | None = None
    # The rounding errors (2-norm, largest element) of the optimizer's step in the run's dtype, in one process
    update_errors: dict[Name, Annotated[list[Finite], Field(min_length=2, max_length=2)]] | None = None
    # Of a replay: see lockstep.verdict.float64.Float64
    regrets: dict[Name, MayBreakDown] | None = None


class Run(header.Run):
    exact: Literal[True] | None = None


class Manifest(Strict):
    format: int  # FORMAT, as `read_sealed` has checked
    run: Run
    initial_sha256: Sha256
    layout: Layout
    contract: dict[Name, Any] | None = None
    steps: dict[Step, Any]
    sha256: Sha256


def write(folder: Path, manifest: dict) -> None:
    """Write the manifest of a dump, with the SHA-256 of its content."""
    content = {
        "format": FORMAT,
        **{key: value for key, value in manifest.items() if key not in ("format", "sha256")},
    }
    lines = (
        f"{json.dumps(key)}: {json.dumps(part)}"
        for key, part in (*content.items(), ("sha256", header.seal(content)))
    )
    # `indent` takes ten times as long
    write_text(folder / MANIFEST, "{" + ",\n ".join(lines) + "}\n")


def read(path: Path) -> dict:
    """Return the content of a manifest. Raises UserError if it is damaged, against the schema, or contradicts itself."""
    content = header.read_sealed(path, "a dump's manifest", FORMAT, REMEDY)
    validate(Manifest, content, path, REMEDY)
    for step, entry in content["steps"].items():
        validate(Tensors if step == "0" else Trained, entry, f"{path}: step {step}", REMEDY)
    for problem in _contradictions(content):
        raise UserError(f"{path}: {problem}; {REMEDY}")
    return content


def _contradictions(manifest: dict) -> Iterator[str]:
    """Yield sentences about entries of a manifest that contradict each other."""
    run, steps = manifest["run"], manifest["steps"]
    options, exact = run["config"], bool(run.get("exact"))
    if not steps:
        yield "not one step was finished: the run was stopped or is still going on"
    layout = Layout.model_validate(manifest["layout"])
    yield from _contradictions_of_layout(layout)
    mesh = Mesh.of_options(options)
    problems = list(header.contradictions(run))
    if problems:
        yield from problems
        return
    configured = header.configuration(run)
    label = REFERENCE_LABEL if exact else configured.label
    if run["label"] != label and (exact or configured.spec.factory):
        yield f"run.label is {printable(repr(run['label']), 60)}, of this configuration it is {label!r}"
    numbers = sorted(map(int, steps))
    first = 1 if not exact else min(numbers) if numbers[0] < 2 else 2
    last = options["capture_steps"] if exact else min(options["capture_steps"], run["num_steps"])
    if numbers != list(range(first, first + len(numbers))) or numbers[-1] > last:
        yield f"it has the steps {', '.join(map(str, numbers[:20]))}; {options['capture_steps']} were to be captured"
    # A replay has as many steps as the run that it replays, and a run that broke down has those that it reached.
    if numbers[-1] < last and first < 2 and (exact or header.is_finite(steps[str(numbers[-1])])):
        yield f"it has {numbers[-1]} of {last} steps: the run was stopped"
    for step in map(str, numbers):
        yield from (
            f"step {step}: {problem}" for problem in _contradictions_of_step(manifest, step, exact, first)
        )
    contract = manifest.get("contract")
    if exact and contract is not None:
        yield "it has a contract, and a reference has none"
    if not exact and contract is not None:
        try:
            expected = expected_contract(
                configured, run["architecture"], layout.model, of_optimizer(contract)
            )
        except UserError as error:
            yield f"run.architecture: {error}"
            return
        rank_entries = {f"{entry}{ON_RANK}{rank}" for entry in expected for rank in range(1, mesh.world_size)}
        unknown = contract.keys() - expected.keys() - rank_entries
        # What a user's own spec adds is not known where its file may be gone.
        wrong = sorted((expected.keys() - contract.keys()) | (unknown if configured.spec.factory else set()))
        if wrong:
            yield f"contract: {printable(wrong[0], 60)} is {'missing' if wrong[0] in expected else 'unknown'}"
        for entry in HELD_AGAINST_CONFIGURATION:
            allowed = [expected[entry], *([True] if entry in IF_ASKED else [])]
            if entry not in wrong and contract[entry] not in allowed:
                shown = printable(json.dumps(contract[entry]), 60)
                yield f"contract.{entry} is {shown}, its configuration says {json.dumps(expected[entry])}"


def _contradictions_of_layout(layout: Layout) -> Iterator[str]:
    outputs, model = layout.outputs.keys(), layout.model
    lists = {
        "backward": layout.backward,
        "flat": layout.flat,
        "choices": [*layout.choices, *(choice.scores for choice in layout.choices.values() if choice.scores)],
        "inputs": [name for places in layout.inputs.values() for name in places.values()],
        "sources": [*layout.sources, *(name for names in layout.sources.values() for name in names)],
    }
    for entry, names in lists.items():
        stray = next((name for name in names if name not in outputs), None)
        if stray is not None:
            yield f"layout.{entry} names {printable(stray, 200)}, which is not among its outputs"
    if layout.sources.keys() != outputs:
        yield "layout.sources lacks some of its outputs"
    for entry, names in (("backward", layout.backward), ("unknown", layout.unknown)):
        if len(set(names)) < len(names) or (entry == "unknown" and not outputs.isdisjoint(names)):
            yield f"layout.{entry} names a tensor twice"
    lists_of_parameters = {"frozen": list(model.frozen)}
    lists_of_parameters |= {f"state.{kind}": list(shapes) for kind, shapes in layout.state.items()}
    for entry, parameters in lists_of_parameters.items():
        stray = next((name for name in parameters if name not in model.parameters), None)
        if stray is not None or "/" in entry:
            yield f"layout.{printable(entry, 80)} names {printable(str(stray), 200)}, which is no parameter"
    for role in ("embedding", "head"):
        name = getattr(model.names, role)
        if name and name not in outputs:
            yield f"layout.model.names.{role} is {printable(name, 200)}, which is not among its outputs"


def _contradictions_of_step(manifest: dict, step: str, exact: bool, first: int) -> Iterator[str]:
    run, entry = manifest["run"], manifest["steps"][step]
    options = run["config"]
    mesh = Mesh() if exact else Mesh.of_options(options)
    if not entry["tensors"]:
        yield "it has no tensors"
    for name, tensor in entry["tensors"].items():
        for axis, dim in tensor["sharded"].items():
            if mesh.size(axis) == 1 or dim >= len(tensor["shape"]):
                yield f"{printable(name, 200)}: cut along {axis} in dim {dim}, of shape {tensor['shape']} on {mesh.size(axis)} ranks"
    for name, ranks in entry["replicas_differ"].items():
        if name not in entry["tensors"]:
            yield f"replicas_differ names {printable(name, 200)}, which is not among the tensors"
        if ranks != sorted(set(ranks)) or ranks[-1] >= mesh.world_size:
            yield f"replicas_differ has ranks {ranks[:20]} of {printable(name, 200)}; there are 0 to {mesh.world_size - 1}"
    if step == "0":
        return
    losses = entry["rank_losses"]
    if len(losses) != options["dp_size"]:
        yield f"{len(losses)} rank_losses of {options['dp_size']} DP ranks"
    elif not header.is_mean(entry["loss"], losses):
        yield f"loss is {entry['loss']}, the mean of its rank_losses is {sum(losses) / len(losses)}"
    if exact and not header.is_finite(entry):
        yield "a loss or norm of the reference is not finite"
    rate = rates.rate_of(options, int(step), run["num_steps"])
    if exact and entry["learning_rate"] != rate:
        yield f"learning_rate is {entry['learning_rate']}, its configuration says {rate}"
    if (entry.get("started_from") is not None) != (exact and first > 0):
        yield "started_from must be in all steps of a replay and in no others"
