"""What the scripts here share: run a check on some ranks, say whether the finding still holds.

A check returns (whether it holds, what was seen). Exit status: 0 it holds; 1 it no longer holds; 3 the check itself failed, which
says nothing about the finding.
"""

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

Check = Callable[[], tuple[bool, str]]


def settle(check: Check, *, libraries: tuple[str, ...], ranks: int = 1) -> int:
    """Run `check` in one process, or in `ranks` gloo ranks on this machine, and print what rank 0 found."""
    import torch.multiprocessing

    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (check, ranks, folder), nprocs=ranks)
        outcome = json.loads((Path(folder) / "outcome.json").read_text())
    if "error" in outcome:
        print(f"{outcome['error']}The check failed, which says nothing about the finding.", file=sys.stderr)
        return 3
    installed = ", ".join(f"{name} {version(name)}" for name in libraries)
    print(f"{'Holds' if outcome['holds'] else 'No longer holds'} with {installed}: {outcome['seen']}")
    return 0 if outcome["holds"] else 1


def _rank(rank: int, check: Check, ranks: int, folder: str) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        holds, seen = check()
        outcome = {"holds": bool(holds), "seen": seen}
    except Exception:
        outcome = {"error": traceback.format_exc()}
    if rank == 0:
        (Path(folder) / "outcome.json").write_text(json.dumps(outcome))
    # a rank whose peers have failed would wait for them, and the outcome is written
    sys.stdout.flush()
    os._exit(0)


def message_of(error: Exception) -> str:
    """The first line of an exception that has one."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def tiny_model():
    """A Qwen2 of two small layers, as transformers builds it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=256, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    )


def sharded_by_transformers(model, **sizes: int):
    """The model as transformers loads it with a `DistributedConfig` of these sizes. Collective."""
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    sharded = type(model).from_pretrained(folder[0], distributed_config=DistributedConfig(**sizes))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return sharded


def init_deepspeed() -> None:
    """Make DeepSpeed's backend, with gloo's collectives: its own would be built first, with a C++ compiler."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")


def deepspeed_engine(config: dict, parameters=None, model=None, mpu=None):
    """A DeepSpeed engine around a model, the tiny one by default, with torch's AdamW, ZeRO-1 and micro batches of 2."""
    import deepspeed
    import torch

    init_deepspeed()
    model = model or tiny_model()
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        **config,
    }
    groups = parameters(model) if parameters else list(model.parameters())
    return deepspeed.initialize(
        model=model, model_parameters=groups, optimizer=torch.optim.AdamW, config=whole, mpu=mpu
    )[0]


def train_a_step(engine) -> None:
    import torch

    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
