"""Models that keep functions without a name: the judge finds them again, with what they enclose."""

import collections
import functools
import json
import math
import typing

import pytest
import torch
import torch.utils.checkpoint
from scripts import TRAINS

from lockstep import judge, record
from lockstep.ground.errors import CannotComputeError
from lockstep.recorder import building, tree

NET = """
import torch
import torch.utils.checkpoint
SCALE = 3.0
def scaled(factor):
    def times(x, power=2, *, shift=0.5):
        return factor * x.abs() ** power + shift
    return times
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 16), torch.nn.Linear(16, 5)
        self.inside = lambda x: SCALE * self.one(x)
        self.after, self.steps = scaled(0.7), [lambda x: x + 1, lambda x: x * 2]
    def forward(self, x):
        x = self.after(self.inside(x))
        for step in self.steps:
            x = step(x)
        return self.two(x)
"""


def recorded(folder, *, beside):
    """Of a script that defines its model, or of one with the model in a file `beside` it."""
    if beside:
        (folder / "net_with_functions.py").write_text(NET)
    own = "import torch\nfrom net_with_functions import Net" if beside else NET
    extra = "pass" if beside else "model.extra = lambda x: x - 1"
    (folder / "train.py").write_text(own + TRAINS.format(before=extra))
    assert record.main(["--output", str(folder / "out"), str(folder / "train.py")]) == 0
    return folder / "out"


@pytest.mark.parametrize("beside", [True, False])
def test_a_model_with_functions_that_have_no_name(tmp_path, capsys, beside):
    folder = recorded(tmp_path, beside=beside)
    about = json.loads((folder / "model.json").read_text())["tree"]
    assert about["left_out"] == []
    assert judge.main([str(folder)]) == 0, capsys.readouterr()


def test_what_they_enclose_is_what_it_was(tmp_path, capsys):
    folder = recorded(tmp_path, beside=False)
    path = folder / "model.json"
    path.write_text(path.read_text().replace('"enclosed": {"factor": 0.7}', '"enclosed": {"factor": 0.8}'))
    assert judge.main([str(folder)]) == 1


def test_a_file_that_was_changed_since(tmp_path, capsys):
    folder = recorded(tmp_path, beside=False)
    script = tmp_path / "train.py"
    script.write_text("\n" + script.read_text())
    assert judge.main([str(folder)]) == 2
    assert "train.py has no function" in capsys.readouterr().err


class Recursive(torch.nn.Module):
    def __init__(self):
        super().__init__()

        def count(number):
            return number and count(number - 1)

        self.count = count


def test_a_function_that_encloses_itself_is_left_out():
    about, tensors = tree.describe(Recursive())
    assert about["left_out"] == [".count: a function that encloses itself"]
    building.build(about, tensors)


def test_a_recording_names_no_function_of_other_packages():
    about, _ = tree.describe(torch.nn.Linear(2, 2))
    values = {
        "line": 1,
        "digest": "",
        "path": "<lambda>",
        "enclosed": {},
        "defaults": None,
        "named_defaults": None,
    }
    about["attributes"]["hook"] = {"function": "os", **values}
    with pytest.raises(CannotComputeError, match="os is of no package that the model's own classes are of"):
        building.build(about, {})


class Keeps(torch.nn.Module):
    """What models keep of torch and Python."""

    def __init__(self):
        super().__init__()
        self.functions = [torch.tanh, torch.nn.functional.gelu, torch.nn.functional.relu, torch.einsum]
        self.part = functools.partial(torch.nn.functional.gelu, approximate="tanh")
        self.start, self.again = torch.nn.init.normal_, torch.utils.checkpoint.checkpoint
        self.kinds = [torch.Tensor | None, list[int], typing.Any, torch.nn.Linear]
        self.lists, self.root = collections.defaultdict(list), math.sqrt


def test_functions_and_annotations_of_torch_and_python():
    about, tensors = tree.describe(Keeps())
    assert about["left_out"] == []
    again, own = building.build(json.loads(json.dumps(about)), tensors), Keeps()
    for name in ("functions", "kinds", "start", "again", "root", "lists"):
        assert getattr(again, name) == getattr(own, name)
    assert (again.part.func, again.part.keywords) == (own.part.func, own.part.keywords)
    assert again.lists["new"] == []
