"""--report_to: real TensorBoard and MLflow files and an offline W&B run, read back with the clients; and what is refused."""

import importlib.util
import json
import shutil
import struct
import sys
import tempfile

import pytest
from programs import completed, in_process
from ranks import ROOT
from real_runs import environment, folders

from lockstep.dumps import history
from lockstep.ground.errors import UserError
from lockstep.training import trackers as tracker_module

SMALL = ["--batch_size", "2", "--seq_length", "32", "--num_layers", "1", "--device", "cpu"]
ALL = "tensorboard,wandb,mlflow"
METRICS = {"loss", "grad_norm", "learning_rate", "tokens_per_second"}


@pytest.fixture
def trackers():
    """All clients, and the environment of a run that uses them."""
    for name in ALL.split(","):
        pytest.importorskip(name, reason=f"{name} is missing: pip install -r requirements-{name}.txt")
    short = tempfile.mkdtemp(dir="/tmp")  # the names of Ray's sockets must be
    yield environment(WANDB_MODE="offline", RAY_TMPDIR=short)
    shutil.rmtree(short, ignore_errors=True)


def from_tensorboard(folder, name):
    """({metric: [(step, value)]}, {text: its content}) of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = (folder / "tensorboard").glob(f"{name}-2*")
    read = EventAccumulator(str(path)).Reload()
    numbers = {key: [(one.step, one.value) for one in read.Scalars(key)] for key in read.Tags()["scalars"]}
    texts = {
        key.removesuffix("/text_summary"): read.Tensors(key)[0].tensor_proto.string_val[0].decode()
        for key in read.Tags()["tensors"]
    }
    return numbers, texts


def from_mlflow(folder, name):
    """(the run, {metric: [(step, value)]}, the names of its files)"""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("lockstep").experiment_id
    (run,) = (run for run in client.search_runs([experiment]) if run.info.run_name == name)
    numbers = {
        key: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    return run, numbers, {one.path for one in client.list_artifacts(run.info.run_id)}


def wandb_records(data):
    """The records of an offline run's file: a log of LevelDB, blocks of 32 KiB, behind 7 bytes."""
    assert data.startswith(b":W&B")
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        size, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def from_wandb(folder, name):
    """({metric: [(step, value)]}, the summary, the names of its files, the exit code) of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in (folder / "wandb").glob("offline-run-*/run-*.wandb"):
        found, numbers, summary, code = None, {}, {}, None
        for data in wandb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                found = record.run.display_name
            if record.HasField("exit"):
                code = record.exit.exit_code
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            row = {
                "/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item
            }
            for key in row.keys() & METRICS:
                numbers.setdefault(key, []).append((row["_step"], row[key]))
        if found == name:
            return numbers, summary, {one.name for one in (path.parent / "files").iterdir()}, code
    raise AssertionError(f"no run {name} in {folder}")


def test_the_steps_of_a_run_under_ray(tmp_path, trackers):
    """DeepSpeed, in Ray's workers: what all three hold is what the history holds."""
    command = [sys.executable, "train_deepspeed.py", *folders(tmp_path), *SMALL, "--debug_steps", "3"]
    done = completed([*command, "--report_to", ALL], env=trackers)
    assert done.returncode == 0, done.stdout + done.stderr
    record = history.read(tmp_path / "loss_deepspeed.json")
    told = [{**step, "tokens_per_second": step["tokens"] / step["seconds"]} for step in record.steps]
    wanted = {key: [(step["step"], pytest.approx(step[key], rel=1e-6)) for step in told] for key in METRICS}
    numbers, texts = from_tensorboard(tmp_path, "deepspeed")
    assert numbers == wanted and '"learning_rate": 0.001' in texts["about"]
    run, numbers, _ = from_mlflow(tmp_path, "deepspeed")
    assert numbers == wanted and run.data.params["learning_rate"] == "0.001"
    assert run.info.status == "FINISHED"
    numbers, _, _, code = from_wandb(tmp_path, "deepspeed")
    assert numbers == wanted and code == 0


