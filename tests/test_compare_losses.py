import math

import pytest
from synthetic import control, history, set_loss

from lockstep.compare_losses import compare, require_comparable, tolerance_for
from lockstep.errors import UserError


def verdict(other, baseline=None):
    baseline = baseline or history()
    require_comparable(baseline, other)
    return compare(baseline, other, tolerance_for(baseline))


def test_equal_runs_pass():
    assert verdict(history("fsdp")).passed


def test_tolerances_of_the_tiny_model():
    fp32, autocast = tolerance_for(history()), tolerance_for(history(precision="autocast"))
    assert fp32.first <= 1e-6 and fp32.maximum <= 1e-5 and fp32.mean <= 2e-6 and set(fp32.grad_norm) == {1e-5}
    assert autocast.first <= 2e-4 and autocast.maximum <= 2e-3 and autocast.mean <= 5e-4 and set(autocast.grad_norm) == {1e-2}


def test_tolerance_shrinks_with_more_tokens():
    small, large = history(precision="autocast"), history(precision="autocast")
    large.run["config"]["batch_size"] *= 4
    large.steps[0]["tokens"] = 1  # what a step claims is not asked
    assert tolerance_for(large).first == pytest.approx(tolerance_for(small).first / 2)


def test_no_tolerance_no_verdict():
    with pytest.raises(UserError, match="no tolerance is derived for --precision bf16"):
        tolerance_for(history(precision="bf16"))


def spoil(strategy="fsdp", precision="fp32", **changes):
    other = history(strategy, precision)
    for step, values in changes.items():
        other.steps[int(step[1:]) - 1].update(values)
    return other


@pytest.mark.parametrize(
    "other, loss, grad_norm",
    [
        (spoil(s1={"loss": 7.4 + 3e-6}), False, True),  # the first loss has the tightest bound
        (spoil(s9={"loss": 6.6 + 2e-5}), False, True),
        (history("fsdp", shift=4e-7), True, True),
        (history("fsdp", shift=-3e-6), False, True),  # small, but always on one side: first and mean
        (spoil(s20={"grad_norm": 1.5 * (1 + 2e-5)}), True, False),
        (spoil(s20={"grad_norm": 1.5 * (1 - 5e-6)}), True, True),
        (spoil(s7={"loss": math.nan}), False, True),
        (spoil(s7={"grad_norm": math.inf}), True, False),
    ],
)
def test_what_turns_red(other, loss, grad_norm):
    result = verdict(other)
    assert (result.loss_passed, result.grad_norm_passed) == (loss, grad_norm)
    assert result.passed == (loss and grad_norm)


def test_the_worst_step_is_named():
    assert verdict(spoil(s9={"loss": 6.6 + 2e-5})).worst_step == 9
    assert verdict(spoil(s7={"grad_norm": 2.0})).worst_grad_norm_step == 7


def test_a_nan_in_both_runs_fails():
    both = spoil("ddp", s7={"loss": math.nan}), spoil(s7={"loss": math.nan})
    result = verdict(both[1], both[0])
    assert not result.passed and "step 7" in result.problems[0]


def test_nothing_moves():
    other, baseline = history("fsdp"), history()
    for run in (other, baseline):
        run.weights["moved"] = []
    result = verdict(other, baseline)
    assert result.loss_passed and result.grad_norm_passed and not result.passed


def test_a_constant_loss_fails():
    other, baseline = history("fsdp"), history()
    for run in (other, baseline):
        for step in run.steps:
            step["loss"] = 7.0
    assert not verdict(other, baseline).passed


def test_other_tensors_moved():
    other = history("fsdp")
    other.weights["moved"] = other.weights["moved"][1:]
    result = verdict(other)
    assert not result.passed and "model.embed_tokens.weight moved in one run only" in result.problems[0]


def _shorter(run):
    run.run["num_steps"] = 19
    run.steps.pop()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda r: r.weights.update(initial_sha256="x"), "different weights"),
        (lambda r: r.steps[4].update(batch_hash="x"), "step 5 was trained on different batches"),
        (lambda r: r.contract.update(max_grad_norm=0.0), "max_grad_norm is 0.0, not 1.0"),
        (lambda r: r.contract.pop("optimizer"), "optimizer is None"),
        (lambda r: r.contract.update(new=1), "new is 1, not None"),
        (_shorter, "19 steps against 20"),
        (lambda r: r.steps.pop(), "has 19 of 20 steps"),
        (lambda r: setattr(r, "ended", None), "killed or is still running"),
        (lambda r: r.run.update(versions={"torch": "1"}), "one environment"),
    ],
)
def test_what_is_refused(change, message):
    other = history("fsdp")
    change(other)
    with pytest.raises(UserError, match=message):
        verdict(other)


def test_a_known_difference_is_no_reason_to_refuse():
    other = history("deepspeed")
    other.contract["biased_linear_dtype"] = ["torch.float32"]
    assert verdict(other).passed


def test_a_quiet_control_tightens_the_tolerance():
    fixed, mine = tolerance_for(history()), tolerance_for(history(), control(lambda step: 4e-7))
    assert mine.maximum == pytest.approx(8 * 4e-7) and mine.maximum < fixed.maximum and mine.mean < 2 * fixed.mean
    assert set(mine.grad_norm) == {1e-6}  # the control's norms are the baseline's: what is always allowed is left
    assert not compare(history(), spoil(s9={"loss": 6.6 + 5e-6}), mine).loss_passed


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
        (lambda r: r.weights.update(initial_sha256="a" * 64), "shows no noise"),
        (lambda r: r.steps[4].update(batch_hash="x"), "step 5 was trained on different batches"),
        (lambda r: r.steps.pop(), "has 19 of 20 steps"),
    ],
)
def test_a_control_of_something_else_is_refused(change, message):
    other = control(lambda step: 1e-7)
    change(other)
    with pytest.raises(UserError, match=message):
        tolerance_for(history(), other)


def test_the_first_red_step_is_named():
    result = verdict(spoil(s9={"loss": 6.6 + 2e-5}, s7={"grad_norm": 2.0}))
    assert (result.red_loss_step, result.red_grad_norm_step) == (9, 7)
    aside = history("fsdp", shift=3e-6)
    aside.steps[0]["loss"] = 7.4
    assert verdict(aside).red_loss_step == 20  # no single step shows it, the mean does
