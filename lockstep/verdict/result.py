"""What a comparison found: the rows, failures and verdict of every run. docs/verification.md says what a verdict means."""

import functools
import math
from dataclasses import dataclass, field

from lockstep.dumps.dump import Dump
from lockstep.verdict.distance import Distance, Measured, relative
from lockstep.verdict.float64 import GROUPS
from lockstep.verdict.judgement import MULTIPLE, Judgement
from lockstep.verdict.loss_curves import worst
from lockstep.verdict.module_results import ModuleResults
from lockstep.verdict.rows import described
from lockstep.verdict.scalars import Chosen, Loss, Norm

# A gradient would have shown a deviation if at most so much of that is tolerated of the gradient.
FINER = 0.5
INPUTS = ("batch", "forward", "backward")  # kinds of tensors that modules compute from
Failure = tuple[int, float, str, str]  # (step, position in it, tensor, what is wrong)


@dataclass(frozen=True)
class Cause:
    """A cause and the evidence for it. `value` is a number of it that must be the same in all steps."""

    name: str
    evidence: str
    value: float | None = field(default=None, compare=False)


@dataclass
class Diagnosis:
    """The causes of a failure (none: it is not explained), what is excluded, and what is odd about the first wrong tensor."""

    causes: list[Cause] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """What was found of one run. Rows are in the order of execution within a step.

    All fields must be complete before a property is read, because properties are cached.
    """

    name: str
    dump: Dump
    baseline: str  # the run with whose losses this run's are compared
    losses: list[Loss]  # of all runs
    # Entry of the effective contract -> "entry is a, not b", where it is not the baseline's
    configuration: dict[str, str] = field(default_factory=dict)
    rows: list[Judgement] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    choices: list[Chosen] = field(default_factory=list)
    alone: ModuleResults | None = None  # the run's modules by themselves, if they were computed
    diagnosis: Diagnosis | None = None  # of a run that failed, if it was compared with a reference

    def rows_of(self, step: int) -> dict[str, Judgement]:
        return {row.name: row for row in self.rows if row.step == step}

    def norm_of(self, step: int) -> Norm | None:
        return next((norm for norm in self.norms if norm.step == step), None)

    @functools.cached_property
    def judged(self) -> list[Judgement]:
        """The rows of tensors that are large enough to judge."""
        return [row for row in self.rows if row.judged]

    @functools.cached_property
    def unjudged(self) -> list[str]:
        """The kinds of tensors of which none was large enough to judge in some step; "all passes" if there are no rows."""
        if not self.rows:
            return ["all passes"]
        kinds, judged = ({(row.step, row.kind) for row in rows} for rows in (self.rows, self.judged))
        return [f"{kind} of step {step}" for step, kind in sorted(kinds - judged)]

    @functools.cached_property
    def differing(self) -> list[tuple[int, str, list[int]]]:
        """(step, tensor, ranks whose replica differs) for each tensor that is not equal on all ranks that hold it."""
        return [
            (step, name, ranks)
            for step, entry in self.dump.steps.items()
            for name, ranks in entry["replicas_differ"].items()
        ]

    @functools.cached_property
    def conventions(self) -> list[Judgement]:
        """The rows of intermediate tensors that are not the reference's, in a step that gets to the right result in another way.

        Examples are gradients under a loss scale that is taken off again, and rotary tables of other positions.
        """
        conventions = []
        for step in self.dump.steps:
            rows = self.rows_of(step)
            candidates = self._seen_by_gradients(step, rows)
            head = next(
                (row for row in candidates if row.name == self.dump.layout.names.logits_gradient), None
            )
            gradients = [row for row in rows.values() if row.kind == "gradient" and row.judged]
            if self._ends_right(step, rows):
                conventions += candidates
            elif head is not None and any(_shows(row, head.distance.scale) for row in gradients):
                # A gradient is right without the factor, so it is taken off again. What is wrong is something else.
                factor = head.distance.scale
                conventions += [
                    row for row in candidates if row.kind == "backward" and _is_multiple(row, factor)
                ]
        return conventions

    def _is_end(self, row: Judgement) -> bool:
        """Whether a tensor is not an intermediate one: an input of a step's forward pass, or one of the results that count."""
        return row.kind in ("batch", "gradient") or row.name == self.dump.layout.names.logits

    def _ends_right(self, step: int, rows: dict[str, Judgement]) -> bool:
        """Whether the batch, the logits, the losses, all gradients of parameters and their norm are right in a step."""
        ends = {name: row for name, row in rows.items() if self._is_end(row)}
        norm = self.norm_of(step)
        logits = self.dump.layout.names.logits
        return (logits in ends or (step, logits) in self.skipped) and not (
            any(row.too_far for row in ends.values())
            or any(other == step and name in ends for other, name, _ in self.differing)
            or any(other == step for other, _ in self.not_computed)
            or (norm is not None and norm.off)
            or any(loss.problem(self.name, self.baseline) for loss in self.losses if loss.step == step)
        )

    def _seen_by_gradients(self, step: int, rows: dict[str, Judgement]) -> list[Judgement]:
        """Return the rows of intermediate tensors that are so much too far that the gradients of matrices would have shown it."""
        shapes = self.dump.expected(step)
        tolerated = (
            relative(row.tolerated, row.distance.norm)
            for row in rows.values()
            if row.kind == "gradient" and row.judged and len(shapes[row.name]) > 1
        )
        coarsest = max(tolerated, default=math.inf)
        return [
            row
            for row in rows.values()
            if row.too_far
            and not self._is_end(row)
            and row.kind in ("forward", "backward")
            and coarsest <= FINER * row.distance.relative < math.inf
        ]

    @functools.cached_property
    def excused(self) -> set[tuple[int, str]]:
        """(step, tensor) of each convention."""
        return {(row.step, row.name) for row in self.conventions}

    @functools.cached_property
    def too_far(self) -> list[Judgement]:
        """The rows of tensors that are too far and not a convention."""
        return [row for row in self.rows if row.too_far and (row.step, row.name) not in self.excused]

    @functools.cached_property
    def counted(self) -> list[Judgement]:
        """The rows that count towards the verdict: of tensors that are large enough to judge and not a convention."""
        return [row for row in self.judged if (row.step, row.name) not in self.excused]

    @property
    def nearest(self) -> float:
        """The largest `multiple` of the tensors that count; 0 if there are none."""
        return max((row.multiple for row in self.counted), default=0.0)

    @functools.cached_property
    def order(self) -> dict[int, dict[str, int]]:
        """Step -> tensor -> its place in the order of execution."""
        return {
            step: {name: i for i, name in enumerate(self.dump.expected(step))} for step in self.dump.steps
        }

    @functools.cached_property
    def skipped(self) -> list[tuple[int, str]]:
        """(step, tensor) of each output of a module, or gradient at it, that the run lacks, though it uses the module.

        So it is where one kernel computes several modules.
        """
        kinds = {(row.step, row.kind) for row in self.judged}
        return [
            (step, name)
            for step, name in self.dump.missing
            if name.startswith(("forward/", "backward/")) and (step, name.partition("/")[0]) in kinds
            if self._uses(step, name.partition("/")[2])
        ]

    @functools.cached_property
    def not_computed(self) -> list[tuple[int, str]]:
        """(step, tensor) of each other tensor that the run lacks."""
        return [lacking for lacking in self.dump.missing if lacking not in self.skipped]

    def _uses(self, step: int, module: str) -> bool:
        """Whether gradients arrive at the weights of a module, or of the nearest one around it that has weights."""
        gradients = {
            row.path: row.distance.own_norm for row in self.rows_of(step).values() if row.kind == "gradient"
        }
        while module:
            inside = [norm for name, norm in gradients.items() if name.startswith(f"{module}.")]
            if inside:
                return any(inside)
            module = module.rpartition(".")[0]
        return any(gradients.values())

    @functools.cached_property
    def by_themselves(self) -> list[Judgement]:
        """The rows of modules that were computed from the inputs that they had in the run.

        A step with conventions has none: what follows from a tensor in another convention is not what its modules give. A tensor that is
        too far after one whose replicas differ is left out as well: the reference has one of the replicas.
        """
        return [row for row in self._module_rows if not self._follows_unlike(row)]

    @functools.cached_property
    def after_unlike(self) -> list[Judgement]:
        """The rows of modules that are too far, but were computed from inputs or weights whose replicas differ."""
        return [row for row in self._module_rows if self._follows_unlike(row)]

    @property
    def _module_rows(self) -> list[Judgement]:
        """The rows of modules by themselves, in steps without conventions."""
        steps = {step for step, _ in self.excused}
        return [row for row in self.alone.rows if row.step not in steps] if self.alone else []

    def _follows_unlike(self, row: Judgement) -> bool:
        """Whether a tensor is too far and comes after inputs of modules, or weights, whose replicas differ."""
        return row.too_far and any(
            row.step == step and self.order[step][row.name] > self.order[step][name]
            if name.partition("/")[0] in INPUTS
            else row.step > step and name.startswith("parameter/")
            for step, name, _ in self.differing
        )

    @functools.cached_property
    def choices_by_themselves(self) -> list[Chosen]:
        """The discrete choices that modules made by themselves."""
        return self.alone.choices if self.alone else []

    @functools.cached_property
    def failures(self) -> list[Failure]:
        """All failures, in the order of execution: those from the batch on, and what only a module by itself shows."""
        known = {(step, name) for step, _, name, _ in self.failures_from_batch}
        alone: list[Judgement | Chosen] = [*self.by_themselves, *self.choices_by_themselves]
        further = [
            (row.step, self._place(row.step, row.name), row.name, f"by itself, {row.describe()}")
            for row in alone
            if row.too_far and (row.step, row.name) not in known
        ]
        return sorted([*self.failures_from_batch, *further], key=lambda failure: failure[:3])

    def _place(self, step: int, name: str) -> int:
        """Return the place of a tensor in the order of execution. A choice of expert groups has that of the experts."""
        return self.order[step][name.removesuffix(GROUPS)]

    @property
    def diagnosed(self) -> Failure:
        """The failure that the diagnosis is of. There must be a failure."""
        return (self.failures_from_batch or self.failures)[0]

    @functools.cached_property
    def failures_from_batch(self) -> list[Failure]:
        """The failures of the whole computation: what is too far from the reference, which computes from the batch on."""
        alone = {(row.step, row.name): row for row in self.by_themselves}
        wrong = [
            (row.step, row.name, described(row, alone.get((row.step, row.name)))) for row in self.too_far
        ]
        for step, name, ranks in self.differing:
            if (step, name) not in self.excused:
                holders = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                wrong.append(
                    (step, name, f"is not the same on all ranks: {holders} differ{'s' * (len(ranks) == 1)}")
                )
        wrong += [(step, name, "was not computed") for step, name in self.not_computed]
        wrong += [
            (choice.step, f"forward/{choice.name}", choice.describe())
            for choice in self.choices
            if choice.too_far
        ]
        failures: list[Failure] = [
            (step, self._place(step, name), name, problem) for step, name, problem in wrong
        ]
        for norm in self.norms:
            if norm.off:
                last = max(i for name, i in self.order[norm.step].items() if name.startswith("gradient/"))
                failures.append((norm.step, last + 0.5, "gradient norm", norm.describe()))
        for loss in self.losses:
            problem = loss.problem(self.name, self.baseline)
            if problem:
                failures.append(
                    (loss.step, len(self.order[loss.step]), f"loss of DP rank {loss.dp_rank}", problem)
                )
        return sorted(failures, key=lambda failure: failure[:3])  # of one tensor, its distance first


