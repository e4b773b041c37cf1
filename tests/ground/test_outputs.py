"""What a program writes replaces its own older results and no other file; it is answered before any work."""

import outputs
import pytest
from programs import ROOT, in_process

import run_faults
from lockstep.ground import files

KEPT = "was not written by Lockstep and is not replaced"
# what must be given besides
ARGUMENTS = {"detection_limit": ["x"], "noise_floor": ["--work_dir", "x"], "damaged_files": ["text"]}
# fmt: skip
PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if '"--output"' in path.read_text() and path.stem != "outputs"
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_keeps_the_files_of_others(tmp_path, name):
    path = tmp_path / "thesis.json"
    path.write_text('{"mine": 1}')
    done = in_process(f"benchmarks/{name}.py", *ARGUMENTS.get(name, []), "--output", path)
    assert done.returncode == 2 and KEPT in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert [each.name for each in tmp_path.iterdir()] == [path.name] and path.read_text() == '{"mine": 1}'


@pytest.mark.parametrize("name", [name for name in PROGRAMS if (ROOT / "results" / f"{name}.json").exists()])
def test_a_benchmark_replaces_its_result_in_the_repository(name):
    """What it looks for is what it writes. Of damaged_files test_damaged_files.py speaks."""
    done = in_process(f"benchmarks/{name}.py", "--output", f"results/{name}.json", "--help")
    assert done.returncode == 0, done.stderr


def test_the_results_in_the_repository_are_known_as_results():
    for precision in ("fp32", "autocast"):
        files.require_ours(ROOT / f"results/faults-{precision}.json", "x", run_faults.BEGINS)
        files.require_ours(ROOT / f"results/faults-{precision}.md", "x", run_faults.TITLE.encode())
    for path in (ROOT / "results").glob("*/verdict.json"):
        files.require_ours(path, "x", files.VERDICT)
    for path in (ROOT / "results").glob("*/report.*"):
        files.require_ours(path, "x", files.REPORTS[path.name])
    for path in (*(ROOT / "results").glob("*/loss_curves.png"), ROOT / "results" / "detection_limit.png"):
        files.require_ours(path, "x", files.FIGURE, anywhere=True)


def test_a_page_and_a_figure_beside_it_are_looked_at_too(tmp_path):
    take = outputs.output("[", md="# Title", png="")
    assert take(str(tmp_path / "a.json")) == tmp_path / "a.json"
    for suffix, ours in ((".json", b"[1]"), (".md", b"# Title\n"), (".png", b"..." + files.FIGURE)):
        (tmp_path / "a").with_suffix(suffix).write_bytes(ours)
    take(str(tmp_path / "a.json"))
    for suffix in (".json", ".md", ".png"):
        path = (tmp_path / "a").with_suffix(suffix)
        before = path.read_bytes()
        path.write_bytes(b"mine")
        with pytest.raises(outputs.argparse.ArgumentTypeError, match=f"^{path} {KEPT}"):
            take(str(tmp_path / "a.json"))
        path.write_bytes(before)
    with pytest.raises(outputs.argparse.ArgumentTypeError, match="^.*: is a folder"):
        take(str(tmp_path))


RUN = ["--debug_steps", "1", "--device", "cpu", "--control"]
FAULTS = ["run_faults.py", "tie_broken", "--output", "OUT/f.json"]
DDP = ["train_ddp.py", "--dry_run", "--loss_output_dir", "OUT", *RUN]
# it removes older results before its first run; test_initial_weights.py runs the whole script
# fmt: skip
PLAN = [
    "run_verification.py",
    "--part",
    "plan",
    "--loss_output_dir",
    "OUT",
    "--capture_dir",
    "OUT/tensors",
    "--overwrite",
    *RUN,
]
KEEPS = [
    (FAULTS, "f.json"),
    (FAULTS, "f.md"),
    (["lockstep/compare.py", "OUT/a", "OUT/b", "--output_dir", "OUT"], "report.md"),
    (["run_verification.py", "--output_dir", "OUT", "--overwrite"], "report.md"),
    (DDP, "loss_control.json"),
    *((PLAN, name) for name in ("loss_curves.png", "verdict.json", "tensors/report.md", "loss_control.json")),
]


@pytest.mark.parametrize("command, name", KEEPS)
def test_a_program_keeps_the_files_of_others(tmp_path, command, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('"mine"')
    done = in_process(*(word.replace("OUT", str(tmp_path)) for word in command))
    assert done.returncode == 2 and f"{name} {KEPT}" in done.stderr and done.stderr.count("\n") == 1, (
        done.stderr
    )
    assert (tmp_path / name).read_text() == '"mine"'


def test_without_the_control_run_its_history_may_be_anybodys(tmp_path):
    (tmp_path / "loss_control.json").write_text('"mine"')
    assert in_process(*(word.replace("OUT", str(tmp_path)) for word in DDP[:-1])).returncode == 0
