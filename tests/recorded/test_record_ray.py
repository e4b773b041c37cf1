"""Ray Train's workers record: the examples of its documentation are a PASS; one that trains on twice the loss is a FAIL, and says so."""

import subprocess
import sys

import pytest
from stacks import EXAMPLES, environment
from test_record_stacks import TOKENS, require_pass

from lockstep import judge
from lockstep.running.ray_instance import RAY_ENVIRONMENT

RANKS = "that of the mean of the ranks' token means"


@pytest.fixture(scope="module")
def runs(new_folder):
    """The recordings of one start of Ray, which takes longer than all of the training."""
    folder = new_folder("ray")
    text = (EXAMPLES / "ray_train.py").read_text()
    first, marked, rest = text.partition("def train_deepspeed")
    function, end, last = (marked + rest).partition("LIBRARIES = {")
    assert marked and end and function.count("backward(loss)") == 1
    wrong = function.replace("deepspeed(", "wrong(", 1).replace('/ "deepspeed"', '/ "wrong"')
    script = folder / "ray_train.py"
    script.write_text(
        f'{first}{function}{wrong.replace("backward(loss)", "backward(2 * loss)")}{end}"wrong": train_wrong, {last}'
    )
    command = [sys.executable, str(script), "--output", str(folder / "runs")]
    command += ["--library", "transformers", "deepspeed", "wrong"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | RAY_ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs"


@pytest.mark.parametrize("library, gradient", [("transformers", TOKENS), ("deepspeed", f"{RANKS}, clipped")])
def test_a_worker_of_ray_train_records(runs, library, gradient, capsys):
    require_pass(runs / library, gradient, capsys)


def test_a_bug_in_a_worker_fails(runs, capsys):
    assert judge.main([str(runs / "wrong")]) == 1
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith(f"FAIL: step 1: the gradient is 2 times {RANKS}")
    )
