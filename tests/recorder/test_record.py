"""A recorded run of somebody's own loop is judged: the command, its files, what it refuses."""

import contextlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch
from programs import in_process
from ranks import ROOT, free_port, run_groups

import lockstep
from lockstep import judge, record
from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import from_config
from lockstep.recorder import building, tree
from lockstep.recorder import step as recorder_step
from lockstep.recorder.micro_batch import are_of_other_samples
from lockstep.recorder.recording import Recording
from lockstep.verdict import normalisation

# Other right loops, and bugs: test_record_bugs.py, test_record_stacks.py, test_record_strangers.py.
RIGHT = {
    "ddp": {},
    "fsdp, clipped": {"kind": "fsdp", "clip": 0.5},
    "sgd with momentum": {"optimizer": "sgd", "options": {"momentum": 0.9}},
}


@pytest.fixture(autouse=True)
def seeded():
    """Of a gradient that one element dominates, two right computations may be far from each other by chance (docs/record.md)."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def runs(new_folder):
    """The folder with a recording of each loop: one start of two ranks for all."""
    folder = new_folder("recorded")
    run_groups(
        [(2, "recorded_loops:plain", folder / name, argument) for name, argument in RIGHT.items()],
        timeout=380,
    )
    return folder


@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_pass(runs, name, capsys):
    assert judge.main([str(runs / name / "run")]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("PASS: 2 steps")
    content = json.loads((runs / name / "run" / "report.json").read_text())
    assert content["verdict"] == "PASS" and all(len(step["tensors"]) >= 20 for step in content["steps"])
    assert all(abs(step["factor"] - 1) < 1e-5 for step in content["steps"])


@pytest.mark.parametrize("name", ["ddp", "fsdp, clipped"])
def test_a_model_unit_by_unit_gives_the_same(runs, name):
    """Memory for no weights: each unit of the model has its weights when it is called, and is computed twice."""
    folder = runs / name / "run"
    status = judge.main([str(folder)])
    whole = (folder / "report.json").read_bytes()
    assert judge.main([str(folder), "--memory", "0"]) == status
    assert (folder / "report.json").read_bytes() == whole


def test_what_was_meant_can_be_said(runs, capsys):
    """The micro batches have unequal numbers of tokens, so the mean of their means is not the mean over tokens."""
    folder = str(runs / "ddp" / "run")
    assert judge.main([folder, "--expect", "micro-mean"]) == 0
    assert judge.main([folder, "--expect", "token-mean"]) == 1
    assert (
        "the gradient is that of the mean of the micro batches' means, not of the mean over all tokens"
        in capsys.readouterr().out
    )


def test_a_changed_file_is_seen(runs, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(runs / "ddp" / "run", folder)
    path = folder / "rank_1" / "step_1.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"world_size": 0}))
    assert judge.main([str(folder)]) == 2
    assert "world_size is 0" in capsys.readouterr().err
    path.unlink()
    assert judge.main([str(folder)]) == 2
    assert (
        "rank 1 of 2 did not record step 1; a rank whose process trains no model" in capsys.readouterr().err
    )


def test_shards_that_do_not_cover_a_tensor_are_refused(runs):
    recording = Recording(runs / "fsdp, clipped" / "run")
    recording.steps[0].pop(1)
    with pytest.raises(
        UserError, match="weight/model.embed_tokens.weight of step 1 has 16384 of its elements"
    ):
        recording.whole(1, "weight/model.embed_tokens.weight")


def test_a_script_is_recorded_as_it_is(tmp_path, capsys):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(
        "import sys, torch\nassert sys.argv[1:] == ['--mine', '3']\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))\n"
        "class Own(torch.nn.Module):\n    pass\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for step in range(4):\n"
        "    out = net(torch.randn(8, 4)); torch.nn.functional.cross_entropy(out, torch.randint(0, 3, (8,))).backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
    )
    assert record.main(["--output", str(output), "--steps", "3", str(script), "--mine", "3"]) == 0
    assert judge.main([str(output)]) == 0
    assert capsys.readouterr().out.endswith("PASS: 3 steps; which labels the loss has was not seen\n")


GUARDED = """
import torch
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(4, 3), torch.nn.Dropout({dropout})
    def forward(self, x):
        return self.dropout(self.linear(x))
