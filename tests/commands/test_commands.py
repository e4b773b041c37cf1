"""Every command in the README, the job files and the shell script is parsed by the real parser."""

import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from lockstep.plan import command_line
from lockstep.plan.runs import runs_of
from lockstep.plan.strategies import SPECS

ROOT = Path(__file__).parents[2]


def commands(text):
    """(strategy, arguments) of every train_*.py command line in a text. A backslash continues a line; in a docstring
    an explanation may follow after three spaces."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        match = re.search(
            r"(?:python|torchrun|deepspeed) .*?\btrain_(ddp|deepspeed|fsdp)\.py([^`#|>]*)", line
        )
        if match:
            yield match[1], shlex.split(match[2].split("   ")[0])


def documented():
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("train_*.py")]:
        yield from ((path.name, *command) for command in commands(path.read_text()))


@pytest.mark.parametrize("where, strategy, arguments", list(documented()))
def test_documented_commands(where, strategy, arguments):
    command_line.build_parser(strategy).parse_args(arguments)


def test_there_are_documented_commands():
    assert {strategy for _, strategy, _ in documented()} == {"ddp", "deepspeed", "fsdp"}


STEP_BY_STEP = {  # the step-by-step verification: model and data flags common to the three
    "ddp": "--num_workers 2 --save_init_weights --precision autocast",
    "deepspeed": "--tp_size 2 --dp_size 2 --num_workers 4 --precision autocast",
    "fsdp": "--tp_size 2 --dp_size 2 --num_workers 4 --autocast",
}


@pytest.mark.parametrize("strategy", STEP_BY_STEP)
def test_step_by_step_commands(strategy):
    common = (
        "--model_name Qwen/Qwen2.5-0.5B --batch_size 2 --seq_length 1024 --num_layers 2 --num_epochs 1 "
        "--learning_rate 1e-5 --debug_steps 100 --log_interval 10 --loss_output_dir /tmp/loss_curves "
        "--storage_path /tmp/ray_checkpoints --init_weights_path /tmp/shared_weights/init_weights.pt"
    )
    parsed = command_line.parse_config(strategy, f"{common} {STEP_BY_STEP[strategy]}".split())
    assert parsed.precision == "autocast" and parsed.debug_steps == 100
    assert (parsed.tp_size, parsed.dp_size) == ((1, 2) if strategy == "ddp" else (2, 2))


@pytest.mark.parametrize("strategy", SPECS)
def test_job_files(strategy, monkeypatch):
    from anyscale.job.models import JobConfig

    job = JobConfig.from_yaml(str(ROOT / f"job_{strategy}.yaml"))
    ((found, arguments),) = commands(job.entrypoint)
    assert found == strategy
    parsed = command_line.build_parser(strategy).parse_args(arguments)
    assert parsed.device == "cuda" and str(parsed.loss_output_dir) == "/mnt/cluster_storage/loss_curves"
    assert str(parsed.init_weights_path) == "/mnt/cluster_storage/shared_weights/init_weights.pt"
    assert parsed.save_init_weights == (strategy == "ddp")
    assert job.max_retries == 0


def test_jobs_compare_like_with_like():
    from anyscale.job.models import JobConfig

    jobs = {s: JobConfig.from_yaml(str(ROOT / f"job_{s}.yaml")) for s in SPECS}
    parsed = {
        s: vars(command_line.build_parser(s).parse_args(next(commands(j.entrypoint))[1]))
        for s, j in jobs.items()
    }
    own = {"tp_size", "dp_size", "num_workers", "save_init_weights"}
    own |= {option.name for spec in SPECS.values() for option in fields(spec.options)}
    shared = [{k: v for k, v in each.items() if k not in own} for each in parsed.values()]
    assert shared[0] == shared[1] == shared[2]


def test_a_wrong_key_in_a_job_file_is_found(tmp_path):
    """Negative control for the parser of the job files."""
    from anyscale.job.models import JobConfig

    text = (ROOT / "job_ddp.yaml").read_text().replace("max_retries", "max_retry")
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(Exception, match="max_retry"):
        JobConfig.from_yaml(str(tmp_path / "job.yaml"))


def test_shell_script_defaults_are_the_parsers():
    """The laptop defaults of the script are those of the scripts it calls."""
    text = (ROOT / "run_verification_main.sh").read_text()
    laptop = text.split("else # a laptop")[1]
    defaults = command_line.parse_config("ddp", [])
    for name in (
        "model_name",
        "batch_size",
        "seq_length",
        "learning_rate",
        "precision",
        "debug_steps",
        "log_interval",
        "seed",
        "dataset_name",
        "optimizer",
        "weight_decay",
        "max_grad_norm",
        "gradient_accumulation_steps",
        "attn_impl",
    ):
        value = re.search(rf"\b{name.upper()}=\${{{name.upper()}:-(.*)}}", laptop)[1]
        assert type(getattr(defaults, name))(value) == getattr(defaults, name), name


@pytest.mark.parametrize("script", ["run_verification_main.sh", "run_tests.sh", "environment.sh", ".ci/run"])
def test_shell_scripts_are_sound(script):
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0


def test_documented_verifications():
    """Every run_verification.py command line with its flags, through its parser and the training scripts'."""
    import run_verification

    found = 0
    for path in (ROOT / "README.md", ROOT / "run_verification.py", *ROOT.glob("docs/*.md")):
        for match in re.finditer(r"^ *python run_verification\.py(.*)$", path.read_text(), re.MULTILINE):
            options, rest = run_verification.parse(shlex.split(match[1].split("   ")[0]))
            command_line.parse_config(
                "fsdp", [*rest, "--tp_size", str(options.tp_size), "--dp_size", str(options.dp_size)]
            )
            if "path/to/" not in options.strategies:
                for run in runs_of(
                    options.strategies, command_line.parse_config("ddp", rest), options.tp_size
                ):
                    command_line.parse_config(run.spec.place, [*rest, *run.arguments])
            found += 1
    assert found >= 3


PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py"))


def arguments_of(pattern):
    """The arguments of every documented command line that matches, a comment behind three spaces left out."""
    for path in PAGES:
        for match in re.finditer(rf"^ *{pattern}(.*)$", path.read_text(), re.MULTILINE):
            yield shlex.split(match[match.re.groups].split("   ")[0], comments=True)


def test_documented_fault_runs():
    import run_faults

    parsed = [run_faults.parse(arguments) for arguments in arguments_of(r"python run_faults\.py")]
    assert len(parsed) >= 3


def test_documented_trainings_with_a_strategy_of_ones_own():
    from lockstep.train import split

    found = 0
    for arguments in arguments_of(r"(?:torchrun --nproc_per_node 4 -m|python -m) lockstep\.train"):
        strategy, rest = split(arguments)
        assert strategy.endswith(".py:MyStrategy")
        command_line.build_parser("fsdp").parse_args(rest)
        found += 1
    assert found >= 1
