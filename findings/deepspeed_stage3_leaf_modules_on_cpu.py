"""DeepSpeed ZeRO-3 on CPUs: a step fails with `stage3_module_granularity_threshold`.

python findings/deepspeed_stage3_leaf_modules_on_cpu.py
"""

from finding import deepspeed_engine, message_of, settle, train_a_step


def check() -> tuple[bool, str]:
    engine = deepspeed_engine(
        {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 100000}}
    )
    try:
        train_a_step(engine)
    except RuntimeError as error:
        return True, message_of(error)
    return False, "a step was trained"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed",), ranks=2))