def main():
    net = Own()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "text, status, said",
    [
        (GUARDED.format(dropout=0.0) + 'if __name__ == "__main__":\n    main()\n', 0, "PASS: 2 steps"),
        (GUARDED.format(dropout=0.0) + "main()\n", 0, "PASS: 2 steps"),
        (GUARDED.format(dropout=0.1) + "main()\n", 0, "PASS: 2 steps"),
    ],
)
def test_a_class_of_the_script_itself(tmp_path, capsys, text, status, said):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(text)
    real = torch.autograd.grad
    assert record.main(["--output", str(output), str(script)]) == 0
    assert torch.autograd.grad is real
    assert judge.main([str(output)]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


AT_THE_TOP = """
from __future__ import annotations
import argparse, functools
from dataclasses import dataclass
import torch
try:
    from no_such_package import fused
except ImportError:
    fused = None
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--api_key")
arguments = parser.parse_args()
TRAINED = 0
table = torch.rand(arguments.width, arguments.width)
table /= 2
norm = functools.partial(torch.nn.functional.layer_norm, normalized_shape=(arguments.width,))
Linear = torch.nn.Linear
@dataclass
class Config:
    width: int = arguments.width
config = Config(width=arguments.width)
class Signs(torch.optim.Optimizer):
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= self.param_groups[0]["lr"] * parameter.grad.sign() * arguments.width
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(config.width, config.width)
    def forward(self, x):
        return norm(self.linear(x) @ table) if fused is None else fused(x)
net = Own()
optimizer = Signs(net.parameters(), {"lr": 1e-3})
for step in range(2):
    TRAINED += 1
    loss = net(torch.randn(8, config.width)).square().log().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print("trained", TRAINED)
"""


def test_a_script_that_trains_without_a_main_function(tmp_path, capsys):
    """The judge makes the classes again, with the settings of the command line, and trains nothing."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(AT_THE_TOP)
    command = ["--output", str(output), str(script), "--width", "4", "--api_key", "abc123"]
    assert record.main(command) == 0
    assert "trained 2" in capsys.readouterr().out
    assert judge.main([str(output)]) == 0
    out = capsys.readouterr().out
    assert "trained 1" not in out
    assert out.endswith("PASS: 2 steps; the loss itself is not judged\n")
    written = (output / "model.json").read_text()
    assert '"width": 4' in written
    assert "abc123" not in written


def test_what_a_script_computes_with_is_what_it_had(tmp_path, capsys):
    """A script that is changed between the recording and the judging is another model."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(AT_THE_TOP)
    assert record.main(["--output", str(output), str(script), "--width", "4"]) == 0
    script.write_text(AT_THE_TOP.replace("@ table)", "@ table) + 0.01 * x"))
    assert judge.main([str(output)]) == 1
    script.write_text(AT_THE_TOP.replace("Linear(", "fused.Linear(").replace("class Own", "class Other"))
    capsys.readouterr()
    assert judge.main([str(output)]) == 2
    assert "has no attribute 'Own'" in capsys.readouterr().err
    # a class that depends on a line which needs the loop
    broken = AT_THE_TOP.replace("class Own", "if True:\n    fail = None\nfail = 1 / 0\nclass Own").replace(
        "@ table)", "@ table) + fail"
    )
    script.write_text(broken)
    assert judge.main([str(output)]) == 2
    assert "fails without the training: ZeroDivisionError" in capsys.readouterr().err
    # a setting that the recording does not have is computed as the script does: here from the command line, which is the judge's
    script.write_text(AT_THE_TOP.replace("arguments", "others"))
    assert judge.main([str(output)]) == 2
    assert "ends the program" in capsys.readouterr().err


SENT = """
import torch
SIZE = 3
class Scaled(torch.nn.Linear):
    def forward(self, values):
        return SIZE * super().forward(values)
def inside():
    class Hidden(Scaled):
        def forward(self, values):
            return values
    return Hidden(4, 4)
"""


def test_a_class_that_was_sent_to_another_process(tmp_path):
    """As Ray sends what a script defines to its workers: functions come with the names of the script that they read."""
    path = tmp_path / "train.py"
    path.write_text(SENT)
    names = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(SENT, path, "exec"), names)
    net = names["Scaled"](4, 4)
    about, tensors = tree.describe(net)
    assert about["class"] == f"{path}:Scaled"
    assert about["scripts"] == {str(path): {"package": None, "values": {"SIZE": 3}}}
    again = building.build(about, tensors)
    building.give(again, {key: value.detach() for key, value in net.named_parameters()})
    assert torch.equal(again(torch.eye(4)), net(torch.eye(4)))
    hidden = building.build(*tree.describe(names["inside"]()))
    assert type(hidden).__qualname__ == "inside.<locals>.Hidden" and hidden(3) == 3


def test_a_recording_calls_nothing_for_a_named_tuple():
    """Negative control: one of torch's."""
    made = building.Building({}, {})
    values = [1, 2]
    shape = {"namedtuple": "inspect:ClosureVars", "values": [*values, 3, 4]}
    assert made.value(shape) == inspect.ClosureVars(1, 2, 3, 4)
    for other in ("builtins:print", "builtins:exec", "builtins:tuple"):
        with pytest.raises(ValueError, match="is no named tuple|may name"):
            made.value({"namedtuple": other, "values": ["raise SystemExit"]})


@pytest.mark.parametrize(
    "name, is_refused",
    [
        *((name, True) for name in ("builtins:exec", "builtins:__import__", "torch:os.system", "os:system")),
        *(
            (name, False)
            for name in ("builtins:max", "builtins:int", "torch:relu", "torch.nn.functional:gelu")
        ),
    ],
)
def test_what_a_recording_may_name(name, is_refused):
    made = building.Building({}, {})
    refused = pytest.raises(ValueError, match="that a recording may name|no package that the model")
    with refused if is_refused else contextlib.nullcontext():
        assert callable(made.value({"named": name}))


