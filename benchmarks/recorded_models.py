"""Tiny random models of all classes that transformers' auto classes name, recorded and judged: does each PASS?

    PYTHONPATH=. python benchmarks/recorded_models.py --output results/recorded_models.json       about an hour on two cores
    PYTHONPATH=. python benchmarks/recorded_models.py --precision autocast bert gpt2

One process trains two steps of two micro batches with AdamW and clipping, on random samples. A configuration is the class's own with small
sizes and without dropout; classes that cannot be made or called so are listed as "not made". Exit status: 0 all others pass; 1 something else.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from outputs import output
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lockstep
from lockstep import judge
from lockstep.ground.errors import first_line
from lockstep.ground.files import write_result

VOCABULARY, MASKED, LABELS, LENGTH, BATCH = 256, 3, 5, 16, 2
LARGEST = 30e6  # parameters
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("head_dim", "d_kv", "state_size", "patch_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **{"vocab_size": VOCABULARY, "num_key_value_heads": 2, "num_experts_per_tok": 2, "image_size": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
Batch = dict[str, torch.Tensor]


def causal(ids: torch.Tensor, draw: torch.Generator) -> Batch:
    return {"input_ids": ids, "labels": ids}


def shifted(ids: torch.Tensor, draw: torch.Generator) -> Batch:
    """For a class that leaves it to its caller, such as BartForCausalLM."""
    return {"input_ids": ids, "labels": torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)}


def masked(ids: torch.Tensor, draw: torch.Generator) -> Batch:
    chosen = torch.rand(ids.shape, generator=draw) < 0.3
    chosen[0, 0] = True
    return {
        "input_ids": ids.masked_fill(chosen, MASKED),
        "labels": ids.masked_fill(~chosen, -100),
        "attention_mask": torch.ones_like(ids),
    }


def of_text(*shape: int) -> Callable[[torch.Tensor, torch.Generator], Batch]:
    def batch(ids: torch.Tensor, draw: torch.Generator) -> Batch:
        labels = torch.randint(LABELS, (BATCH, *shape), generator=draw)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    return batch


def answer(ids: torch.Tensor, draw: torch.Generator) -> Batch:
    start, end = torch.randint(LENGTH, (2, BATCH), generator=draw)
    return {"input_ids": ids, "start_positions": start, "end_positions": end}


def translated(ids: torch.Tensor, draw: torch.Generator) -> Batch:
    return {
        "input_ids": ids,
        "labels": ids.flip(1)[:, :12].contiguous(),
        "attention_mask": torch.ones_like(ids),
    }


def image(ids: torch.Tensor, draw: torch.Generator) -> Batch:
    pixels = torch.randn(BATCH, 3, SIZES["image_size"], SIZES["image_size"], generator=draw)
    return {"pixel_values": pixels, "labels": torch.randint(LABELS, (BATCH,), generator=draw)}


TASKS = {
    "CAUSAL_LM": causal,
    "MASKED_LM": masked,
    "SEQUENCE_CLASSIFICATION": of_text(),
    "TOKEN_CLASSIFICATION": of_text(LENGTH),
    "QUESTION_ANSWERING": answer,
    "SEQ_TO_SEQ_CAUSAL_LM": translated,
    "IMAGE_CLASSIFICATION": image,
}


def made(model_type: str, name: str, task: str) -> torch.nn.Module:
    """A tiny model. Raises whatever its classes do."""
    kind = CONFIG_MAPPING[model_type]
    own = kind()
    known = {key: size for key, size in SIZES.items() if hasattr(own, key) and key not in own.attribute_map}
    if task == "CAUSAL_LM" and hasattr(own, "is_decoder"):
        known["is_decoder"] = True
    drop = {key: 0.0 for key in vars(own) if "drop" in key and isinstance(getattr(own, key), float)}
    torch.manual_seed(0)
    config = kind(**known, **drop)
    config.decoder_start_token_id = SIZES["bos_token_id"]
    if task.endswith("CLASSIFICATION"):
        config.num_labels = LABELS
    with torch.device("meta"):
        parameters = getattr(transformers, name)(config).parameters()
    if sum(one.numel() for one in parameters) > LARGEST:
        raise ValueError("too large")
    model = getattr(transformers, name)(config).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def loss_of(model: torch.nn.Module, batch: Batch, autocast: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        returned = model(**batch)
    loss = getattr(returned, "loss", None)
    return (returned[0] if loss is None else loss).mean()


def verdict(
    model_type: str,
    name: str,
    task: str,
    batch_of: Callable[[torch.Tensor, torch.Generator], Batch],
    autocast: bool,
    folder: Path,
) -> str:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(MASKED + 1, VOCABULARY, (BATCH, LENGTH), generator=draw) for _ in range(4)]
    for one in ids:
        one[:, -1] = SIZES["eos_token_id"]  # some look for it
    batches = [batch_of(one, draw) for one in ids]
    try:
        model = made(model_type, name, task)
        loss_of(model, batches[0], autocast).backward()
        model.zero_grad()
    except Exception as error:  # noqa: BLE001 - of sizes that do not fit each other, or packages that are missing
        return f"not made: {type(error).__name__}: {first_line(error)}"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with lockstep.record(model, folder):
        for first in (0, 2):
            for batch in batches[first : first + 2]:
                (loss_of(model, batch, autocast) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        judge.main([str(folder), "--memory", "4"])
    return said.getvalue().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types, such as bert (default: all)")
    parser.add_argument("--precision", choices=["fp32", "autocast"], default="fp32")
    parser.add_argument("--output", type=output('{\n "verdicts": '))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    found = {}
    for task in TASKS:
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            if (options.types and model_type not in options.types) or not isinstance(name, str):
                continue
            for batch_of in (TASKS[task], shifted):
                with tempfile.TemporaryDirectory() as folder:
                    autocast = options.precision == "autocast"
                    found[name] = verdict(model_type, name, task, batch_of, autocast, Path(folder))
                if "labels are not shifted" not in found[name]:
                    break
            print(f"{name}: {found[name]}", flush=True)
    counts = Counter(one.partition(":")[0] for one in found.values())
    print(dict(counts))
    if options.output:
        content = {"verdicts": counts, "precision": options.precision, "models": found}
        write_result(options.output, json.dumps(content, indent=1) + "\n")
    return 0 if counts.keys() <= {"PASS", "not made"} else 1


if __name__ == "__main__":
    sys.exit(main())
