"""DeepSpeed's sequence parallelism (Ulysses): stage 3 averages gradients over the ranks of a sequence, the other stages sum them.

python findings/deepspeed_ulysses_stage3_scale.py
"""

from finding import deepspeed_engine, init_deepspeed, settle, tiny_model


def gradient_norm(stage: int) -> float:
    """Of one step in which two ranks share a sequence, and each gives the engine the mean loss of its own half."""
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    init_deepspeed()
    model = tiny_model()
    model.set_attn_implementation("sdpa")
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    parallel_state_sp._release_sequence_parallel_groups()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=2
    )
    config = {"zero_optimization": {"stage": stage}, "communication_data_type": "fp32"}
    engine = deepspeed_engine(config, model=model, mpu=mpu)
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    own = torch.arange(16).chunk(2)[dist.get_rank()]
    logits = engine(input_ids=ids[:, own], position_ids=own[None]).logits
    engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, own].flatten()))
    engine.step()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
    return float(engine.get_global_grad_norm())


def check() -> tuple[bool, str]:
    norms = {stage: gradient_norm(stage) for stage in (1, 2, 3)}
    shown = ", ".join(f"{norm:.4f} at stage {stage}" for stage, norm in norms.items())
    return norms[2] > 1.5 * norms[3], f"gradient norm of the same step {shown}"


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("deepspeed", "transformers"), ranks=2))
