"""What a GPU computes otherwise than a CPU, by stand-ins that leave what was measured on one (results/gpu_arithmetic.md): runs with it pass, and bugs do not."""

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep import judge
from lockstep.verdict import gpu_arithmetic
from lockstep.verdict.factors import NOTHING
from lockstep.verdict.judgement import FLOOR, MULTIPLE

WIDTH, TOKENS, VOCABULARY = 64, 48, 64
aten = torch.ops.aten
AUTOCAST = gpu_arithmetic.CudaAutocast(torch.__version__)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.head = (nn.Linear(WIDTH, n) for n in (3 * WIDTH, WIDTH, VOCABULARY))

    def forward(self, ids, labels):
        x = self.embedding(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(attention(q[:, None], k[:, None], v[:, None])[:, 0])
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.rnn(self.embedding(ids))[0]).flatten(0, 1), labels.flatten())


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.conv = nn.Embedding(VOCABULARY, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, labels):
        x = self.conv(self.embedding(ids).transpose(1, 2))[..., :-2].transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def recorded(folder, kind=Small, *, device="cuda:0", tf32=(), autocast=False, changes=None, make=None):
    """A recording of two steps on the CPU, which says that it was made on another device. `changes` happens to gradients."""
    torch.manual_seed(0)
    net = kind().train()
    optimizer = (make or (lambda of: torch.optim.SGD(of, lr=1e-2)))(net.parameters())
    with lockstep.record(net, folder):
        for _ in range(3):
            ids = torch.randint(0, VOCABULARY, (4, TOKENS))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = net(ids, ids.roll(-1, 1))
            loss.backward()
            if changes is not None:
                changes(net)
            optimizer.step()
            optimizer.zero_grad()
    path = folder / "model.json"
    said = json.loads(path.read_text())
    said["origin"] |= {"device": device, "tf32": list(tf32)}
    path.write_text(json.dumps(said))
    return folder


def verdict(folder, capsys):
    capsys.readouterr()
    status = judge.main([str(folder)])
    return status, capsys.readouterr().out


class InTf32(TorchDispatchMode):
    """Products of operands that have 11 significant bits, made in another way than the judge's."""

    PLACES = {
        aten.mm: (0, 1),
        aten.bmm: (0, 1),
        aten.addmm: (1, 2),
        aten.convolution: (0, 1),
        aten.convolution_backward: (0, 1, 2),
    }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        places = self.PLACES.get(function.overloadpacket, ())
        args = [self.rounded(one) if place in places else one for place, one in enumerate(args)]
        return function(*args, **(kwargs or {}))

    @staticmethod
    def rounded(tensor):
        mantissa, exponent = np.frexp(tensor.detach().numpy())
        return torch.from_numpy(np.ldexp(np.rint(mantissa * 2**11) / 2**11, exponent).astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "use"), [(Small, "matmul"), (Pixels, "convolution"), (Recurrent, "recurrent")]
)
def test_a_run_in_tf32_passes(tmp_path, capsys, kind, use):
    # torch's default, and all
    said = ["convolution"] if use == "recurrent" else ["matmul", "convolution"]
    with InTf32(), gpu_arithmetic.without_onednn():
        recorded(tmp_path, kind, tf32=said)
    status, out = verdict(tmp_path, capsys)
    assert status == 0, out


def test_products_in_place_are_in_tf32_too():
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    with gpu_arithmetic.Tf32(["matmul"]):
        made = [torch.zeros(8, 8).addmm_(a, b), torch.addmm(torch.zeros(8, 8), a, b), a @ b]
        batched = torch.addbmm(torch.zeros(8, 8), a[None], b[None])
    want = InTf32.rounded(a) @ InTf32.rounded(b)
    assert all(torch.allclose(one, want, rtol=0, atol=1e-5) for one in (*made, batched))
    assert not torch.allclose(a.double() @ b.double(), want.double(), rtol=0, atol=1e-5)


