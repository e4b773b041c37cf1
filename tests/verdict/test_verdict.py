"""How one tensor is judged: what is too far, what is too small to prove anything."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import describe
from lockstep.plan.config import BETAS
from lockstep.verdict.distance import Distance, Size, clip_factors
from lockstep.verdict.judgement import (
    EXACT,
    LIMIT,
    ROUNDOFF,
    Judgement,
    Yardstick,
    is_vector_gradient,
    is_zero,
    measure,
    own_update_tolerance,
    tolerance,
    typical_error,
    yardstick_tolerance,
)
from lockstep.verdict.module_results import ModuleResults
from lockstep.verdict.result import Findings, Result
from lockstep.verdict.scalars import Loss, Norm, float32_norm_error
from lockstep.verdict.tensor_report import by_itself

F32 = ROUNDOFF["F32"]
INF = math.inf


def size(error, norm, *, largest_error=None, change=None):
    largest_error = error / 10 if largest_error is None else largest_error
    change = norm if change is None else change
    return Distance(error, largest_error, norm, norm / 10, norm, change, change / 10, 1.0)


def row(error, *, ddp=1e-7, norm=1.0, change=None, largest_error=None, name="gradient/w"):
    mine = size(error, norm, largest_error=largest_error, change=change)
    return judge(mine, size(ddp, norm).errors, name=name)


def judge(distance, measure, *, name="gradient/w"):
    return Judgement(1, name, distance, *tolerance(name, distance, measure, F32))


def yardstick(error, *, norm=1.0, noise=0.0):
    mine = size(error, norm)
    return Judgement(1, "gradient/w", mine, *yardstick_tolerance(mine, "fp32", Size(noise, noise / 10)))


@pytest.mark.parametrize(
    "error, too_far", [(0.0, False), (1e-7, False), (4e-7, False), (7e-7, True), (1.0, True), (INF, True)]
)
def test_a_multiple_of_the_yardstick(error, too_far):
    assert row(error).too_far is too_far


def test_one_element_far_off_is_enough():
    assert not row(1e-7).too_far and row(1e-7, largest_error=1e-6).too_far


@pytest.mark.parametrize(
    "numbers",
    [
        {"error": math.nan},
        {"error": INF, "ddp": 1.0},
        {"error": INF, "ddp": INF},
        {"error": 0.0, "norm": INF},
        {"error": INF, "ddp": INF, "norm": INF},
    ],
)
def test_what_is_not_finite_is_too_far(numbers):
    assert row(**numbers).too_far
    assert yardstick(INF).too_far and yardstick(INF, norm=INF).too_far and yardstick(math.nan).too_far


def test_a_tensor_that_ddp_gets_exactly_right_allows_a_few_unit_roundoffs():
    assert not row(3 * F32, ddp=0.0).too_far and row(5 * F32, ddp=0.0).too_far


def test_the_batch_is_equal_or_not():
    equal, other = (judge(size(error, 5), EXACT, name="batch/labels") for error in (0, 1))
    assert equal.judged and not equal.too_far and other.too_far


def test_noise_is_not_judged_and_can_still_be_too_far():
    """A gradient that cancels: DDP is off by its whole norm. Zeros would agree, so agreement counts for nothing."""
    noise = row(1e-9, ddp=1e-9, norm=1e-9)
    assert not noise.too_far and not noise.judged
    assert row(1e-6, ddp=1e-9, norm=1e-9).too_far
    assert not row(0.0, ddp=0.0, norm=0.0).too_far


def test_a_yardstick_far_from_the_reference_measures_nothing():
    assert not yardstick(LIMIT["fp32"] / 2).too_far and yardstick(2 * LIMIT["fp32"]).too_far
    quiet = yardstick(
        1e-9, norm=1e-9, noise=1e-3
    )  # all rounding noise: no reason to reject it, nothing to judge
    assert not quiet.too_far and not quiet.judged


@pytest.mark.parametrize("kind, roundoffs", [("exp_avg", 8), ("exp_avg_sq", 16), ("parameter", 4)])
def test_an_update_has_no_yardstick_but_its_unit_roundoffs(kind, roundoffs):
    near, far = (row(share * roundoffs * F32, ddp=1.0, change=1e-3, name=f"{kind}/w") for share in (0.9, 1.1))
    assert not near.too_far and far.too_far


def test_a_parameter_is_judged_by_its_update():
    assert row(1e-8, change=1e-3, name="parameter/w").judged
    assert not row(1e-8, change=1e-9, name="parameter/w").judged


LAYOUT = SimpleNamespace(names=describe(BUILT_IN["tiny-qwen2"]).names)


def findings(name, rows, losses=(), differ=(), baseline="ddp"):
    """Those of a run whose tensors are its rows: matrices all of them."""
    dump = SimpleNamespace(
        steps={1: {"replicas_differ": {each: [1] for each in differ}}},
        expected=lambda step: {one.name: (4, 4) for one in rows},
        missing=(),
        label=name,
        layout=LAYOUT,
    )
    return Findings(name, dump, baseline, list(losses), rows=rows)


def result(*runs, baseline="ddp", has_reference=False):
    return Result({run.name: run for run in runs}, baseline, [], has_reference)


def test_a_module_whose_inputs_differ_between_ranks_is_not_called_wrong_by_itself():
    """Which copy it had is not known. What comes before, and the output that differs itself, is. Negative control: no copies differ."""
    names = ["forward/a", "forward/b", "forward/c"]
    rows = [row(0.1, name=name) for name in names]
    far = [row(9.0, name=name) for name in names]
    assert all(one.too_far for one in far)
    for differ, named in (([], names), (["forward/b"], names[:2]), (["gradient/b"], names)):
        run = findings("fsdp", [*rows, row(0.1, name="gradient/b")], differ=differ)
        run.alone = ModuleResults(dump="0" * 64, rows=far, choices=[])
        assert [one.name for one in run.by_themselves] == named
        assert len(run.after_unlike) == 3 - len(named)
        assert ("are computed after tensors" in by_itself(run)) == (len(named) < 3)


def outcome(*arguments, **options):
    return result(findings("fsdp", *arguments, **options)).outcome


def test_all_too_small_is_not_a_pass():
    small = [row(1e-9, ddp=1e-9, norm=1e-9, name=name) for name in ("forward/a", "gradient/w")]
    assert outcome(small) == "NOT JUDGED"
    assert findings("fsdp", small).unjudged == ["forward of step 1", "gradient of step 1"]
    assert outcome([row(1e-7), row(1e-9, ddp=1e-9, norm=1e-9, name="gradient/v")]) == "PASS"


def test_one_kind_or_one_step_without_a_judged_tensor_is_not_a_pass():
    assert outcome([row(1e-7), row(0.0, change=0.0, name="parameter/w")]) == outcome([]) == "NOT JUDGED"


def test_the_first_in_execution_order_is_named():
    rows = [row(1e-7, name="forward/a"), row(1e-3, name="forward/b"), row(1e-1, name="gradient/w")]
    assert [failure[2] for failure in findings("fsdp", rows).failures] == ["forward/b", "gradient/w"]
    assert outcome(rows) == "FAIL"
    assert findings("fsdp", rows, differ=["forward/a"]).failures[0][2] == "forward/a"


@pytest.mark.parametrize(
    "loss, verdict", [(7.0, "PASS"), (7.0000005, "PASS"), (7.00001, "FAIL"), (math.nan, "FAIL")]
)
def test_the_loss_of_every_dp_rank(loss, verdict):
    assert outcome([row(1e-7)], [Loss(1, 0, 7.0, {"ddp": 7.0, "fsdp": loss}, 1e-6)]) == verdict


def test_a_single_draw_that_came_out_small_is_no_measure():
    """Of the gradient of a vector at least the median over all such gradients counts, and no more for anything else."""
    typical = typical_error([size(error, 2.0) for error in (2e-7, 4e-7, 8e-6)])
    assert typical.norm == pytest.approx(2e-7) and typical.largest == pytest.approx(2e-7)
    lucky, usual = size(1e-9, 2.0), size(1e-6, 2.0)
    assert measure(lucky, typical) == pytest.approx((4e-7, 4e-8)) and measure(usual, typical) == usual.errors
    assert measure(lucky) == lucky.errors and typical_error([]) == EXACT


@pytest.mark.parametrize(
    "name, shape, found",
    [
        ("gradient/gate", [], True),
        ("gradient/bias", [8], True),
        ("gradient/weight", [8, 8], False),
        ("forward/gate", [], False),
    ],
)
def test_the_gradient_of_a_scalar_is_a_single_draw_as_well(name, shape, found):
    assert is_vector_gradient(name, {"shape": shape}) == found


@pytest.mark.parametrize(
    "loss, verdict", [(7.0, "PASS"), (7.00006, "PASS"), (7.0001, "FAIL"), (math.nan, "FAIL")]
)
def test_the_loss_of_every_run_against_its_own_reference(loss, verdict):
    """DDP's, too, which is held against no other run's. Without a reference there is nothing to hold it against."""
    for exact, expected in (({"fsdp": 7.0}, verdict), ({}, "FAIL" if math.isnan(loss) else "PASS")):
        losses = [Loss(1, 0, 7.0, {"fsdp": loss}, 1e-6, exact, 7.0 * LIMIT["fp32"])]
        assert outcome([row(1e-7)], losses, baseline="fsdp") == expected


@pytest.mark.parametrize(
    "ddp, fsdp, blamed",
    [
        (7.0, 7.0000005, ""),
        (7.00001, 7.0000005, "ddp"),
        (7.1, 7.0000005, "ddp"),
        (math.nan, 7.0, "ddp"),
        (7.0, 7.00001, "fsdp"),
        (7.0000009, 6.9999995, "fsdp"),  # both are near the reference
        (7.00001, 6.99999, "fsdp"),
        (7.1, 7.2, "ddp fsdp"),
        (7.00001, 7.00001, ""),
    ],
)
def test_where_the_losses_of_two_runs_differ_the_one_that_is_off_is_blamed(ddp, fsdp, blamed):
    losses = [
        Loss(1, 0, 7.0, {"ddp": ddp, "fsdp": fsdp}, 1e-6, {"ddp": 7.0, "fsdp": 7.0}, 7.0 * LIMIT["fp32"])
    ]
    failed = [run for run in ("ddp", "fsdp") if any(loss.problem(run, "ddp") for loss in losses)]
    assert " ".join(failed) == blamed


def test_a_tensor_that_is_zero_in_exact_arithmetic_may_be_noise():
    """As the gradients of queries and keys over a single position. It is not judged, and may not be more than noise."""
    noise, zero = Size(1e-6, 1e-7), size(1e-7, 0.0)
    least = measure(size(0.0, 0.0), None, noise)
    small = judge(zero, least)
    assert not small.too_far and not small.judged
    assert judge(size(1e-5, 0.0), least).too_far and judge(zero, measure(size(0.0, 0.0))).too_far
    assert is_zero(zero, noise, "fp32") and not is_zero(size(0.0, 1e-9), noise, "fp32")
    # DDP's own may be the share of the pass's scale, noise / unit roundoff, that any of its tensors may be off by.
    allowed = LIMIT["fp32"] * 1e-6 / F32
    within, beyond = (yardstick(share * allowed, norm=0.0, noise=1e-6) for share in (0.9, 1.1))
    assert not within.too_far and beyond.too_far


def test_vectors_that_were_not_rounded_have_a_median_of_their_own():
    """Where each module is computed from the run's tensors. A scalar, whose error may be small by chance, has that of the rounded ones."""
    errors = {"bias": 1e-3, "other bias": 2e-3, "norm": 1e-7, "other norm": 2e-7, "scale": 1e-7}
    found = {f"gradient/{name}": size(error, 1.0) for name, error in errors.items()}
    entries = {name: {"shape": [1 if "scale" in name else 8], "dtype": "F32"} for name in found}
    for precision, alone, of_norm in (
        ("autocast", True, 1e-7),
        ("autocast", False, 2e-7),
        ("fp32", True, 2e-7),
    ):
        yardstick = Yardstick(found, entries, precision, alone=alone)
        allowed = {
            name: yardstick.tolerance(f"gradient/{name}", found[f"gradient/{name}"]).norm for name in errors
        }
        assert allowed["norm"] == pytest.approx(4 * of_norm + 4 * F32), (precision, alone)
        of_scale = 1.5e-3 if precision == "autocast" and alone else 2e-7
        assert allowed["scale"] == pytest.approx(4 * of_scale + 4 * F32), (precision, alone)
        assert allowed["other bias"] == pytest.approx(8e-3 + 4 * F32)


