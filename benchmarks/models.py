"""Models of transformers, tiny and random, one of each architecture: does each PASS, and how near does it come?

    PYTHONPATH=. python benchmarks/models.py --output results/models.json               all, about twenty minutes on two cores
    PYTHONPATH=. python benchmarks/models.py gemma2 mixtral --output results/models.json    replaces their rows

Each is verified by run_verification.py: DDP and FSDP at dp 2, and transformers' own tensor parallelism at tp 2 where the architecture has a
plan. Exit status: 0 all pass; 1 something else; 2 a usage error.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outputs import output

from lockstep.ground import origin
from lockstep.ground.errors import run_program
from lockstep.ground.files import read_json, write_result
from lockstep.training.observe import versions

ROOT = Path(__file__).parents[1]
TITLE = "# Models of transformers"
BEGINS = '{\n "of": "models of transformers"'
OWN = "ddp,fsdp@tp1xdp2"
OWN_TP = "examples/transformers_tp.py:TransformersTP@tp2"
COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
HEADS = {"head_dim": 16}
WINDOW = {"sliding_window": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BALANCE = {"output_router_logits": True}
LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
# what each config class needs beside COMMON; "eager" where there is no other attention
MODELS: dict[str, dict] = {
    "apertus": {},
    "arcee": {},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True},
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, "eager": True},
    "cohere": {},
    "cohere2": HEADS | WINDOW,
    "deepseek_v2": LATENT | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": LATENT | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "ernie4_5": {},
    "exaone4": WINDOW,
    "falcon": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gemma": HEADS,
    "gemma2": HEADS | WINDOW | {"eager": True},
    "gemma3_text": HEADS | WINDOW,
    "glm": HEADS,
    "glm4": HEADS,
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "gpt_oss": LOCAL | HEADS | WINDOW | BALANCE | {"eager": True},
    "granite": {},
    "granitemoe": LOCAL | BALANCE,
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "lfm2": {},
    "llama": {},
    "llama4_text": LOCAL | HEADS | {"num_experts_per_tok": 1, "intermediate_size_mlp": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16, "expand": 2, "eager": True},
    "mistral": HEADS | WINDOW,
    "mixtral": LOCAL | BALANCE,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS | BALANCE,
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0, "attention_dropout": 0.0},
    "phi": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": EXPERTS | BALANCE | {"shared_expert_intermediate_size": 64},
    "qwen3": HEADS,
    "qwen3_moe": EXPERTS | BALANCE | HEADS,
    "qwen3_next": EXPERTS
    | HEADS
    | {
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "full_attention_interval": 2,
    },
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
}  # fmt: skip


def has_plan(name: str) -> bool:
    from transformers import AutoConfig

    return bool(getattr(AutoConfig.for_model(name), "base_model_tp_plan", None))


def verify(name: str) -> dict:
    """What is said of the model, by strategy: verdict, the first failure, and how near the nearest tensor comes to its tolerance."""
    options = dict(MODELS[name])
    eager = options.pop("eager", False)
    strategies = [OWN, *([OWN_TP] if has_plan(name) else [])]
    with tempfile.TemporaryDirectory(prefix="lockstep-models-") as place:
        folder, model = Path(place) / "verification", Path(place) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({**COMMON, **options, "model_type": name}))
        start = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, str(ROOT / "run_verification.py"), "--output_dir", str(folder)),
                *("--model_name", str(model), "--seq_length", "64", "--strategies", ",".join(strategies)),
                *(("--attn_impl", "eager") if eager else ()),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        row: dict = {"status": done.returncode, "seconds": round(time.monotonic() - start), "eager": eager}
        report = folder / "report.json"
        if not report.exists():
            lines = done.stderr.strip().splitlines() or ["no message"]
            return row | {"said": lines[-1].replace(place, "DIR")}
        return row | {
            "runs": {
                key: {
                    "verdict": run["verdict"],
                    "first": run["first_failure"],
                    "nearest": run["nearest"],
                }
                for key, run in read_json(report)["runs"].items()
            }
        }


def table(rows: dict[str, dict]) -> str:
    passed = sum(row["status"] == 0 for row in rows.values())
    lines = [
        TITLE,
        "",
        "`PYTHONPATH=. python benchmarks/models.py --output results/models.json`. Two layers, random weights, fp32, two steps. The number is the",
        "share of what is tolerated that the nearest tensor uses.",
        "",
        f"{passed} of {len(rows)} pass.",
        "",
        "| model | DDP, dp 2 | FSDP, dp 2 | transformers' own tp 2 | |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items()):
        runs = row.get("runs", {})
        # In their order
        cells = [f"{run['verdict']} {run['nearest']:.2f}" for run in runs.values()]
        cells += [""] * (3 - len(cells))
        first = next((run["first"][0][2] for run in runs.values() if run["first"]), "")
        lines.append(f"| {name} | {' | '.join(cells)} | {row.get('said', '') or first} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="model", help="model types (default: all)")
    parser.add_argument("--output", type=output(BEGINS, md=TITLE), required=True, help=".md beside it")

    def body() -> int:
        options = parser.parse_args()
        path, page = options.output, options.output.with_suffix(".md")
        rows = read_json(path)["models"] if options.names and path.exists() else {}
        for name in options.names or MODELS:
            rows[name] = verify(name)
            print(name, json.dumps(rows[name])[:300], flush=True)
            data = {
                "of": "models of transformers",
                "models": rows,
                "origin": origin.about(),
                "versions": versions(),
            }
            write_result(path, json.dumps(data, indent=1))
            write_result(page, table(rows))
        return int(any(row["status"] for row in rows.values()))

    return run_program("models.py", body)


if __name__ == "__main__":
    sys.exit(main())
