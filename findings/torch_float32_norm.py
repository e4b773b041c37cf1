"""torch: the float32 norm of a large tensor on the CPU is off by up to a percent.

python findings/torch_float32_norm.py          uses 1 GB of memory
"""

import torch
from finding import settle

NUMBERS = (10**4, 10**5, 10**6, 10**8)


def error(number: int) -> float:
    values = torch.randn(number, generator=torch.Generator().manual_seed(0))
    return float(torch.linalg.vector_norm(values) / torch.linalg.vector_norm(values, dtype=torch.float64) - 1)


def check() -> tuple[bool, str]:
    errors = {number: error(number) for number in NUMBERS}
    return abs(errors[10**8]) > 1e-3, "relative error " + ", ".join(
        f"{e:.1e} at {n:.0e} elements" for n, e in errors.items()
    )


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("torch",)))
