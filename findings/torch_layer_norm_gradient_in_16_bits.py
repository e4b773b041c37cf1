"""torch sums the gradient of LayerNorm's weight and bias in bfloat16 on the CPU, row after row.

python findings/torch_layer_norm_gradient_in_16_bits.py
"""

import torch
from finding import settle

ROWS, FEATURES = 8192, 64
ROUNDED_ONCE = 2.0**-8  # unit roundoff of bfloat16


def error(of_bias: torch.Tensor, gradient: torch.Tensor) -> float:
    """The relative error (2-norm) of the gradient of a bias, which is a sum over rows."""
    exact = gradient.double().sum(0)
    return float((of_bias.double() - exact).norm() / exact.norm())


def check() -> tuple[bool, str]:
    torch.manual_seed(0)
    x, gradient = torch.randn(2, ROWS, FEATURES).bfloat16()
    errors = {}
    for threads in (1, 4):
        torch.set_num_threads(threads)
        norm, linear = torch.nn.LayerNorm(FEATURES).bfloat16(), torch.nn.Linear(FEATURES, FEATURES).bfloat16()
        norm(x).backward(gradient)
        linear(x).backward(gradient)
        errors[threads] = error(norm.bias.grad, gradient), error(linear.bias.grad, gradient)
    said = "; ".join(
        f"{threads} thread(s): LayerNorm's bias {of_norm:.1e}, Linear's {of_linear:.1e}"
        for threads, (of_norm, of_linear) in errors.items()
    )
    holds = errors[1][0] > 10 * ROUNDED_ONCE and errors[1][1] < ROUNDED_ONCE
    return holds, f"relative error of a bias's gradient over {ROWS} rows, {said}"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",)))
