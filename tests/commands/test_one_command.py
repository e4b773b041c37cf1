"""run_verification_main.sh: real runs to their end; runs that are killed, interrupted, or go wrong."""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from own_strategy import DOUBLED, own_strategy
from programs import completed, in_process
from ranks import ROOT
from real_runs import environment, gone, preempting
from synthetic import history as made_up

from lockstep.dumps import history
from lockstep.ground.files import VERDICT
from lockstep.inputs.architectures import BUILT_IN
from lockstep.plan.config import history_file

SMALL = {"BATCH_SIZE": "2", "SEQ_LENGTH": "32"}


@pytest.fixture
def short():
    """A folder with a short name: those of Ray's sockets must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def plotted(folder, status):
    """What plot_loss_curves.py says of a folder; the figure goes beside the folder."""
    figure = folder.parent / "figure.png"
    done = in_process("plot_loss_curves.py", "--input_dir", folder, "--output", figure)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def the_one_command(folder, **settings):
    """run_verification_main.sh to its end, called from a folder."""
    settings = {"OUTPUT_DIR": "out", "DEVICE": "cpu", **settings}
    command = [ROOT / "run_verification_main.sh"]
    return completed(command, cwd=folder, env=environment(**settings))


def test_the_one_command(tmp_path, short, request):
    """All runs and the control, both verdicts, a figure, a table that fits a terminal. From another folder, with paths of that folder that
    the shell and Python could take apart. With --all on the script's own mesh, TP=2 x DP=2, whose workers take two minutes to start."""
    dp_size = "2" if request.config.getoption("--all") else "1"
    folder = tmp_path / "out $x 'y'"
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "config.json").write_text(json.dumps(BUILT_IN["tiny-qwen2"]))
    settings = {
        **SMALL,
        "DEBUG_STEPS": "4",
        "OUTPUT_DIR": folder.name,
        "MODEL_NAME": "a model",
        "DP_SIZE": dp_size,
        "RAY_TMPDIR": str(short),
    }
    result = the_one_command(tmp_path, **settings)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert (
        lines[-1] == "PASS"
        and (folder / "loss_curves.png").is_file()
        and (folder / "tensors" / "report.md").is_file()
    )
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["passed"], verdict["losses"], verdict["tensors"]) == (True, "PASS", "PASS")
    assert verdict["control"] == f"DDP (TP=1, DP={dp_size}), control" and verdict["precision"] == "fp32"
    table = lines[
        next(index for index, line in enumerate(lines) if "gradient norm" in line and "tensors" in line) :
    ]
    assert len(table) <= 12 and all(
        any(line.startswith(label) and line.endswith("PASS") for line in table)
        for label in ("DDP", "DeepSpeed", "FSDP")
    )
    assert (
        "0.000000" not in result.stdout
        and "RayTrainWorker" not in result.stdout
        and max(map(len, table[:5])) <= 120
    )
    assert "Attempting to start training worker group" in (folder / "logs" / "loss_fsdp.txt").read_text()
    assert not (folder / "ray").exists()
    assert [path.name for path in short.glob("**/*")] in ([], ["ray"]), "something of Ray is left"
    assert gone(tmp_path) is True


def test_the_one_command_names_the_first_tensor(tmp_path):
    """A strategy from outside has gradients twice too large. AdamW hides it from the losses; the tensors of the first step do not."""
    own_strategy(tmp_path / "my_parallel.py", name="Mine", then=DOUBLED)
    settings = {
        **SMALL,
        "DEBUG_STEPS": "2",
        "MAX_GRAD_NORM": "0",
        "NOISE_FLOOR": "0",
        "DP_SIZE": "1",
    }
    result = the_one_command(
        tmp_path, **settings, STRATEGIES="ddp,my_parallel.py:Doubled:activation_checkpointing"
    )
    lines, label = result.stdout.splitlines(), "Doubled (TP=1, DP=1, activation_checkpointing)"
    assert result.returncode == 1 and lines[-1] == "FAIL", result.stdout + result.stderr
    assert any(line.strip() == "Cause" for line in lines)
    assert any(line.startswith(label) and line.endswith("FAIL") for line in lines)
    said = f"First tensor too far, {label}: step 1, gradient/model.norm.weight"
    assert any(line.startswith(said) for line in lines)
    report = (tmp_path / "out" / "tensors" / "report.md").read_text()
    listed = report.partition("## Wrong by themselves")[2].partition("##")[0].count(f"| {label} |")
    assert listed > 5 and f"- {label}: {listed} of " in report.partition("## Each module by itself")[2]
    assert history.read(tmp_path / "out" / "loss_doubled_activation_checkpointing.json").run["label"] == label
    assert "Doubled" in plotted(tmp_path / "out", status=1) and (tmp_path / "figure.png").is_file()


