"""transformers: a model in float64 computes in float32.

python findings/transformers_float64.py
"""

import torch
from finding import settle, tiny_model


def check() -> tuple[bool, str]:
    norm = tiny_model().double().model.norm
    x = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    error = float((norm(x) / exact - 1).detach().abs().max())
    return (
        error > 1e-12,
        f"RMSNorm in float64 is off by a relative {error:.1e}; the unit roundoff of float64 is 1.1e-16",
    )


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("transformers",)))
