"""Do correct runs keep within what is tolerated of a factor, and how small a factor is seen?

    PYTHONPATH=. python benchmarks/factors.py --runs 300 --work_dir runs/factors --output results/factors.json

Each run is one step of a model that is drawn at random: family, sizes, precision. It computes in another way than the judge's yardstick: linear
layers in halves, as tensor parallelism does, attention or norms in another order, samples one by one. All projections of all tensors are kept.
Then factors are planted into tensors of the same runs, each into one tensor. Writes a figure beside the data, too.
"""

import argparse
import contextlib
import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import numpy as np
import torch
import transformers
from outputs import output
from torch.nn import functional as F

import lockstep
from lockstep.ground.files import FIGURE, write_result
from lockstep.recorded import forced_pass as recorded_alone
from lockstep.recorded import step
from lockstep.recorder.recording import Recording
from lockstep.verdict.factors import (
    FEWEST,
    NOTHING,
    RATE,
    Factors,
    Projections,
    farthest,
    is_unknown,
    project,
    ratio,
    tolerated_of,
)

PRECISIONS = ("fp32", "autocast", "bf16")
FAMILIES = ("qwen2", "llama", "gpt2", "gpt_neox", "qwen3_moe")
NEAREST = 20  # tensors that are listed
PLANTED = 12  # tensors of a run that factors are planted into
EXPONENTS = range(8, 24)  # of factors 1 + 2^-k; larger ones are seen by their distance
MANY = 4096  # elements
WHERE = ("all of it", "one sample", "half of a dim")


