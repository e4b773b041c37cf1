"""A model that draws random numbers from torch's generator is judged: the reference draws them again."""

import functools
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep import judge
from lockstep.ground.errors import UserError
from lockstep.recorder import dropout_masks, parallelism
from lockstep.verdict import draws, float64
from lockstep.verdict.draws import require_known
from lockstep.verdict.float64 import Told

OWN = np.random.default_rng(0)
KINDS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2)[0],
    "like": lambda x: x + torch.randn_like(x),
    "factory": lambda x: x * torch.rand(len(x), 1, 1).lt(0.8) + torch.rand(1),
    "factory of numbers": lambda x: x + torch.normal(0.0, 0.1, x.shape),
    "in float32": lambda x: x + torch.randn(x.shape, dtype=torch.float32),
    "in a new tensor": lambda x: x + torch.empty(x.shape).normal_(),
    "distribution of numbers": lambda x: x + torch.distributions.Normal(0.0, 0.5).sample(x.shape),
    "like float32": lambda x: x + torch.rand_like(x.float()),
    "mask": lambda x: x * torch.empty_like(x, dtype=torch.bool).bernoulli_(0.8),
    "in place": lambda x: x + torch.empty_like(x).exponential_(),
    "distribution": lambda x: x + torch.distributions.Normal(x, 0.1).rsample(),
    "chosen": lambda x: x[torch.multinomial(x.detach().square().mean((1, 2)), 3)],
    "by name": lambda x: x[torch.multinomial(input=x.detach().square().mean((1, 2)), num_samples=3)],
    "gumbel": lambda x: x * F.gumbel_softmax(x, tau=0.9, hard=True, dim=-1),
    "of python": lambda x: x * random.gauss(1, 0.2),
    "of numpy": lambda x: x * float(np.random.rand()),
    "hidden": lambda x: F.rrelu(x, training=True),
    "of its own": lambda x: x * float(OWN.random()),
}


class Net(torch.nn.Module):
    def __init__(self, kind, recompute=False):
        super().__init__()
        self.recompute, self.kind = recompute, kind
        self.embedding, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.2), torch.nn.GELU())
            for _ in range(2)
        )
        self.lstm = torch.nn.LSTM(16, 16, 2, dropout=0.1, batch_first=True)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.head(KINDS[self.kind](self.lstm(x)[0]))


def recorded(
    folder, kind="dropout", *, autocast=False, recompute=False, wrap=lambda net: net, dtype=torch.float32
):
    torch.manual_seed(0)
    net = Net(kind, recompute).to(dtype)
    wrapped = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with lockstep.record(net, folder):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = wrapped(torch.randint(0, 32, (4, 9))).flatten(0, 1)
                logits = logits.float() if autocast else logits
                (F.cross_entropy(logits, torch.randint(0, 32, (len(logits),))) / 2).backward()
            optimizer.step()
    return folder


def judged(folder, capsys, *arguments):
    capsys.readouterr()
    status = judge.main([str(folder), *arguments])
    captured = capsys.readouterr()
    return status, (captured.out + captured.err).splitlines()[-1]


