"""Is the float64 reference the model that transformers builds, for any config.json of the families?

    python benchmarks/model_families.py --number 240 --output results/model_families.json

Draws random configurations: sizes, windows, layer types, rope variants, head widths, activations, epsilons, tied weights, the token that
pads, and in every other one something odd or wrong. Each must be computed right (lockstep/tensors/model_check.py, and a forward and backward
pass of the drawn model itself) or refused by name. Exit status 1 if one is neither.
"""

import argparse
import collections
import json
import math
import random
from pathlib import Path

import torch
from outputs import output

from lockstep.errors import UserError
from lockstep.files import write_text
from lockstep.inputs import model_config
from lockstep.inputs.model import build_model, causal_lm_loss
from lockstep.tensors import model_check
from lockstep.tensors.exact import make_exact

RIGHT, REFUSED, WRONG = "computed right", "refused", "WRONG"
TITLE = "# Configurations drawn by chance"
SEQUENCE = 64
ODD = {  # what a config.json may say besides, harmless or not
    "torch_dtype": ("bfloat16", "float16"), "use_cache": (True, False), "pretraining_tp": (1, 2),
    "output_attentions": (False, True), "return_dict": (True, False), "output_hidden_states": (True,),
    "problem_type": ("regression", None), "num_labels": (3, 10**9),
    "architectures": (["Qwen2ForCausalLM"], ["LlamaForSequenceClassification"], None),
    "gradient_checkpointing": (True,), "attn_implementation": ("flash_attention_2",),
    "attention_dropout": (0, 0.1, None), "hidden_dropout": (0.0, 0.2), "attention_bias": (True, False),
    "mlp_bias": (True, False), "partial_rotary_factor": (1.0, 0.5, None), "head_dim": (7, None, 16.0),
    "final_logit_softcapping": (30.0, None), "logit_scale": (0.5, 1.0), "is_causal": (False, True),
    "colour": ("blue",), "quantization_config": ({"bits": 4}, None),
    "auto_map": ({"AutoModelForCausalLM": "m.M"}, {}), "per_layer_config": ({"0": {"num_attention_heads": 2}},),
    "base_model_tp_plan": ({"layers.*": "rowwise"},), "num_key_value_heads": (3, None, 0),
    "num_hidden_layers": (1.5, 10**9, True, 0), "rms_norm_eps": ("1e-6", float("nan"), -1.0, 0.0),
    "hidden_act": ("xielu", "prelu", "nosuch", None), "eos_token_id": (-1, 1.5, "1", [2, 3], []),
    "rope_theta": (None, 0.0, 1), "initializer_range": (0.0, 2.0, None), "vocab_size": ("64", 2**40),
    "hidden_size": (66, 2**40), "tie_word_embeddings": (None, 1),
    "rope_parameters": ({"rope_type": "axial"}, {"full_attention": {"rope_type": "default"}}, []),
    "layer_types": (["linear_attention"], ["sliding_attention"], "full"), "sliding_window": (0, -3, 7),
    "n_embd": (64.0, 66), "n_positions": (0, 64), "scale_attn_weights": (False, None), "reorder_and_upcast_attn": (False, True),
    "resid_pdrop": (0.1, None), "n_ctx": (1024,), "summary_first_dropout": (0.1,), "add_cross_attention": (True, False),
    "to_dict": ("x",), "_attn_implementation_internal": ("nosuch",), "tie_last_hidden_states": (True,),
}  # fmt: skip