def test_a_patched_class_is_the_one_whose_name_it_has():
    """As where a method is replaced for one module alone. Negative control: another name is no file's class."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    plain, kind = tree.describe(net)[0], torch.nn.Linear
    patched = {"__module__": kind.__module__, "forward": lambda self, x: kind.forward(self, x) * 2}
    net[0].__class__ = type(kind.__name__, (kind,), patched)
    assert tree.describe(net)[0] == plain
    net[0].__class__ = type("Twice", (kind,), patched)
    with pytest.raises(UserError, match="Twice: no file has this class by its name"):
        tree.describe(net)


def test_a_class_of_a_notebook_has_no_file(tmp_path, monkeypatch):
    loop = """
import torch, lockstep
class Own(torch.nn.Linear):
    pass
net = {kind}(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with lockstep.record(net, "{output}"):
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
    # An interactive session has no file either
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))

    def run(kind):
        exec(loop.format(kind=kind, output=tmp_path / kind), vars(sys.modules["__main__"]))

    run("torch.nn.Linear")
    assert judge.main([str(tmp_path / "torch.nn.Linear")]) == 0
    with pytest.raises(UserError, match="__main__.Own: no file has this class by its name"):
        run("Own")


def test_the_trainer_of_hugging_face(tmp_path, capsys):
    """Through the real thing: torchrun, two ranks, the script as it is."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), "-m", "lockstep.record", "--output", str(tmp_path)]
    command += [str(ROOT / "examples" / "record" / "trainer.py"), "--gradient_accumulation_steps", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    started = r"python -m torch\.distributed\.run --nproc_per_node 2 --master_port \d+ -m lockstep\.record --output "
    assert re.match(started, Recording(tmp_path).origin.command)
    assert judge.main([str(tmp_path), "--expect", "token-mean"]) == 0
    said = capsys.readouterr().out
    assert (
        "the gradient is that of the mean over all tokens of the global batch, clipped from a norm of" in said
    )


@pytest.mark.parametrize(
    "text, arguments, said",
    [
        ("pass", [], "called no model in training mode"),
        ("pass", ["--steps", "0"], "--steps 0: give a number of at least 1"),
        (None, [], "there is no such file; name the training script"),
    ],
)
def test_usage_errors_of_recording(tmp_path, capsys, text, arguments, said):
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    assert record.main(["--output", str(tmp_path / "out"), *arguments, str(script)]) == 2
    assert said in capsys.readouterr().err


def test_usage_errors_of_judging(tmp_path, capsys):
    assert judge.main([str(tmp_path)]) == 2
    assert "holds no recording" in capsys.readouterr().err
    recorder_step.write_model(tmp_path, *tree.describe(torch.nn.Linear(2, 2)), {})
    assert judge.main([str(tmp_path)]) == 2
    assert "no optimizer's step was recorded" in capsys.readouterr().err


OWN = """
import torch
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)
    def forward(self, ids, targets=None, noise=0.0):
        logits = self.head(self.embedding(ids) + noise * torch.randn(8))
        if targets is None:
            return logits
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
def main():
    torch.manual_seed(0)
    net = Own()
    make = lambda: torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer = make()
    for _ in range(2):
        {new}
        optimizer.zero_grad()
        for number in range(2):
            ids = torch.randint(0, 11, (3, 5))
            targets = torch.randint(0, 11, (3, 5))
            targets[0, : 1 + 2 * number] = -1
            {loss}
        {then}
        optimizer.step()
if __name__ == "__main__":
    main()
"""
CLOSURE = """
import torch
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    given = torch.randn(8, 4)
    def closure():
        optimizer.zero_grad()
        loss = net(given).square().mean()
        loss.backward()
        return loss
    optimizer.step(closure)
