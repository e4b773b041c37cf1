"""Any model, any optimizer: examples and mixtures of experts through run_verification.py, each beside a run with a bug."""

import importlib.util
import json

import pytest
import torch
from programs import ROOT, in_process

from lockstep.inputs import own_model
from lockstep.plan import compiled

EXAMPLES = ROOT / "examples"
BUGGY = """
import torch
from torch.nn.parallel import DistributedDataParallel

from lockstep.training.torch_strategy import TorchStrategy


class Plain(TorchStrategy):
    axes = ("dp",)

    def parallelize(self, model, device_mesh):
        return DistributedDataParallel(model, process_group=device_mesh["dp"].get_group())


class StepsTwice(Plain):
    def update(self):
        norm = super().update()
        self.optimizer.step()
        return norm


class MovesWhatIsFrozen(Plain):
    def update(self):
        norm = super().update()
        with torch.no_grad():
            next(one for one in self.model.parameters() if not one.requires_grad).mul_(1.001)
        return norm


class OtherExpert(Plain):
    def parallelize(self, model, device_mesh):
        gate = model.model.layers[1].mlp.gate
        gate.register_forward_hook(lambda _module, _inputs, output: (*output[:2], output[2].roll(1, 0)))
        return super().parallelize(model, device_mesh)
"""


def verdicts(tmp_path, bug, *arguments, strategies="ddp,fsdp@tp1xdp2"):
    """(run -> verdict, first wrong tensor of the run with this bug)."""
    (tmp_path / "buggy.py").write_text(BUGGY)
    done = in_process(
        "run_verification.py",
        *("--output_dir", tmp_path / "out", "--seq_length", "32", "--batch_size", "2"),
        *("--strategies", f"{strategies},{tmp_path / 'buggy.py'}:{bug}", *arguments),
    )
    assert done.returncode == 1, done.stderr
    runs = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    return {name: one["verdict"] for name, one in runs.items()}, runs[bug.lower()]["first_failure"][0]


@pytest.mark.parametrize("optimizer", [f"{EXAMPLES}/optimizers.py:muon", "NAdam"])
def test_any_optimizer_on_a_module_of_ones_own(tmp_path, optimizer):
    strategies, model = "ddp,fsdp@tp1xdp2", ["--model", f"{EXAMPLES}/own_model.py:make_model"]
    if "muon" in optimizer:
        strategies, model = f"{strategies},fsdp@pp2", ["--model_name", "tiny-llama"]
    found, first = verdicts(tmp_path, "StepsTwice", "--optimizer", optimizer, *model, strategies=strategies)
    right = [run.replace("@", "_") for run in strategies.split(",")]
    assert found == {**dict.fromkeys(right, "PASS"), "stepstwice": "FAIL"}
    assert first[0] == 1 and first[2].split("/")[0] in ("parameter", "momentum_buffer", "exp_avg")


# It keeps whole state of what is cut.
OF_ROWS = """
import torch
from torch.distributed.tensor import DTensor, distribute_tensor


class OfRows(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, is_cut = parameter.grad, isinstance(parameter, DTensor)
                gradient = gradient.full_tensor() if is_cut else gradient
                rows = gradient.reshape(len(gradient), -1)
                mean = self.state[parameter].setdefault("mean", gradient.new_zeros(len(gradient)))
                mean.lerp_(rows.square().mean(1), 0.1)
                update = (rows / (mean + 1e-12).sqrt()[:, None]).view_as(gradient)
                placed = distribute_tensor(update, parameter.device_mesh, parameter.placements) if is_cut else update
                parameter.add_(placed, alpha=-group["lr"])


def of_rows(named, *, learning_rate, weight_decay):
    return OfRows([parameter for _, parameter in named], {"lr": learning_rate})
"""


# A part of it keeps no state.
BOTH = """
import torch


def both(named, *, learning_rate, weight_decay):
    matrices = [parameter for _, parameter in named if parameter.ndim > 1]
    others = [parameter for _, parameter in named if parameter.ndim == 1]
    return [torch.optim.Adam(matrices, lr=learning_rate), torch.optim.SGD(others, lr=learning_rate)]
"""


