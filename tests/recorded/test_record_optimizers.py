"""Updates by optimizers that are none of torch's (record_optimizers.py): right ones are judged and pass, wrong ones fail, the rest is said."""

import json

import pytest
import torch
from ranks import run_groups
from test_record_bugs import said

from lockstep import judge
from lockstep.recorded import update as recorded_update

UNSEEN = "PASS: 2 steps; the loss itself is not judged"
RIGHT = [
    "WithLion",
    "WithForeachLion",
    "LionOnShards",
    "WithTorchAdafactor",
    "WithAdafactor",
    "WithScheduleFree",
    "WithLamb",
    "LambOnShards",
    "WithMuon",
    "WithShampoo",
    "WithListed",
    "WithLookahead",
    "WithCapped",
    "Accelerated",
    "TurnedSigns",
]
KEPT = "what the optimizer keeps changed between step 1 and step 2: "
WRONG = {
    "WrongForeach": "step 1: 6 of 6 of what the optimizer keeps are not ForeachWrong's with its recorded settings, most of all exp_avg/one.weight: "
    "off by 9.0e+00 of the change, tolerated 2.0e-06; it is 10 times the reference's",
    "RatioOfShards": "step 1: 6 of 6 updates are not LambOfShards's with its recorded settings",
    "MovedInHook": "step 1: 3 of 6 updates are not Lion's with its recorded settings",
    "SignsApart": "step 1: 1 of 6 updates are not Lion's with its recorded settings, most of all body.weight",
    "StateReset": f"step 2: {KEPT}m/body.bias and 11 more",
    "CountReset": f"step 2: {KEPT}group 0.k",
    "AttributeReset": f"step 2: {KEPT}steps",
    "LowState": "step 1: what Lion keeps has another dtype than in one process: exp_avg/body.bias, torch.bfloat16 for torch.float32 and 5 more",
}
NOT_JUDGED = {
    "WithRounded": "Rounded is not judged: it draws random numbers",
    "WithSharp": "Sharp is not judged: one process cannot step it again (AssertionError: a closure is needed)",
    "EightBits": "AdamW8bit is not judged: in float64, its step gives numbers that are not finite",
    "Inside": "Inside.make_optimizer.<locals>.Own is not judged: its class is defined inside a function",
}


@pytest.fixture(scope="module")
def judged(new_folder):
    folder = new_folder("optimizers")
    # What is kept of one step is in the next
    steps = dict.fromkeys([*RIGHT, *WRONG, *NOT_JUDGED], 2)
    run_groups([(2, "record_optimizers:run", folder, steps)], timeout=1600)
    return folder


@pytest.mark.parametrize("name", RIGHT)
def test_right_updates_pass(judged, name):
    status, lines = said(judged / name)
    assert status == 0 and lines[-1] == UNSEEN, lines
    for step in json.loads((judged / name / "report.json").read_text())["steps"]:
        rows = [row for row in step["tensors"] if row.startswith("update/")]
        assert len(rows) == (40 if name == "TurnedSigns" else 6)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_updates_are_said(judged, name):
    status, lines = said(judged / name)
    assert status == 1 and lines[-1].startswith(f"FAIL: {WRONG[name]}"), lines


@pytest.mark.parametrize("name", NOT_JUDGED)
def test_what_one_process_cannot_step_is_said(judged, name):
    status, lines = said(judged / name)
    assert status == 0 and lines[-1] == f"{UNSEEN}; the update of {NOT_JUDGED[name]}", lines


def test_signs_that_no_rounding_error_turns_would_fail(judged, monkeypatch, capsys):
    """Negative control: without it, the signs that are rounding errors' are too far."""
    monkeypatch.setattr(recorded_update, "UPDATE_OF_CHANGE", 0)
    assert judge.main([str(judged / "TurnedSigns")]) == 1
    assert "of 40 updates are not Lion's" in capsys.readouterr().out


def test_what_only_moves_a_change_is_held_to_it():
    """Between what the step makes of other gradients lies what is right only where they turn the direction."""
    before, own = torch.ones(64), torch.full((64,), 1.05)
    reference, yardstick, far, back = (torch.full((64,), one) for one in (1.1, 1.1, 1.0 + 1e-6, 0.9))
    assert recorded_update._row(1, "update/a", own, before, [reference, far, reference], yardstick).too_far
    assert not recorded_update._row(
        1, "update/a", own, before, [reference, back, reference], yardstick
    ).too_far


@pytest.mark.parametrize("name, status", [("WithLion", 0), ("WithLamb", 0), ("MovedInHook", 0)])
def test_memory_for_one_parameter(judged, name, status, capsys):
    """An update that needs all of them, or may, is then not judged, which is said."""
    assert judge.main([str(judged / name), "--memory", "0"]) == status
    line = capsys.readouterr().out.splitlines()[-1]
    assert (line == UNSEEN) == (name == "WithLion") and line.startswith(UNSEEN)
    assert ("for which memory does not suffice" in line) == (name != "WithLion")
