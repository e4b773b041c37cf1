"""Compare the samples of a step in two recordings, whichever rank or micro batch has them, and in any order."""

from collections import Counter
from collections.abc import Iterator

import torch

from lockstep.ground.words import and_more
from lockstep.recorder.called import Called, is_label
from lockstep.recorder.hashes import hashes

Row = dict[str, int]  # of a sample, a hash of what it has of each tensor


def compare(own: list[Called], other: list[Called]) -> Iterator[str]:
    """What is not the same of the micro batches of a step, which have samples along the first dim of their tensors, or along the second."""
    numbers, same = list[tuple[int, int]](), 0
    for dim, masked in ((0, False), (0, True), (1, False)):  # of some models, places are first
        here, there = (_rows(each, dim, masked=masked) for each in (own, other))
        numbers.append((len(here), len(there)))
        names = [name for name in here[0] if name in there[0]] if here and there else []
        if not names:
            continue
        # What says which sample it is comes first.
        first, *rest = sorted(names, key=lambda name: (is_label(name), "mask" in name))
        known, known_there = _counted(here, first), _counted(there, first)
        if known == known_there:
            odd = [name for name in rest if _counted(here, first, name) != _counted(there, first, name)]
            if odd:
                yield f"the samples are the same, and {and_more(odd)} of them not"
            return
        if dim == 0:
            same = max(same, (known & known_there).total())
    if all(numbers[0]):
        yield f"it trains on {numbers[0][0]} samples, and that run on {numbers[0][1]}; {same} are in both"


def _rows(called: list[Called], dim: int, *, masked: bool) -> list[Row]:
    """Of each sample that is trained on; `masked`: without what its mask leaves out, since other samples may ask for other padding."""
    found: list[Row] = []
    for one in {id(each.first): each.first for each in called if each.about.used}.values():
        tensors = {name: of for name, of in one.tensors.items() if of.ndim}
        if one.piece is not None:
            # Each piece has its own labels, and in other places ignored ones, which are less.
            labels = {
                name: [each.tensors[name] for each in one.piece.all] for name in filter(is_label, tensors)
            }
            tensors |= {name: torch.stack(each).amax(0) for name, each in labels.items()}
        if dim:
            tensors = {name: of.transpose(0, dim) for name, of in tensors.items() if of.ndim > dim}
        # One of a single dim may be that of all samples, such as positions
        size = next(
            (len(of) for of in tensors.values() if of.ndim > 1), max(map(len, tensors.values()), default=0)
        )
        of_all = {
            name: of.expand(size, *of.shape[1:]) for name, of in tensors.items() if len(of) in (1, size)
        }
        mask = of_all.get("attention_mask") if masked else None
        by_name = {name: hashes(of, mask).tolist() for name, of in of_all.items()}
        found += [dict(zip(by_name, row, strict=True)) for row in zip(*by_name.values(), strict=True)]
    return found


def _counted(rows: list[Row], *names: str) -> Counter[tuple[int | None, ...]]:
    return Counter(tuple(row.get(name) for name in names) for row in rows)