def halves_of_inputs(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first = F.linear(x[..., :half], self.weight[:, :half], self.bias)
    return first + F.linear(x[..., half:], self.weight[:, half:])


def halves_of_outputs(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    half = len(self.weight) // 2
    biases = (None, None) if self.bias is None else (self.bias[:half], self.bias[half:])
    return torch.cat(
        [F.linear(x, self.weight[:half], biases[0]), F.linear(x, self.weight[half:], biases[1])], -1
    )


def sample_by_sample(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([F.linear(one, self.weight, self.bias) for one in x])


def plain_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # type: ignore[no-untyped-def]
    """`scaled_dot_product_attention`, operation by operation."""
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -torch.inf)
            if attn_mask.dtype is torch.bool
            else scores + attn_mask
        )
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def norm_in_float64(self: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(
        x.double(), self.normalized_shape, self.weight.double(), self.bias.double(), self.eps
    ).to(x.dtype)


WAYS = {
    "halves of inputs": lambda: mock.patch.object(torch.nn.Linear, "forward", halves_of_inputs),
    "halves of outputs": lambda: mock.patch.object(torch.nn.Linear, "forward", halves_of_outputs),
    "sample by sample": lambda: mock.patch.object(torch.nn.Linear, "forward", sample_by_sample),
    "attention by operations": lambda: mock.patch.object(F, "scaled_dot_product_attention", plain_attention),
    "norms in float64": lambda: mock.patch.object(torch.nn.LayerNorm, "forward", norm_in_float64),
}


def model_of(family: str, draw: random.Random) -> torch.nn.Module:
    heads = draw.choice([2, 4, 8])
    hidden = heads * draw.choice([8, 16, 24, 32])
    sizes = {"vocab_size": draw.choice([96, 256, 1000]), "max_position_embeddings": 128}
    if family == "gpt2":
        config = transformers.GPT2Config(
            **sizes, n_embd=hidden, n_head=heads, n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        return transformers.GPT2LMHeadModel(config)
    sizes |= {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": 2}
    sizes["intermediate_size"] = draw.choice([48, 96, 160])
    if family == "gpt_neox":
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))
    sizes["num_key_value_heads"] = draw.choice([1, 2])
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    kind = {"qwen2": "Qwen2", "llama": "Llama"}[family]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def record(seed: int, folder: Path) -> tuple[str, str, str]:
    """One step of a drawn model, recorded. Returns (family, precision, way)."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    family, precision, way = draw.choice(FAMILIES), draw.choice(PRECISIONS), draw.choice(list(WAYS))
    model = model_of(family, draw).train()
    with torch.no_grad():  # fresh norms and biases are ones and zeros
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    if precision == "bf16":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples, length = draw.choice([2, 4]), draw.choice([16, 48, 96])
    vocabulary = model.get_input_embeddings().num_embeddings
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    with WAYS[way](), lockstep.record(model, folder, steps=1):
        for _ in range(2):
            ids = torch.randint(0, vocabulary, (samples, length))
            with autocast:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return family, precision, way


class Kept(Factors):
    """Keeps the tensors that factors are planted into."""

    every: list["Kept"] = []

    def __init__(self, steps: int, nothing: float = NOTHING):
        super().__init__(steps, nothing)
        self.tensors: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, bool]] = []
        Kept.every.append(self)

    def add(self, *tensors: Any, is_weight: bool, **where: Any) -> None:
        super().add(*tensors, is_weight=is_weight, **where)
        self.tensors.append((*tensors, is_weight))


def spoilt(own: torch.Tensor, where: str, factor: float, draw: random.Random) -> torch.Tensor:
    """A tensor with a factor in a part of it. The factor comes before the rounding to its dtype, so it is rounded up or down by chance."""
    found = own.double()
    part = found
    if where == "one sample":
        part = found[draw.randrange(len(found))]
    elif where == "half of a dim":
        dim = draw.randrange(found.ndim)
        part = found.narrow(dim, 0, max(found.shape[dim] // 2, 1))
    part *= factor
    ulps = torch.finfo(own.dtype).eps * 2.0 ** part.abs().log2().floor()
    part += (torch.rand(part.shape, dtype=part.dtype) - 0.5) * ulps.nan_to_num(0.0)
    return found.to(own.dtype)


def plant(kept: Kept, seed: int) -> Iterator[tuple[str, int | None]]:
    """(kind of tensor and where, the largest k of a factor 1 + 2^-k from which on every larger one is seen)."""
    draw = random.Random(seed)
    for name, own, yardstick, reference, is_weight in draw.sample(
        kept.tensors, min(PLANTED, len(kept.tensors))
    ):
        if reference.numel() < 256 or not bool(reference.any()):
            continue
        where = draw.choice([one for one in WHERE if one != "one sample" or not is_weight])
        seen = None
        for k in EXPONENTS:
            own_spoilt = spoilt(own, where, 1 + 2.0**-k, random.Random(seed))
            found = project(name, own_spoilt, yardstick, reference, is_weight)
            if farthest(found, kept.number, kept.nothing).multiple <= 1:
                break
            seen = k
        size = "many" if reference.numel() >= MANY else "few"
        yield f"{name.split('/')[0]}, {where}, {size} elements", seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--work_dir", type=Path, default=None, help="default: a temporary folder")
    parser.add_argument("--output", type=output('{\n "what": "factors', png=""), default=None)
    args = parser.parse_args()
    if args.work_dir is not None:
        args.work_dir.mkdir(parents=True, exist_ok=True)
    recorded_alone.Factors = Kept
    counts: Counter[str] = Counter()
    alarms, nearest, wrong, all_chances = [], [], [], {one: [] for one in PRECISIONS}
    limits: dict[str, list[int | None]] = {}
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        for seed in range(args.runs):
            Kept.every = []
            about = record(seed, Path(folder) / "run")
            verdict = step.judge(Recording(Path(folder) / "run"), 1)
            if verdict.wrong:
                wrong.append([seed, *about, verdict.wrong[0][:300]])
            for kept in Kept.every:
                for each in kept.found:
                    multiples = np.abs(each.excess) / tolerated_of(each, kept.number, kept.nothing)
                    part = int(multiples.argmax())
                    nearest.append(
                        [float(multiples[part]), *about, each.name, each.parts[part], each.excess[part]]
                    )
                nearest = sorted(nearest, key=lambda row: -row[0])[:NEAREST]
                alarms += [[seed, *about, one.name, one.describe()] for one in kept.beyond()]
                counts[about[1]] += kept.number
                all_chances[about[1]] += [chances(one) for one in kept.found]
                for kind, seen in plant(kept, seed):
                    limits.setdefault(f"{about[1]}, {kind}", []).append(seen)
            print(seed, *about, len(alarms), verdict.wrong[:1], flush=True)
    data = {
        "what": f"factors in correct runs, and the smallest that are seen; a rate of {RATE} a run",
        "runs": args.runs,
        "projections": dict(counts),
        "alarms": alarms,
        "nearest": nearest,
        "wrong": wrong,
        "smallest": {
            precision: float(np.concatenate(found).min()) for precision, found in all_chances.items() if found
        },
        "limits": {kind: {"tensors": len(found), **_limits(found)} for kind, found in sorted(limits.items())},
    }
    print(json.dumps(data, indent=1))
    if args.output:
        write_result(args.output, json.dumps(data, indent=1) + "\n")
        _draw(all_chances, args.output.with_suffix(".png"))


def chances(one: Projections) -> np.ndarray:
    """A bound of the chance that rounding errors give so large a factor or a larger one, of each part."""
    freedom = np.maximum(one.freedom, FEWEST)
    times = ratio(np.maximum(np.abs(one.excess) - NOTHING, 0), one.errors)
    bound = (1 + np.square(times) / freedom) ** (-(freedom - 1) / 2)
    return np.where(is_unknown(one), 1.0, bound).max(0)


def _limits(found: list[int | None]) -> dict[str, float | None]:
    """The factors, less 1, that are seen in half and in 99 of 100 tensors; None: not even the largest."""
    order = sorted(found, key=lambda k: -1 if k is None else k)
    of = {"half": order[len(order) // 2], "99 of 100": order[len(order) // 100]}
    return {name: None if k is None else 2.0**-k for name, k in of.items()}


def _draw(all_chances: dict[str, list[np.ndarray]], path: Path) -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for (precision, found), style in zip(all_chances.items(), ("-", "--", ":"), strict=True):
        if found:
            order = np.sort(np.concatenate(found))
            axes.loglog(order, np.arange(1, len(order) + 1) / len(order), style, label=precision)
    axes.loglog([1e-12, 1], [1e-12, 1], color="0.6", linewidth=0.8, label="as many as tolerated")
    axes.set_xlabel("chance that rounding errors give such a factor, by the bound")
    axes.set_ylabel("share of projections of correct runs")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Creator": FIGURE.decode()})


if __name__ == "__main__":
    main()