@pytest.mark.parametrize("elements", [1 << 10, 1 << 16, 1 << 22])
def test_what_a_norm_may_be_off_by_that_was_summed_in_float32(elements):
    """Measured with torch's own sum, in other orders; a norm that counts a part twice is off by more."""
    values = torch.randn(elements, generator=torch.Generator().manual_seed(3)) * 1e-3
    held = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    allowed = float32_norm_error(held, float(torch.linalg.vector_norm(values)), elements)
    orders = [values.flip(0), values[torch.randperm(elements)], values.sort().values]
    norms = [float(torch.linalg.vector_norm(order)) for order in orders]
    norms.append(float(torch.stack([torch.linalg.vector_norm(part) for part in values.chunk(4)]).norm()))
    assert all(not Norm(1, norm, held, allowed).off for norm in norms)
    more = math.sqrt(held**2 + held**2 / 500)
    assert Norm(1, more, held, allowed).off and Norm(1, math.nan, held, allowed).off


def test_a_norm_that_is_off_is_not_what_was_clipped_by():
    assert Norm(1, 1.1, 1.0).used == 1.0 and Norm(1, 1.0 + 1e-6, 1.0, 1e-5).used == 1.0 + 1e-6


# Another convention: what is made of an intermediate tensor is right, though the tensor is not


