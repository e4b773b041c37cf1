"""Corpus -> tokens -> packed windows -> the batch of one step and one DP rank.

Everything is a function of (corpus, tokenizer, seq_length, seed, step, dp_rank). Ranks that differ only along other axes than dp get the same batch, DP ranks disjoint ones;
neither the strategy nor the number of steps matters. Documents are joined with a separator and cut into windows of seq_length + 1 tokens,
without padding. torch is not imported before a batch is made.
"""

import functools
import hashlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep.ground.errors import UserError
from lockstep.inputs.initial_weights import Start
from lockstep.inputs.samples import IGNORED, Samples, scrambled
from lockstep.inputs.token_cache import corpus_tokens, opened
from lockstep.inputs.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Corpus:
    """A corpus cut into windows of `width` = seq_length + 1 tokens. The rest at its end is not used.

    Tokens of a file (a np.memmap) are pickled as its path: the process that unpickles them must see the same file there.
    """

    tokens: np.ndarray
    width: int
    tokenizer_name: str
    sha256: str  # of all tokens

    @property
    def num_windows(self) -> int:
        return len(self.tokens) // self.width

    def windows(self, indices: np.ndarray) -> np.ndarray:
        """The windows (len(indices), width) int32."""
        return np.stack([self.tokens[index * self.width :][: self.width] for index in indices.tolist()])

    def __reduce__(self) -> tuple[Callable[..., "Corpus"], tuple]:
        about = (self.width, self.tokenizer_name, self.sha256)
        if isinstance(self.tokens, np.memmap):
            return _reopened, (Path(str(self.tokens.filename)), *about)
        return Corpus, (self.tokens, *about)


def _reopened(path: Path, width: int, tokenizer_name: str, sha256: str) -> Corpus:
    tokens, found = opened(path) or (np.empty(0), None)
    if found != sha256:
        raise UserError(
            f"{path}: on {socket.gethostname()} it is missing or holds other tokens; set --data_cache_dir to a folder "
            "that all machines share"
        )
    return Corpus(tokens, width, tokenizer_name, sha256)


def load_corpus(
    dataset_name: str,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    windows_per_step: int,
    cache_folder: Path,
    held_out: int = 0,
) -> Corpus:
    """Tokenize and pack a whole corpus, or find its tokens in the cache folder (lockstep/inputs/token_cache.py).

    Raises UserError if the text is missing, empty, or too short for one step.
    """
    tokens, sha256 = corpus_tokens(dataset_name, tokenizer, cache_folder)
    corpus = Corpus(tokens, seq_length + 1, tokenizer.name, sha256)
    if corpus.num_windows < windows_per_step + held_out:
        needed = f"{windows_per_step}" + (f", and --held_out {held_out}" if held_out else "")
        raise UserError(
            f"--dataset_name {dataset_name}: {len(tokens)} tokens make {corpus.num_windows} windows of {corpus.width}; one step "
            f"needs {needed}; give more text, or lower --batch_size, --seq_length or --gradient_accumulation_steps"
        )
    return corpus


@dataclass(frozen=True)
class Batches:
    """The windows of each step: a new permutation for each epoch, cut into global batches and these into DP shares."""

    corpus: Corpus
    seed: int
    dp_size: int
    batch_size: int
    num_micro_batches: int
    held_out: int = 0  # windows at the end of the corpus that are not trained on
    made: Samples = Samples()
    # Step -> its windows. Not of a copy by `dataclasses.replace`, which may be cut otherwise.
    _last: dict[int, np.ndarray] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def num_windows(self) -> int:
        """Windows to train on."""
        return self.corpus.num_windows - self.held_out

    @property
    def windows_per_step(self) -> int:
        return self.dp_size * self.batch_size * self.num_micro_batches

    @property
    def tokens_per_step(self) -> int:
        return self.windows_per_step * (self.corpus.width - 1)

    @property
    def steps_per_epoch(self) -> int:
        return self.num_windows // self.windows_per_step

    def windows(self, step: int, dp_rank: int) -> np.ndarray:
        """The windows (num_micro_batches, batch_size, seq_length + 1) of one step (from 0) and one DP rank."""
        shares = (self.dp_size, self.num_micro_batches, self.batch_size, -1)
        return self._global_batch(step).reshape(shares)[dp_rank]

    def _global_batch(self, step: int) -> np.ndarray:
        """The windows (windows_per_step, seq_length + 1) of a step. Those of the last step asked for are kept."""
        if step in self._last:
            return self._last[step]
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.windows_per_step
        order = places(first, self.windows_per_step, self.num_windows, seed=self.seed, epoch=epoch)
        found = self.corpus.windows(order)
        found.flags.writeable = False
        self._last.clear()
        self._last[step] = found
        return found

    def independent_tokens(self, step: int) -> float:
        """`independent_tokens` of the global batch of a step (from 0)."""
        return independent_tokens(*self.made.of(self._global_batch(step))[:2])

    def num_labels(self, step: int) -> int:
        """The number of labels of the global batch of a step (from 0)."""
        return int((self.made.of(self._global_batch(step))[1] != IGNORED).sum())

    def micro_batches(
        self, step: int, dp_rank: int, device: "torch.device | str"
    ) -> list[tuple["torch.Tensor", ...]]:
        """(input_ids, labels, *further inputs), each (batch_size, seq_length) int64 on the device, for each micro batch."""
        import torch

        parts = (torch.from_numpy(each).to(device) for each in self.made.of(self.windows(step, dp_rank)))
        return list(zip(*parts, strict=True))

    def held_out_batches(self) -> Iterator[tuple["torch.Tensor", ...]]:
        """(input_ids, labels, *further inputs), each (at most batch_size, seq_length) int64 on the CPU: the windows that are not trained on."""
        import torch

        for first in range(self.num_windows, self.corpus.num_windows, self.batch_size):
            indices = np.arange(first, min(first + self.batch_size, self.corpus.num_windows))
            yield tuple(map(torch.from_numpy, self.made.of(self.corpus.windows(indices))))


