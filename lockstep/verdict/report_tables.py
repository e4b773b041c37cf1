"""The tables of the report on a comparison of tensors: what was compared, and how far apart everything is."""

from collections.abc import Callable, Iterable

from lockstep.dumps.dump import Dump
from lockstep.ground import origin
from lockstep.inputs.architectures import in_words
from lockstep.plan.mesh import Mesh
from lockstep.verdict.distance import relative
from lockstep.verdict.judgement import COMPUTED, Judgement, pass_of
from lockstep.verdict.result import Result

Line = str | tuple[str, ...]  # a line of text, or a row of a table
WRONG = ("step", "tensor", "error")
OPTIONS = (
    "optimizer",
    "learning_rate",
    "weight_decay",
    "max_grad_norm",
    "seq_length",
    "gradient_accumulation_steps",
    "attn_impl",
)


def about(result: Result) -> dict[str, str]:
    """Return model, options, meshes, versions, commits, machines and dates of the comparison, by name."""
    run = next(iter(result.runs.values())).dump.run
    config = run["config"]

    def alike(value_of: Callable[[Dump], str]) -> str:
        """Return the value if all runs have the same, else each run's with its label."""
        by_label = {result.label(name): value_of(findings.dump) for name, findings in result.runs.items()}
        values = set(by_label.values())
        return (
            values.pop()
            if len(values) == 1
            else ", ".join(f"{label}: {value}" for label, value in by_label.items())
        )

    return {
        "model": f"{config['model_name']}, {in_words(run['architecture'])} ({run['architecture_source']})",
        "precision": config["precision"],
        "mesh": alike(
            lambda dump: f"{Mesh(**dump.run['mesh']).label}, batch_size {dump.run['config']['batch_size']} on {dump.run['config']['device']}"
        ),
        "initial weights": alike(lambda dump: dump.run["initial_weights"]),
        "seed": alike(lambda dump: str(dump.run["config"]["seed"])),
        "steps": f"{', '.join(map(str, next(iter(result.runs.values())).dump.steps))} captured of {alike(lambda dump: str(dump.run['num_steps']))}",
        "options": ", ".join(f"{key} {config[key]}" for key in OPTIONS),
        "dataset": f"{alike(lambda dump: dump.run['config']['dataset_name'])} (SHA-256 of the tokens {run['corpus_sha256'][:16]}), tokenizer {run['tokenizer']}",
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        "Lockstep": f"captured at {alike(lambda dump: dump.run['origin']['commit'])}; compared at {origin.commit()}",
        "processor": alike(lambda dump: origin.machine(dump.run["origin"])),
        "captured": alike(lambda dump: dump.run["origin"]["date"]),
        "compared": f"{origin.now()} by {origin.command()}",
    }


def wrong_tensors(result: Result) -> list[Line]:
    """Return a table of all tensors that are too far, in order of execution, with what is tolerated of each."""
    table: list[Line] = [("run", *WRONG)]
    for name, run in result.runs.items():
        rows = sorted(run.too_far, key=lambda row: (row.step, run.order[row.step][row.name]))
        table += [(result.label(name), *cells) for cells in wrong_rows(rows)]
    return table


def wrong_by_themselves(result: Result) -> list[Line]:
    """Return a table of all tensors that modules do not give from their inputs in the run, in order of execution."""
    table: list[Line] = [("run", *WRONG)]
    for name, run in result.runs.items():
        table += [(result.label(name), *cells) for cells in wrong_rows(run.by_themselves)]
    return table


def wrong_rows(rows: Iterable[Judgement]) -> list[tuple[str, ...]]:
    """Return the rows of a table, with the head WRONG, of the tensors that are too far."""
    return [(str(row.step), row.name, row.describe()) for row in rows if row.too_far]


def losses(result: Result) -> list[Line]:
    """Return a table of the loss of each DP rank in each step: of each run, with its relative difference from the baseline's."""
    labels = map(result.label, result.runs)
    reference = ["reference"] if result.has_reference else []
    table: list[Line] = [("step", "DP rank", *reference, *labels, "tolerated")]
    for loss in result.losses:
        base = loss.by_strategy[result.baseline]
        reference_cell = [f"{loss.reference:.9f}"] if result.has_reference else []
        cells = [
            f"{loss.by_strategy[name]:.9f} ({relative(abs(loss.by_strategy[name] - base), abs(base)):.1e})"
            for name in result.runs
        ]
        table.append(
            (
                str(loss.step),
                str(loss.dp_rank),
                *reference_cell,
                *cells,
                f"{relative(loss.tolerated, abs(base)):.1e}",
            )
        )
    return table