def step_of(*rows, differ=(), losses=()):
    """What is found of a run with these rows, each (name, relative error, scale), of tolerance 1e-6."""
    found = []
    for name, error, scale in rows:
        distance = dataclasses.replace(size(error, 1.0), scale=scale)
        found.append(Judgement(1, name, distance, 1e-6, 1e-7))
    return findings("mine", found, losses, differ)


def verdict(run):
    return result(run).verdict("mine")


RIGHT = [("forward/lm_head", 0.0, 1.0), ("gradient/a", 0.0, 1.0), ("gradient/b", 0.0, 1.0)]
SCALED = [("backward/lm_head", 1023.0, 1024.0), ("backward/a", 1023.0, 1024.0)]


def test_a_loss_scale_that_is_taken_off_again_is_a_convention():
    run = step_of(*RIGHT, *SCALED, ("gradient/c", 5e-7, 1.0))
    assert [row.name for row in run.conventions] == ["backward/lm_head", "backward/a"]
    assert not run.failures and verdict(run) == "PASS"
    # nor does it count in how near the run comes to its tolerances
    assert run.nearest == pytest.approx(0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"gradient/a": (1e-3, 1.0)},
        {"forward/lm_head": (1e-3, 1.0)},
        # so little that the gradients, which are tolerated 1e-6, might not show it
        {"backward/lm_head": (1.5e-6, 1.0), "backward/a": (1.5e-6, 1.0)},
    ],
)
def test_what_is_made_of_it_must_be_right_and_have_shown_it(change):
    rows = [(name, *change.get(name, (error, scale))) for name, error, scale in [*RIGHT, *SCALED]]
    run = step_of(*rows)
    assert verdict(run) == "FAIL" and run.nearest > 1


