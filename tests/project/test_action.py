"""action.yml: held against the public schema of GitHub's actions, and its steps run here (tests/action.py)."""

import sys

import pytest
import yaml
from action import Action, expand
from own_strategy import DOUBLED, own_strategy
from programs import completed
from ranks import ROOT

SMALL = "--batch_size 2 --seq_length 32 --steps 1 --num_layers 1"
OURS = {"python": sys.executable, "install": "false", "output_dir": "out put"}


def checked(path):
    """What the program check-jsonschema says of a file, with the schema that it brings along."""
    pytest.importorskip(
        "check_jsonschema", reason="requirements-test.txt brings the schema of GitHub's actions"
    )
    return completed(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions", path]
    )


def test_the_action_is_one_by_the_public_schema():
    done = checked(ROOT / "action.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "spoil",
    [
        lambda action: action["runs"]["steps"][1].pop("shell"),
        lambda action: action.update(runs={"using": "composite"}),
        lambda action: action["outputs"]["verdict"].pop("value"),
    ],
)
def test_what_is_no_action_would_be_seen(tmp_path, spoil):
    """Negative control."""
    action = Action()
    spoil(action.content)
    (tmp_path / "action.yml").write_text(yaml.safe_dump(action.content))
    assert checked(tmp_path / "action.yml").returncode == 1


def test_no_input_is_text_of_a_script():
    """It would be run. Negative control: each is a variable, and expressions stand elsewhere."""
    steps = [step for step in Action().steps if "run" in step]
    assert [step["name"] for step in steps if "${{" in step["run"]] == []
    assert sum("${{" in str(step["env"]) for step in steps) == len(steps) == 2
    with pytest.raises(KeyError):
        expand("${{ inputs.gone }}", {})


@pytest.mark.parametrize(("strategy", "status", "verdict"), [("Mine", 0, "PASS"), ("Doubled", 1, "FAIL")])
def test_strategies_are_verified(tmp_path, strategy, status, verdict):
    """A correct strategy, and one whose gradients are twice as large."""
    own_strategy(tmp_path / "mine.py", "Mine", DOUBLED)
    ran = Action().run(tmp_path, strategies=f"ddp,mine.py:{strategy}", arguments=SMALL, **OURS)
    assert (ran.status, ran.outputs) == (status, {"verdict": verdict}), ran.said[-3000:]
    report = tmp_path / "out put" / "report.md"
    assert ran.summary == report.read_text() and ran.summary.startswith(f"# Tensor by tensor: {verdict}\n")
    (kept,) = ran.used.values()
    assert kept["path"] == "out put/report.*\nout put/logs\n" and kept["name"] == "lockstep"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategies": 'ddp"; touch pwned; "'}, "there is no strategy"),
        ({"strategies": "$(touch pwned)"}, "there is no strategy"),
        ({"arguments": "--steps '$(touch pwned)'"}, "invalid int value: '$(touch pwned)'"),
        ({"arguments": "--steps 1 `touch pwned`;touch pwned"}, "unrecognized arguments"),
        ({"arguments": "--steps '1"}, "unmatched single quote"),
    ],
)
def test_usage_errors_are_the_programs_and_nothing_that_is_given_is_run(tmp_path, given, said):
    ran = Action().run(tmp_path, **OURS, **given)
    assert ran.status == 2 and said in ran.said and not (tmp_path / "pwned").exists()
    assert said in ran.summary or "quote" in said
    assert list(ran.used) == ["actions/upload-artifact@v7"]


def test_an_older_report_is_not_taken_for_this_runs(tmp_path):
    (tmp_path / "out put").mkdir()
    (tmp_path / "out put" / "report.md").write_text("# Tensor by tensor: PASS\n")
    ran = Action().run(tmp_path, **OURS)
    assert ran.status == 2 and "PASS" not in ran.summary and "--overwrite" in ran.summary


@pytest.mark.parametrize(("factor", "status", "verdict"), [("1.0", 0, "PASS"), ("0.5", 1, "FAIL")])
def test_a_script_is_recorded_and_judged(tmp_path, factor, status, verdict):
    """The loop of an example, and the same with half the gradient."""
    for name in ("torch_loop.py", "trainer.py"):
        (tmp_path / name).write_text((ROOT / "examples" / "record" / name).read_text())
    loop = (tmp_path / "torch_loop.py").read_text()
    changed = loop.replace("loss / options.accumulation", f"{factor} * loss / options.accumulation")
    assert changed != loop
    (tmp_path / "torch_loop.py").write_text(changed)
    ran = Action().run(tmp_path, script="torch_loop.py", arguments="--strategy ddp", **OURS)
    assert ran.status == status and ran.outputs["verdict"].startswith(verdict), ran.said[-3000:]
    assert ran.summary.startswith(verdict)


@pytest.mark.parametrize("status", [0, 1, 2])
def test_three_lines_of_shell_do_the_same(tmp_path, status):
    """Those of docs/commands.md, also where a shell ends at the first failure."""
    page = (ROOT / "docs" / "commands.md").read_text()
    (lines,) = (part for part in page.split("```bash\n") if "GITHUB_STEP_SUMMARY" in part)
    program = (
        f"python() {{ mkdir -p runs/verify; echo '# said' > runs/verify/report.md; return {status}; }}\n"
    )
    summary = tmp_path / "summary"
    command = ["bash", "-ec", program + lines.split("```")[0]]
    done = completed(
        command, cwd=tmp_path, env={"GITHUB_STEP_SUMMARY": str(summary), "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == status and summary.read_text() == "# said\n", done.stderr
