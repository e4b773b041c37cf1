"""Corpus -> tokens -> packed windows -> the batch of one step and one DP rank.

Everything is a function of (corpus, tokenizer, seq_length, seed, step, dp_rank). Ranks that differ only along other axes than dp get the
same batch, DP ranks get disjoint ones. Neither the strategy nor the number of steps matters. Documents are joined with a separator and cut
into windows of seq_length + 1 tokens, without padding. torch is not imported before a batch is made.
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
        """The windows with these numbers: (len(indices), width) int32."""
        return np.stack([self.tokens[index * self.width :][: self.width] for index in indices.tolist()])

    def __reduce__(self) -> tuple[Callable[..., "Corpus"], tuple]:
        other_fields = (self.width, self.tokenizer_name, self.sha256)
        if isinstance(self.tokens, np.memmap):
            return _reopened, (Path(str(self.tokens.filename)), *other_fields)
        return Corpus, (self.tokens, *other_fields)


def _reopened(path: Path, width: int, tokenizer_name: str, sha256: str) -> Corpus:
    tokens, found_sha256 = opened(path) or (np.empty(0), None)
    if found_sha256 != sha256:
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

    Raises UserError if the text is missing, empty, or too short for one step and the `held_out` windows.
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
    """The windows of each step: a new permutation for each epoch, cut into global batches, and each of these among the DP ranks."""

    corpus: Corpus
    seed: int
    dp_size: int
    batch_size: int
    num_micro_batches: int
    held_out: int = 0  # windows at the end of the corpus that are not trained on
    made: Samples = Samples()
    # The step asked for last -> its windows. `dataclasses.replace` does not copy them, as the copy may have other batches.
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
        shape = (self.dp_size, self.num_micro_batches, self.batch_size, -1)
        return self._global_batch(step).reshape(shape)[dp_rank]

    def _global_batch(self, step: int) -> np.ndarray:
        """The windows (windows_per_step, seq_length + 1) of a step. Those of the step asked for last are kept."""
        if step in self._last:
            return self._last[step]
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.windows_per_step
        indices = places(first, self.windows_per_step, self.num_windows, seed=self.seed, epoch=epoch)
        windows = self.corpus.windows(indices)
        windows.flags.writeable = False
        self._last.clear()
        self._last[step] = windows
        return windows

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

        tensors = (torch.from_numpy(array).to(device) for array in self.made.of(self.windows(step, dp_rank)))
        return list(zip(*tensors, strict=True))

    def held_out_batches(self) -> Iterator[tuple["torch.Tensor", ...]]:
        """(input_ids, labels, *further inputs), each (at most batch_size, seq_length) int64 on the CPU.

        One tuple for each batch of the windows that are not trained on.
        """
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
    """48 bits of the SHA-256 of each sequence that a rank really feeds its model, in order. A float64 holds 48 bits exactly."""
    return [
        int.from_bytes(hashlib.sha256(b"".join(row.tobytes() for row in sample)).digest()[:6], "big")
        for micro_batch in micro_batches
        for sample in zip(*(tensor.cpu().numpy() for tensor in micro_batch), strict=True)
    ]


def global_batch_hash(hashes: list[int]) -> str:
    """Hash of a step's global batch from the hashes of its windows, in order. It does not depend on dp_size."""
    return hashlib.sha256(" ".join(map(str, hashes)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Inputs:
    """What a checked configuration resolves to: the architecture, where it came from, the steps to train, and the initial weights."""

    architecture: dict
    architecture_source: str
    batches: Batches
    num_steps: int
    start: Start


# A Feistel network of few bits mixes slowly: with 4 rounds, a small n is seen to be badly mixed (tests/inputs/test_order.py)
ROUNDS = 12


def permuted(indices: np.ndarray, n: int, *, seed: int, epoch: int) -> np.ndarray:
    """The images (len(indices),) int64 of the indices under the permutation of [0, n) of this epoch.

    It is a Feistel network with cycle walking: an image that is not below n is permuted again.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))  # bits of either half of an index
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(hashlib.shake_256(f"{seed} {epoch}".encode()).digest(8 * ROUNDS), dtype="<u8")
    images = np.asarray(indices, dtype=np.uint64)
    is_outside = np.ones(images.shape, dtype=bool)
    while is_outside.any():
        left, right = images[is_outside] >> half, images[is_outside] & mask
        for key in keys:
            left, right = right, left ^ (scrambled(right ^ key) & mask)
        images[is_outside] = left << half | right
        is_outside = images >= n
    return images.astype(np.int64)


BLOCK = 4096  # indices that are permuted at once


def places(first: int, count: int, n: int, *, seed: int, epoch: int) -> np.ndarray:
    """`permuted` of `count` indices from `first` on. Blocks are cached: a step needs a few images, and one takes as long as a block."""
    blocks = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
    images = np.concatenate([_block(block, n, seed, epoch) for block in blocks])
    return images[first - blocks[0] * BLOCK :][:count]


@functools.lru_cache(maxsize=4)
def _block(block: int, n: int, seed: int, epoch: int) -> np.ndarray:
    return permuted(np.arange(block * BLOCK, min((block + 1) * BLOCK, n)), n, seed=seed, epoch=epoch)
