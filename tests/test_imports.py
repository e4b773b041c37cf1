"""The direction of imports: a room may only use the rooms below it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [*ROOT.glob("*.py"), *ROOT.glob("lockstep/**/*.py")]
STRATEGIES = ["ddp_strategy", "autotp_strategy", "fsdp_strategy"]


def imports(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def users_of(package):
    return {p.name for p in FILES if any(name.split(".")[0] == package for name in imports(p))}


def test_one_file_each():
    assert users_of("ray") == {"under_ray.py"}
    assert users_of("deepspeed") == {"autotp_strategy.py", "build.py"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_stay_below_the_loop(name):
    forbidden = {"lockstep.training.loop", "lockstep.launch", "ray", *STRATEGIES} - {name}
    assert not imports(ROOT / f"{name}.py") & forbidden


def test_the_loop_knows_no_strategy_by_name():
    source = (ROOT / "lockstep/training/loop.py").read_text()
    assert "hasattr" not in source and not imports(ROOT / "lockstep/training/loop.py") & {
        *STRATEGIES,
        "ray",
        "deepspeed",
    }
    assert not any(f'"{name}"' in source for name in ("ddp", "deepspeed", "fsdp"))


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "training.contract",
        "losses.curves",
        "training.history",
        "training.history_schema",
        "losses.curve_report",
        "inputs.data",
        "inputs.weights",
        "launch",
        "running.jobs",
        "running.locks",
        "running.processes",
        "strategies",
    ],
)
def test_what_answers_a_mistake_does_not_wait_for_torch(module):
    code = f"import sys, lockstep.{module}; sys.exit(bool({{'torch', 'transformers', 'ray', 'deepspeed'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_what_starts_first_needs_nothing():
    """It answers in a Python that has no packages, or is too old for the rest."""
    used = {name.split(".")[0] for name in imports(ROOT / "lockstep/startup.py")}
    assert used <= sys.stdlib_module_names and not imports(ROOT / "lockstep/__init__.py")


@pytest.mark.parametrize(
    "name, absent",
    [("ddp_strategy", "deepspeed"), ("fsdp_strategy", "deepspeed"), ("lockstep.training.loop", "ray")],
)
def test_runs_without(name, absent):
    code = f"import sys; sys.modules[{absent!r}] = None; import {name}"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
