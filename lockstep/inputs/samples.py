"""How a window of text becomes a sample: which of its tokens have a label, which are padding, and where its documents begin.

Everything is drawn from the window's tokens and the seed alone, so it does not depend on who trains on the window, or when.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Tensor = TypeVar("Tensor")

IGNORED = -100  # the label of a position that is not trained on, as torch and transformers have it
PADDING = 0  # the token id at positions that are padding
DOCUMENTS = 4  # in a window, on average


@dataclass(frozen=True)
class Samples:
    """How samples are made; see the flags of the same names (lockstep/plan/config.py)."""

    labels: str = "all"
    padding: str = "none"
    documents: str = "joined"
    seed: int = 0

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> "Samples":
        """From a configuration, live or recorded."""
        return cls(options["labels"], options["padding"], options["documents"], options["seed"])

    @property
    def further(self) -> tuple[str, ...]:
        """The names, as in transformers, of the inputs that a model is given beside input_ids and labels; each is (B, S) int64."""
        masks = ("attention_mask",) if self.padding != "none" else ()
        return (*masks, "position_ids") if self.documents == "apart" else masks

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all parts of a micro batch, in order."""
        return ("input_ids", "labels", *self.further)

    def named(self, further: Iterable[Tensor]) -> dict[str, Tensor]:
        """The inputs that a model is given beside input_ids and labels, by name."""
        return dict(zip(self.further, further, strict=True))

    @property
    def counted(self) -> bool:
        """Whether some positions have no label: then the mean loss is a sum, divided by a number that must be counted."""
        return self.labels != "all" or bool(self.further)

    def of(self, windows: np.ndarray) -> tuple[np.ndarray, ...]:
        """input_ids, labels and what `further` names, each (..., S) int64, of windows (..., S + 1)."""
        input_ids, labels = windows[..., :-1].astype(np.int64), windows[..., 1:].astype(np.int64)
        size = labels.shape[-1]
        positions = np.arange(size, dtype=np.uint64)
        key = windows.sum(-1, dtype=np.uint64)[..., None] + np.uint64(self.seed)

        def drawn(draw: int, below: np.ndarray | int) -> np.ndarray:
            return scrambled(scrambled(key) + np.uint64(draw)) % np.uint64(below)

        further = []
        num_tokens: np.ndarray | int = size
        if self.padding != "none":
            num_tokens = size - drawn(0, 3 * size // 4 + 1)  # of each sample
            is_token = positions < num_tokens
            input_ids[~is_token], labels[~is_token] = PADDING, IGNORED
            further.append(is_token.astype(np.int64))
        if self.labels == "completion":
            labels[positions < drawn(1, 3 * num_tokens // 4 + 1)] = IGNORED
        if self.padding == "left":
            sources = ((positions + num_tokens) % size).astype(np.int64)
            input_ids, labels, *further = (
                np.take_along_axis(array, sources, -1) for array in (input_ids, labels, *further)
            )
        if self.documents == "apart":
            is_first = scrambled(scrambled(key) + positions + np.uint64(2)) % np.uint64(size) < DOCUMENTS
            # No document begins within a run of equal tokens: attention to them alone has a gradient of nothing but rounding errors.
            differs = windows[..., 1:] != windows[..., :-1]
            is_first[..., 1:] &= differs[..., :-1] & differs[..., 1:]
            is_first[..., 0] = True
            # The first token of another document is not predicted.
            labels[..., :-1][is_first[..., 1:]] = IGNORED
            first_position = np.maximum.accumulate(np.where(is_first, positions, 0), -1)
            further.append((positions - first_position).astype(np.int64))
        return input_ids, labels, *further


def scrambled(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit of x."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
