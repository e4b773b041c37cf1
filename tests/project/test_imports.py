"""The direction of imports: a room may only use the rooms below it."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import completed

from lockstep.inputs import shapes
from lockstep.inputs.architectures import BUILT_IN

ROOT = Path(__file__).parents[2]
FILES = [*ROOT.glob("*.py"), *ROOT.glob("lockstep/**/*.py")]
STRATEGIES = ["ddp_strategy", "autotp_strategy", "fsdp_strategy"]


# From the bottom. A room may use those before it; what lies beside the rooms are commands, which use all of them.
ROOMS = [
    "ground",
    "inputs",
    "plan",
    "dumps",
    "recorder",
    "training",
    "faults",
    "verdict",
    "recorded",
    "diagnosis",
    "page",
    "running",
]
ORDER = [*ROOMS, "commands", "root"]
NAMED = re.compile(r"([\w.]+):\w+")


def imports(path):
    """Modules that a file imports, in functions and for type hints, too; and "module:" for each text "module:NAME"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {f"{name[1]}:" for name in [NAMED.fullmatch(node.value)] if name}
    return found


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module):
    top, *rest = module.split(".")
    if top != "lockstep":
        return "root"
    return rest[0] if rest and rest[0] in ROOMS else "commands"


def graph_of(paths):
    """Module -> modules of this project that it imports or names."""
    found = {module_of(path): imports(path) for path in paths}
    return {
        name: {one for one in used if one.rstrip(":") in found.keys() - {name, "lockstep"}}
        for name, used in found.items()
    }


def arrows_up(graph):
    """(module, what it uses) where the second is in a later room. A room itself is no file of it."""
    return sorted(
        (name, one)
        for name, used in graph.items()
        for one in used
        if one.rstrip(":").removeprefix("lockstep.") not in ROOMS
        and ORDER.index(room_of(one.rstrip(":"))) > ORDER.index(room_of(name))
    )


# The two texts that each strategy has: its factory, and the handles of planted faults.
TEXTS = [
    ("lockstep.plan.config", "lockstep.faults.torch_handles:"),
    ("lockstep.plan.ddp", "ddp_strategy:"),
    ("lockstep.plan.ddp", "lockstep.faults.torch_handles:"),
    ("lockstep.plan.deepspeed", "autotp_strategy:"),
    ("lockstep.plan.deepspeed", "lockstep.faults.deepspeed_handles:"),
    ("lockstep.plan.fsdp", "fsdp_strategy:"),
    ("lockstep.plan.fsdp", "lockstep.faults.torch_handles:"),
]


def test_no_room_looks_up():
    graph = graph_of(FILES)
    assert {room_of(name) for name in graph} == set(ORDER)
    assert arrows_up(graph) == TEXTS


@pytest.mark.parametrize(
    "name, used", [("lockstep.dumps.dump", "lockstep.running.jobs"), ("lockstep.inputs.data", "run_faults:")]
)
def test_a_room_that_looks_up_would_be_seen(name, used):
    """Negative control: an import, and a text."""
    graph = graph_of(FILES)
    graph[name].add(used)
    assert (name, used) in arrows_up(graph)


def users_of(package):
    return {p.name for p in FILES if any(name.split(".")[0] == package for name in imports(p))}


def test_one_file_each():
    assert users_of("ray") == {
        "under_ray.py",
        "train.py",
        *(f"train_{name}.py" for name in ("ddp", "deepspeed", "fsdp")),
    }
    own = (
        "deepspeed_build",
        "deepspeed_engine",
        "deepspeed_file",
        "deepspeed_handles",
        "deepspeed_layers",
        "ulysses",
        "zero",
    )
    assert users_of("deepspeed") == {"autotp_strategy.py", *(f"{name}.py" for name in own)}


# Where DeepSpeed may be spoken of: its own files, the registry, what records and judges its optimizers, what installs it, pages, results and tests.
MAY_NAME_DEEPSPEED = re.compile(
    r"lockstep/(plan|training|faults|recorder)/(deepspeed\w*|zero|ulysses)\.py|extras/memory/(plan|zero)\.py|lockstep/(plan/strategies|faults/__init__)\.py|autotp_strategy\.py|train_deepspeed\.py|job_deepspeed\.yaml"
    r"|lockstep/recorder/(optimizers|recorded_step)\.py|lockstep/recorded/(update|optimizer)\.py"
    r"|benchmarks/releases\.py|pyproject\.toml|requirements.*\.txt|(README|CONTRIBUTING|CHANGELOG)\.md|(docs|results|findings|studies|tests|examples/record)/.*"
)
# In other files: its launcher, which starts every strategy, its files of the recorder, and the public thread of a planted fault.
SPOKEN_OF = re.compile(
    r"deepspeed launcher|\bdeepspeed_(engine|layers)\b|seen_in=\"deepspeedai/DeepSpeed \d+\""
)


def strangers(contents):
    """Of {path: text} the paths that name DeepSpeed and may not."""
    return [
        path
        for path, text in contents.items()
        if not MAY_NAME_DEEPSPEED.fullmatch(path) and "deepspeed" in SPOKEN_OF.sub("", text).lower()
    ]


