"""The same two scripts, Trainer's and DeepSpeed's, recorded and judged with three releases of the libraries, each in an environment of its own.

    python benchmarks/releases.py --work_dir runs/releases --output results/releases.md

Makes the environments in the folder, or uses those that are there. Needs the network. Exit status 0, whatever the verdicts are.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from outputs import output

from lockstep.ground.files import write_result

ROOT = Path(__file__).resolve().parents[1]
TORCH = "2.13.0"
BEGINS = "Two ranks over gloo"
RELEASES = {
    "2025": {"transformers": "4.57.1", "accelerate": "1.10.1", "deepspeed": "0.17.6"},
    "spring of 2026": {"transformers": "5.4.0", "accelerate": "1.13.0", "deepspeed": "0.18.6"},
    "newest": {"transformers": "5.24.0", "accelerate": "1.15.0", "deepspeed": "0.19.8"},
}
RUNS = {
    "transformers": [
        ("trainer.py", ["--gradient_accumulation_steps", str(steps), "--max_grad_norm", "0.5"])
        for steps in (1, 2)
    ],
    "deepspeed": [("deepspeed_loop.py", ["--stage", str(stage)]) for stage in range(4)],
}


def environment(folder: Path, packages: dict[str, str]) -> str:
    """The Python of an environment with these packages and what Lockstep needs to record and judge."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        pins = [f"{name}=={version}" for name, version in packages.items()]
        subprocess.run(
            [*install, f"torch=={TORCH}", "numpy", "pydantic", "safetensors", "setuptools", "wheel"],
            check=True,
        )
        subprocess.run([*install, "--no-build-isolation", *pins], check=True)
    return str(python)


def verdict(python: str, script: str, arguments: list[str], folder: Path) -> str:
    """What the judge says last of a run of two ranks; of one that failed, its last line."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "lockstep.record"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = [python, *start, "--output", str(folder), str(ROOT / "examples" / "record" / script), *arguments]
    for command in (run, [python, "-m", "lockstep.judge", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        if done.returncode not in (0, 1) or (command is run and done.returncode):
            return f"not judged: {(done.stderr or done.stdout).strip().splitlines()[-1][:200]}"
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work_dir", type=Path, default=Path("runs/releases"))
    parser.add_argument("--output", type=output(BEGINS), required=True)
    options = parser.parse_args()
    lines = [f"{BEGINS}, torch {TORCH}; `python benchmarks/releases.py` (see README.md here).", ""]
    lines += ["| release | script | verdict |", "|---|---|---|"]
    for label, packages in RELEASES.items():
        folder = options.work_dir.absolute() / label.replace(" ", "_")
        python = environment(folder / "environment", packages)
        for library, runs in RUNS.items():
            for number, (script, arguments) in enumerate(runs):
                said = verdict(python, script, arguments, folder / f"{library}_{number}")
                lines.append(
                    f"| {library} {packages[library]} ({label}) | `{script} {' '.join(arguments)}` | {said} |"
                )
                print(lines[-1], flush=True)
    write_result(options.output, "\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