def test_attention_by_products_in_tf32_passes(tmp_path, capsys):
    """Which kernel a run had is not known."""
    with InTf32(), sdpa_kernel(SDPBackend.MATH):
        recorded(tmp_path, tf32=["matmul"])
    before = torch.backends.cuda.flash_sdp_enabled()
    status, out = verdict(tmp_path, capsys)
    assert status == 0, out
    assert torch.backends.cuda.flash_sdp_enabled() == before


def test_a_run_in_float64_has_no_tf32(tmp_path, capsys):
    """The yardstick is in float32 then, and its products are not rounded: a smaller error is found."""
    recorded(
        tmp_path,
        lambda: Small().double(),
        tf32=["matmul"],
        changes=lambda net: net.out.weight.grad.mul_(1.00002),
    )
    status, out = verdict(tmp_path, capsys)
    assert status == 1 and "gradient/out.weight" in out


def test_tf32_that_the_run_did_not_ask_for_is_a_fail(tmp_path, capsys):
    with InTf32():
        recorded(tmp_path)
    status, out = verdict(tmp_path, capsys)
    assert status == 1 and "forward/qkv" in out


def test_a_bug_in_a_run_in_tf32_is_found(tmp_path, capsys):
    with InTf32():
        recorded(tmp_path, tf32=["matmul"], changes=lambda net: net.out.weight.grad.mul_(1.003))
    status, out = verdict(tmp_path, capsys)
    assert status == 1 and re.search(r"gradient/out.weight.* 1\.00[23]\d* times", out), out


def test_tf32_rounds_to_nearest_and_ties_to_even():
    tensor = torch.randn(3, 1000) * torch.tensor([[1e-30], [1.0], [1e30]])
    ties = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11])
    assert torch.equal(gpu_arithmetic.rounded(tensor), InTf32.rounded(tensor))
    assert gpu_arithmetic.rounded(ties).tolist() == [1, 1 + 2.0**-9, -1]


class _Cut(torch.autograd.Function):
    """Leaves all numbers as many times smaller."""

    @staticmethod
    def forward(context, tensor, by):
        context.by = by
        return tensor * (1 - by)

    @staticmethod
    def backward(context, gradient):
        return gradient * (1 - context.by), None


@pytest.mark.parametrize(
    ("device", "by", "autocast", "passes"),
    [
        # As tensor cores that cut sums, three for one product in float32
        ("cuda:0", 7e-7, False, True),
        ("cpu", 7e-7, False, False),
        ("cuda:0", 3e-6, False, False),
        ("cuda:0", 4e-3, True, False),
    ],
)
def test_sums_may_be_too_small_by_what_tensor_cores_cut(
    tmp_path, capsys, monkeypatch, device, by, autocast, passes
):
    with monkeypatch.context() as patch:
        patch.setitem(
            globals(),
            "attention",
            lambda *given: _Cut.apply(F.scaled_dot_product_attention(*given, is_causal=True), by),
        )
        recorded(tmp_path, device=device, autocast=autocast)
    status, out = verdict(tmp_path, capsys)
    assert (status == 0) is passes, out


def test_what_a_gpu_may_leave_is_more_than_a_cpu_and_less_than_a_bug():
    """2e-4 is what docs/verification.md promises to find in 16 bits."""
    gpu, sixteen, tf32 = (
        gpu_arithmetic.arithmetic_of("cuda:0", single=single, tf32=single and tf32)
        for single, tf32 in ((True, False), (False, False), (True, True))
    )
    cpu = gpu_arithmetic.arithmetic_of("cpu", single=True)
    assert (cpu.factor, cpu.floor) == (NOTHING, FLOOR)
    assert cpu.factor < gpu.factor < sixteen.factor < 2e-4 < tf32.factor < 1e-3


def in_float32(beta):
    return float(np.float32(1) - np.float32(beta))


def fused_adamw(parameters, gradients, averages, squares, _largest, steps, *, lr, beta1, beta2, eps, **more):
    """torch's kernel on a GPU: its settings are float32, so 1 - beta2 is off by 1.3e-5."""
    for parameter, gradient, average, square, step in zip(
        parameters, gradients, averages, squares, steps, strict=True
    ):
        parameter.mul_(1 - lr * more["weight_decay"])
        average.lerp_(gradient, in_float32(beta1))
        square.mul_(float(np.float32(beta2))).addcmul_(gradient, gradient, value=in_float32(beta2))
        first, second = (1 - float(np.float32(beta)) ** float(step) for beta in (beta1, beta2))
        parameter.addcdiv_(average, square.sqrt().div_(second**0.5).add_(eps), value=-lr / first)