def independent_tokens(input_ids: np.ndarray, labels: np.ndarray) -> float:
    """The number of tokens whose rounding errors are independent: N^2 / (sum of n^2 over the pairs of token and label that occur n times).

    Equal tokens with equal labels are rounded nearly alike, so the error of a mean over N tokens falls with the square root of this number,
    not of N. It is N if no pair occurs twice, and 1 if there is only one pair. Positions without a label do not count.
    """
    input_ids, labels = input_ids[labels != IGNORED], labels[labels != IGNORED]
    # One integer sorts faster than a pair
    pairs = input_ids.astype(np.int64) << 32 | labels.astype(np.int64)
    _, counts = np.unique(pairs, return_counts=True)
    return float(counts.sum() ** 2 / np.square(counts, dtype=np.float64).sum())


def window_hashes(micro_batches: list[tuple["torch.Tensor", ...]]) -> list[int]:
    """48 bits of the SHA-256 of each sequence that a rank really feeds its model, in order. A float64 can carry 48 bits."""
    return [
        int.from_bytes(hashlib.sha256(b"".join(part.tobytes() for part in sample)).digest()[:6], "big")
        for micro_batch in micro_batches
        for sample in zip(*(part.cpu().numpy() for part in micro_batch), strict=True)
    ]


def global_batch_hash(hashes: list[int]) -> str:
    """Hash of a step's global batch from the hashes of its windows, in order. It does not depend on the DP shares."""
    return hashlib.sha256(" ".join(map(str, hashes)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Inputs:
    """What a checked configuration resolves to: the architecture, where it came from, the steps to train, and the initial weights."""

    architecture: dict
    architecture_source: str
    batches: Batches
    num_steps: int
    start: Start


# A network of few bits mixes slowly: with 4 rounds, small n show (tests/inputs/test_order.py)
ROUNDS = 12


def permuted(indices: np.ndarray, n: int, *, seed: int, epoch: int) -> np.ndarray:
    """The images (len(indices),) int64 in [0, n) of the indices, each in [0, n), in this epoch."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))  # bits of either half
    low = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(hashlib.shake_256(f"{seed} {epoch}".encode()).digest(8 * ROUNDS), dtype="<u8")
    found = np.asarray(indices, dtype=np.uint64)
    outside = np.ones(found.shape, dtype=bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & low
        for key in keys:
            left, right = right, left ^ (scrambled(right ^ key) & low)
        found[outside] = left << half | right
        outside = found >= n
    return found.astype(np.int64)


BLOCK = 4096


def places(first: int, count: int, n: int, *, seed: int, epoch: int) -> np.ndarray:
    """`permuted` of first, first + 1, ..., in cached blocks: a step needs a few, and one costs as much as a block."""
    blocks = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
    found = np.concatenate([_block(block, n, seed, epoch) for block in blocks])
    return found[first - blocks[0] * BLOCK :][:count]


@functools.lru_cache(maxsize=4)
def _block(block: int, n: int, seed: int, epoch: int) -> np.ndarray:
    return permuted(np.arange(block * BLOCK, min((block + 1) * BLOCK, n)), n, seed=seed, epoch=epoch)
