"""A small runner of the steps of a composite action, as GitHub's: files for GITHUB_* variables, expressions replaced, bash as it calls it."""

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from ranks import ROOT

EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")


@dataclass
class Ran:
    """What came of the steps: the first status that is not 0, what was said, the summary, the outputs, and `with` of each used action."""

    status: int = 0
    said: str = ""
    summary: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    used: dict[str, dict[str, str]] = field(default_factory=dict)


class Action:
    def __init__(self, path: Path = ROOT / "action.yml"):
        self.content = yaml.safe_load(path.read_text())
        self.steps = self.content["runs"]["steps"]

    def run(self, folder: Path, **given: str) -> Ran:
        """Run the bash steps in `folder`, with these inputs. Raises ValueError for what it does not know."""
        unknown = given.keys() - self.content["inputs"].keys()
        if unknown:
            raise ValueError(f"no such inputs: {sorted(unknown)}")
        inputs = {name: one["default"] for name, one in self.content["inputs"].items()} | given
        known, ran = {f"inputs.{name}": value for name, value in inputs.items()}, Ran()
        for step in self.steps:
            if not _wanted(step.get("if", "success()"), known, failed=ran.status != 0):
                continue
            if "uses" in step:
                ran.used[step["uses"]] = {key: expand(value, known) for key, value in step["with"].items()}
                continue
            done = _bash(step, folder, known)
            ran.said += done.stdout
            ran.status = ran.status or done.returncode
            lines = (folder / "output").read_text().splitlines()
            found = dict(line.split("=", 1) for line in lines)
            known |= {f"steps.{step.get('id')}.outputs.{name}": value for name, value in found.items()}
        ran.summary = (folder / "summary").read_text()
        ran.outputs = {name: expand(one["value"], known) for name, one in self.content["outputs"].items()}
        return ran


def expand(value: Any, known: dict[str, str]) -> str:
    """Replace each ${{ name }}: an output that no step wrote by nothing; a KeyError for any other name that there is not."""

    def known_as(found: re.Match) -> str:
        return known.get(found[1], "") if found[1].startswith("steps.") else known[found[1]]

    return EXPRESSION.sub(known_as, str(value))


def _wanted(condition: str, known: dict[str, str], *, failed: bool) -> bool:
    condition = EXPRESSION.sub(r"\1", condition)
    if condition == "!cancelled()":
        return True
    if condition == "success()":
        return not failed
    name, value = re.fullmatch(r"([\w.]+) == '([^']*)'", condition).groups()
    return not failed and known[name] == value


def _bash(step: dict[str, Any], folder: Path, known: dict[str, str]) -> subprocess.CompletedProcess:
    if step["shell"] != "bash":
        raise ValueError(f"{step['name']}: {step['shell']} is not known here")
    files = {name: folder / name for name in ("output", "summary", "script")}
    for path in files.values():
        path.touch()
    files["script"].write_text(expand(step["run"], known))
    environment = {
        **os.environ,
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_OUTPUT": str(files["output"]),
        "GITHUB_STEP_SUMMARY": str(files["summary"]),
        "RUNNER_TEMP": str(folder),
        **{name: expand(value, known) for name, value in step.get("env", {}).items()},
    }
    command = [*BASH, str(files["script"])]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=380,
    )