@pytest.mark.parametrize("code, name, kept", [(OF_ROWS, "of_rows", "mean"), (BOTH, "both", "exp_avg")])
def test_an_optimizer_of_unusual_state(tmp_path, code, name, kept):
    (tmp_path / "mine.py").write_text(code)
    arguments = ("--optimizer", f"{tmp_path}/mine.py:{name}", "--model_name", "tiny-llama")
    found, first = verdicts(tmp_path, "StepsTwice", *arguments)
    assert found == {"ddp": "PASS", "fsdp_tp1xdp2": "PASS", "stepstwice": "FAIL"}
    assert first[0] == 1 and first[2].split("/")[0] in ("parameter", kept)


FLAT = """
import torch
from torch.nn import functional as F


class Flat(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.module = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 16)
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 256)
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, labels):
        # The norm takes the shift away, so its gradient is zero in exact arithmetic.
        logits = self.head(self.norm(self.module(self.embedding(input_ids)) + self.shift))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""


def test_a_model_without_a_list_of_layers(tmp_path):
    """FSDP2 wraps it as a whole. A part of it is called `module`, as what a wrapper wraps."""
    (tmp_path / "flat.py").write_text(FLAT)
    found, first = verdicts(tmp_path, "StepsTwice", "--model", f"{tmp_path}/flat.py:Flat")
    assert found == {"ddp": "PASS", "fsdp_tp1xdp2": "PASS", "stepstwice": "FAIL"}
    assert first[0] == 1 and first[2].split("/")[0] in ("parameter", "exp_avg")


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_on_a_frozen_model(tmp_path):
    found, first = verdicts(tmp_path, "MovesWhatIsFrozen", "--model", f"{EXAMPLES}/lora.py:make_model")
    assert found == {"ddp": "PASS", "fsdp_tp1xdp2": "PASS", "moveswhatisfrozen": "FAIL"}
    assert first[0] == 1 and first[2].startswith("parameter/") and "lora" not in first[2]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_experts(tmp_path):
    places = [
        f"{EXAMPLES}/transformers_tp.py:{name}"
        for name in ("TransformersTP@tp2xdp1", "TransformersEP@tp1xdp2")
    ]
    found, first = verdicts(
        tmp_path, "OtherExpert", "--model_name", "tiny-mixtral", strategies=",".join(["ddp", *places])
    )
    assert found.pop("otherexpert") == "FAIL" and set(found.values()) == {"PASS"} and len(found) == 3
    assert first[0] == 1 and first[2].startswith(
        "forward/model.layers.1.mlp.gate"
    )  # its scores are of others


def test_a_model_or_an_optimizer_that_is_none(tmp_path):
    """One line, status 2, before anything is trained."""
    (tmp_path / "own.py").write_text(
        "import torch\n\ndef number():\n    return 1\n\ndef empty():\n    return torch.nn.Module()\n\n"
        "def lazy():\n    return torch.nn.LazyLinear(4)\n"
    )
    for arguments, message in (
        (["--model", f"{tmp_path}/own.py:number"], "returned int, not a torch.nn.Module"),
        (["--model", f"{tmp_path}/own.py:empty"], "has no torch.nn.Embedding"),
        (["--model", f"{tmp_path}/own.py:lazy"], "weight has no shape yet; give the size of its input"),
        (["--model", f"{tmp_path}/own.py:other"], "the file has no function or class other"),
        (["--model", f"{tmp_path}/none.py:number"], "the file cannot be read"),
        (["--optimizer", f"{tmp_path}/own.py:other"], "the file has no function or class other"),
        (["--optimizer", "lion"], "no class of torch.optim"),
    ):
        done = in_process("run_verification.py", "--output_dir", str(tmp_path / "out"), *arguments)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, (
            done.stderr
        )


def test_a_model_without_layers():
    """A list of none is not compiled, and FSDP2 finds the loss in what the module returns, as layers' hooks do not begin its backward pass."""
    assert compiled.observed(torch.nn.Embedding(2, 2)) == [False]
    model = own_model.build(f"{EXAMPLES}/own_model.py:make_model")
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert torch.utils._pytree.tree_leaves(model(ids, ids))[0].requires_grad