def test_what_is_made_of_it_must_be_equal_on_all_ranks():
    assert verdict(step_of(*RIGHT, *SCALED, differ=["gradient/b"])) == "FAIL"


def test_the_loss_must_be_right():
    for mine, expected in ((7.0, "PASS"), (7.1, "FAIL")):
        losses = [Loss(1, 0, 7.0, {"ddp": 7.0, "mine": mine}, 1e-6)]
        assert verdict(step_of(*RIGHT, *SCALED, losses=losses)) == expected


def test_a_bug_beside_a_convention_is_the_first_failure():
    """A gradient is right without the factor. Where none is, the factor itself is the bug."""
    wrong = [(f"gradient/{name}", 0.5, 1.5) for name in "cdef"]
    failures = step_of(*RIGHT, *SCALED, *wrong).failures
    assert [failure[2] for failure in failures] == [name for name, *_ in wrong]
    scaled = [
        (name, 1023.0, 1024.0) if name.startswith("gradient/") else (name, e, s) for name, e, s in RIGHT
    ]
    assert step_of(*SCALED, *scaled).failures[0][2] == "backward/lm_head"


def test_the_clipping_factors_in_use():
    """torch's adds 1e-6 to the norm, and may be below 1 for a norm just below the bound."""
    factors = lambda norm, bound: clip_factors({"max_grad_norm": bound}, norm)  # noqa: E731
    assert factors(2.0, 0.0) == [1.0] and factors(0.4, 0.5) == [1.0]
    assert factors(2.0, 0.5) == [0.5 / (2.0 + 1e-6), 0.25]
    torchs, plain = factors(0.5 - 1e-7, 0.5)
    assert torchs < 1 and plain == 1


