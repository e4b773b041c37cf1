"""DeepSpeed ZeRO-1 and 2: with `round_robin_gradients`, `safe_get_full_fp32_param` returns the weights of other parameters.

python findings/deepspeed_round_robin_gradients.py
"""

from finding import deepspeed_engine, settle


def check() -> tuple[bool, str]:
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    engine = deepspeed_engine({"zero_optimization": {"stage": 2, "round_robin_gradients": True}})
    parameters = dict(engine.module.named_parameters())
    wrong = [
        name
        for name, parameter in parameters.items()
        # No step yet, and all is float32
        if not torch.equal(safe_get_full_fp32_param(parameter), parameter)
    ]
    return bool(wrong), f"not the weights of the parameter asked for: {len(wrong)} of {len(parameters)}"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed",), ranks=2))
