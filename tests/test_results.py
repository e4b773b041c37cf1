"""The pages under results/ are what their scripts make of the data beside them."""

import importlib.util
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


def script(name):
    spec = importlib.util.spec_from_file_location(f"results_{name}", RESULTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_faults_is_generated():
    figures = script("figures")
    contents = figures.read()
    assert (RESULTS / "faults.md").read_text() == figures.page(contents)
    contents["fp32"]["rows"][0]["named"] = "wrong"  # negative control
    assert (RESULTS / "faults.md").read_text() != figures.page(contents)


def test_the_table_of_loss_curves_is_generated():
    assert (RESULTS / "loss_curves.md").read_text() == script("table").page()
