"""DeepSpeed AutoTP: the name of a preset that does not exist is ignored.

python findings/deepspeed_unknown_preset.py
"""

from finding import deepspeed_engine, message_of, settle


def check() -> tuple[bool, str]:
    try:
        engine = deepspeed_engine({"tensor_parallel": {"autotp_size": 2, "preset_model": "qwen2_misspelt"}})
    except ValueError as error:
        return False, message_of(error)
    query = type(engine.module.model.layers[0].self_attn.q_proj).__name__
    return True, f'preset_model "qwen2_misspelt" is accepted, and q_proj is a {query} all the same'


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed",), ranks=2))