def test_only_its_own_files_name_deepspeed():
    listed = completed(["git", "ls-files"])
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [path for path in listed.stdout.splitlines() if not MAY_NAME_DEEPSPEED.fullmatch(path)]
    assert "lockstep/launch.py" in paths and "run_verification_main.sh" in paths
    assert strangers({path: (ROOT / path).read_text(errors="replace") for path in paths}) == []


@pytest.mark.parametrize(
    "path, text, named",
    [
        ("lockstep/training/loop.py", "# DeepSpeed does so by itself", True),
        ("benchmarks/real_size.py", 'RANKS = {"deepspeed": 4}', True),
        ("lockstep/plan/config.py", "# the deepspeed launcher passes it; so says deepspeed", True),
        ("lockstep/plan/config.py", "# the deepspeed launcher passes it", False),
        ("lockstep/faults/optimizer.py", 'seen_in="deepspeedai/DeepSpeed 8068",', False),
        ("lockstep/plan/strategies.py", 'name="deepspeed",', False),
    ],
)
def test_a_file_that_names_deepspeed_would_be_seen(path, text, named):
    """Negative control."""
    assert strangers({path: text}) == ([path] if named else [])


def test_no_circle():
    graph = {name: {one for one in used if one[-1] != ":"} for name, used in graph_of(FILES).items()}
    assert "lockstep.plan.config" in graph["lockstep.training.preflight"]
    graphlib.TopologicalSorter(graph).prepare()
    graph["lockstep.plan.config"].add("lockstep.training.preflight")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


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


# In this order in one process: a module that imports something slow is the first after which it is there.
ANSWERS_AT_ONCE = [
    "plan.config",
    "plan.contract",
    "plan.strategies",
    "verdict.loss_curves",
    "verdict.loss_report",
    "dumps.history",
    "inputs.data",
    "inputs.weights",
    "launch",
    "running.jobs",
    "ground.locks",
    "ground.processes",
]
SLOW = {"torch", "transformers", "ray", "deepspeed"}


def first_slow(modules):
    """The first of the modules whose import imports a slow library, or "". In one new process."""
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
        f"    if {SLOW!r} & set(sys.modules): print(name); break"
    )
    done = completed([sys.executable, "-c", code, *modules])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_answers_a_usage_error_does_not_wait_for_torch():
    assert first_slow(f"lockstep.{name}" for name in ANSWERS_AT_ONCE) == ""
    assert (
        first_slow(["lockstep.plan.config", "lockstep.ground.collective"]) == "lockstep.ground.collective"
    )  # negative control


USAGE_ERRORS = {
    "--batch_size 0": "0 is out of range",
    "--model_name tiny-nothing": "no built-in model",
    "--num_layers 3": "tiny-qwen2 has 2 layers",
    "--tp_size 4": "does not divide the model's 2 KV heads",
    "--seq_length 8192": "has positions for 4096 tokens",
    "--init_weights_path nothing.safetensors": "no such file",
    "--capture_dir /proc/nothing": "cannot be written",
    "--loss_output_dir /proc/nothing": "cannot be written",
    "--storage_path /proc/nothing": "cannot be written",
}
WITHOUT_TORCH = """
import contextlib, io, json, sys
sys.modules.update(torch=None, transformers=None)
import train_fsdp
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        status = train_fsdp.main(arguments)
    print(json.dumps([status, error.getvalue()]))
"""


def test_a_usage_error_is_answered_without_torch(tmp_path):
    """All of them in one process, also where there is a weights file, which torch will read.

    What is known of a model is kept from its first use on, which needs torch.
    """
    shapes.describe(BUILT_IN["tiny-qwen2"])
    (tmp_path / "w.pt").touch()
    folders = ["--storage_path", str(tmp_path), "--loss_output_dir", str(tmp_path)]
    folders += ["--init_weights_path", str(tmp_path / "w.pt")]
    calls = json.dumps([[*folders, *arguments.split()] for arguments in USAGE_ERRORS])
    done = completed([sys.executable, "-c", WITHOUT_TORCH, calls])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for (arguments, message), line in zip(USAGE_ERRORS.items(), done.stdout.splitlines(), strict=True):
        status, said = json.loads(line)
        assert (status, len(said.splitlines())) == (2, 1) and message in said, (arguments, said)


def test_what_starts_first_needs_nothing():
    """It answers in a Python that has no packages, or is too old for the rest."""
    used = {name.split(".")[0] for name in imports(ROOT / "lockstep/ground/startup.py")}
    assert used <= sys.stdlib_module_names
    assert imports(ROOT / "lockstep/__init__.py") == {"lockstep.record"}  # in a function


def test_runs_without():
    """DDP and FSDP without deepspeed, and the loop without ray, too."""
    code = "import sys; sys.modules.update(deepspeed=None, ray=None); import ddp_strategy, fsdp_strategy, lockstep.training.loop"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
