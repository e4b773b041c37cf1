"""How much bfloat16 autocast rounds the loss of one token, and the mean over a batch: the noise from which the tolerances are derived.

    python benchmarks/rounding_noise.py

Same weights, same batch, autocast against float32; prints the tables of docs/precision.md.
"""

import torch

from lockstep.ground import files
from lockstep.inputs import (
    architectures,
    data,
    texts,
    tokenizer,
)
from lockstep.inputs.model import build_model
from lockstep.plan import command_line
from lockstep.plan.config import BASELINE
from lockstep.training import preflight

MODELS = {
    "tiny-qwen2": ("tiny-qwen2", {}),
    "tiny-qwen2, hidden 256": ("tiny-qwen2", {"hidden_size": 256, "intermediate_size": 512}),
    "tiny-qwen2, 8 layers": ("tiny-qwen2", {"num_hidden_layers": 8}),
    "Qwen2.5-0.5B": ("Qwen2.5-0.5B", {}),
}


def token_losses(model, input_ids, labels) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token loss in float64, shape (B * S,), and the logits."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), labels.flatten(), reduction="none"
    ), logits


def main() -> None:
    print(f"{'model, 2 layers unless said':<28} spread   noise    noise / (2^-9 x spread)")
    for label, (name, changes) in MODELS.items():
        architecture = {**architectures.resolve(name, 2)[0], **changes}
        corpus = data.load_corpus(
            texts.BUILT_IN_CORPUS,
            tokenizer.build_tokenizer(name, architecture),
            seq_length=128,
            windows_per_step=8,
            cache_folder=files.cache_folder(),
        )
        ((input_ids, labels),) = data.Batches(corpus, 0, 1, 8, 1).micro_batches(0, 0, "cpu")
        model, _ = build_model(architecture, seed=0, attn_impl="sdpa", init_weights_path=None)
        with torch.no_grad():
            exact, logits = token_losses(model, input_ids, labels)
            with torch.autocast("cpu", torch.bfloat16):
                rounded, _ = token_losses(model, input_ids, labels)
        noise, spread = (rounded - exact).std().item(), logits.std().item()
        print(f"{label:<28} {spread:.3f}    {noise:.1e}  {noise / (2**-9 * spread):.1f}")
    print(
        "\nmodel         seed  tokens  independent  error of the mean / (noise / sqrt(tokens))  .../ sqrt(independent)"
    )
    for name in ("tiny-qwen2", "tiny-llama", "tiny-mistral"):
        for seed in range(4):
            print(f"{name:<13} {seed}     " + of_the_mean(name, seed))


def of_the_mean(name: str, seed: int) -> str:
    """The error of a batch's mean loss, in the noise of a mean of independent tokens: all of them, and as many as are independent."""
    config = command_line.parse_config(
        BASELINE, ["--model_name", name, "--seed", str(seed), "--device", "cpu"]
    )
    inputs = preflight.load_inputs(config)
    model, _ = build_model(inputs.architecture, seed=seed, attn_impl="sdpa", init_weights_path=None)
    pairs = [
        pair for share in range(config.dp_size) for pair in inputs.batches.micro_batches(0, share, "cpu")
    ]
    input_ids, labels = (torch.cat(halves) for halves in zip(*pairs, strict=True))
    with torch.no_grad():
        exact, _ = token_losses(model, input_ids, labels)
        with torch.autocast("cpu", torch.bfloat16):
            rounded, _ = token_losses(model, input_ids, labels)
    error = rounded - exact
    independent = inputs.batches.independent_tokens(0)
    in_noise = abs(error.mean().item()) / error.square().mean().sqrt().item()
    return f"{error.numel():<7} {independent:<12.0f} {in_noise * error.numel() ** 0.5:<44.1f} {in_noise * independent**0.5:.1f}"


if __name__ == "__main__":
    main()
