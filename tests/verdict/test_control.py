"""The control run as a tolerance, and when it is none."""

import math
import re

import pytest
from synthetic import control, history, spoil

from lockstep.ground.errors import UserError
from lockstep.verdict.loss_curves import compare_curves, tolerance_for


def test_a_quiet_control_tightens_the_tolerance():
    fixed, mine = tolerance_for(history()), tolerance_for(history(), control(lambda step: 4e-7))
    assert (
        mine.maximum == pytest.approx(8 * 4e-7)
        and mine.maximum < fixed.maximum
        and mine.mean < 2 * fixed.mean
    )
    assert set(mine.grad_norm) == {
        1e-6
    }  # the control's norms are the baseline's: what is always allowed is left
    assert compare_curves(history(), spoil(s9={"loss": 6.6 + 5e-6}), mine).red_loss_step == 9


def test_what_the_control_shows_is_allowed_from_that_step_on():
    late = tolerance_for(history(), control(lambda step: 6e-7 if step >= 10 else 0.0))
    assert set(late.loss[:9]) == {late.first} and late.loss[9:] == pytest.approx([4.8e-6] * 11)


def test_a_control_that_nears_the_rule_replaces_it_from_there_on():
    """Correct runs go up to four times as far as a control, so a rule of which it has used a quarter is not honest."""
    mine = tolerance_for(history(), control(lambda step: 2e-5 if step >= 5 else 2e-6, s5=1.5 * (1 + 3e-5)))
    rule = tolerance_for(history())
    assert mine.first == rule.first and mine.loss[3] == rule.maximum and mine.loss[4] == pytest.approx(1.6e-4)
    assert mine.grad_norm[3] == 1e-6 and mine.grad_norm[4] == pytest.approx(2.4e-4)


def test_bf16_is_judged_by_its_control():
    baseline = history(precision="bf16")
    mine = tolerance_for(baseline, control(lambda step: 1e-3 * step, "bf16"))
    assert mine.loss[:3] == pytest.approx([2.4e-2] * 3) and mine.maximum == pytest.approx(0.16)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda r: r.weights.update(initial_sha256="a" * 64), "which were not perturbed"),
        (lambda r: r.steps[4].update(batch_hash="x"), "step 5 was trained on different batches"),
        (lambda r: r.weights["moved"].pop(), "trained other tensors"),
    ],
)
def test_a_control_of_something_else_is_refused(change, message):
    other = control(lambda step: 1e-7)
    change(other)
    with pytest.raises(UserError, match=message):
        tolerance_for(history(), other)


def judged(other=None, baseline=None, **changes):
    """The outcome for a correct run, or `other`, with a control whose difference is gap(step)."""
    baseline = baseline or history(precision=changes.get("precision", "fp32"))
    other = other or history("fsdp", changes.get("precision", "fp32"))
    return compare_curves(baseline, other, tolerance_for(baseline, control(**changes)))


HONEST = {
    "one ulp": lambda n: 4.8e-7,
    "amplified steadily": lambda n: 2e-7 * 1.3**n,
    "a batch that amplifies thirtyfold": lambda n: 1.5e-5 if n == 9 else 5e-7,
    "a late onset": lambda n: 4e-7 if n < 12 else 4e-5,
}


@pytest.mark.parametrize("name", HONEST)
def test_what_rounding_does_is_a_tolerance(name):
    result = judged(gap=HONEST[name])
    assert result.outcome == "PASS" and result.doubt == ""


IMPLAUSIBLE = {
    "far off in one step": (
        lambda n: 50.0 if n == 2 else 4e-7,
        "in step 2 the control's loss is 5.0e[+]01 nats from DDP's",
    ),
    "off from the start": (lambda n: 1e-4, "in step 1 .* weights perturbed by one ulp move it by at most"),
    "off from some step on": (
        lambda n: 0.4 if n >= 3 else 4e-7,
        "in step 3 .* training amplifies rounding errors by less than 100",
    ),
    "a step of its own": (lambda n: 8e-5 if n == 9 else 5e-7, "in step 9 .* times its neighbours"),
    "the last step": (lambda n: 8e-5 if n == 20 else 5e-7, "in step 20 .* times its neighbours"),
    "of another scale": (lambda n: 0.05 * (7.5 - 0.1 * n), "in step 1 "),
    "the other way": (lambda n: -50.0 if n == 6 else -4e-7, "in step 6 "),
    "without end": (lambda n: 1e-7 * 2.3**n, "training is unstable"),
}