def test_a_small_factor_that_most_gradients_cannot_show_is_no_convention():
    """As in autocast: the gradients are tolerated more than the factor that they would have."""
    rows = step_of(("forward/lm_head", 0.0, 1.0), ("backward/lm_head", 0.03, 1.03)).rows
    rows += [
        Judgement(1, f"gradient/{name}", size(error, 1.0), 0.05, 0.05)
        for name, error in (("a", 0.03), ("b", 0.03), ("c", 0.06))
    ]
    assert findings("mine", rows).failures[0][2] == "backward/lm_head"


@pytest.mark.parametrize(
    "of_fsdp, differs, verdict",
    [
        (2e-4, (), "NOT JUDGED"),  # both are far: the model jumps there
        (9e-6, (), "FAIL"),  # the other run is near, so DDP is wrong
        (1e-7, (), "FAIL"),
        (2e-4, ("gradient/w",), "FAIL"),  # replicas of correct runs do not differ
    ],
)
def test_a_yardstick_that_is_too_far(of_fsdp, differs, verdict):
    ddp = findings("ddp", [yardstick(1e-4)], differ=differs)
    found = result(ddp, findings("fsdp", [row(of_fsdp, ddp=1e-4)]), has_reference=True)
    assert ddp.rows[0].too_far and found.verdict("ddp") == verdict
    # the other run is near enough, but not four times nearer
    just = findings("ddp", [yardstick(3e-5)], differ=())
    near = result(just, findings("fsdp", [row(9e-6, ddp=3e-5)]), has_reference=True)
    assert just.rows[0].too_far and near.verdict("ddp") == "NOT JUDGED"
    # Modules by themselves tell grown rounding errors from a bug
    for by_modules, verdict_by_modules in (
        (yardstick(1e-7), "PASS"),
        (yardstick(1e-4), "NOT JUDGED"),
        (row(1e-9, ddp=1e-9, norm=1e-9), "NOT JUDGED"),
    ):
        judged = findings("ddp", [yardstick(1e-4)], differ=())
        judged.alone = ModuleResults(dump="0" * 64, rows=[by_modules], choices=[])
        both = result(judged, findings("fsdp", [row(2e-4, ddp=1e-4)]), has_reference=True)
        assert both.verdict("ddp") == verdict_by_modules
    # nothing tells a jump from a bug
    assert result(ddp, has_reference=True).verdict("ddp") == "FAIL"