@pytest.mark.parametrize(
    "number, word, send", [(signal.SIGINT, "interrupted", os.killpg), (signal.SIGTERM, "terminated", os.kill)]
)
def test_the_one_command_stopped(run, tmp_path, number, word, send):
    """By Ctrl-C, which reaches all of its processes, or SIGTERM, while the first run starts. Older histories stay, and give no verdict."""
    older = [history_file(tmp_path, name) for name in ("ddp", "fsdp", "control")]
    for path in older:
        made_up(steps=3).save(path)
    (tmp_path / "verdict.json").write_bytes(VERDICT)
    content = [path.read_bytes() for path in older]
    one = run(DP_SIZE="1", DEBUG_STEPS="100000")
    one.wait_for("1 workers on cpu")
    send(one.process.pid, number)
    assert one.process.wait(60) == 128 + number, one.log.read_text()
    said = one.log.read_text().splitlines()
    assert said[-1] == f"{ROOT}/run_verification_main.sh: {word}", said
    assert said[-2] == f"train_ddp.py: {word}; no step was written; the older history is as it was", said
    assert not any("Traceback" in line or "SIGTERM" in line for line in said), said
    assert [path.read_bytes() for path in older] == content and not (tmp_path / "verdict.json").exists()
    assert gone(tmp_path) is True


def test_the_one_command_twice_into_one_folder_then_a_worker_dies(run, tmp_path):
    """The second is refused at once. The death of a worker ends the first; the steps so far are kept. With TENSORS=0 nothing is captured."""
    one = run(DEBUG_STEPS="100000", TENSORS="0")
    one.wait_for_step(5)
    again = the_one_command(tmp_path, OUTPUT_DIR=str(tmp_path))
    assert again.returncode == 2 and len(again.stderr.splitlines()) == 1
    assert f"OUTPUT_DIR: another run (process {one.process.pid} on" in again.stderr
    assert one.process.poll() is None and (tmp_path / "loss_ddp.json").exists()
    workers = completed(["pgrep", "-f", "ray::RayTrainWorker"]).stdout.split()
    mine = [pid for pid in workers if str(tmp_path).encode() in Path(f"/proc/{pid}/environ").read_bytes()]
    assert [preempting(pid) for pid in mine] == [[], []]
    os.kill(int(mine[-1]), signal.SIGKILL)
    assert one.process.wait(120) == 1, one.log.read_text()
    last = one.log.read_text().splitlines()[-1]
    assert last.startswith("train_ddp.py: worker ") and last.endswith(
        f"the full output is in {tmp_path}/logs/loss_ddp.txt"
    )
    assert "Started training worker group" in (tmp_path / "logs" / "loss_ddp.txt").read_text()
    assert [path.name for path in tmp_path.glob("*.json")] == ["loss_ddp.json"]
    kept = history.read(tmp_path / "loss_ddp.json")
    assert len(kept.steps) >= 5 and kept.ended != "finished"
    assert not (tmp_path / "tensors").exists()
    assert gone(tmp_path) is True


def test_the_one_command_killed(run, tmp_path):
    """Its scripts end with it, and none speaks of a Ray cluster that the user never named."""
    one = run(DP_SIZE="1", DEBUG_STEPS="100000")
    one.wait_for("1 workers on cpu")
    os.kill(one.process.pid, signal.SIGKILL)
    one.process.wait()
    assert gone(tmp_path, 30) is True
    assert "RAY_ADDRESS" not in one.log.read_text()


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"TENSORS": "2"}, "must be 0 or 1"),
        ({"OUTPUT_DIR": __file__}, "cannot be written"),
    ],
)
def test_the_one_command_answers_a_usage_error_at_once(tmp_path, setting, message):
    """What the script itself checks, and one refusal of the plan, while Ray starts. The plan's others: test_verification.py."""
    result = the_one_command(tmp_path, **setting)
    assert "ray" not in result.stdout.lower(), "something was started"
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1, (
        result.stderr
    )
    assert list(tmp_path.iterdir()) == [] and gone(tmp_path) is True
