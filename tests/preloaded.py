"""A process that has imported torch, transformers and the libraries of the strategies once. It forks for each start of ranks that a test
asks for, which saves five seconds of a core each time. What is forked is the same program, in a session of its own.

test_processes.py, test_launch.py and the tests of programs that are killed start theirs from nothing.
"""

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Forked:
    """What subprocess.Popen is for a program that the server has started, as far as lockstep.running.jobs and tests/ranks.py need it."""

    def __init__(self, pid: int, ended: Path):
        self.pid, self.returncode, self._ended = pid, None, ended

    def poll(self) -> int | None:
        if self.returncode is None and self._ended.exists():
            self.returncode = int(self._ended.read_text())
        return self.returncode

    def wait(self, timeout: float = 1e9) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            time.sleep(0.02)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class Server:
    def __init__(self, environment: dict[str, str] | None = None):
        """`environment`: variables that the server has, and all that it starts."""
        self._environment = environment or {}
        self._folder = tempfile.TemporaryDirectory()
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._folder.name],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **self._environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)

    def start(self, module: str, arguments: list[str], log: str, env: dict[str, str]) -> Forked:
        """`python -m module arguments`, with its output in the file `log`."""
        asked = {
            "module": module,
            "arguments": arguments,
            "log": log,
            "env": {**env, **self._environment},
            "folder": os.getcwd(),
        }
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        pid = int(self._process.stdout.readline())
        return Forked(pid, Path(self._folder.name, str(pid)))

    def start_command(self, command: list[str], *, env: dict[str, str], stdout: Any, **_same: Any) -> Forked:
        """In the place of processes.start, for `python -m MODULE ...`."""
        python, option, module, *arguments = command
        assert (python, option) == (sys.executable, "-m")
        return self.start(module, arguments, os.path.realpath(f"/proc/self/fd/{stdout.fileno()}"), env)


@functools.cache
def server() -> Server:
    return Server()


def _be(asked: dict[str, Any]) -> None:
    """The program, in this process. Does not return."""
    from lockstep.ground import processes

    status: Any = 3
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        processes.end_with_parent()
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for file, number in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(file, number)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv = [asked["module"], *asked["arguments"]]
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - this is where the process ends
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(folder: str) -> None:
    from lockstep.ground import processes, startup
    from lockstep.plan.strategies import SPECS
    from lockstep.running import jobs

    processes.end_with_parent(signal.SIGKILL)

    def reap(*_: object) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            path = Path(folder, f"{pid}.new")
            path.write_text(str(os.waitstatus_to_exitcode(status)))
            path.rename(Path(folder, str(pid)))

    with startup.importing():
        captures = ["--capture_dir", folder]  # most of what tests start does
        jobs.preload([(1, [{"strategy": name, "arguments": captures} for name in SPECS])])
        import torch
    # Each process of pytest -n has a core: a second thread of a reference waits for it, and burns a quarter more.
    set_num_threads = torch.set_num_threads
    torch.set_num_threads = lambda _number: set_num_threads(1)
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _be(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
