"""The pages under results/ are what their scripts make of the data beside them."""

import json
from pathlib import Path

from programs import script

RESULTS = Path(__file__).parents[2] / "results"


def test_the_table_of_faults_is_generated():
    figures = script("figures")
    contents = figures.read()
    assert (RESULTS / "faults.md").read_text() == figures.page(contents)
    contents["fp32"]["rows"][0]["named"] = "wrong"  # negative control
    assert (RESULTS / "faults.md").read_text() != figures.page(contents)


def test_the_table_of_loss_curves_is_generated():
    assert (RESULTS / "loss_curves.md").read_text() == script("table").page()


def test_runs_without_a_fault_are_one_entry_of_a_figure(monkeypatch):
    """Each planted fault is one of its own, told apart by colour and dashes."""
    from matplotlib.figure import Figure

    from extras.studies import converging_report
    from extras.studies.converging import Converging

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    monkeypatch.setattr(converging_report, "write_atomically", lambda path, write: write(path))
    study = json.loads((RESULTS / "loss_converging.json").read_text())
    converging_report.draw(Converging(**study["converging"]), study["runs"], RESULTS / "losses.png")
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    faults = [run["run"] for run in study["runs"] if run["fault"]]
    assert labels == ["fsdp", "14 runs without a fault", *faults]
    looks = [(line.get_color(), line.get_linestyle()) for line in drawn[0].axes[0].lines]
    assert len(looks) == len(study["runs"]) and len(set(looks)) == len(labels)