def test_a_run_that_fails_is_one_that_failed(tmp_path, trackers):
    """Negative control of the status, under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    rates = ["--learning_rate", "1e30", "--max_grad_norm", "0", "--debug_steps", "4"]
    command = [*launcher, "train_ddp.py", *folders(tmp_path), *SMALL, *rates, "--report_to", "mlflow,wandb"]
    done = completed(command, env=trackers)
    assert done.returncode == 1 and "the loss is nan" in done.stderr, done.stderr
    run, numbers, _ = from_mlflow(tmp_path, "ddp")
    assert run.info.status == "FAILED" and [step for step, _ in numbers["loss"]] == [1]
    assert from_wandb(tmp_path, "ddp")[3] == 1


@pytest.mark.parametrize(("strategy", "verdict"), [("Mine", "PASS"), ("Doubled", "FAIL")])
def test_the_verdict_its_tolerance_and_the_report(tmp_path, trackers, strategy, verdict):
    from own_strategy import DOUBLED, own_strategy

    own_strategy(tmp_path / "mine.py", "Mine", DOUBLED)
    out = tmp_path / "out"
    strategies = f"ddp,{tmp_path / 'mine.py'}:{strategy}"
    command = [sys.executable, "run_verification.py", "--output_dir", out, "--strategies", strategies, *SMALL]
    done = completed([*command, "--steps", "1", "--report_to", ALL], env=trackers)
    assert done.returncode == (verdict != "PASS") and done.stdout.endswith(f"{verdict}\n"), done.stderr
    name, report = strategy.lower(), json.loads((out / "report.json").read_text())
    worst = max((row for row in report["tensors"] if row["run"] == name), key=lambda row: row["of_tolerated"])
    said = {
        f"{name}/worst_error": worst["distance"],
        f"{name}/worst_tolerated": worst["tolerated"],
        f"{name}/worst_of_tolerated": worst["of_tolerated"],
    }
    wanted = {key: pytest.approx(value, rel=1e-5) for key, value in said.items()}
    texts = {"verdict": verdict, "ddp/tensors": "PASS", f"{name}/tensors": verdict}
    texts[f"{name}/worst_tensor"] = f"step 1, {worst['name']}"
    numbers, found = from_tensorboard(out / "losses", "verification")
    assert {key: numbers[key][0][1] for key in wanted} == wanted and texts.items() <= found.items()
    assert found["report.md"] == (out / "report.md").read_text()
    run, numbers, files = from_mlflow(out / "losses", "verification")
    assert {key: numbers[key][0][1] for key in wanted} == wanted and texts.items() <= run.data.tags.items()
    assert files == {"report.md", "report.json", "report.html"}
    _, summary, files, _ = from_wandb(out / "losses", "verification")
    assert {key: summary[key] for key in wanted} == wanted and texts.items() <= summary.items()
    assert {"report.md", "report.json", "report.html"} <= files
    assert from_mlflow(out / "losses", name)[1]["loss"], "the runs are reported, too"


def test_what_a_tracker_refuses_ends_the_run_in_one_line(tmp_path, trackers):
    """Before its first step: MLflow no longer writes folders of files."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command = [*launcher, "train_ddp.py", *folders(tmp_path), *SMALL, "--report_to", "mlflow"]
    done = completed(command, env=trackers | {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/runs"})
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("train_ddp.py: "))
    assert done.returncode == 1 and line.startswith(
        "train_ddp.py: --report_to mlflow: The filesystem tracking"
    )
    assert line.endswith("; set its environment variables, or leave it out")
    assert not (tmp_path / "loss_ddp.json").exists()


def test_a_tracker_is_closed_if_the_next_cannot_be_opened(tmp_path, monkeypatch):
    closed = []

    class First:
        def __init__(self, *_):
            self.close = closed.append

    def second(*_):
        raise RuntimeError("no login")

    monkeypatch.setattr(tracker_module, "TRACKERS", {"first": First, "second": second})
    with pytest.raises(UserError, match="--report_to second: no login"):
        tracker_module.Trackers(["first", "second"], "ddp", tmp_path, {})
    assert closed == [1]


@pytest.mark.parametrize(
    "program", ["train_ddp.py", "train_deepspeed.py", "train_fsdp.py", "run_verification.py"]
)
def test_a_missing_package_is_a_usage_error_before_anything_starts(tmp_path, monkeypatch, program):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else find(name, *more)
    )
    folder = (
        ["--output_dir", tmp_path / "out"] if program == "run_verification.py" else folders(tmp_path / "out")
    )
    done = in_process(program, *folder, "--report_to", "wandb")
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "out").exists()
    assert done.stderr == (
        f"{program}: --report_to wandb: this Python has no package wandb; pip install -r requirements-wandb.txt, or leave it out\n"
    )


@pytest.mark.parametrize("given", ["comet", "wandb,", ""])
def test_an_unknown_tracker_is_refused(tmp_path, given):
    done = in_process("train_ddp.py", *folders(tmp_path), "--report_to", given)
    assert done.returncode == 2 and "there is no tracker" in done.stderr
    assert "choose from tensorboard, wandb, mlflow" in done.stderr


def test_none_and_nothing_report_to_nobody(tmp_path):
    assert in_process("train_ddp.py", *folders(tmp_path), "--report_to", "none", "--dry_run").returncode == 0


def test_the_extra_has_the_pins():
    extras = (ROOT / "pyproject.toml").read_text()
    for name in ALL.split(","):
        assert f'dependencies.{name} = {{ file = "requirements-{name}.txt" }}' in extras
        assert f"\n{name}" in (ROOT / f"requirements-{name}.txt").read_text()