def test_fused_adamw_has_its_settings_in_float32_on_a_gpu(tmp_path, capsys, monkeypatch):
    def make(of):
        return torch.optim.AdamW(of, lr=1e-2, fused=True)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", fused_adamw)
        for device in ("cuda:0", "cpu"):
            recorded(tmp_path / device, make=make, device=device)
    status, out = verdict(tmp_path / "cuda:0", capsys)
    assert status == 0, out
    status, out = verdict(tmp_path / "cpu", capsys)
    assert status == 1 and "exp_avg_sq" in out


def as_of(folder, version):
    path = folder / "model.json"
    said = json.loads(path.read_text())
    said["origin"]["versions"]["torch"] = version
    path.write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(("version", "status"), [("2.10.0+cu130", 0), ("2.11.0+cu130", 1)])
def test_earlier_kernels_have_settings_in_float64(tmp_path, capsys, version, status):
    """torch's kernel for CPUs has, too."""
    recorded(tmp_path, make=lambda of: torch.optim.AdamW(of, lr=1e-2, fused=True))
    assert verdict(as_of(tmp_path, version), capsys)[0] == status


def test_a_group_that_is_not_fused_has_settings_in_float64(tmp_path, capsys, monkeypatch):
    def make(of):
        first, *others = of
        groups = [{"params": [first], "fused": False}, {"params": others, "fused": True}]
        return torch.optim.AdamW(groups, lr=1e-2)

    monkeypatch.setattr(torch, "_fused_adamw_", fused_adamw)
    recorded(tmp_path, make=make)
    monkeypatch.undo()
    status, out = verdict(tmp_path, capsys)
    assert status == 0, out


def test_another_beta_of_fused_adamw_is_found(tmp_path, capsys, monkeypatch):
    def other(*given, beta2, **more):
        fused_adamw(*given, beta2=beta2 + 1e-7, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", other)
        recorded(tmp_path, make=lambda of: torch.optim.AdamW(of, lr=1e-2, fused=True))
    status, out = verdict(tmp_path, capsys)
    assert status == 1 and "exp_avg_sq" in out


def test_autocast_is_that_of_a_gpu():
    x = torch.randn(4, 8).bfloat16()
    calls = {
        "pow": lambda: x.abs() ** 3,
        "layer_norm": lambda: F.layer_norm(x, (8,)),
        "softmax": lambda: x.softmax(-1),
        "sum": lambda: x.sum(),
        "norm": lambda: x.norm(),
    }
    for name, call in calls.items():
        with torch.autocast("cpu", torch.bfloat16):
            on_cpu = call().dtype
            with gpu_arithmetic.CudaAutocast("2.13.0"):
                assert (on_cpu, call().dtype) == (torch.bfloat16, torch.float32), name
    with gpu_arithmetic.CudaAutocast("2.13.0"):  # without autocast
        assert x.softmax(-1).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert x.sum(dtype=torch.bfloat16).dtype == torch.bfloat16
            assert F.relu(x).dtype == torch.bfloat16
            assert F.rms_norm(x, (8,)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), gpu_arithmetic.CudaAutocast("2.11.0+cu130"):
        assert F.rms_norm(x, (8,)).dtype == torch.bfloat16
        out = torch.empty_like(x)
        assert torch.equal(torch.exp(x, out=out), out) and bool(out.any())


def test_functions_that_a_gpu_alone_computes_in_16_bits_or_in_the_widest_dtype():
    x, wide, autocast = torch.randn(4, 4), torch.randn(4, 4).bfloat16(), torch.autocast("cpu", torch.bfloat16)
    cell = nn.LSTMCell(4, 4)
    calls = {
        torch.bfloat16: [lambda: x.mv(x[0]), lambda: cell(x)[0], lambda: x[0].addmv(x, x[0])],
        torch.float32: [
            lambda: wide[0].dot(x[0]),
            lambda: x.scatter_add(0, torch.zeros(4, 4, dtype=torch.long), wide),
            lambda: torch.bilinear(x, wide, torch.ones(2, 4, 4), None),
        ],
    }
    for dtype, those in calls.items():
        for place, call in enumerate(those):
            with autocast, AUTOCAST:
                assert call().dtype == dtype, (dtype, place)
            # What a CPU refuses, or has otherwise
            with autocast, contextlib.suppress(RuntimeError):
                assert call().dtype != dtype, (dtype, place)


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.two((self.one(x) ** 2).softmax(-1) * x)


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Mixes() for _ in range(2))

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def test_layer_by_layer_autocast_is_the_same(tmp_path, capsys):
    """A layer is computed again in the backward pass."""
    with AUTOCAST:
        recorded(tmp_path, Layered, autocast=True)
    assert verdict(tmp_path, capsys)[0] == 0
    report = (tmp_path / "report.json").read_text()
    assert judge.main([str(tmp_path), "--memory", "0"]) == 0
    assert (tmp_path / "report.json").read_text() == report