def draw(family: str, chance: random.Random) -> dict:
    """A random config.json of the family, small enough to run."""
    if family == "gpt2":
        return draw_gpt2(chance)
    kv_heads, ratio, head_dim = (
        chance.choice((1, 2, 4)),
        chance.choice((1, 2, 3)),
        chance.choice((4, 8, 16, 32)),
    )
    heads = kv_heads * ratio
    layers = chance.choice((1, 2, 3, 5))
    content = {
        "model_type": family,
        "vocab_size": chance.choice((64, 101, 512)),
        "hidden_size": heads * head_dim,
        "intermediate_size": chance.choice((24, 64)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": chance.choice(("silu", "silu", *model_config.ACTIVATIONS)),
        "max_position_embeddings": chance.choice((64, 4096)),
        "initializer_range": chance.choice((0.02, 0.2, 1.0)),
        "rms_norm_eps": chance.choice((1e-6, 1e-5, 1e-2)),
        "tie_word_embeddings": chance.random() < 0.5,
        "rope_theta": chance.choice((10000.0, 500000, 1e6, 2.0)),
    }
    if family == "qwen3" or chance.random() < 0.4:
        content["head_dim"] = chance.choice((head_dim, 2 * head_dim))
        head_dim = content["head_dim"]
    if chance.random() < 0.4:
        content["pad_token_id"] = chance.randrange(content["vocab_size"])
    if family == "mistral":
        content["sliding_window"] = chance.choice((None, 1, 2, 5, 16, 63, 64, 200))
    if family in ("qwen2", "qwen3") and chance.random() < 0.6:
        content.update(
            use_sliding_window=chance.random() < 0.8, sliding_window=chance.choice((1, 2, 5, 16, 63, 64, 200))
        )
        if chance.random() < 0.5:
            content["max_window_layers"] = chance.randrange(layers + 1)
        else:
            content["layer_types"] = [
                chance.choice((model_config.FULL, model_config.SLIDING)) for _ in range(layers)
            ]
    if chance.random() < 0.7:
        content[chance.choice(("rope_scaling", "rope_parameters"))] = draw_rope(head_dim, chance)
    return content


def draw_gpt2(chance: random.Random) -> dict:
    heads = chance.choice((1, 2, 3, 4, 12))
    content = {
        "model_type": "gpt2",
        "vocab_size": chance.choice((64, 101, 512)),
        "n_embd": heads * chance.choice((1, 4, 7, 16, 32)),
        "n_layer": chance.choice((1, 2, 3, 5)),
        "n_head": heads,
        "n_positions": chance.choice((64, 1024)),
        "n_inner": chance.choice((None, 24, 64)),
        "activation_function": chance.choice(("gelu_new", *model_config.ACTIVATIONS)),
        "layer_norm_epsilon": chance.choice((1e-6, 1e-5, 1e-2)),
        "initializer_range": chance.choice((0.02, 0.2)),  # with 1.0, float32 alone is off by 3e-3 in the loss
        "attn_pdrop": 0.0,
        "embd_pdrop": 0,
        "resid_pdrop": 0.0,
    }
    for key in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"):
        if chance.random() < 0.5:
            content[key] = chance.random() < 0.5
    if chance.random() < 0.4:
        content["pad_token_id"] = chance.randrange(content["vocab_size"])
    return content


def draw_rope(head_dim: int, chance: random.Random) -> dict:
    def factors() -> list[float]:
        return [round(chance.uniform(1, 8), 2) for _ in range(head_dim // 2)]

    kind = chance.choice(list(model_config.ROPE_KEYS))
    rope = {chance.choice(("rope_type", "type")): kind, "factor": chance.choice((1.0, 4.0, 32.0))}
    if kind == "default" or (kind in ("proportional", "longrope") and chance.random() < 0.5):
        del rope["factor"]
    if kind in ("yarn", "longrope", "llama3") and chance.random() < 0.8:
        rope["original_max_position_embeddings"] = chance.choice((16, 63, 64, 2048))
    if kind == "longrope":
        rope.update(short_factor=factors(), long_factor=factors())
    if kind == "llama3":
        rope.update(low_freq_factor=1.0, high_freq_factor=chance.choice((4.0, 1.5)))
    if kind == "yarn" and chance.random() < 0.5:
        rope.update(beta_fast=chance.choice((16.0, 32)), attention_factor=chance.choice((None, 1.3)))
        rope["truncate"] = chance.random() < 0.5
    if kind == "proportional" and chance.random() < 0.7:
        rope["partial_rotary_factor"] = chance.choice((0.25, 0.5, 1.0))
    if chance.random() < 0.15:
        rope["rope_theta"] = chance.choice((100.0, 1e5))
    return rope


def odd(content: dict, chance: random.Random) -> list[str]:
    """Put one or two odd things into it; their names."""
    names = chance.sample(sorted(ODD), chance.choice((1, 1, 2)))
    content.update({name: chance.choice(ODD[name]) for name in names})
    return names


def judge(content: dict) -> tuple[str, str | float]:
    """(outcome, the largest relative difference or the message) of a configuration."""
    try:
        architecture, _ = model_config.checked(content, "config.json")
        model_check.try_out(architecture, content, "drawn")
    except UserError as error:
        return REFUSED, str(error)
    worst = 0.0
    for attn_impl in ("sdpa", "eager"):
        difference, distance = model_check.compare(architecture, content, SEQUENCE, attn_impl)
        if difference:
            return WRONG, difference
        worst = max(worst, distance)
    trained = train(architecture)
    return (WRONG, trained) if trained else (RIGHT, worst)


def train(architecture: dict) -> str:
    """A forward and backward pass of the drawn model and its reference: what went wrong in a sentence, or ""."""
    ids = torch.arange(SEQUENCE)[None] % architecture["vocab_size"]
    losses = []
    for exactly in (False, True):
        model, _ = build_model(architecture, seed=0, attn_impl="sdpa", init_weights_path=None)
        if exactly:
            make_exact(model, attn_impl="sdpa")
        loss = causal_lm_loss(model, ids, ids).mean()
        loss.backward()
        losses.append(float(loss.detach()))
    near = abs(losses[0] - losses[1]) <= 1e-3 * abs(losses[1])  # one is float32, through saturated softmaxes
    near = near or all(
        map(math.isnan, losses)
    )  # an epsilon of 0 and the zeros of a token that pads are 0 / 0 in both
    return "" if near else f"the loss is {losses[0]}, the reference's {losses[1]}"


def summary(content: dict) -> str:
    short = {
        key: value
        for key, value in content.items()
        if key not in ("model_type", "intermediate_size", "initializer_range")
    }
    text = json.dumps(short).replace('"', "").replace("_attention", "")
    return text if len(text) < 420 else text[:417] + "..."


def write_report(rows: list[dict], path: Path, seed: int) -> None:
    data = {"seed": seed, "sequence": SEQUENCE, "tolerance": model_check.TOLERANCE, "drawn": rows}
    write_text(path, json.dumps(data, indent=1) + "\n")
    count = collections.Counter(row["outcome"] for row in rows)
    right = [row["worst"] for row in rows if row["outcome"] == RIGHT]
    counts = ", ".join(f"{count[outcome]} {outcome}" for outcome in (RIGHT, REFUSED, WRONG))
    command = f"python benchmarks/model_families.py --number {len(rows)} --seed {seed}"
    lines = [
        TITLE,
        "",
        f"`{command}`: {counts}. The largest relative difference of any output,",
    ]
    lines += [f"loss or gradient from transformers' own model in float64 is {max(right, default=0):.1e}."]
    lines += ["", "| family | configuration | outcome |", "|---|---|---|"]
    for row in rows:
        outcome = (
            f"right, {row['worst']:.1e}" if row["outcome"] == RIGHT else f"{row['outcome']}: {row['why']}"
        )
        lines.append(
            f"| {row['config']['model_type']} | {summary(row['config'])} | {outcome.replace('|', '/')} |"
        )
    write_text(path.with_suffix(".md"), "\n".join(lines) + "\n")


def drawn(number: int, seed: int) -> list[dict]:
    """The configurations: the families in turn, every other one with something odd in it."""
    chance = random.Random(seed)
    families = list(model_config.FAMILIES)
    configs = []
    for index in range(number):
        content = draw(families[index % len(families)], chance)
        if index % 2:
            odd(content, chance)
        configs.append(content)
    return configs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--number", type=int, default=240, help="configurations to draw (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--output",
        type=output('{\n "seed": ', md=TITLE),
        default="runs/model_families.json",
        help=".md beside it",
    )
    options = parser.parse_args()
    rows = []
    for content in drawn(options.number, options.seed):
        outcome, detail = judge(content)
        rows.append({"config": content, "outcome": outcome, "worst" if outcome == RIGHT else "why": detail})
        print(f"{len(rows):4} {content['model_type']:6} {outcome:15} {detail}", flush=True)
    write_report(rows, options.output, options.seed)
    return int(any(row["outcome"] == WRONG for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
