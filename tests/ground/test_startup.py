"""What a program does first: Ctrl-C at any moment, and a Python without the packages, are one line each."""

import os
import signal
import subprocess
import sys
import time

import pytest
from programs import completed
from ranks import ROOT

PROGRAMS = {
    "train_ddp.py": ["train_ddp.py"],
    "run_verification.py": ["run_verification.py"],
    "run_faults.py": ["run_faults.py"],
    "plot_loss_curves.py": ["plot_loss_curves.py"],
    "lockstep.compare": ["-m", "lockstep.compare"],
    "lockstep.reference": ["-m", "lockstep.reference"],
    "lockstep.running.jobs": ["-m", "lockstep.running.jobs"],
}
STOPS = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}
INTERRUPTS_ITSELF = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
try:
    time.sleep(10)
except KeyboardInterrupt:
    raise ImportError("what a library makes of it")
"""


def python(folder, *arguments, paths=()):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))}
    command = [sys.executable, *map(str, arguments)]
    return completed(command, cwd=folder, env=environment)


def run(name, folder, *options, paths=()):
    words = [str(ROOT / part) if part.endswith(".py") else part for part in PROGRAMS[name]]
    return python(folder, *options, *words, paths=paths)


@pytest.mark.parametrize(
    "name, number",
    [*((name, signal.SIGINT) for name in PROGRAMS), ("train_ddp.py", signal.SIGTERM)],
)
def test_a_stop_while_it_is_imported(name, tmp_path, number):
    word, status = STOPS[number]
    for package in ("numpy", "pydantic"):  # all of them import one of these, and not first
        (tmp_path / f"{package}.py").write_text(INTERRUPTS_ITSELF.replace("SIGINT", number.name))
    done = run(name, tmp_path, paths=[tmp_path])
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"{name}: {word}\n")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_python_without_the_packages(name, tmp_path):
    """-S: a Python that sees no installed package."""
    done = run(name, tmp_path, "-S")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(
        f"{name}: {sys.executable} has no package numpy; enter the environment first: "
    )


def test_an_old_python_is_told_so(tmp_path):
    """Whatever is imported before the version is looked at has to be readable by it."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.version_info = (3, 9, 1, 'final', 0)")
    done = run("train_ddp.py", tmp_path, paths=[tmp_path])
    assert done.returncode == 2 and "this is Python 3.9, and 3.11 or later is needed" in done.stderr


def test_a_shells_background_job_is_not_interrupted(tmp_path):
    (tmp_path / "numpy.py").write_text(INTERRUPTS_ITSELF.replace("10", "0"))
    command = f"trap '' INT; exec {sys.executable} {ROOT / 'train_ddp.py'} --nosuch"
    done = completed(["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "interrupted" not in done.stderr and done.returncode != 130


CLEANS_UP = """
import os, signal, sys, time
from lockstep.ground import startup
startup.begin()
from lockstep.ground.errors import run_program
def body():
    with startup.cleaning_up():
        try:
            print("begun", flush=True)
            time.sleep(30)
        finally:
            print("cleaned", flush=True)
            time.sleep(float(sys.argv[1]))
raise SystemExit(run_program("x.py", body))
"""


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("times, seconds", [(1, 0), (2, 30)])
def test_what_has_to_clean_up_does_so_unless_asked_twice(tmp_path, times, seconds, number):
    (tmp_path / "x.py").write_text(CLEANS_UP)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "x.py", str(seconds)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.stdout.readline() == "cleaned\n"
    if times == 2:
        time.sleep(0.2)
        process.send_signal(number)
    _, said = process.communicate(timeout=20)
    word, status = STOPS[number]
    assert (process.returncode, said) == (status, f"x.py: {word}\n")


INTERRUPTED_CHILD = """
import contextlib, os, signal, subprocess, sys
from lockstep.ground import startup
startup.begin()
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
with startup.cleaning_up() if "cleaning up" in sys.argv else contextlib.nullcontext():
    print(subprocess.run(["true"], preexec_fn=interrupt if "child" in sys.argv else None).returncode, flush=True)
interrupt()
"""


@pytest.mark.parametrize("when", ["any time", "cleaning up"])
@pytest.mark.parametrize("who, status", [("child", 130), ("nobody", 0)])
def test_a_child_that_is_interrupted_too_says_nothing(tmp_path, who, status, when):
    """Ctrl-C reaches the whole group of processes, and some may not have become what they are started for."""
    (tmp_path / "x.py").write_text(INTERRUPTED_CHILD)
    done = python(tmp_path, "x.py", who, when)
    assert (done.returncode, done.stdout, done.stderr) == (130, f"{status}\n", "x.py: interrupted\n")


ENDS = """
import atexit, sys
from lockstep.ground import startup
startup.begin()

class Module:
    def __del__(self):
        print("taken apart")

module = Module()
atexit.register(print, "handled")
print("done", end=" ")
{end}
"""


@pytest.mark.parametrize(
    "end, status, said",
    [
        ("startup.end(3)", 3, "done handled\n"),
        ("raise SystemExit(3)", 3, "done handled\ntaken apart\n"),
        ("1 / 0", 1, "done handled\ntaken apart\n"),
    ],
    ids=["end", "exit", "error"],
)
def test_what_libraries_do_at_the_end_is_done_and_nothing_is_taken_apart(tmp_path, end, status, said):
    (tmp_path / "x.py").write_text(ENDS.format(end=end))
    done = python(tmp_path, "x.py")
    assert (done.returncode, done.stdout) == (status, said)


FAILS = """
from programs import in_process

def test_a_program_and_a_failure():
    assert in_process("plot_loss_curves.py", "--help").returncode == 0
    assert in_process("plot_loss_curves.py", "--nosuch").returncode == 2
    assert {}
"""


@pytest.mark.parametrize("holds, status", [(True, 0), (False, 1)])
def test_a_program_in_this_process_does_not_end_it(tmp_path, holds, status):
    """pytest's own status, not that of the last program it ran."""
    (tmp_path / "test_it.py").write_text(FAILS.format(holds))
    done = python(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py", paths=[ROOT / "tests"])
    assert done.returncode == status, done.stdout


def test_what_is_imported_is_not_looked_at_again():
    """In a process of its own: nothing is unfrozen again."""
    program = """
import gc
from lockstep.ground import startup
before = gc.get_threshold()
with startup.importing():
    import json
    during = gc.get_threshold()
print(gc.get_freeze_count() > 1000, gc.get_threshold() == before != during)
"""
    done = python(ROOT, "-c", program)
    assert (done.stdout, done.stderr) == ("True True\n", "")