def test_the_functions_are_those_of_the_installed_torch():
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    for table, known in (
        ("AT_FORALL_FP32(_)", AUTOCAST.always),
        ("AT_FORALL_FP32_SET_OPT_DTYPE(_)", AUTOCAST.unless_told),
        ("AT_FORALL_PROMOTE(_)", AUTOCAST.in_the_widest),
    ):
        body = header.partition(f"#define {table}")[2].partition("\n\n")[0]
        names = set(re.findall(r"_\((\w+)", body))
        # Functions of C++: `interpolate` calls them
        scales = {name for name in names if "upsample" in name}
        assert len(names) >= 8 and names - scales <= known, names - scales - known
    on_a_gpu = set(
        re.findall(
            r"_\((\w+)", header.partition("#define AT_FORALL_LOWER_PRECISION_FP(_)")[2].partition("\n\n")[0]
        )
    )
    # linalg.multi_dot, as Python calls it
    assert AUTOCAST.in_sixteen_bits - {"multi_dot"} <= on_a_gpu


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_yardstick_has_as_many_threads_as_the_run(tmp_path, threads):
    """LayerNorm's gradient in bfloat16 depends on their number (docs/findings.md). Control: a run whose number is not known."""
    threads(1)
    recorded(tmp_path, lambda: Small().bfloat16(), device="cpu")
    threads(2)
    multiples = []
    for told in (1, 0):
        path = tmp_path / "model.json"
        said = json.loads(path.read_text())
        path.write_text(json.dumps(said | {"origin": said["origin"] | {"threads": told}}))
        assert judge.main([str(tmp_path)]) == 0 and torch.get_num_threads() == 2
        rows = json.loads((tmp_path / "report.json").read_text())["steps"][0]["tensors by themselves"]
        multiples.append(rows["gradient/norm.bias"][1])
    assert said["origin"]["threads"] == 1
    path.write_text(json.dumps(said | {"origin": said["origin"] | {"threads": 10**6}}))
    assert judge.main([str(tmp_path)]) == 2  # a damaged file, and more than torch can have
    assert multiples[0] < 1 / MULTIPLE and multiples[0] != multiples[1]


def test_a_gradient_in_bfloat16_depends_on_the_threads(threads):
    def gradient():
        generator = torch.Generator().manual_seed(0)
        x, gradient = torch.randn(2, 1024, 64, generator=generator).bfloat16()
        norm = torch.nn.LayerNorm(64).bfloat16()
        norm(x).backward(gradient)
        return norm.bias.grad

    of_threads = []
    for number in (1, 2):
        threads(number)
        of_threads.append(gradient())
    for number, expected in enumerate(of_threads, 1):
        with gpu_arithmetic.as_in_the_run("cpu", number, [], {}):
            assert torch.equal(gradient(), expected)
    assert not torch.equal(*of_threads) and torch.get_num_threads() == 2