def has_lstm_in_bfloat16():
    """torch has it on processors with AVX512 alone."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.randn(2, 4))
    except RuntimeError:
        return False
    return True


IN_AUTOCAST = pytest.param(
    True,
    marks=pytest.mark.skipif(not has_lstm_in_bfloat16(), reason="this processor has no LSTM in bfloat16"),
)


@pytest.mark.parametrize("autocast", [False, IN_AUTOCAST])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("hidden", "of its own")])
def test_what_is_drawn_is_drawn_again(tmp_path, capsys, kind, autocast):
    status, said = judged(recorded(tmp_path, kind, autocast=autocast), capsys)
    assert status == 0 and said.startswith("PASS: 2 steps"), said


@pytest.fixture(params=[torch.float32, torch.float64])
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("hidden", "of its own")])
def test_what_is_drawn_in_float64(tmp_path, capsys, kind, default_dtype):
    status, said = judged(recorded(tmp_path, kind, dtype=torch.float64), capsys)
    assert status == 0 and said.startswith("PASS: 2 steps"), said
    assert "hardly judged" not in said  # as where the reference draws other numbers


def test_a_layer_that_is_computed_again_draws_the_same(tmp_path, capsys):
    assert judged(recorded(tmp_path, recompute=True), capsys)[0] == 0
    report = (tmp_path / "report.json").read_text()
    assert judged(tmp_path, capsys, "--memory", "0")[0] == 0
    assert (tmp_path / "report.json").read_text() == report


def test_what_is_drawn_from_another_state_is_wrong(tmp_path, capsys):
    """Negative control."""
    path = recorded(tmp_path) / "rank_0" / "step_1.safetensors"
    torch.manual_seed(1)
    save_file({**load_file(path), "random/0": torch.get_rng_state()}, path)
    status, said = judged(tmp_path, capsys)
    assert status == 1 and "forward/layers.0.1 (micro batch 0, rank 0) is the first of" in said


def test_a_wrong_dropout_is_found(tmp_path, capsys, monkeypatch):
    real = F.dropout
    monkeypatch.setattr(F, "dropout", lambda x, p=0.5, *more: real(x, p, *more) * (1 - p if p == 0.2 else 1))
    recorded(tmp_path)
    monkeypatch.undo()
    status, said = judged(tmp_path, capsys)
    assert status == 1 and "forward/layers.0.1 (micro batch 0, rank 0) is the first of" in said


def test_a_run_that_draws_nothing_though_its_model_does(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(KINDS, "like", lambda x: x)
    monkeypatch.setattr(F, "dropout", lambda x, *_: x)
    monkeypatch.setattr(torch.nn.LSTM, "train", lambda self, _: torch.nn.Module.train(self, False))
    recorded(tmp_path, "like")
    monkeypatch.undo()
    status, said = judged(tmp_path, capsys)
    assert status == 1 and "forward/layers.0.1 (" in said


@pytest.fixture
def on_gpu(monkeypatch):
    """A GPU's random numbers are another generator's, so which elements dropout keeps is recorded."""
    monkeypatch.setattr(dropout_masks, "draws_as_a_cpu", lambda _: False)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cpu, name, getattr(torch, name), raising=False)


def elsewhere(folder, **made):
    """As if it had been recorded on a GPU."""
    content = json.loads((folder / "model.json").read_text())
    content["origin"] |= {"device": "cuda:0", **made}
    (folder / "model.json").write_text(json.dumps(content))
    for path in (folder / "rank_0").glob("step_*.json"):
        path.write_text(path.read_text().replace('"drawn": true', '"drawn": false'))


class Adapted(torch.nn.Module):
    """An adapter beside a frozen layer, whose input needs no gradient."""

    def __init__(self):
        super().__init__()
        self.frozen, self.adapter = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.dropout, self.head = torch.nn.Dropout(0.3), torch.nn.Linear(8, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        for _ in range(2):
            x = self.frozen(x) + self.adapter(self.dropout(x))
        return self.head(self.dropout(x))


def adapted(folder, **autocast):
    torch.manual_seed(0)
    net = Adapted()
    optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=1e-2)
    with lockstep.record(net, folder):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, **autocast):
                logits = net(torch.randn(6, 8))
            F.cross_entropy(logits.float(), torch.randint(0, 4, (6,))).backward()
            optimizer.step()


@pytest.mark.parametrize("memory", [[], ["--memory", "0"]])
def test_what_a_gpu_left_out_is_recorded(tmp_path, capsys, on_gpu, memory):
    adapted(tmp_path, enabled=False)
    elsewhere(tmp_path)
    status, said = judged(tmp_path, capsys, *memory)
    assert status == 0 and said.startswith("PASS: 2 steps"), said
    path = tmp_path / "rank_0" / "step_1.safetensors"
    tensors = load_file(path)  # negative control: one element less was left out
    tensors["dropped/0/2"][0] ^= 16
    save_file(tensors, path)
    assert judged(tmp_path, capsys)[0] == 1
    del tensors["dropped/0/2"]
    save_file(tensors, path)
    status, said = judged(tmp_path, capsys)
    assert status == 2 and "dropout of 0.3 is active in call 3 of dropout" in said


class Attends(torch.nn.Module):
    """Drops probabilities of attention and in place, by functions, and computes a part again in the backward pass."""

    def __init__(self, p=0.2):
        super().__init__()
        self.embedding, self.head, self.p = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32), p
        self.qkv, self.again = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def mix(self, x):
        return F.dropout(self.again(x), self.p, self.training, True)

    def forward(self, ids):
        x = self.embedding(ids)
        q, k, v = self.qkv(F.dropout(x, 0.1, False)).chunk(3, -1)
        x = x + F.dropout((q @ k.transpose(1, 2) / 4).softmax(-1), p=self.p, training=self.training) @ v
        for _ in range(2):
            x = x + checkpoint(self.mix, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("autocast", [False, True])
def test_functions_that_drop_elements_on_a_gpu(tmp_path, capsys, on_gpu, autocast):
    torch.manual_seed(0)
    net = Attends()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with (
        lockstep.record(net, tmp_path),
        torch.device("cpu"),
    ):  # a mode in which torch calls its functions again
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = net(torch.randint(0, 32, (4, 9))).flatten(0, 1)
            F.cross_entropy(logits.float(), torch.randint(0, 32, (36,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    elsewhere(tmp_path)
    status, said = judged(tmp_path, capsys)
    assert status == 0 and said.startswith("PASS: 2 steps"), said
    path = tmp_path / "rank_0" / "step_1.json"
    path.write_text(path.read_text().replace('"dropouts": 3', '"dropouts": 4'))
    status, said = judged(tmp_path, capsys)
    assert status == 2 and "the reference calls dropout 3 times, and 4 calls were seen in the run" in said


class FromZero(torch.nn.Module):
    """A layer that gives nothing but zeros at first: what dropout keeps of these still has a gradient. Attention drops elements by a function."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)
        self.attention = torch.nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
        self.zero, self.dropout = torch.nn.Linear(16, 16), torch.nn.Dropout(0.2)
        torch.nn.init.zeros_(self.zero.weight)
        torch.nn.init.zeros_(self.zero.bias)

    def forward(self, ids):
        x = self.embedding(ids)
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attention(x, x, x, attn_mask=later)[0]
        return self.head(x + self.dropout(self.zero(x)))