ROTARY = """
import torch
from torch.nn import functional as F


class Rotated(torch.nn.Module):
    \"\"\"Its table of rotations is complex, as in Meta's own Llama.\"\"\"

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        angles = torch.outer(torch.arange(64), torch.arange(1, 9) / 8)
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x).float().unflatten(-1, (-1, 2)))
            x = x + torch.view_as_real(pairs * self.table[: x.shape[1]]).flatten(2).to(x.dtype).cumsum(1)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())
"""


SHARED = """
import torch
from torch.nn import functional as F


class Shared(torch.nn.Module):
    \"\"\"A layer and the rest of the model share a weight.\"\"\"

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        self.layers, self.out = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2)), torch.nn.Linear(16, 16)
        self.out.weight = self.layers[0].weight

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for layer in (*self.layers, self.out):
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
"""


def test_a_weight_in_a_layer_and_elsewhere(tmp_path):
    """FSDP2 would untie it in silence. Wrapped as a whole, the model passes."""
    (tmp_path / "shared.py").write_text(SHARED)
    for wrap, status in (("layer", 2), ("model", 0)):
        done = in_process(
            "run_verification.py",
            *("--output_dir", tmp_path / wrap, "--seq_length", "32", "--batch_size", "2"),
            *("--strategies", f"ddp,fsdp@tp1xdp2:wrap={wrap}", "--model", f"{tmp_path}/shared.py:Shared"),
        )
        assert done.returncode == status, done.stderr
        assert ("layers.0.weight is in a layer and elsewhere" in done.stderr) == (wrap == "layer")


UNUSUAL = """
import torch
from torch.nn import functional as F


class Recurrent(torch.nn.Module):
    \"\"\"Each layer is a list, and a state of a recurrent network has its samples along the second dim.\"\"\"

    shape = (1,)

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList([torch.nn.LayerNorm(16), torch.nn.GRU(16, 16, batch_first=True)]) for _ in range(2)
        )
        self.scale = torch.nn.Parameter(torch.ones(self.shape))

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for norm, rnn in self.layers:
            x = x + rnn(norm(x))[0]
        return F.cross_entropy(self.head(self.scale * x).flatten(0, 1), labels.flatten())


class OfAScalar(Recurrent):
    shape = ()


class Positions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(64, 16))

    def forward(self, length):
        return self.table[:length]


class OfAPart(torch.nn.Module):
    \"\"\"A module returns a part of its weight, as learned positions do.\"\"\"

    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.positions = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256), Positions()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids) + self.positions(input_ids.shape[1])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
"""


@pytest.mark.parametrize(
    "name, wrap, said",
    [
        ("Recurrent", "layer", "layers.0 is a ModuleList, which is never called"),
        ("Recurrent", "model", ""),
        ("OfAPart", "layer", ""),
        (
            "OfAScalar",
            "model",
            "scale is a scalar, which FSDP2 cannot shard; make it a tensor of one element",
        ),
    ],
)
def test_models_of_unusual_shape_under_fsdp(tmp_path, name, wrap, said):
    (tmp_path / "unusual.py").write_text(UNUSUAL)
    done = in_process(
        "run_verification.py",
        *("--output_dir", tmp_path / "out", "--seq_length", "32", "--batch_size", "2"),
        *("--strategies", f"ddp,fsdp@tp1xdp2:wrap={wrap}", "--model", f"{tmp_path}/unusual.py:{name}"),
    )
    assert done.returncode == (2 if said else 0), done.stderr
    assert said in done.stderr


def test_a_complex_table(tmp_path):
    """It stays complex where weights are converted."""
    (tmp_path / "rotary.py").write_text(ROTARY)
    strategies = "ddp,fsdp@tp1xdp2,deepspeed@tp1xdp2"
    found, first = verdicts(
        tmp_path, "StepsTwice", "--model", f"{tmp_path}/rotary.py:Rotated", strategies=strategies
    )
    assert found == {"ddp": "PASS", "fsdp_tp1xdp2": "PASS", "deepspeed_tp1xdp2": "PASS", "stepstwice": "FAIL"}
    assert first[0] == 1 and first[2].split("/")[0] in ("parameter", "exp_avg")
