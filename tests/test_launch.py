"""Real launches: Ray Train, torchrun, the deepspeed launcher; runs that are killed, interrupted, or go wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from own_strategy import DOUBLED, own_strategy
from ranks import ROOT, free_port

from lockstep.inputs.architectures import BUILT_IN
from lockstep.training import history

BIN = Path(sys.executable).parent


def environment(**changes):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RAY_ADDRESS", "MASTER_PORT")
    clean = {key: value for key, value in os.environ.items() if key not in names}
    return {**clean, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **changes}


def orphans(folder):
    """Processes still running whose command line or environment names the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, variables = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command + variables and int(process.name) != os.getpid():
            found.append(command.replace(b"\0", b" ").decode()[:200])
    return found


def gone(folder, seconds=15):
    deadline = time.monotonic() + seconds
    while (left := orphans(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left == [] or left


def folders(path):
    return ["--loss_output_dir", str(path), "--storage_path", str(path / "ray")]


class Run:
    """A command in its own process group, marked by an environment variable to find orphans."""

    def __init__(self, folder, command, **settings):
        self.folder, self.log, self.settings = folder, folder / "log.txt", settings
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(LOCKSTEP_TEST=str(folder), **settings),
                text=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, text):
        deadline = time.monotonic() + 60
        while text not in self.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert text in self.log.read_text()

    def wait_for_step(self, number):
        path = history.path_of(self.folder, "ddp")
        for _ in range(1200):
            if path.exists() and len(history.read(path).steps) >= number:
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())


@pytest.fixture
def run(tmp_path):
    started = []
    short = tempfile.mkdtemp(dir="/tmp")  # the names of Ray's sockets must be

    def start(*arguments, **settings):
        """train_ddp.py with these arguments, or run_verification_main.sh with these settings."""
        train_ddp = [sys.executable, "train_ddp.py", *folders(tmp_path), *arguments]
        script = [ROOT / "run_verification_main.sh"]
        settings = (
            {"OUTPUT_DIR": str(tmp_path), "DEVICE": "cpu", "RAY_TMPDIR": short, **settings}
            if settings
            else {}
        )
        started.append(Run(tmp_path, script if settings else train_ddp, **settings))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
    gone(tmp_path)
    shutil.rmtree(short, ignore_errors=True)


@pytest.mark.parametrize("moment", ["imports", "Ray starts", "workers start", "training"])
def test_an_interrupt_is_one_line(run, tmp_path, moment):
    """And the steps so far are kept."""
    one = run("--debug_steps", "100000")
    if moment == "training":
        one.wait_for_step(5)
    elif moment == "workers start":
        one.wait_for("2 workers on cpu")
    else:
        time.sleep({"imports": 1, "Ray starts": 4}[moment])
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.process.wait(60) == 130, one.log.read_text()
    *_, last = said = one.log.read_text().splitlines()
    assert last.startswith("train_ddp.py: interrupted") and not any("Traceback" in line for line in said)
    assert sum(line.startswith("train_ddp.py: ") for line in said) == 1
    if moment == "training":
        assert last == "train_ddp.py: interrupted; the history holds the steps so far"
        kept = history.read(history.path_of(tmp_path, "ddp"))
        assert len(kept.steps) >= 5 and kept.ended != "finished"
    assert gone(tmp_path) is True


