"""Updates by optimizers that are none of torch's (record_optimizers.py): right ones are judged and pass, wrong ones fail, the rest is said."""

import json

import pytest
from ranks import run_groups
from test_record_bugs import said

UNSEEN = "; the loss itself is not judged"
RIGHT = [
    "WithLion",
    "WithForeachLion",
    "LionOnShards",
    "WithTorchAdafactor",
    "WithAdafactor",
    "WithScheduleFree",
    "WithLamb",
    "LambOnShards",
    "WithMuon",
    "WithShampoo",
    "WithListed",
    "WithLookahead",
    "WithCapped",
    "Accelerated",
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    run_groups([(2, "record_optimizers:run", folder, RIGHT)], timeout=580)
    return folder


@pytest.mark.parametrize("name", RIGHT)
def test_right_updates_pass(judged, name):
    status, lines = said(judged / name)
    assert status == 0 and lines[-1] == f"PASS: 2 steps{UNSEEN}", lines
    for step in json.loads((judged / name / "report.json").read_text())["steps"]:
        assert sum(row.startswith("update/") for row in step["tensors"]) == 6, step["tensors"]
