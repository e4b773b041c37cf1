"""Compare the samples of a step in two recordings, whichever rank or micro batch has them, and in any order."""

from collections import Counter
from collections.abc import Iterator

import torch

from lockstep.ground.words import and_more
from lockstep.recorder.hashes import hashes
from lockstep.recorder.micro_batch import JoinedMicroBatch, is_label

Row = dict[str, int]  # the hashes of a sample: of what it has of each tensor, by name


def compare(own: list[JoinedMicroBatch], other: list[JoinedMicroBatch]) -> Iterator[str]:
    """Yield what differs between the samples of a step in two recordings, as sentences.

    Samples lie along the first dim of tensors, or along the second.
    """
    numbers, shared = list[tuple[int, int]](), 0
    # Tensors of some models have positions along the first dim, so the second is tried, too.
    for dim, masked in ((0, False), (0, True), (1, False)):
        here, there = (_rows(batches, dim, masked=masked) for batches in (own, other))
        numbers.append((len(here), len(there)))
        names = [name for name in here[0] if name in there[0]] if here and there else []
        if not names:
            continue
        # First the tensor that tells samples apart: neither labels nor a mask
        first, *rest = sorted(names, key=lambda name: (is_label(name), "mask" in name))
        counts, counts_there = _counted(here, first), _counted(there, first)
        if counts == counts_there:
            differing = [name for name in rest if _counted(here, first, name) != _counted(there, first, name)]
            if differing:
                yield f"the samples are the same, and {and_more(differing)} of them not"
            return
        if dim == 0:
            shared = max(shared, (counts & counts_there).total())
    if all(numbers[0]):
        yield f"it trains on {numbers[0][0]} samples, and that run on {numbers[0][1]}; {shared} are in both"


def _rows(batches: list[JoinedMicroBatch], dim: int, *, masked: bool) -> list[Row]:
    """Return a row for each sample of these micro batches that is trained on. Samples lie along the dim `dim`.

    `masked`: without what a sample's mask leaves out, as beside other samples it may need other padding.
    """
    rows: list[Row] = []
    for micro_batch in {id(m.first): m.first for m in batches if m.record.used}.values():
        tensors = {name: tensor for name, tensor in micro_batch.tensors.items() if tensor.ndim}
        if micro_batch.piece is not None:
            # A piece has ignored labels in the places of other pieces. They are less than any label.
            labels = {
                name: [piece.tensors[name] for piece in micro_batch.piece.members]
                for name in filter(is_label, tensors)
            }
            tensors |= {name: torch.stack(of_pieces).amax(0) for name, of_pieces in labels.items()}
        if dim:
            tensors = {name: x.transpose(0, dim) for name, x in tensors.items() if x.ndim > dim}
        # A tensor of a single dim may be that of all samples, such as positions.
        size = next(
            (len(x) for x in tensors.values() if x.ndim > 1), max(map(len, tensors.values()), default=0)
        )
        expanded = {name: x.expand(size, *x.shape[1:]) for name, x in tensors.items() if len(x) in (1, size)}
        mask = expanded.get("attention_mask") if masked else None
        by_name = {name: hashes(tensor, mask).tolist() for name, tensor in expanded.items()}
        rows += [dict(zip(by_name, row, strict=True)) for row in zip(*by_name.values(), strict=True)]
    return rows


def _counted(rows: list[Row], *names: str) -> Counter[tuple[int | None, ...]]:
    """Count the rows that are equal in the tensors `names`."""
    return Counter(tuple(row.get(name) for name in names) for row in rows)