def norms(result: Result, kind: str) -> list[Line]:
    """Return a table of the 2-norms of a kind of tensors in the first step, by run.

    The last column is the largest relative difference from the baseline's norm.
    """
    table: list[Line] = [("tensor", *map(result.label, result.runs), "relative")]
    for name, tensor in result.pairs.items():
        if name.startswith(f"{kind}/"):
            by_run = {run: distance.own_norm for run, distance in tensor.distances.items()}
            base = by_run[result.baseline]
            gap = max(abs(norm - base) for norm in by_run.values())
            table.append((name, *(f"{norm:.6e}" for norm in by_run.values()), f"{relative(gap, base):.1e}"))
    return table


def worst(result: Result) -> list[Line]:
    """Return a table of the largest relative distance, and of the largest share of the tolerated, for each run and pass."""
    table: list[Line] = [("run", "pass", "tensors", "largest distance", "largest share of the tolerated")]
    for name, run in result.runs.items():
        for pass_name in ("batch", *COMPUTED):
            rows = [row for row in run.judged if row.which_pass == pass_name]
            if rows:
                far = max(rows, key=lambda row: row.distance.relative)
                near = max(rows, key=lambda row: row.multiple)
                distance = f"{far.distance.relative:.1e} of {relative(far.tolerated, far.distance.norm):.1e}: {far.name}"
                share = f"{near.multiple:.2f}: {near.name}"
                table.append((result.label(name), pass_name, str(len(rows)), distance, share))
    return table


def differences(result: Result) -> list[Line]:
    """Return a table of the differences from the first run in the first step, by tensor: the largest absolute and the relative one.

    The tensor with the largest difference comes first.
    """
    others = list(result.runs)[1:]
    head = (f"{result.label(name)} {column}" for name in others for column in ("max abs", "relative"))
    table: list[Line] = [("tensor", *head)]
    largest_by_tensor = {
        name: max((largest for _, largest in tensor.from_first.values()), default=0.0)
        for name, tensor in result.pairs.items()
    }
    for tensor_name in sorted(largest_by_tensor, key=largest_by_tensor.__getitem__, reverse=True):
        cells, tensor = [tensor_name], result.pairs[tensor_name]
        for name in others:
            norm, largest = tensor.from_first[name]
            cells += [f"{largest:.2e}", f"{relative(norm, tensor.distances[name].norm):.2e}"]
        table.append(tuple(cells))
    return table


def identical(result: Result) -> list[str]:
    """Return how many tensors of the first step are bit-identical in the last two runs, a line for each pass."""
    if len(result.runs) < 2:
        return []
    label, other_label = map(result.label, list(result.runs)[-2:])
    lines = [f"{label} and {other_label}, step 1:"]
    for pass_name in dict.fromkeys(map(pass_of, result.pairs)):
        differs = {
            name: not pair.last_two_identical
            for name, pair in result.pairs.items()
            if pass_of(name) == pass_name
        }
        first = "".join(f"; {name} is not" for name in [name for name in differs if differs[name]][:1])
        lines.append(
            f"- {pass_name}: {len(differs) - sum(differs.values())} of {len(differs)} tensors bit-identical{first}"
        )
    return lines


def replicas(result: Result) -> list[str]:
    """Return how many tensors are equal on all ranks that hold them, and the first that is not, a line for each run."""
    lines = []
    for name, run in result.runs.items():
        count = sum(len(entry["tensors"]) for entry in run.dump.steps.values())
        equal = f"{result.label(name)}: {count - len(run.differing)} of {count} tensors equal on all ranks that hold them"
        first = (
            f"; {tensor} of step {step} differs on ranks {ranks}" for step, tensor, ranks in run.differing[:1]
        )
        lines.append("".join((equal, *first)))
    return lines
