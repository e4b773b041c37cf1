"""Models whose classes functions define: the judge makes them again, with what they enclose."""

import pytest
import torch
from scripts import TRAINS
from torch.nn import functional as F

import lockstep
from lockstep import judge, record
from lockstep.ground.errors import UserError

SCALE = 0.5


def make(width, act=F.gelu):
    class Block(torch.nn.Module):
        def __init__(self):
            super(Block, self).__init__()  # noqa: UP008 - the class encloses itself
            self.linear = torch.nn.Linear(width, width)

        def forward(self, x):
            return x + SCALE * act(self.linear(x))

    class Base(torch.nn.Module):
        def normed(self, x):
            return F.layer_norm(x, (width,))

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(2)), torch.nn.Linear(width, 5)
            self.kind = Block

        @property
        def number(self):
            return sum(isinstance(block, self.kind) for block in self.blocks)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(self.normed(x)) / self.number

    return Net()


def trained(folder, model):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, folder):
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(4, 8)), torch.randint(0, 5, (4,))).backward()
            optimizer.step()


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_classes_that_a_function_defines(tmp_path, capsys, factor):
    torch.manual_seed(0)
    model = make(8)
    if factor != 1:
        model.head.weight.register_hook(lambda gradient: factor * gradient)
    trained(tmp_path, model)
    assert judge.main([str(tmp_path)]) == (factor != 1), capsys.readouterr()


SCRIPT = """
import torch
WIDTH = 8
def make(classes):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(WIDTH, classes)
        def forward(self, x):
            return self.head(x)
    return Net
"""


def test_a_class_of_a_function_of_the_script(tmp_path, capsys):
    """Negative control: the file has another class in its place now."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT + TRAINS.format(before="").replace("Net()", "make(5)()"))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output)]) == 0, capsys.readouterr()
    script.write_text(script.read_text().replace("self.head(x)", "2 * self.head(x)"))
    assert judge.main([str(output)]) == 2
    assert "make.<locals>.Net is no longer what it was" in capsys.readouterr().err


def test_what_only_the_body_of_a_class_reads_is_not_known(tmp_path):
    width = 8

    class Net(torch.nn.Module):
        size = width

        def forward(self, x):
            return x

    model = torch.nn.Sequential(torch.nn.Linear(8, 5), Net())
    with pytest.raises(UserError, match="reads width of the function .* move the class to the top of a file"):
        trained(tmp_path, model)