@pytest.mark.parametrize("name", IMPLAUSIBLE)
def test_a_control_that_shows_something_else_is_no_tolerance(name):
    gap, message = IMPLAUSIBLE[name]
    for other in (history("fsdp"), spoil(s9={"loss": 7.0}), history("fsdp", shift=8e-7)):
        result = judged(other, gap=gap)
        assert result.outcome == "NOT JUDGED" and not result.passed and re.search(message, result.doubt)
    assert (
        judged(history("fsdp", shift=0.4), gap=gap).outcome == "FAIL"
    )  # its first loss is judged without a control
    broken = spoil(s7={"loss": math.nan})
    assert judged(broken, gap=gap).outcome == "FAIL"


@pytest.mark.parametrize(
    "norms, message",
    [
        ({"s7": 15.0}, "in step 7 the control's gradient norm is 9.0e[+]00 of it from DDP's"),
        ({"s1": 1.5001}, "in step 1 the control's gradient norm"),
        ({"s7": 0.0}, "in step 7 "),
    ],
)
def test_gradient_norms_likewise(norms, message):
    result = judged(**norms)
    assert result.outcome == "NOT JUDGED" and re.search(message, result.doubt)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize(
    "values",
    [
        {"loss": 0.001},
        {"loss": 9.0},
        {"loss": 0.0},
        {"loss": -1.0},
        {"loss": math.nan},
        {"grad_norm": 15.0},
        {"grad_norm": 1e-3},
        {"grad_norm": 0.0},
        {"learning_rate": 0.1},
    ],
)
@pytest.mark.parametrize("edited", ["ddp", "control", "other", "ddp and control", "ddp and other"])
def test_whichever_history_is_edited_at_one_step(precision, values, edited):
    noise = {"fp32": 4e-7, "autocast": 1e-4, "bf16": 1e-4}[precision]
    runs = {"ddp": history(precision=precision), "other": history("fsdp", precision)}
    runs["control"] = control(lambda n: noise, precision)
    assert compare_curves(runs["ddp"], runs["other"], tolerance_for(runs["ddp"], runs["control"])).passed
    for name in edited.split(" and "):
        runs[name].steps[5].update(values)
    try:
        result = compare_curves(runs["ddp"], runs["other"], tolerance_for(runs["ddp"], runs["control"]))
    except UserError:
        return
    assert not result.passed


def test_one_outlier_opens_its_own_place_only():
    """A batch may amplify thirtyfold: allowed there and in the step after, and nowhere else."""
    mine = tolerance_for(history(), control(HONEST["a batch that amplifies thirtyfold"]))
    assert mine.loss[8:10] == pytest.approx([1.2e-4] * 2) and set(mine.loss[1:8]) | set(mine.loss[10:]) == {
        mine.loss[1]
    }
    assert mine.loss[1] == pytest.approx(4e-6)


def test_a_tolerance_as_wide_as_the_loss_is_no_test():
    """32 tokens a step: what is tolerated is most of what the loss covers."""
    baseline, mine = history(precision="bf16"), control(lambda n: 1e-3 * 1.33**n, "bf16")
    for run in (baseline, mine):
        run.run["config"].update(batch_size=1, seq_length=16)
    result = compare_curves(baseline, history("fsdp", "bf16"), tolerance_for(baseline, mine))
    assert (
        result.outcome == "NOT JUDGED"
        and "is more than half the range of the loss, 1.9e+00, so it proves nothing" in result.doubt
    )
    assert judged(precision="bf16", gap=lambda n: 1e-3).outcome == "PASS"


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_run_is_judged(precision, steps):
    """Its loss covers nothing yet."""
    noise = {"fp32": 9e-7, "autocast": 2e-4, "bf16": 2e-4}[precision]
    runs = [
        history("ddp", precision, steps),
        control(lambda n: noise, precision, steps),
        history("fsdp", precision, steps),
    ]
    assert compare_curves(runs[0], runs[2], tolerance_for(*runs[:2])).outcome == "PASS"