def test_a_run_leaves_nothing_of_ray_behind(tmp_path):
    """From another folder, too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # the names of sockets must be
        command = [sys.executable, str(ROOT / "train_ddp.py"), *folders(Path("out"))]
        command += ["--debug_steps", "1", "--dp_size", "1"]
        settings = environment(RAY_TMPDIR=short)
        done = subprocess.run(
            command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert [path.name for path in tmp_path.glob("**/*")] == [
            "out",
            "loss_ddp.json",
            "logs",
            "loss_ddp.txt",
        ]
        assert [path.name for path in Path(short).glob("**/*")] in ([], ["ray"])


def test_a_reader_that_is_gone(tmp_path):
    """`python train_ddp.py | head -1`: no traceback of a broken pipe."""
    command = f"{sys.executable} train_ddp.py --dry_run --loss_output_dir {tmp_path} --storage_path {tmp_path} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "" and done.stdout.strip() in ("141", "0")


def test_a_killed_worker_ends_the_run(run, tmp_path):
    one = run("--debug_steps", "100000")
    one.wait_for_step(5)
    workers = subprocess.run(
        ["pgrep", "-f", "ray::RayTrainWorker"], capture_output=True, text=True
    ).stdout.split()
    mine = [pid for pid in workers if str(tmp_path).encode() in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(int(mine[-1]), signal.SIGKILL)
    assert one.process.wait(90) == 1, one.log.read_text()
    kept = history.read(history.path_of(tmp_path, "ddp"))
    assert len(kept.steps) >= 5 and kept.ended != "finished"
    last = one.log.read_text().splitlines()[-1]
    assert last.startswith("train_ddp.py: worker ") and last.endswith(
        f"the full output is in {tmp_path}/logs/loss_ddp.txt"
    )
    assert "Started training worker group" in (tmp_path / "logs" / "loss_ddp.txt").read_text()
    assert gone(tmp_path) is True


def launcher(command, folder, *arguments):
    result = subprocess.run(
        [*command, *folders(folder), "--debug_steps", "3", *arguments],
        cwd=ROOT,
        env=environment(DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_torchrun_and_the_deepspeed_launcher_run_the_same_loop(tmp_path):
    weights = ["--init_weights_path", str(tmp_path / "init.pt"), "--precision", "fp32"]
    port = ["--master_port", str(free_port())]
    out = launcher(
        [BIN / "torchrun", "--nproc_per_node", "2", *port, "train_ddp.py"],
        tmp_path,
        *weights,
        "--save_init_weights",
        "--control",
    )
    assert out.count("Loaded initial weights from") == 2 and out.count(": 3 steps in ") == 2
    deepspeed = [BIN / "deepspeed", "--num_gpus", "2", *port, "train_deepspeed.py", "--tp_size", "1"]
    launcher(deepspeed, tmp_path, *weights)
    plot = [sys.executable, "plot_loss_curves.py", "--input_dir", str(tmp_path)]
    result = subprocess.run(
        [*plot, "--json", str(tmp_path / "v.json")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "v.json").read_text())["control"] == "DDP (TP=1, DP=2), control"


def test_a_killed_torchrun_leaves_every_step_so_far(tmp_path):
    command = [BIN / "torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), "train_ddp.py"]
    process = subprocess.Popen(
        [*command, *folders(tmp_path), "--debug_steps", "100000"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    path = history.path_of(tmp_path, "ddp")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (path.exists() and len(history.read(path).steps) >= 20):
        time.sleep(0.1)
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for worker in workers:  # torchrun's own death would leave them training
        os.kill(int(worker), signal.SIGKILL)
    assert process.wait(60) != 0
    kept = history.read(path)
    assert len(kept.steps) >= 20 and kept.ended is None
    assert gone(tmp_path) is True


@pytest.mark.parametrize("attempt", range(2))
def test_a_usage_error_under_torchrun_is_said_every_time(attempt):
    command = [
        BIN / "torchrun",
        "--standalone",
        "--nproc_per_node",
        "2",
        ROOT / "train_fsdp.py",
        "--dp_size",
        "3",
    ]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    said = [line for line in result.stderr.splitlines() if line.startswith("train_fsdp.py: ")]
    assert (
        result.returncode == 1
        and len(said) == 1
        and "the launcher started 2 processes, the mesh has 2 x 3" in said[0]
    ), result.stderr


def plotted(folder, status):
    """What plot_loss_curves.py says of a folder; the figure goes beside the folder."""
    command = [sys.executable, "plot_loss_curves.py", "--input_dir", str(folder)]
    command += ["--output", str(folder.parent / "figure.png")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def the_one_command(folder, **settings):
    """run_verification_main.sh to its end, called from a folder."""
    settings = {"OUTPUT_DIR": "out", "DEVICE": "cpu", **settings}
    command = [ROOT / "run_verification_main.sh"]
    return subprocess.run(
        command, cwd=folder, env=environment(**settings), capture_output=True, text=True, timeout=300
    )


def test_the_one_command(tmp_path):
    """All runs and the control, both verdicts, a figure, a table that fits a terminal. From another folder, with paths of that folder that
    the shell and Python could take apart."""
    folder = tmp_path / "out $x 'y'"
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "config.json").write_text(json.dumps(BUILT_IN["tiny-qwen2"]))
    settings = {"DEBUG_STEPS": "4", "OUTPUT_DIR": folder.name, "MODEL_NAME": "a model"}
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
    assert verdict["control"] == "DDP (TP=1, DP=2), control" and verdict["precision"] == "fp32"
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
    assert gone(tmp_path) is True


def test_the_one_command_names_the_first_tensor(tmp_path):
    """Of two strategies from outside, one has gradients twice too large. AdamW hides it from the losses; the tensors of the first step do
    not."""
    own_strategy(tmp_path / "my_parallel.py", name="Mine", then=DOUBLED)
    settings = {
        "DEBUG_STEPS": "2",
        "SEQ_LENGTH": "64",
        "MAX_GRAD_NORM": "0",
        "NOISE_FLOOR": "0",
        "DP_SIZE": "1",
    }
    result = the_one_command(
        tmp_path, **settings, STRATEGIES="ddp,my_parallel.py:Mine,my_parallel.py:Doubled"
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 1 and lines[-1] == "FAIL", result.stdout + result.stderr
    assert any(line.strip() == "Cause" for line in lines)
    for label, verdict in (("mine", "PASS"), ("Doubled", "FAIL")):
        assert any(line.startswith(f"{label} (TP=1, DP=1)") and line.endswith(verdict) for line in lines)
    said = "First tensor too far, Doubled (TP=1, DP=1): step 1, gradient pass, gradient of model.norm.weight"
    assert any(line.startswith(said) for line in lines)
    assert history.read(tmp_path / "out" / "loss_doubled.json").run["label"] == "Doubled (TP=1, DP=1)"
    assert "Doubled" in plotted(tmp_path / "out", status=1) and (tmp_path / "figure.png").is_file()


def test_the_one_command_twice_into_one_folder_then_interrupted(run, tmp_path):
    """The second is refused at once. Of the first, the steps so far are left. With TENSORS=0 nothing is captured."""
    one = run(DP_SIZE="1", DEBUG_STEPS="100000", TENSORS="0")
    one.wait_for_step(5)
    again = the_one_command(tmp_path, OUTPUT_DIR=str(tmp_path))
    assert again.returncode == 2 and len(again.stderr.splitlines()) == 1
    assert f"OUTPUT_DIR: another run (process {one.process.pid} on" in again.stderr
    assert one.process.poll() is None and (tmp_path / "loss_ddp.json").exists()
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.process.wait(60) == 130, one.log.read_text()
    last = one.log.read_text().splitlines()[-1]
    assert last.endswith(f"interrupted; the histories in {tmp_path} hold the steps so far")
    assert [path.name for path in tmp_path.glob("*.json")] == ["loss_ddp.json"]
    assert len(history.read(tmp_path / "loss_ddp.json").steps) >= 5
    assert not (tmp_path / "tensors").exists()
    assert gone(tmp_path) is True


def test_the_one_command_stops_with_the_first_run_that_fails(run, tmp_path):
    """By divergence, which stops all ranks with its step."""
    one = run(DP_SIZE="1", NOISE_FLOOR="0", LEARNING_RATE="1e30", OPTIMIZER="sgd", MAX_GRAD_NORM="0")
    assert one.process.wait(120) == 1
    assert one.log.read_text().splitlines()[-1].startswith("train_ddp.py: step 2: the ")
    assert [path.name for path in tmp_path.glob("*.json")] == ["loss_ddp.json"]
    kept = history.read(tmp_path / "loss_ddp.json")
    assert len(kept.steps) == 2 and "step 2" in kept.ended
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
        ({"TP_SIZE": "abc"}, "TP_SIZE=abc: must be a whole"),
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
