"""A strategy from outside the repository goes through every program as it is; through run_verification_main.sh in test_one_command.py."""

import ast
import json
import shlex

import pytest
from own_strategy import own_strategy
from programs import in_process
from ranks import ROOT, run_groups

from lockstep.ground.errors import UserError
from lockstep.plan import ddp, strategies
from lockstep.plan.command_line import parse_config
from lockstep.training.preflight import load_inputs

SMALL = shlex.split("--batch_size 2 --seq_length 64 --precision fp32")


@pytest.fixture(scope="module")
def folder(new_folder):
    """A folder with my_parallel.py, whose class Mine is DDPStrategy."""
    folder = new_folder("own")
    own_strategy(folder / "my_parallel.py", name="Mine")
    return folder


def test_through_the_verification_of_tensors(folder):
    """With the worked example of the documentation, on a model whose head is not tied."""
    example = ROOT / "examples" / "transformers_tp.py"
    strategies = f"ddp,my_parallel.py:Mine:bucket_cap_mb=2,{example}:TransformersTP"
    arguments = ["--strategies", strategies, "--model_name", "tiny-llama", "--output_dir", "verify", *SMALL]
    done = in_process("run_verification.py", *arguments, cwd=folder)
    assert done.returncode == 0 and done.stdout.endswith("PASS\n"), done.stdout[-3000:] + done.stderr[-3000:]
    runs = json.loads((folder / "verify" / "report.json").read_text())["runs"]
    assert list(runs)[0] == "ddp"
    labels = [run["label"] for run in runs.values()][1:]
    assert labels == ["mine (TP=1, DP=2, bucket_cap_mb=2.0)", "transformers TP (TP=2, DP=2)"]


def test_its_spec_has_options_and_refuses_one(folder, monkeypatch):
    monkeypatch.chdir(folder)
    config = parse_config("my_parallel.py:Mine", ["--device", "cpu", "--bucket_cap_mb", "200"])
    assert config.spec.options is ddp.Options and config.spec.label == "mine"
    with pytest.raises(UserError, match="--bucket_cap_mb 200.0: mine has 100 at most"):
        config.spec.require(config, {})


