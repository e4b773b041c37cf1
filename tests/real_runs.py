"""Real runs in processes of their own, and what is left of them: for test_launch.py and test_one_command.py."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks import ROOT

from lockstep.dumps import history
from lockstep.plan.config import history_file

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


def preempting(process):
    """The names of the threads of a rank that may take the core from another one, of those that train and of those of gloo."""
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found.append(((task / "comm").read_text().strip(), os.sched_getscheduler(int(task.name))))
    assert "gloo_tcp_loop" in [name for name, _ in found]
    return [
        name for name, policy in found if policy != os.SCHED_BATCH and name.startswith(("gloo", "pt_", "py"))
    ]


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

    def wait_for_process(self, name):
        """Until the run has started a process of this name."""
        deadline = time.monotonic() + 60
        while not any(name in command for command in orphans(self.folder)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def wait_for_step(self, number):
        path = history_file(self.folder, "ddp")
        for _ in range(1200):
            if path.exists() and len(history.read(path).steps) >= number:
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())


@contextlib.contextmanager
def starting(tmp_path):
    """Yields a function that starts train_ddp.py or the script in a folder; what still runs at the end is killed."""
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

    try:
        yield start
    finally:
        for one in started:
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()
        gone(tmp_path)
        shutil.rmtree(short, ignore_errors=True)
