"""DeepSpeed AutoTP: `train_batch_size` counts tensor-parallel ranks.

python findings/deepspeed_train_batch_size.py
"""

from finding import deepspeed_engine, message_of, settle


def check() -> tuple[bool, str]:
    try:  # tp 2 x dp 1: two samples are trained in a step
        deepspeed_engine({"train_batch_size": 2, "tensor_parallel": {"autotp_size": 2}})
    except AssertionError as error:
        return True, message_of(error)
    return False, "the number of samples really trained is taken"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed",), ranks=2))
