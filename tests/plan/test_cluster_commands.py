"""SLURM and the deepspeed launcher, as far as parsing goes: neither can be run here. And a run that MPI or srun started by itself."""

import os
import re
import shlex

import pytest
from programs import completed
from ranks import ROOT

from lockstep.ground.errors import UserError
from lockstep.plan import command_line

SCRIPT = ROOT / "studies" / "slurm.sh"


def told_to_srun(tmp_path, *arguments):
    """What the sbatch script passes to srun; srun and scontrol are stand-ins."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for name, body in {"srun": 'printf "%s\\n" "$@"', "scontrol": "printf 'node7\\nnode8\\n'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": tmp_path, "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": 2}
    job |= {"SLURM_GPUS_ON_NODE": 4, "SLURM_JOB_ID": 99, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment = {key: str(value) for key, value in job.items()}
    done = completed(["bash", SCRIPT, *arguments], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_sbatch_script_starts_torchrun(tmp_path):
    from torch.distributed.run import get_args_parser

    command, *arguments = told_to_srun(tmp_path, "train_deepspeed.py", "--tp_size", "1", "--zero_stage", "2")
    parsed = get_args_parser().parse_args(arguments)
    assert (command, parsed.nnodes, parsed.nproc_per_node) == ("torchrun", "2", "4")
    assert (parsed.rdzv_endpoint, parsed.rdzv_backend, parsed.rdzv_id) == ("node7:29500", "c10d", "99")
    assert parsed.training_script == "train_deepspeed.py"
    trained = command_line.parse_config("deepspeed", parsed.training_script_args)
    assert (trained.tp_size, trained.own["zero_stage"]) == (1, 2)


def test_the_sbatch_script_outside_a_job_is_one_line():
    done = completed(["bash", SCRIPT], env={"PATH": os.environ["PATH"]})
    assert done.returncode != 0 and "submit this script with sbatch" in done.stderr


def test_its_directives_are_well_formed():
    """One option with a value on each line, before the first command: sbatch ignores what comes later."""
    lines = SCRIPT.read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert len(directives) == 7 and lines[1:8] == directives
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+=\S+", line) for line in directives)


def commands_in(page, program):
    """The command lines of a page of docs that start with a program, words apart."""
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith(f"{program} ")]


def test_the_commands_of_the_deepspeed_launcher(tmp_path, monkeypatch):
    """Its own parser takes them, its hostfile is read, and the script takes what is left."""
    from deepspeed.launcher import runner

    commands = commands_in("studies.md", "deepspeed")
    assert len(commands) == 3
    for words in commands:
        parsed = runner.parse_args(words)
        assert parsed.user_script == "train_deepspeed.py"
        command_line.parse_config("deepspeed", parsed.user_args)
    hosts = tmp_path / "hostfile"
    hosts.write_text("node7 slots=4\nnode8 slots=4\n")
    (words,) = [words for words in commands if "--hostfile" in words]
    assert runner.fetch_hostfile(str(hosts)) == {"node7": 4, "node8": 4}
    assert runner.parse_args(words).hostfile == "hostfile"


@pytest.mark.parametrize(
    "environment, by",
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun"),
        ({"PMI_SIZE": "4"}, "mpirun"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun"),
    ],
)
def test_processes_without_ranks_are_refused(monkeypatch, environment, by):
    """Each would start a Ray of its own, and DeepSpeed would look for MPI."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=f"{by} started 4 processes .* start them with torchrun or the deepspeed launcher"
    ):
        command_line.parse_config("deepspeed", [])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert command_line.parse_config("deepspeed", []).num_workers == 4  # torchrun under srun


def test_one_process_of_srun_is_a_run_of_its_own(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert command_line.parse_config("ddp", [])