"""
# The first step is over when the model is found.
EPOCHS = CLOSURE.replace("for _ in range(3):", "data = torch.randn(24, 4)\nfor number in range(4):").replace(
    "given = torch.randn(8, 4)", "given = data[:8] if number == 3 else data[8 * number :][:8]\n    {order}"
)
# The first scale is so large that two steps are skipped.
SCALED = """
import torch
net = torch.nn.Linear(4, 3)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**127)
for _ in range({steps}):
    given, labels = 20 * torch.rand(8, 4), torch.randint(0, 3, (8,))
    with torch.autocast("cpu", torch.float16, enabled=False):
        loss = torch.nn.functional.cross_entropy(net(given), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
UNCOPIED = """
import torch
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    net.register_buffer("odd", torch.eye(2).to_sparse())
print("trained to the end")
"""


IN_PARTS = "clip, own = torch.nn.utils.clip_grad_norm_, list(net.parameters()); clip(own[:1], 0.05); clip(own[1:], 0.1)"
CLIP = "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)"
BY_VALUE = "from torch.nn.utils import clip_grad_value_ as cut; cut(net.parameters(), 0.001)"
# A part is looked at before the model is trained.
PART = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
print(net[0](torch.randn(8, 4)).shape)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


# The optimizer that steps was made of a new model.
ANOTHER = """
import torch
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
stepping = torch.optim.SGD(torch.nn.Linear(4, 3).parameters(), lr=0.1)
for _ in range(3):
    net(torch.randn(8, 4)).square().mean().backward()
    stepping.step()
"""


COMMUNICATES = """
import torch, torch.distributed as dist
class Own(torch.nn.Linear):
    def forward(self, values):
        mean = values.mean(0)
        dist.all_reduce(mean)
        return super().forward(values - mean)
if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = Own(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    dist.destroy_process_group()
"""


# The first call of the model gives the gradient that makes the batch of the second one.
ATTACKED = """
import torch
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def loss(given):
    return torch.nn.functional.cross_entropy(net(given), torch.tensor([0, 1, 2, 0]))
for _ in range(2):
    given = torch.randn(4, 4, requires_grad=True)
    optimizer.zero_grad()
    {first}
    loss((given + 0.1 * gradient.flatten()[0].sign()).detach()).backward()
    optimizer.step()
"""


ASKS = "gradient, *_ = torch.autograd.grad(loss(given), {})"
UNFROZEN = """
import torch
class Own(torch.nn.Sequential):
    def forward(self, values):
        self.calls = getattr(self, "calls", 0) + 1
        self[0].requires_grad_(self.calls > {calls})
        return super().forward(values)
def main():
    net = Own(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            (net(torch.randn(8, 4)).square().mean() / 2).backward()
        optimizer.step()
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "text, status, said",
    [
        (ATTACKED.format(first=ASKS.format("given")), 0, "PASS: 2 steps"),
        # The gradients of weights may be for the update, but the last call alone has a backward pass.
        (ATTACKED.format(first=ASKS.format("net.bias")), 1, "which is no known mean"),
        (ATTACKED.format(first=ASKS.format("net.parameters()")), 1, "which is no known mean"),
        (ATTACKED.format(first=ASKS.format("given, create_graph=True")), 2, "is differentiated again"),
        # The first call is trained on, too.
        (
            ATTACKED.format(
                first="one = loss(given); (one / 2).backward(retain_graph=True); gradient, *_ = torch.autograd.grad(one, given)"
            )
            .replace(").backward()\n", ") / 2).backward()\n")
            .replace("    loss((given", "    (loss((given")
            .replace("detach()) / 2)", "detach()) / 2)"),
            0,
            "PASS: 2 steps",
        ),
        (UNFROZEN.format(calls=2), 0, "PASS: 2 steps"),
        (UNFROZEN.format(calls=1), 1, "0.weight"),
        (COMMUNICATES, 0, "PASS: 1 steps"),  # with itself
        (CLOSURE, 0, "whole run: 3 steps, 24 samples"),
        (EPOCHS.format(order=""), 0, "whole run: 4 steps, 32 samples"),
        (
            EPOCHS.format(order="given = data[8 * (number == 3) :][:8]"),
            1,
            "16 samples were seen again before",
        ),
        (SCALED.format(steps=9), 0, "PASS: 2 steps"),
        (
            SCALED.format(steps=1),
            2,
            "lockstep.record: no step was recorded: no optimizer made one, or a GradScaler",
        ),
        (
            ANOTHER,
            2,
            "lockstep.record: no step was recorded: the optimizers that stepped hold none of the recorded",
        ),
        (PART, 0, "whole run: 3 steps, 24 samples"),
        (UNCOPIED, 0, "the recording ended in step 2 on rank 0"),
    ],
)
def test_unusual_scripts(tmp_path, capsys, text, status, said):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(text)
    real = torch.autograd.grad
    assert record.main(["--output", str(output), str(script)]) == 0
    assert torch.autograd.grad is real
    assert judge.main([str(output)]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err and (text != UNCOPIED or "to the end" in captured.out)


WARMED_UP = (
    "made = torch.optim.lr_scheduler; kinds = made.LinearLR, made.ConstantLR; "
    "optimizer.all = getattr(optimizer, 'all', None) or made.SequentialLR(optimizer, [kind(optimizer) for kind in kinds], [4]); "
    "optimizer.all.step()"
)
LOADED = """
import torch
import helper
def main():
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
    data = torch.utils.data.TensorDataset(torch.randn(40, 4))
    for (x,) in torch.utils.data.DataLoader(data, 2, sampler={order}):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        {step}
main()
"""


@pytest.mark.parametrize(
    "order, step, said",
    [
        (list(range(12)), "schedule.step()", ""),
        (list(range(12)), "helper.step(schedule)", ""),
        # The loop asks for its first batch before it calls the model.
        ([*range(6)] * 2, "schedule.step()", "after 6 different ones, of the 40"),
        (
            list(range(12)),
            "schedule.step(); helper.step(schedule)",
            "2 times in a step, by __main__ and helper",
        ),
        # One that steps others in turn is stepped once.
        (list(range(12)), WARMED_UP, ""),
        (
            list(range(12)),
            f"{WARMED_UP}; helper.step(optimizer.all)",
            "2 times in a step, by __main__ and helper",
        ),
    ],
)
def test_what_a_loop_goes_over_and_steps(tmp_path, capsys, order, step, said):
    script, output = tmp_path / "train.py", tmp_path / "out"
    (tmp_path / "helper.py").write_text("def step(schedule):\n    schedule.step()\n")
    script.write_text(LOADED.format(order=order, step=step))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output)]) == bool(said)
    assert said in capsys.readouterr().out.splitlines()[-1]


COMPILED = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x)
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
def main():
    torch.manual_seed(0)
    net = Own()
    compiled = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(2):
            compiled(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
main()
"""


def test_a_compiled_model_is_found(tmp_path):
    """torch.compile does not look into the program that waits for it."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(COMPILED)
    assert record.main(["--output", str(output), str(script)]) == 0 and judge.main([str(output)]) == 0


def test_an_error_of_the_script_is_its_own(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("1 / 0")
    assert record.main(["--output", str(tmp_path / "out"), str(script)]) == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and "lockstep.record:" not in said


def test_a_rank_that_trains_nothing(tmp_path, capsys, monkeypatch):
    """Of several ranks, one may serve the others."""
    (tmp_path / "train.py").write_text("pass")
    monkeypatch.setenv("RANK", "1")
    assert record.main(["--output", str(tmp_path / "out"), str(tmp_path / "train.py")]) == 0
    assert "called no model in training mode, so nothing was recorded (rank 1)" in capsys.readouterr().err


def test_an_error_after_recorded_steps_is_said(tmp_path, capsys):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(CLOSURE + "\n1 / 0\n")
    assert record.main(["--output", str(output), str(script)]) == 1
    ended = "the run ended in an error (ZeroDivisionError: division by zero on rank 0)"
    assert judge.main([str(output)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"; {ended}")
    script.write_text(CLOSURE)
    assert record.main(["--output", str(output), str(script)]) == 0 and judge.main([str(output)]) == 0
    assert "ended in an error" not in capsys.readouterr().out
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ZeroDivisionError), lockstep.record(model, output):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        raise ZeroDivisionError("division by zero")
    assert judge.main([str(output)]) == 0 and ended in capsys.readouterr().out


def test_modules_beside_the_script(tmp_path, capsys, monkeypatch):
    """They are found where the run is judged, too, from any folder."""
    (tmp_path / "beside_it.py").write_text("import torch\nclass Net(torch.nn.Linear):\n    pass\n")
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text("import beside_it\n" + CLOSURE.replace("torch.nn.Linear", "beside_it.Net"))
    monkeypatch.syspath_prepend("")
    assert record.main(["--output", str(output), str(script)]) == 0
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "beside_it")
    assert str(tmp_path) not in sys.path and judge.main([str(output)]) == 0
    assert capsys.readouterr().out.endswith("PASS: 2 steps; the loss itself is not judged\n")


def test_settings_that_come_with_a_star(tmp_path, capsys, monkeypatch):
    """A module beside the script reads the command line, which the judge's is not. Negative control: the value of the judge's own."""
    (tmp_path / "its_settings.py").write_text("import sys\nSCALE = len(sys.argv)\n")
    script, output = tmp_path / "train.py", tmp_path / "out"
    scaled = "from its_settings import *\nimport torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * SCALE\n"
    script.write_text(scaled + CLOSURE.replace("torch.nn.Linear", "Net"))
    monkeypatch.syspath_prepend("")
    assert record.main(["--output", str(output), str(script), "a", "b", "c"]) == 0
    monkeypatch.delitem(sys.modules, "its_settings")
    assert judge.main([str(output)]) == 0
    assert capsys.readouterr().out.endswith("PASS: 2 steps; the loss itself is not judged\n")
    about = json.loads((output / "model.json").read_text())
    (found,) = about["tree"]["scripts"].values()
    assert found["values"]["SCALE"] == 4
    found["values"]["SCALE"] = 5
    (output / "model.json").write_text(json.dumps(about))
    assert judge.main([str(output)]) == 1


MEAN = "(net(ids, targets)[1] / 2).backward()"
TOKENS = "(net(ids, targets)[1] * (14 - 2 * number) / 26).backward()"
FROM_LOGITS = "out = net(ids).flatten(0, 1); (torch.nn.functional.cross_entropy(out, targets.flatten(), ignore_index=-1) / {by}).backward()"
SMOOTHED = FROM_LOGITS.replace("ignore_index", "label_smoothing=0.1, ignore_index")
WEIGHED = "out = net(ids).flatten(0, 1); (torch.rand(15) * torch.nn.functional.cross_entropy(out, targets.flatten(), ignore_index=-1, reduction='none')).sum().backward()"


@pytest.mark.parametrize(
    "loop, arguments, status, said",
    [
        ({"loss": MEAN}, [], 0, "that of the mean of the micro batches' means"),
        (
            {"loss": TOKENS},
            ["--expect", "token-mean"],
            0,
            "that of the mean over all tokens of the global batch\n",
        ),
        ({"loss": MEAN}, ["--expect", "token-mean"], 1, "not of the mean over all tokens"),
        # Of one rank, the two are equal.
        ({"loss": MEAN}, ["--expect", "micro-step-mean"], 0, "that of the mean of the micro batches' means"),
        (
            {"loss": FROM_LOGITS.format(by=2)},
            ["--expect", "micro-mean"],
            0,
            "times as much; which labels the loss has was not seen",
        ),
        (
            {"loss": FROM_LOGITS.format(by=1)},
            [],
            1,
            "FAIL: step 1: the gradient is 2 times that of the mean of the micro batches' means, which is the micro batches of a rank; it is there when",
        ),
        (
            {"loss": FROM_LOGITS.format(by="(2 + number)")},
            [],
            1,
            "which is no known mean (nearest",
        ),
        (
            {"loss": FROM_LOGITS.format(by="(26 / (14 - 2 * number))")},
            ["--expect", "token-mean"],
            0,
            "that of the mean over all tokens of the global batch\n",
        ),
        ({"loss": SMOOTHED.format(by=2)}, [], 0, "a cross-entropy with label smoothing 0.1, whose labels"),
        ({"loss": WEIGHED}, [], 0, "PASS: 2 steps; the loss itself is not judged"),
        ({"loss": "a, b = net(ids), net(ids, targets)[1]; (a.sum() + b).backward()"}, [], 0, "PASS"),
        (
            {
                "loss": "out, _ = net(ids, targets); out.square().sum().backward(retain_graph=True); out.mean().backward()"
            },
            [],
            0,
            "PASS",
        ),
        ({"loss": "(net(ids, targets, 0.1)[1] / 2).backward()"}, [], 0, "PASS: 2 steps"),
        (
            {"loss": MEAN, "then": "net.head.bias.grad = None"},
            [],
            1,
            "head.bias has no gradient on rank 0, though the loss depends on it",
        ),
        (
            {"loss": MEAN, "new": "optimizer = make()"},
            [],
            1,
            "what the optimizer keeps changed between step 1 and step 2",
        ),
        (
            {
                "loss": MEAN,
                "then": "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type=float('inf'))",
            },
            [],
            0,
            "clipped from",
        ),
        (
            {"loss": MEAN, "then": "[torch.nn.utils.clip_grad_norm_(one, 0.1) for one in net.parameters()]"},
            [],
            0,
            "clipped in 3 of 3 parts by the norm of each",
        ),
        (
            {"loss": MEAN, "then": f"{IN_PARTS}; clip(own[:1], 0.01)"},
            [],
            0,
            "clipped in 3 of 3 parts by the norm of each",
        ),
        (
            {"loss": MEAN, "then": f"{IN_PARTS}; own[0].grad *= 1.01"},
            [],
            1,
            "1 of 3 gradients is too far from the reference",
        ),
        (
            {"loss": MEAN, "then": IN_PARTS.replace("own[1:]", "own[1:2]")},
            [],
            1,
            "2 of 3 parameters with a gradient were clipped, and not head.bias",
        ),
        ({"loss": MEAN, "then": BY_VALUE}, [], 0, "elements of gradients were clipped"),
        ({"loss": MEAN, "then": f"{CLIP}; {BY_VALUE}"}, [], 0, "elements of gradients were clipped"),
        (
            {"loss": MEAN, "then": f"net.head.weight.grad *= 1.01; {BY_VALUE}"},
            [],
            1,
            "1 of 3 gradients is too far from the reference",
        ),
        (
            {"loss": MEAN, "then": f"{BY_VALUE}; net.head.weight.grad *= 1.01"},
            [],
            1,
            "gradient/head.weight is not what is left of it when elements are clipped to 0.001",
        ),
        (
            {"loss": MEAN, "then": f"{BY_VALUE}; {CLIP}"},
            [],
            2,
            "was clipped by value and then by a norm",
        ),
        (
            {"loss": MEAN, "then": f"{IN_PARTS}; clip(own[:1], 0.01, norm_type=3.0)"},
            [],
            1,
            "the gradient was clipped by a norm of",
        ),
        (
            {"loss": "net(ids, targets)"},
            [],
            2,
            "no model in training mode|no optimizer's step|no gradient arrived|holds no recording",
        ),
    ],
)
def test_loops_of_one_process(tmp_path, capsys, loop, arguments, status, said):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(OWN.format(**{"new": "", "then": "", **loop}))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output), *arguments]) == status
    captured = capsys.readouterr()
    assert any(one in captured.out + captured.err for one in said.split("|")), captured.out + captured.err


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        (["judge", "nowhere"], 2, "nowhere holds no recording"),
        (["record", "--output", "out", "nowhere.py"], 2, "nowhere.py: there is no such file"),
        (["jugde"], 2, "jugde is no command; choose from record, judge"),
        (["--help"], 0, "lockstep judge runs/mine"),
    ],
)
def test_the_command(tmp_path, arguments, status, said):
    ended = in_process("lockstep/__main__.py", *arguments, cwd=tmp_path)
    assert ended.returncode == status and said in ended.stdout + ended.stderr


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name.startswith("tiny")])
def test_a_model_is_built_again_from_its_tree(name):
    torch.manual_seed(0)
    model = from_config(dict(BUILT_IN[name]), attn_impl="sdpa").train()
    about, tensors = tree.describe(model)
    again = building.build(
        json.loads(json.dumps(about)), {key: value.clone() for key, value in tensors.items()}
    )
    building.give(again, {key: value.detach().clone() for key, value in model.named_parameters()})
    ids = torch.randint(0, 50, (2, 16))
    losses = [one(input_ids=ids, labels=ids, use_cache=False).loss for one in (model, again)]
    assert torch.equal(*losses) and about["left_out"] == []
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in again.named_parameters()]


def test_a_tree_names_nothing_of_other_packages():
    about, tensors = tree.describe(torch.nn.Linear(2, 2))
    about["attributes"]["hook"] = {"named": "os:system"}
    with pytest.raises(UserError, match="os:system is of no package that the model's classes are of"):
        building.build(about, tensors)
    for name in ("torch:load", "torch.fx.graph_module:_exec_with_source", "typing:get_type_hints"):
        about["attributes"]["hook"] = {"named": name}
        with pytest.raises(UserError, match="no class or function that a recording may name"):
            building.build(about, tensors)
    made = {"partial": [{"named": "torch:tanh"}, {"tuple": []}, {"dict": []}]}
    about["attributes"]["hook"] = {"annotation": [{"defaultdict": [made, {"dict": []}]}, "key"]}
    with pytest.raises(UserError, match="defaultdict makes its values by another class"):
        building.build(about, tensors)
    about["attributes"]["hook"] = {"annotation": [{"dict": []}, "key"]}
    with pytest.raises(UserError, match="is no annotation"):
        building.build(about, tensors)
    spoofed = {"data": {"dict": [["eval", 1]]}, "__module__": "typing"}
    spoofing = {"object": "collections:UserDict", "number": 9, "attributes": spoofed}
    about["attributes"]["hook"] = {"annotation": [spoofing, "eval"]}
    with pytest.raises(UserError, match="is no annotation"):
        building.build(about, tensors)
    about["class"] = "os:system"
    with pytest.raises(UserError, match="is no torch.nn.Module"):
        building.build(about, tensors)


@pytest.mark.parametrize(
    "value",
    [
        {"method": [{"named": "torch:nn.Module"}, "__init__"]},
        {"method": [{"method": [{"module": ""}, "forward"]}, "__globals__"]},
        {"method": [{"module": ""}, "__class__"]},
        {"method": [{"module": ""}, "weight"]},
        {"enum": "torch:nn.Module", "name": "__init__"},
    ],
)
def test_what_a_recording_says_of_a_method_leads_nowhere_else(value):
    """An attribute of a method is its function's, which knows all names of its file."""
    about, tensors = tree.describe(torch.nn.Linear(2, 2))
    about["attributes"]["hook"] = value
    with pytest.raises(UserError, match="the recorded model cannot be built again"):
        building.build(about, tensors)
    # negative control
    about["attributes"]["hook"] = {"method": [{"module": ""}, "reset_parameters"]}
    assert building.build(about, tensors).hook.__func__ is torch.nn.Linear.reset_parameters


def test_no_function_of_torch_is_made_of_a_recording():
    about, tensors = tree.describe(torch.nn.Linear(2, 2))
    runs = {"function": "torch.jit.unsupported_tensor_ops", "path": "execWrapper", "line": 8, "digest": ""}
    about["attributes"]["hook"] = {**runs, "enclosed": {}, "defaults": None, "named_defaults": None}
    with pytest.raises(UserError, match="of no package that the model's own classes are of"):
        building.build(about, tensors)
    about["attributes"] = {"modules": {"named": "torch:relu"}}  # which the judge calls
    with pytest.raises(UserError, match="modules would be called for a method"):
        building.build(about, tensors)
    about["attributes"] = {"hook": {"named": "torch:nn.Module.forward.__globals__"}}
    with pytest.raises(UserError, match="no class or function that a recording may name"):
        building.build(about, tensors)


def test_a_script_names_only_what_it_defines(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, torch\nclass Net(torch.nn.Linear):\n    pass\n")
    made = building.Building({}, {str(script): {"package": None, "values": {}}})
    assert made.named(f"{script}:Net").__name__ == "Net"
    with pytest.raises(ValueError, match="os.system is not defined in that file"):
        made.named(f"{script}:os.system")


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("as_script", [True, False])
def test_no_code_of_a_recording_is_run(tmp_path, monkeypatch, capsys, inside, as_script):
    """It may be somebody else's. Negative control: a file beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder, net = tmp_path / "mine", torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    with record(net, folder, steps=1):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    package = folder / f"code{as_script}{inside}" if inside else tmp_path / f"code{as_script}{inside}"
    package.mkdir()
    code = "import pathlib, torch\npathlib.Path(__file__).with_name('run').touch()\nclass Net(torch.nn.Linear):\n    pass\n"
    (package / "net.py").write_text(code)
    (package / "__init__.py").write_text(code)
    model = json.loads((folder / "model.json").read_text())
    name = ".".join((package / "net").relative_to(tmp_path).parts)
    model["tree"]["class"] = f"{package / 'net.py' if as_script else name}:Net"
    (folder / "model.json").write_text(json.dumps(model))
    status = judge.main([str(folder)])
    captured = capsys.readouterr()
    if inside:
        assert status == 2 and "whose code is not run" in captured.err, captured.err
        assert not (package / "run").exists()
    else:
        assert "whose code is not run" not in captured.err and (as_script or (package / "run").exists())


def test_a_class_without_a_name_is_refused():
    Inside = type("Inside", (torch.nn.Linear,), {})  # noqa: N806 - a class
    with pytest.raises(UserError, match="no file has this class by its name|move the class"):
        tree.describe(torch.nn.Sequential(Inside(2, 2)))


def test_weights_are_measured():
    torch.manual_seed(0)
    columns = [{"a": torch.randn(20).double(), "b": torch.randn(5, 4).double()} for _ in range(3)]
    weights = torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)
    del columns[1]["b"]  # a micro batch in which it is not used
    observed = {**normalisation.Sum(columns[0], columns, weights), "c": torch.zeros(3)}
    assert torch.allclose(observed["b"], 0.5 * columns[0]["b"] + columns[2]["b"], rtol=1e-15)
    fitted = normalisation.fit(observed, columns)
    assert torch.allclose(fitted.weights, weights, rtol=1e-12) and max(fitted.rest.values()) < 1e-14
    named = normalisation.nearest(
        torch.tensor([3.0, 2.0, 1.0]) / 6, [4, 4, 8], normalisation.known([4, 4, 8], [0, 0, 1], [0, 1, 0])
    )
    assert named.off > 0.1  # negative control: no known mean
    names = [(one.name, one.others) for one in normalisation.known([4, 8, 4, 8], [0, 0, 1, 1], [0, 1, 0, 1])]
    assert names == [("token-mean", {"rank-mean"}), ("micro-mean", {"micro-step-mean", "piece-mean"})]
    assert normalisation.explanations(0.375, {"a": 3.0, "b": 8.0}, 1e-6) == ["a / b"]
    assert normalisation.explanations(64.0, {"a": 8.0, "b": 8.0}, 1e-6) == ["a x b"]
    # Such as the square of a temperature that a distillation forgets: two numbers make it by accident, one hardly
    assert normalisation.explanations(0.25, {"a": 2.0, "b": 8.0, "c": 2.0}, 1e-6) == []
    assert normalisation.explanations(0.25, {"a": 4.0}, 1e-6) == ["1 / a"]


def test_every_example_is_documented():
    text = (ROOT / "docs" / "record.md").read_text()
    for path in (ROOT / "examples" / "record").glob("*.py"):
        assert path.name in text


WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("transformers", "ray", "deepspeed", "matplotlib", "accelerate"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from lockstep import judge, record
assert record.main(["--output", "out", "train.py"]) == 0
raise SystemExit(judge.main(["out"]))
"""


def test_torch_numpy_safetensors_and_pydantic_are_enough(tmp_path):
    (tmp_path / "train.py").write_text(OWN.format(new="", then="", loss=MEAN))
    command = [sys.executable, "-c", WITHOUT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("PASS: 2 steps"), done.stderr
    blocked = subprocess.run(
        [sys.executable, "-c", WITHOUT.replace("from lockstep", "import transformers\nfrom lockstep")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert "ImportError: transformers" in blocked.stderr


def test_a_shard_of_other_weights_is_refused(tmp_path, refusal):
    """Where a shard lies is found by its content, which is another if weights are made anew after the recording began."""
    net = torch.nn.Linear(4, 4, bias=False)
    with record(net, tmp_path / "run", 1):
        net.weight = torch.nn.Parameter(torch.randn(2, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    assert "weight has the shape [2, 4] in step 1, and [4, 4] when" in refusal(judge.main, [tmp_path / "run"])


def test_a_scaler_is_left_as_it_was(tmp_path):
    """After a recording whose loop goes on when its first steps are over."""
    real = torch.amp.GradScaler.step
    net, scaler = torch.nn.Linear(4, 3), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with lockstep.record(net, tmp_path / "run", steps=1):
        for _ in range(3):
            assert torch.amp.GradScaler.step is not real
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert torch.amp.GradScaler.step is real


@pytest.mark.parametrize(
    "other, by_rows, found",
    [
        ([[1.0, 2.0], [0.0, 0.0]], True, False),
        ([[3.0, 6.0], [0.0, 0.0]], False, False),  # a multiple
        ([[2.0, -1.0], [0.0, 0.0]], False, True),
        ([[2.0, -1.0], [0.0, 0.0]], True, False),  # as of other random numbers
        ([[0.0, 0.0], [1.0, 2.0]], True, True),
        ([[1.0, 2.0], [1.0, 2.0]], True, False),
        ([[0.0, 0.0], [0.0, 0.0]], True, False),
    ],
)
def test_losses_of_different_samples(other, by_rows, found):
    one, other = ({"0": torch.tensor(rows)} for rows in ([[1.0, 2.0], [0.0, 0.0]], other))
    assert are_of_other_samples(one, other, by_rows=by_rows) == found
    assert are_of_other_samples({"0": one["0"][:, 0]}, {"0": other["0"][:, 0]}, by_rows=True) in (
        found,
        False,
    )