def _shows(row: Judgement, factor: float) -> bool:
    """Whether a tensor is right, and would not be if it were `factor` times what it is."""
    return not row.too_far and relative(row.tolerated, row.distance.norm) <= FINER * abs(factor - 1)


def _is_multiple(row: Judgement, factor: float) -> bool:
    """Whether a tensor is `factor` times the reference's, as exactly as a right tensor would equal the reference's."""
    distance = row.distance
    off = abs(distance.scale - factor) * distance.change
    return max(distance.across, off) <= max(1.0, abs(factor)) * row.tolerated


@dataclass
class Result:
    """The findings of a comparison."""

    runs: dict[str, Findings]
    baseline: str  # the run with whose losses the others' are compared
    losses: list[Loss]
    has_reference: bool = False
    # Every tensor of step 1 but those of the update
    pairs: dict[str, Measured] = field(default_factory=dict)
    # Further runs, and why their training failed
    untrained: dict[str, str] = field(default_factory=dict)

    def label(self, name: str) -> str:
        """Return what a report calls a run: its label, or without a reference its folder."""
        return self.runs[name].dump.label if self.has_reference else name

    def verdict(self, name: str) -> str:
        """Return the verdict on a run, one of VERDICTS."""
        run = self.runs[name]
        if run.configuration:
            return "CONFIGURED DIFFERENTLY"
        if run.failures and not self.is_no_yardstick(name):
            return "FAIL"
        is_far = bool(run.failures) and not self.is_right_by_modules(name)
        return "NOT JUDGED" if is_far or run.unjudged else "PASS"

    def has_failed(self, name: str) -> bool:
        return self.verdict(name) in ("CONFIGURED DIFFERENTLY", "FAIL")

    @functools.cached_property
    def outcome(self) -> str:
        """The worst verdict of any run."""
        return worst([*map(self.verdict, self.runs), *["FAIL" for _ in self.untrained]])

    def is_no_yardstick(self, name: str) -> bool:
        """Whether the run is the yardstick, but too far from the reference to measure other runs by.

        This is so if all that is wrong with it are distances from the reference, and other runs share the first of them. Then the model or
        its optimizer jumps there, or is ill-conditioned, so that rounding errors alone take correct runs so far. If another run is near
        enough there, and MULTIPLE times nearer, this run is wrong.
        """
        return name == self.baseline and self.has_reference and self._all_are_far

    def is_right_by_modules(self, name: str) -> bool:
        """Whether the run is no yardstick, but all that is too far is what its modules give from the inputs that they had.

        Then rounding errors have grown on the way to these modules.
        """
        run = self.runs[name]
        right = {(row.step, row.name) for row in run.by_themselves if row.judged and not row.too_far}
        return self.is_no_yardstick(name) and right.issuperset(
            (step, name) for step, _, name, _ in run.failures
        )

    @functools.cached_property
    def _all_are_far(self) -> bool:
        """Whether all failures of the baseline are distances from the reference, and no other run is much nearer at the first."""
        run = self.runs[self.baseline]
        far = {(row.step, row.name): row for row in run.too_far}
        if not run.failures or run.differing:
            return False
        if any((step, name) not in far or name.startswith("batch/") for step, _, name, _ in run.failures):
            return False
        first = far[run.failures[0][0], run.failures[0][2]]
        distances = [
            row.distance
            for other in self.runs.values()
            for row in other.rows
            if other is not run and (row.step, row.name) == (first.step, first.name)
        ]
        return bool(distances) and not any(_is_nearer(distance, first) for distance in distances)


def _is_nearer(other: Distance, row: Judgement) -> bool:
    """Whether another run's distance is within what is tolerated of the row, and the row's is more than MULTIPLE times as large.

    Rounding errors alone do not explain that.
    """
    if other.error > row.tolerated or other.largest_error > row.tolerated_largest:
        return False
    distance = row.distance
    by_norm = distance.error > row.tolerated and MULTIPLE * other.error < distance.error
    by_largest = distance.largest_error > row.tolerated_largest
    return by_norm or (by_largest and MULTIPLE * other.largest_error < distance.largest_error)
