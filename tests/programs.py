"""Run a program of this repository as a shell does, but in this process, which has imported the libraries already."""

import atexit
import contextlib
import importlib.util
import io
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import torch
from ranks import ROOT

from lockstep.ground import startup


def completed(command, *, cwd: Path = ROOT, **options) -> subprocess.CompletedProcess:
    """What a command of its own process said, and its status."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=380, **options)


def in_process(
    program: str | Path, *arguments, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess:
    """Run the file `program`, a path from the repository's root, as __main__: its status, and what it printed.

    A start of Python costs 0.3 s, with torch 3 s. That the program is found and starts is proven by one real process somewhere.
    """
    out, error = io.StringIO(), io.StringIO()
    before, argv = dict(os.environ), sys.argv
    handlers = {number: signal.getsignal(number) for number in startup.WORDS}
    os.environ.update(environment)
    sys.argv = [str(ROOT / program), *map(str, arguments)]
    status: object = 0
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)  # startup.begin() has set its own
        atexit.unregister(startup._leave)  # or it would end pytest, with the program's status
        startup._status = None
        if torch.distributed.is_initialized():  # which would have ended with the program's process
            torch.distributed.destroy_process_group()
    return subprocess.CompletedProcess([program, *arguments], status, out.getvalue(), error.getvalue())


def script(name: str):
    """The module results/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"results_{name}", ROOT / "results" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
