"""Real launches: Ray Train, torchrun, the deepspeed launcher; runs that are killed, interrupted, or go wrong."""

import json
import os
import signal
import sys
import time

import pytest
from programs import completed
from ranks import ROOT, free_port
from real_runs import BIN, environment, folders, gone
from synthetic import history as made_up

from lockstep.dumps import history
from lockstep.plan.config import history_file


@pytest.mark.parametrize("moment", ["Ray starts", "training"])
def test_ctrl_c_is_one_line(run, tmp_path, moment):
    """And the steps so far are kept, or an older history if there are none. While it is imported: test_startup.py; while workers start, and by
    SIGTERM: test_one_command.py."""
    training, path = moment == "training", history_file(tmp_path, "ddp")
    if not training:
        made_up(steps=3).save(path)
        content = path.read_bytes()
    one = run("--debug_steps", "100000", "--dp_size", "1" if training else "2")
    one.wait_for_step(5) if training else one.wait_for_process("gcs_server")  # Ray's first
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.process.wait(60) == 130, one.log.read_text()
    *_, last = said = one.log.read_text().splitlines()
    assert last == "train_ddp.py: interrupted" + "; the history holds the steps so far" * training, said
    assert sum(line.startswith("train_ddp.py: ") for line in said) == 1
    assert not any("Traceback" in line for line in said)
    if training:
        kept = history.read(path)
        assert len(kept.steps) >= 5 and kept.ended != "finished"
    else:
        assert len(said) == 1 and path.read_bytes() == content
    assert gone(tmp_path) is True


HANGS = """
import time
from ddp_strategy import DDPStrategy

class Hangs(DDPStrategy):
    axes, updates = ("dp",), 0

    def update(self):
        self.updates += 1
        if self.updates == 2:
            time.sleep(10**6)
        return super().update()
"""


def test_a_run_that_hangs_under_ray(tmp_path):
    (tmp_path / "own.py").write_text(HANGS)
    command = [sys.executable, "-m", "lockstep.train", "--strategy", f"{tmp_path}/own.py:Hangs"]
    done = completed(
        [*command, *folders(tmp_path), "--dp_size", "1", "--debug_steps", "3", "--batch_size", "1"],
        env=environment(LOCKSTEP_PATIENCE="8"),
    )
    assert done.returncode == 1 and done.stderr.startswith(
        "lockstep.train: worker 0 failed: no rank has made progress for 8 s: rank 0 is in step 2, update, at own.py:11, time.sleep"
    ), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "    time.sleep(10**6)\n" in (tmp_path / "logs" / "loss_hangs.txt").read_text()
    assert gone(tmp_path) is True


def test_an_interrupt_ends_what_the_kernel_would_leave():
    """A process that has only just been forked has not asked the kernel yet to end with its parent."""
    program = (
        "import subprocess; from lockstep.running import ray_instance; child = subprocess.Popen(['sleep', '60']); "
        "ray_instance.end_children(); print(child.wait())"
    )
    done = completed([sys.executable, "-c", program])
    assert done.stdout == f"{-signal.SIGKILL}\n", done.stderr


# The signal arrives in a callback, whose exceptions Python only prints: the alarm a second later ends the process.
ENDED_IN_A_CALLBACK = """
import os, signal, sys, time, weakref
from lockstep.running import ray_instance
class Referred: pass
ray_instance.ended_by(signal.SIGUSR1)
def killed(_): os.kill(os.getpid(), signal.SIGUSR1); time.sleep(0.1)
def raised(_): raise ValueError("shown")
for called in (killed, raised):
    object = Referred()
    reference = weakref.ref(object, called)
    del object
time.sleep(60)
"""


def test_a_ray_instance_that_ends_in_a_callback_says_nothing():
    """Negative control: what another callback raises is printed."""
    began = time.monotonic()
    done = completed([sys.executable, "-c", ENDED_IN_A_CALLBACK])
    assert done.returncode == 0 and time.monotonic() - began < 30
    assert "SystemExit" not in done.stderr
    assert done.stderr.count("Exception ignored") == 1 and done.stderr.endswith("ValueError: shown\n")


# The signal arrives while Ray is imported, when it has just registered its callback of the interpreter's end.
ENDED_IN_AN_IMPORT = """
import atexit, os, runpy, signal
register = atexit.register
def registered(callback, *arguments, **options):
    register(callback, *arguments, **options)
    if callback.__module__ == "ray._private.worker":
        print("arrived", flush=True)
        os.kill(os.getpid(), signal.SIGUSR1)
atexit.register = registered
runpy.run_module("lockstep.running.ray_instance", run_name="__main__")
"""


def test_a_ray_instance_that_ends_while_it_is_imported_says_and_leaves_nothing(tmp_path):
    done = completed([sys.executable, "-c", ENDED_IN_AN_IMPORT], env=environment(RAY_TMPDIR=str(tmp_path)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "arrived\n", "")
    assert list(tmp_path.iterdir()) == []


def launcher(command, folder, *arguments):
    small = ["--batch_size", "2", "--seq_length", "32", "--debug_steps", "3"]
    result = completed(
        [*command, *folders(folder), *small, *arguments], env=environment(DS_ACCELERATOR="cpu")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_folder_of_ray_that_is_not_there_is_a_usage_error(tmp_path):
    """Of the instance that run_verification_main.sh starts. Negative control: the other tests name one that is."""
    there = tmp_path / "gone"
    command = [sys.executable, "-m", "lockstep.running.ray_instance"]
    done = completed(command, env=environment(RAY_TMPDIR=str(there)))
    said = f"lockstep.running.ray_instance: RAY_TMPDIR: {there}: No such file or directory; name a folder that can be written"
    assert (done.returncode, done.stderr.splitlines()) == (2, [said])


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
    result = completed([*plot, "--json", str(tmp_path / "v.json")])
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "v.json").read_text())["control"] == "DDP (TP=1, DP=2), control"


def test_a_usage_error_under_torchrun_is_said_once():
    command = [
        BIN / "torchrun",
        "--standalone",
        "--nproc_per_node",
        "2",
        ROOT / "train_fsdp.py",
        "--dp_size",
        "3",
    ]
    result = completed(command, env=environment())
    said = [line for line in result.stderr.splitlines() if line.startswith("train_fsdp.py: ")]
    assert (
        result.returncode == 1
        and len(said) == 1
        and "the launcher started 2 processes, the mesh has 2 x 3" in said[0]
    ), result.stderr
