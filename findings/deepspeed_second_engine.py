"""DeepSpeed: an engine without tensor parallelism cannot follow one with it in the same process.

python findings/deepspeed_second_engine.py
"""

from finding import deepspeed_engine, message_of, settle


def check() -> tuple[bool, str]:
    deepspeed_engine({"tensor_parallel": {"autotp_size": 2}})
    try:
        deepspeed_engine({"tensor_parallel": {"autotp_size": 1}})
    except AttributeError as error:
        return True, message_of(error)
    return False, "the second engine is built"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed",), ranks=2))