@pytest.mark.parametrize("memory", [[], ["--memory", "0"]])
@pytest.mark.parametrize("kind", [FromZero, lambda: Net("of a layer")])
def test_what_is_kept_is_seen_where_it_is_zero(tmp_path, capsys, on_gpu, monkeypatch, kind, memory):
    monkeypatch.setitem(KINDS, "of a layer", lambda x: x)
    torch.manual_seed(0)
    net = kind()
    if isinstance(net, Net):
        net.lstm.dropout = 0.0
    before = torch.get_rng_state()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with lockstep.record(net, tmp_path):
        for _ in range(2):
            F.cross_entropy(net(torch.randint(0, 32, (4, 9))).flatten(0, 1), torch.arange(36) % 32).backward()
            optimizer.step()
            optimizer.zero_grad()
    elsewhere(tmp_path)
    drawn = torch.get_rng_state()
    status, said = judged(tmp_path, capsys, *memory)
    assert status == 0 and said.startswith("PASS: 2 steps"), said
    again = kind()  # what is recorded draws no other numbers than what is not
    torch.set_rng_state(before)
    if isinstance(again, Net):
        again.lstm.dropout = 0.0
    for _ in range(2):
        again(torch.randint(0, 32, (4, 9)))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_copy_on_the_meta_device_is_let_alone(tmp_path):
    with lockstep.record(torch.nn.Linear(2, 2), tmp_path):
        assert F.dropout(torch.ones(2, device="meta"), 0.5).device.type == "meta"


def test_dropout_of_16_bits_is_scaled_in_float32():
    x = torch.randn(4096).bfloat16()
    found = draws.dropped(lambda _, shape: torch.ones(shape, dtype=torch.bool), 0, (x,), {"p": 0.1})
    assert torch.equal(found, (x.float() / 0.9).bfloat16())
    assert not torch.equal(found, x * torch.tensor(1 / 0.9).bfloat16())


def test_a_bug_beside_dropout_on_a_gpu_is_found(tmp_path, capsys, on_gpu, monkeypatch):
    real = F.dropout
    monkeypatch.setattr(F, "dropout", lambda x, p=0.5, *more: real(x, p, *more) * (1 - p))
    adapted(tmp_path, enabled=False)
    monkeypatch.setattr(F, "dropout", real)
    elsewhere(tmp_path)
    status, said = judged(tmp_path, capsys)
    assert status == 1 and "forward/dropout" in said