def test_a_planted_fault_is_found_in_it(folder):
    arguments = ["--strategy", "my_parallel.py:Mine", "--steps", "3", "--output", "f.json"]
    done = in_process("run_faults.py", "no_dp_reduction", *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = json.loads((folder / "f.json").read_text())["rows"]
    assert (
        row["caught"]
        and row["first_right"]
        and row["strategy"] == "mine"
        and row["cause"] == "dp reduction missing"
    )


@pytest.mark.parametrize(
    "name, message",
    [
        ("nope", "there is no strategy nope; choose from ddp, deepspeed, fsdp, or give your own"),
        ("gone.py:Mine", "gone.py:Mine: the file cannot be imported"),
        (
            "taken.py:DDP",
            "taken.py: DDP: a run of this strategy would be called ddp, as one of Lockstep's own",
        ),
        ("taken.py:Control", "taken.py: Control: a run of this strategy would be called control"),
        ("my_parallel.py:Nobody", "my_parallel.py:Nobody: the file has no function or class Nobody"),
    ],
)
def test_what_is_no_strategy_is_refused(folder, monkeypatch, name, message):
    monkeypatch.chdir(folder)
    (folder / "taken.py").write_text("class DDP: ...\n\n\nclass Control: ...\n")
    with pytest.raises(UserError, match=message):
        strategies.spec_of(name)


WRONG = """

def no_class():
    pass


class NoBase:
    pass


class NoAxis(Mine):
    axes = ("dp", "ep")


class NoParallelize(TorchStrategy):
    axes = ("dp",)


class ReturnsNothing(Mine):
    def parallelize(self, model, device_mesh):
        super().parallelize(model, device_mesh)


class Freezes(Mine):
    def parallelize(self, model, device_mesh):
        model.model.norm.requires_grad_(False)
        return super().parallelize(model, device_mesh)


class Renames(Mine):
    def parallelize(self, model, device_mesh):
        model.model.norm = torch.nn.Sequential(model.model.norm)
        return super().parallelize(model, device_mesh)


class Cuts(Mine):
    def full_parameters(self):
        for name, tensor in super().full_parameters():
            yield name, tensor[:32] if name == "model.norm.weight" else tensor


class Casts(TorchStrategy):
    axes = ("dp",)

    def parallelize(self, model, device_mesh):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        fully_shard(model, mesh=device_mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        return model


class Optimizes(Mine):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.optimizer = self.own(self.parameters)

    def own(self, parameters):
        return torch.optim.Adafactor(parameters)


class Momentum(Optimizes):
    def own(self, parameters):
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


class Plain(Optimizes):
    def own(self, parameters):
        groups = [{"params": parameters, "weight_decay": 0.01}]
        return torch.optim.SGD(groups, lr=1e-3, foreach=False)


class Leaves(Mine):
    def update(self):
        import os

        if self.geometry().coordinates.dp == 1:
            os._exit(0)
        return super().update()
"""
STOPPED = {  # class -> what is said of it on every rank
    "NoParallelize": "NoParallelize has no method parallelize; write it",
    "ReturnsNothing": "ReturnsNothing.parallelize returned NoneType; return the module that forward calls",
    "Freezes": "Freezes.parallelize left model.norm.weight frozen (requires_grad is False)",
    "Renames": "after sharding, the strategy's model lacks model.norm.weight (1 in all) and also has model.norm.0.weight (1 in all)",
    "Cuts": "after sharding, model.norm.weight is (32,) when gathered, and (64,) in the model; weights must be whole",
    "Casts": "biased_linear_dtype is ['torch.bfloat16'], not ['torch.float32']; --precision gives all strategies their dtypes",
    "Optimizes": "the optimizer is Adafactor, and --optimizer says adamw or sgd; give the optimizer itself",
    "Momentum": "the optimizer is SGD with momentum, and --optimizer says adamw or sgd; give the optimizer itself",
    "Plain": "the live objects contradict the options: optimizer is 'SGD', not 'AdamW'; give --optimizer",
}


@pytest.fixture(scope="module")
def wrong(new_folder):
    """A folder with wrong.py, and what the ranks said of each class of STOPPED; the optimizers once with captured tensors, too."""
    folder = new_folder("wrong")
    own_strategy(folder / "wrong.py", name="Mine", then=f"\nimport torch\n{WRONG}")
    calls = []
    for name in STOPPED:
        arguments = [*SMALL, "--dp_size", "2", "--debug_steps", "1"]
        if name == "Momentum":
            arguments += ["--capture_dir", str(folder / "dumps")]
        run = {"strategy": f"{folder}/wrong.py:{name}", "fault": "none", "arguments": arguments}
        calls.append(("jobs:refused", name, run))
    run_groups([(2, "jobs:in_turn", folder / "runs", calls)])
    return folder


@pytest.mark.parametrize("name", STOPPED)
def test_what_stops_a_wrong_strategy_is_one_clear_line(wrong, name):
    for rank in range(2):
        said = (wrong / "runs" / name / f"error{rank}.txt").read_text()
        assert STOPPED[name] in said and len(said.splitlines()) == 1, said


def test_a_rank_that_leaves_is_named(wrong):
    """It ends with status 0, and the others fail of it."""
    arguments = [*SMALL, "--dp_size", "2", "--debug_steps", "1"]
    run = {"strategy": f"{wrong}/wrong.py:Leaves", "fault": "none", "arguments": arguments}
    with pytest.raises(
        AssertionError, match="ranks.py: rank 1 ended with status 0 before rank 0, which failed"
    ):
        run_groups([(2, "jobs:refused", wrong / "leaves", run)])


@pytest.mark.parametrize(
    "name, message",
    [
        ("NoBase", "NoBase has no geometry, .*full_parameters, .*derive it from TorchStrategy"),
        ("NoAxis", r"NoAxis: axes is \('dp', 'ep'\); it must be a tuple of some of pp, dp, cp, tp"),
        ("no_class", "no_class is no class; derive it from TorchStrategy"),
        ("torch", "the file has no function or class torch"),
    ],
)
def test_what_is_no_class_of_a_strategy_is_refused_before_the_start(wrong, name, message):
    with pytest.raises(UserError, match=message):
        load_inputs(parse_config(f"{wrong}/wrong.py:{name}", ["--device", "cpu"]))


def named_in(source):
    """The string literals in a Python source that are a registered strategy's name."""
    nodes = ast.walk(ast.parse(source))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and n.value in list(strategies.SPECS)]


def test_no_file_compares_the_name_of_a_strategy():
    """Whatever is told apart by strategy asks the registry: nothing else has a name that it could compare."""
    may = {
        "strategies.py",
        *(row.program for row in strategies.SPECS.values()),
        *("config.py", "deepspeed.py", "fsdp.py"),  # the specs
        *("deepspeed_engine.py", "releases.py"),  # a package
    }
    rooms = ("*.py", "lockstep/**/*.py", "benchmarks/*.py", "results/*.py", "examples/*.py")
    files = [path for room in rooms for path in ROOT.glob(room) if path.name not in may]
    assert len(files) > 80
    assert {path.name: named_in(path.read_text()) for path in files if named_in(path.read_text())} == {}


@pytest.mark.parametrize("line", ['x = name == "fsdp"', 'x in ("ddp", a)', 'RANKS = {"deepspeed": 4}'])
def test_the_name_of_a_strategy_would_be_seen(line):
    """Negative control."""
    assert named_in(line) and not named_in("row.is_baseline or 'tp' in row.axes")
