"""DeepSpeed ZeRO-1: `safe_get_full_optimizer_state` fails for all parameter groups but the first.

python findings/deepspeed_moments_of_later_groups.py
"""

from finding import deepspeed_engine, message_of, settle, train_a_step


def two_groups(model) -> list[dict]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def check() -> tuple[bool, str]:
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = deepspeed_engine({}, two_groups)
    train_a_step(engine)
    layer = engine.module.model.layers[0]
    # The first group's
    assert safe_get_full_optimizer_state(layer.mlp.up_proj.weight, "exp_avg") is not None
    try:
        moment = safe_get_full_optimizer_state(layer.input_layernorm.weight, "exp_avg")
    except ValueError as error:
        return True, message_of(error)
    return (
        moment is None,
        f"the moment of a norm's weight, in the second group, is {'missing' if moment is None else 'there'}",
    )


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed",), ranks=2))