def test_what_is_computed_in_tf32():
    assert "matmul" not in parallelism.tf32()
    torch.set_float32_matmul_precision("high")
    try:
        assert "matmul" in parallelism.tf32()
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "kind, message",
    [
        ("hidden", "the model calls rrelu, and the reference would draw other random numbers"),
        ("of its own", "it draws random numbers that are not those of torch on CPUs, Python's random"),
    ],
)
def test_what_cannot_be_drawn_again_is_refused(tmp_path, capsys, kind, message):
    recorded(tmp_path, kind)
    status, said = judged(tmp_path, capsys)
    assert status == 2 and message in said


INSIDE = {
    "lstm": (torch.nn.LSTM(8, 8, 2, dropout=0.1), lambda net, x: net(x)[0]),
    "gru": (torch.nn.GRU(8, 8, 2, dropout=0.1), lambda net, x: net(x)[0]),
    "dropout1d": (torch.nn.Dropout1d(0.1), lambda net, x: net(x)),
    "alpha_dropout": (torch.nn.AlphaDropout(0.1), lambda net, x: net(x)),
    "scaled_dot_product_attention": (
        torch.nn.Identity(),
        lambda net, x: F.scaled_dot_product_attention(net(x), x, x, dropout_p=0.1 * net.training),
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_gpu_drops_inside_of_a_function_is_refused(name):
    net, call = INSIDE[name]
    x, mode = torch.randn(2, 4, 8), Told()
    mode.kept_of = lambda *_: None
    with mode:
        assert call(net.eval(), x).shape == x.shape
        with pytest.raises(UserError, match=f"dropout of 0.1 is active in {name}, and a CPU"):
            call(net.train(), x)


class Inside(torch.nn.Module):
    """Calls its module inside of torch.func alone, where hooks see nothing, as in compiled code."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.func.vmap(self.inner)(x + torch.randn_like(x)).square().mean()


def test_a_model_inside_of_torch_func_draws_again(tmp_path, capsys):
    net = Inside()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    with lockstep.record(net, tmp_path):
        for _ in range(2):
            net(torch.randn(8, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert judged(tmp_path, capsys) == (0, "PASS: 2 steps")


def test_compiled_code_may_draw_otherwise(tmp_path, capsys):
    torch.compile(torch.sin, backend="eager")(torch.ones(2))  # of something else, before
    assert judged(recorded(tmp_path / "right"), capsys)[0] == 0
    recorded(tmp_path / "compiled", wrap=functools.partial(torch.compile, backend="eager"))
    status, said = judged(tmp_path / "compiled", capsys)
    assert status == 2 and "by code that torch.compile made" in said


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"record": SimpleNamespace(compiled=True)}, "by code that torch.compile made"),
        ({"ranks": [0, 2]}, "by each of several ranks"),
        ({"piece": object()}, "by each of several ranks"),
        ({"dtypes": {torch.float32, torch.float64}}, "by a model with weights in float64 and others"),
        ({"dtypes": {torch.float64}}, ""),
        ({"ranks": [0, 1]}, ""),  # which share no samples, as FSDP2 says: that is judged
        ({"generator_state": None, "ranks": [0, 2]}, ""),
    ],
)
def test_who_drew_what(changes, message):
    fields = {
        "generator_state": torch.zeros(1),
        "ranks": [0],
        "piece": None,
        "dtypes": {torch.float32},
        "number": 0,
        "record": SimpleNamespace(compiled=False),
    }
    micro_batch = SimpleNamespace(**{**fields, **changes})
    if not message:
        require_known(micro_batch, [0, 1], micro_batch.dtypes)
        return
    with pytest.raises(UserError, match=message):
        require_known(micro_batch, [0, 1], micro_batch.dtypes)


def test_other_random_numbers_than_the_run_drew_leave_little_to_judge(tmp_path, capsys, monkeypatch):
    """The yardstick draws as the run did, and would make it look right, if nothing said how much is tolerated."""
    recorded(tmp_path, "factory of numbers")
    monkeypatch.setattr(
        float64, "drawn_in", lambda _, function, args, kwargs, wide: function(*args, **kwargs)
    )
    status = judge.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert status == 0 and "hardly judged, as one process in the run's dtype is as far off" in out
    assert out.splitlines()[-1].endswith("are hardly judged") and "forward/head" in out, out
