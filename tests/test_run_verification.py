"""run_verification.py from end to end, and what it says to mistakes."""

import json
import subprocess
import sys

import pytest
from ranks import ROOT
from test_launch import environment


def verify(*arguments):
    command = [sys.executable, "run_verification.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280)


def test_from_end_to_end(tmp_path):
    folder = tmp_path / "verify"
    arguments = ["--output_dir", folder, "--batch_size", "2", "--seq_length", "64", "--steps", "2", "--model_name", "tiny-qwen3"]
    done = verify(*arguments)
    assert done.returncode == 0 and done.stdout.endswith("PASS\n"), done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"] == "PASS" and {run["verdict"] for run in report["runs"].values()} == {"PASS"}
    assert len(report["runs"]) == 3 and all(row["judged"] for row in report["tensors"])
    text = (folder / "report.md").read_text()
    order = ["Verdict", "First tensor that is too far", "Loss by DP rank", "Layer output norms", "Gradient norms",
             "Largest distances", "Largest differences", "Bit-identical tensors", "Replicas"]  # fmt: skip
    places = [text.index(f"## {title}") for title in order]
    assert places == sorted(places) and "forward: 39 of 39 tensors bit-identical" in text
    again = verify(*arguments)
    assert again.returncode == 2 and "nothing is overwritten" in again.stderr
    (folder / "thesis.tex").write_text("")
    again = verify(*arguments, "--overwrite")
    assert again.returncode == 2 and "holds thesis.tex, which no verification wrote" in again.stderr
    assert (folder / "report.md").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tp_size", "4"], "does not divide the model's 2 KV heads"),
        (["--precision", "bf16"], "no tolerance is derived"),
        (["--steps", "0"], "--steps 0"),
        (["--nosuch", "1"], "unrecognized arguments"),
        (["--model_name", "nosuch"], "no built-in model"),
        (["--capture_dir", "x"], "is set by run_verification.py itself"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(tmp_path, arguments, message):
    done = verify("--output_dir", tmp_path / "verify", *arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not list((tmp_path / "verify").rglob("*.*"))
