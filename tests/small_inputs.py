"""Batches of the built-in text, and weights of the smallest models."""

from pathlib import Path

from lockstep.inputs import weights
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.data import Batches, load_corpus
from lockstep.inputs.model import build_model
from lockstep.inputs.tokenizer import HashTokenizer

TINY = BUILT_IN["tiny-qwen2"]
NOWHERE = Path("/proc/nothing can be written here")


def corpus(dataset="builtin", vocab=2048, seq=64, need=4, cache=NOWHERE):
    return load_corpus(
        dataset, HashTokenizer(vocab), seq_length=seq, windows_per_step=need, cache_folder=cache
    )


def batches(dp_size=2, batch_size=4, micro=2, seed=0, **options):
    return Batches(corpus(need=dp_size * batch_size * micro, **options), seed, dp_size, batch_size, micro)


def build(path=None, seed=3, architecture=TINY):
    return build_model(architecture, seed=seed, attn_impl="sdpa", init_weights_path=path)


def write_weights(path, seed=0):
    weights.save(path, build(seed=seed)[0], TINY, f"random weights, seed {seed}")
    return path
