"""The order of the windows in an epoch: a pseudo-random permutation, computed index by index.

A Feistel network over the smallest 2^(2k) >= n with cycle walking: an image outside [0, n) is permuted again until it lies inside (Black
and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). It needs no memory, and the order depends on seed, epoch and n only.
"""

import functools
import hashlib

import numpy as np

ROUNDS = 12  # a network of few bits mixes slowly: with 4 rounds, small n show (tests/test_order.py)


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
            left, right = right, left ^ (_scrambled(right ^ key) & low)
        found[outside] = left << half | right
        outside = found >= n
    return found.astype(np.int64)


def _scrambled(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit of x."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


BLOCK = 4096


def places(first: int, count: int, n: int, *, seed: int, epoch: int) -> np.ndarray:
    """`permuted` of first, first + 1, ..., in cached blocks: a step needs a few, and one costs as much as a block."""
    blocks = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
    found = np.concatenate([_block(block, n, seed, epoch) for block in blocks])
    return found[first - blocks[0] * BLOCK :][:count]


@functools.lru_cache(maxsize=4)
def _block(block: int, n: int, seed: int, epoch: int) -> np.ndarray:
    return permuted(np.arange(block * BLOCK, min((block + 1) * BLOCK, n)), n, seed=seed, epoch=epoch)
