"""Frozen modules that a model keeps in a list, so that they are none of its own: a teacher, a perceptual loss."""

import collections
import threading

import numpy
import pytest
import torch
from torch.nn import functional as F

import lockstep
from lockstep import judge


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)
        self.dropout, self.last = torch.nn.Dropout(), torch.nn.Linear(16, 5)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


class Distilled(torch.nn.Module):
    """A student, and its teacher in a list, in a dict, or as an attribute that torch does not see."""

    def __init__(self, kept="list"):
        super().__init__()
        self.student = Net()
        self.student.dropout.p = 0.0
        teacher = Net().requires_grad_(False).eval()
        self.kept = kept
        if kept == "attribute":
            object.__setattr__(self, "teacher", teacher)
        else:
            self.teachers = [teacher] if kept == "list" else {0: teacher}

    def seen(self):
        return self.teacher if self.kept == "attribute" else self.teachers[0]

    def forward(self, x, labels):
        logits = self.student(x)
        with torch.no_grad():
            wanted = self.seen()(x).softmax(-1)
        return F.cross_entropy(logits, labels) + F.kl_div(
            logits.log_softmax(-1), wanted, reduction="batchmean"
        )


def status(folder, model, *, after_step=lambda model: None):
    """The judge's status of three steps in which `after_step` is called after each."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, folder, steps=3):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 8), torch.randint(0, 5, (8,))).backward()
            optimizer.step()
            after_step(model)
    return judge.main([str(folder)])


@pytest.mark.parametrize("kept", ["list", "dict", "attribute"])
def test_a_frozen_module_that_is_no_part_of_the_model(tmp_path, kept):
    torch.manual_seed(0)
    assert status(tmp_path, Distilled(kept)) == 0


class Centred(torch.nn.Module):
    """A model with a tensor that is neither a parameter nor a buffer, which the loop changes in place."""

    def __init__(self):
        super().__init__()
        self.student, self.centre = torch.nn.Linear(8, 5), torch.zeros(5)

    def forward(self, x, labels):
        return F.cross_entropy(self.student(x) - self.centre, labels)


def test_a_tensor_that_the_loop_changes(tmp_path):
    torch.manual_seed(0)
    assert status(tmp_path, Centred(), after_step=lambda model: model.centre.add_(0.3 * torch.randn(5))) == 0


def average(model):
    for own, students in zip(model.seen().parameters(), model.student.parameters(), strict=True):
        own.data.lerp_(students.data, 0.5)


def test_a_teacher_that_the_loop_changes(tmp_path):
    torch.manual_seed(0)
    assert status(tmp_path, Distilled(), after_step=average) == 0


def test_a_gradient_that_is_wrong_beside_it(tmp_path, capsys):
    torch.manual_seed(0)
    model = Distilled()
    model.student.last.weight.register_hook(lambda gradient: gradient * 1.001)
    assert status(tmp_path, model) == 1
    assert "gradient/student.last.weight" in capsys.readouterr().out


def test_a_module_that_may_be_trained_is_refused(tmp_path, capsys):
    torch.manual_seed(0)
    model = Distilled()
    model.seen().requires_grad_(True)
    assert status(tmp_path, model) == 2
    assert "torch.nn.ModuleList makes it one" in capsys.readouterr().err


class Regularised(torch.nn.Module):
    """A function of its own keeps a hidden output, which the loss uses; another changes one."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.seen = torch.nn.Linear(8, 16), torch.nn.Linear(16, 5), {}
        self.first.register_forward_hook(self.keep("first"))
        self.last.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))

    def keep(self, name):
        def hook(module, inputs, output):
            self.seen[name] = output

        return hook

    def forward(self, x, labels):
        loss = F.cross_entropy(self.last(self.first(x).relu()), labels)
        return loss + 0.01 * self.seen["first"].square().mean()


@pytest.mark.parametrize("of", ["model", "loop"])
def test_hooks_of_the_models_own(tmp_path, of):
    """A hook that the loop puts on a module is none of these."""
    torch.manual_seed(0)
    model = Regularised()
    if of == "loop":
        model.first.register_forward_hook(lambda module, inputs, output: 1.01 * output)
    assert status(tmp_path, model) == (of == "loop")


class Scripted(torch.nn.Module):
    """What is no tensor, and no module: a scripted function, an array of numpy."""

    def __init__(self):
        super().__init__()
        self.head, self.shifted = torch.nn.Linear(8, 5), shifted
        self.table = numpy.linspace(0, 1, 8, dtype=numpy.float32)

    def forward(self, x, labels):
        return F.cross_entropy(self.shifted(self.head(x * torch.from_numpy(self.table)), 0.5), labels)


@torch.jit.script
def shifted(x: torch.Tensor, by: float):
    return torch.tanh(x + by)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_function_and_an_array(tmp_path):
    torch.manual_seed(0)
    assert (
        status(tmp_path, Scripted(), after_step=lambda model: numpy.multiply(model.table, 2, out=model.table))
        == 0
    )


class Holding(torch.nn.Module):
    """Keeps a loader, its optimizer and a lock, which the forward pass does not use, and a queue, which it does."""

    def __init__(self):
        super().__init__()
        self.head, self.recent, self.lock = (
            torch.nn.Linear(8, 5),
            collections.deque([1.0], maxlen=2),
            threading.Lock(),
        )
        self.loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 8)))
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)

    def forward(self, x, labels):
        self.recent.append(2.0)
        return sum(self.recent) * F.cross_entropy(self.head(x), labels)


def test_what_the_forward_pass_does_not_use_is_left_out(tmp_path):
    torch.manual_seed(0)
    assert status(tmp_path, Holding()) == 0
