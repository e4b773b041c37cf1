"""What the arithmetic of a GPU leaves: the factors and distances of products, functions, attention and fused optimizers, from float64.

    PYTHONPATH=. python benchmarks/gpu_arithmetic.py --output results/gpu_arithmetic.json

A factor is sum(d sign(a)) / sum(|a|) of the difference d from the result a in float64, as in lockstep/verdict/factors.py; rounding to nearest
has none. lockstep/verdict/gpu_arithmetic.py has what follows for the judge. Needs a GPU, and nothing of Lockstep's other packages.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from outputs import output
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.ground.files import write_result

DEVICE = "cuda"
Found = dict[str, dict[str, float]]
LENGTHS = (64, 128, 512, 2048, 8192, 32768, 151936)  # of sums
SIZES = ((256, 256), (2048, 512))
BACKENDS = (
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "sqrt": lambda x: x.abs().sqrt(),
    "log": lambda x: (x.abs() + 0.5).log(),
    "pow": lambda x: x.abs().pow(1.7),
    "softmax": lambda x: x.view(-1, 64).softmax(-1),
    "log_softmax": lambda x: x.view(-1, 64).log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x.view(-1, 128), (128,)),
    "rms_norm": lambda x: F.rms_norm(x.view(-1, 128), (128,)),
    "cumsum": lambda x: x.abs().view(1024, -1).cumsum(1),
}


def off(own: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """How far a tensor is from the exact one: by a factor, less one, with its standard error, and by the 2-norm."""
    mine, right = own.detach().double().cpu(), exact.detach().double().cpu()
    error = mine - right
    factor = float((error * right.sign()).sum() / right.abs().sum())
    left = float((error - factor * right).norm() / right.abs().sum())
    return {"factor": factor, "standard error": left, "distance": float(error.norm() / right.norm())}


def in_tf32(tensor: torch.Tensor, way: str) -> torch.Tensor:
    """A tensor in float32 with 10 bits after the point, rounded in one of several ways."""
    bits = tensor.float().view(torch.int32)
    more = {"even": (1 << 12) - 1 + (bits >> 13 & 1), "away": 1 << 12, "cut": 0}
    return tensor if way == "exact" else ((bits + more[way] >> 13) << 13).view(torch.float32)


def products(dtype: torch.dtype, precision: str) -> dict[str, Found]:
    """Of sums of many lengths. In TF32, against the products of operands that are rounded to nearest and even."""
    torch.backends.cuda.matmul.fp32_precision = precision
    found: dict[str, Found] = {}
    for length, (rows, columns) in itertools.product(LENGTHS, SIZES):
        if length > 40000 and rows > 1000:
            continue  # in float64, it would take too long
        a, b = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((rows, length), (length, columns)))
        own = a @ b if dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)
        exact = (in_tf32(one, "even" if precision == "tf32" else "exact").double() for one in (a, b))
        found[f"{rows} x {length} x {columns}"] = {"out": off(own, torch.matmul(*exact))}
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return found


def in_each_way() -> dict[str, Found]:
    """Distances of products in TF32 from those of operands that are rounded in each way: the smallest tells which a kernel has."""
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    cases: dict[str, tuple[Callable, tuple[int, ...], tuple[int, ...]]] = {
        "linear": (F.linear, (512, 512), (512, 512)),
        "linear of one row": (F.linear, (1, 2048), (2048, 2048)),
        "batched": (torch.matmul, (2, 4, 64, 64), (2, 4, 64, 64)),
        "sum of one product": (torch.matmul, (64, 1), (1, 512)),
        "conv2d of 3 channels": (F.conv2d, (8, 3, 32, 32), (64, 3, 7, 7)),
        "conv2d of 32 channels": (F.conv2d, (8, 32, 16, 16), (64, 32, 3, 3)),
        "conv1d": (F.conv1d, (4, 64, 100), (64, 64, 3)),
    }
    found = {}
    for name, (function, *shapes) in cases.items():
        a, b = (torch.randn(*shape, device=DEVICE) for shape in shapes)
        own = function(a, b)
        found[name] = {
            way: off(own, function(*(in_tf32(one.cpu(), way).double() for one in (a, b))))
            for way in ("exact", "even", "away", "cut")
        }
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "ieee"
    return found


def attention() -> dict[str, Found]:
    found: dict[str, Found] = {}
    for dtype, backend, length, width, causal in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), BACKENDS, (64, 512), (32, 64, 128), (True, False)
    ):
        given = [torch.randn(4, 8, length, width, device=DEVICE).to(dtype) for _ in range(4)]
        try:
            own, exact = (
                _attention(which, [one.to(kind) for one in given], causal)
                for which, kind in ((backend, dtype), (SDPBackend.MATH, torch.float64))
            )
        except RuntimeError:  # it has no kernel for this
            continue
        name = f"{dtype} {backend.name} {length} x {width}{' causal' * causal}"
        found[name] = {
            of: off(*both) for of, both in zip(("out", *"qkv"), zip(own, exact, strict=True), strict=True)
        }
    return found


def _attention(backend: SDPBackend, given: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    *qkv, gradient = [one.clone().requires_grad_() for one in given]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*qkv, is_causal=causal)
        out.backward(gradient.detach())
    return [out, *(one.grad for one in qkv if one.grad is not None)]


def functions() -> dict[str, Found]:
    x, found = torch.randn(1 << 20, device=DEVICE), {}
    for name, function in FUNCTIONS.items():
        inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
        own, exact = map(function, inputs)
        gradient = torch.randn_like(own)
        own.backward(gradient)
        exact.backward(gradient.double())
        found[name] = {"out": off(own, exact), "gradient": off(inputs[0].grad, inputs[1].grad)}
    return found


def recurrent() -> dict[str, Found]:
    layer, x = torch.nn.LSTM(64, 128, 2, batch_first=True), torch.randn(4, 64, 64)
    exact = layer.double()(x.double())[0]
    layer, found = layer.float().to(DEVICE), {}
    for precision in ("tf32", "ieee"):
        torch.backends.cudnn.rnn.fp32_precision = precision
        found[f"LSTM {precision}"] = {"out": off(layer(x.to(DEVICE))[0], exact)}
    return found


def optimizers() -> dict[str, Found]:
    """Two steps of each implementation of Adam, against float64."""
    found: dict[str, Found] = {}
    start, gradients = torch.randn(64, 64), [torch.randn(64, 64) for _ in range(2)]
    for kind, way in itertools.product(
        ("Adam", "AdamW"), ({"fused": True}, {"foreach": True}, {"capturable": True})
    ):
        kept = []
        for device, dtype, options in ((DEVICE, torch.float32, way), ("cpu", torch.float64, {})):
            parameter = torch.nn.Parameter(start.to(device, dtype, copy=True))
            optimizer = getattr(torch.optim, kind)([parameter], lr=1e-2, weight_decay=0.1, **options)
            for gradient in gradients:
                parameter.grad = gradient.to(device, dtype)
                optimizer.step()
            state = optimizer.state[parameter]
            kept.append({"parameter": parameter, **{of: state[of] for of in ("exp_avg", "exp_avg_sq")}})
        found[f"{kind} {next(iter(way))}"] = {of: off(kept[0][of], kept[1][of]) for of in kept[0]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=output('{\n "device": '), default=Path("runs/gpu_arithmetic.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    sixteen = {f"products in {dtype}": products(dtype, "ieee") for dtype in (torch.bfloat16, torch.float16)}
    content = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **sixteen,
        **{f"products in float32, {way}": products(torch.float32, way) for way in ("tf32", "ieee")},
        "products in TF32, by how operands are rounded": in_each_way(),
        "attention": attention(),
        "functions in float32": functions(),
        "recurrent layers": recurrent(),
        "optimizers in float32": optimizers(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_result(options.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