def test_an_update_whose_rounding_errors_are_not_derived():
    """DDP is the yardstick, and must be near itself; a bfloat16 optimizer is allowed half of its change. Or the step once more is, if its
    errors are larger, as far as DDP may be off."""

    def too_far(distance, ddp, limit, of_run=EXACT):
        tolerated = own_update_tolerance(distance, ddp, limit, F32, of_run)
        return Judgement(1, "parameter/w", distance, *tolerated).too_far

    ddp, far, limit, lowered = size(5e-5, 1.0), size(0.3, 1.0), Size(1e-4, 1e-2), Size(0.5, 0.5)
    assert [too_far(each, ddp, limit) for each in (ddp, size(1.9e-4, 1.0), size(2.5e-4, 1.0))] == [
        False,
        False,
        True,
    ]
    assert too_far(far, far, limit) and not too_far(far, far, lowered)
    near, once_more, broken = size(1e-5, 1.0), Size(2e-5, 2e-5), Size(0.3, 0.3)
    assert too_far(size(7e-5, 1.0), near, limit) and not too_far(size(7e-5, 1.0), near, limit, once_more)
    assert not too_far(size(9e-5, 1.0), near, limit, broken) and too_far(size(2e-4, 1.0), near, limit, broken)


@pytest.mark.parametrize("is_ddp", [True, False])
def test_one_element_of_an_update_that_all_but_cancels(is_ddp):
    """Its error may be as large as that of all of the tensor, if the run's step once more has it, and no larger."""
    limit, near = Size(1e-4, 1e-2), size(1e-9, 100.0)
    cancels = Distance(9e-3, 9e-3, 100.0, 0.1, 100.0, 100.0, 1e-3, 1.0)
    for distance, once_more, is_right in (
        (cancels, Size(9e-3, 9e-3), True),
        (cancels, Size(1e-4, 1e-4), False),
        (cancels, EXACT, False),
        (dataclasses.replace(cancels, error=2e-2, largest_error=2e-2), Size(2e-2, 2e-2), False),
    ):
        tolerated = own_update_tolerance(distance, distance if is_ddp else near, limit, F32, once_more)
        assert Judgement(1, "parameter/w", distance, *tolerated).too_far != is_right


def test_a_moment_that_all_but_cancels_has_the_rounding_errors_of_its_terms():
    """AdamW of torch on single elements, whose second gradient nearly undoes the first moment."""
    generator = torch.Generator().manual_seed(0)
    beta, u = BETAS[0], ROUNDOFF["F32"]
    too_far = {"of the moment": 0, "of its terms": 0}
    for _ in range(300):
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        first = torch.rand(1, generator=generator)
        parameter.grad = first.clone()
        optimizer.step()
        kept = optimizer.state[parameter]["exp_avg"].clone()
        parameter.grad = -kept * beta / (1 - beta) * (1 + 1e-3 * torch.rand(1, generator=generator))
        optimizer.step()
        exact = beta * kept.double() + (1 - beta) * parameter.grad.double()
        error = float((optimizer.state[parameter]["exp_avg"].double() - exact).abs())
        size, terms = float(exact.abs()), float(beta * kept.double().abs())
        distance = Distance(error, error, size, size, size, size, size, 1.0, Size(terms, terms))
        alone = dataclasses.replace(distance, terms=Size(0.0, 0.0))
        too_far["of the moment"] += error > tolerance("exp_avg/x", alone, Size(0.0, 0.0), u).norm
        too_far["of its terms"] += error > tolerance("exp_avg/x", distance, Size(0.0, 0.0), u).norm
    assert too_far["of the moment"] > 100 and too_far["of its terms"] == 0
