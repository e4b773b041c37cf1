"""The tables of the report of a tensor-level comparison: what was compared, and how far apart everything is."""

from collections.abc import Callable

from lockstep.dumps.dump import Dump
from lockstep.ground import origin
from lockstep.inputs.architectures import in_words
from lockstep.plan.mesh import Mesh
from lockstep.verdict.distance import relative
from lockstep.verdict.judgement import COMPUTED, pass_of
from lockstep.verdict.result import Result

Line = str | tuple[str, ...]  # a line of text, or a row of a table
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
    """Model, options, meshes, versions, commits, machines and dates of the comparison."""
    run = next(iter(result.runs.values())).dump.run
    config = run["config"]

    def alike(of: Callable[[Dump], str]) -> str:
        """The value if all have the same, else each with its run's label."""
        found = {result.label(name): of(each.dump) for name, each in result.runs.items()}
        values = set(found.values())
        return (
            values.pop()
            if len(values) == 1
            else ", ".join(f"{label}: {value}" for label, value in found.items())
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
    """All tensors that are too far, in order of execution, with what is tolerated of each."""
    table: list[Line] = [("run", "step", "tensor", "error")]
    for name, run in result.runs.items():
        rows = sorted(run.too_far, key=lambda row: (row.step, run.order[row.step][row.name]))
        table += [(result.label(name), str(row.step), row.name, row.describe()) for row in rows]
    return table


def losses(result: Result) -> list[Line]:
    labels = map(result.label, result.runs)
    reference = ["reference"] if result.has_reference else []
    table: list[Line] = [("step", "DP rank", *reference, *labels, "tolerated")]
    for loss in result.losses:
        base = loss.by_strategy[result.baseline]
        exact = [f"{loss.reference:.9f}"] if result.has_reference else []
        own = [
            f"{loss.by_strategy[name]:.9f} ({relative(abs(loss.by_strategy[name] - base), abs(base)):.1e})"
            for name in result.runs
        ]
        table.append(
            (str(loss.step), str(loss.dp_rank), *exact, *own, f"{relative(loss.tolerated, abs(base)):.1e}")
        )
    return table


def norms(result: Result, kind: str) -> list[Line]:
    """2-norms in the first step, by run, and the largest relative difference from the baseline's."""
    table: list[Line] = [("tensor", *map(result.label, result.runs), "relative")]
    for name, tensor in result.pairs.items():
        if name.startswith(f"{kind}/"):
            own = {run: distance.own_norm for run, distance in tensor.distances.items()}
            base = own[result.baseline]
            apart = max(abs(norm - base) for norm in own.values())
            table.append((name, *(f"{norm:.6e}" for norm in own.values()), f"{relative(apart, base):.1e}"))
    return table


def worst(result: Result) -> list[Line]:
    """By run and pass: the largest relative distance, and the largest share of its tolerance."""
    table: list[Line] = [("run", "pass", "tensors", "largest distance", "largest share of the tolerated")]
    for name, run in result.runs.items():
        for which in ("batch", *COMPUTED):
            rows = [row for row in run.judged if row.which_pass == which]
            if rows:
                far = max(rows, key=lambda row: row.distance.relative)
                near = max(rows, key=lambda row: row.multiple)
                of = f"{far.distance.relative:.1e} of {relative(far.tolerated, far.distance.norm):.1e}: {far.name}"
                share = f"{near.multiple:.2f}: {near.name}"
                table.append((result.label(name), which, str(len(rows)), of, share))
    return table


def differences(result: Result) -> list[Line]:
    """By tensor of the first step, the largest first: the largest absolute and the relative difference from the first run."""
    others = list(result.runs)[1:]
    head = (f"{result.label(name)} {what}" for name in others for what in ("max abs", "relative"))
    table: list[Line] = [("tensor", *head)]
    far = {
        name: max((far for _, far in one.from_first.values()), default=0.0)
        for name, one in result.pairs.items()
    }
    for tensor in sorted(far, key=far.__getitem__, reverse=True):
        cells, measured = [tensor], result.pairs[tensor]
        for name in others:
            size, largest = measured.from_first[name]
            cells += [f"{largest:.2e}", f"{relative(size, measured.distances[name].norm):.2e}"]
        table.append(tuple(cells))
    return table


def identical(result: Result) -> list[str]:
    """By pass: the number of tensors of the first step that are bit-identical in the last two runs."""
    if len(result.runs) < 2:
        return []
    one, other = map(result.label, list(result.runs)[-2:])
    lines = [f"{one} and {other}, step 1:"]
    for which in dict.fromkeys(map(pass_of, result.pairs)):
        odd = {
            name: not pair.last_two_identical for name, pair in result.pairs.items() if pass_of(name) == which
        }
        first = "".join(f"; {name} is not" for name in [name for name in odd if odd[name]][:1])
        lines.append(f"- {which}: {len(odd) - sum(odd.values())} of {len(odd)} tensors bit-identical{first}")
    return lines


def replicas(result: Result) -> list[str]:
    lines = []
    for name, run in result.runs.items():
        count = sum(len(entry["tensors"]) for entry in run.dump.steps.values())
        same = f"{result.label(name)}: {count - len(run.differing)} of {count} tensors equal on all ranks that hold them"
        first = (
            f"; {tensor} of step {step} differs on ranks {ranks}" for step, tensor, ranks in run.differing[:1]
        )
        lines.append("".join((same, *first)))
    return lines
