"""Where a part of a tensor lies in the whole: runs of consecutive places along each dim."""

import torch

Runs = list[
    tuple[int, int]
]  # (start, length) of consecutive places along a dim of a full tensor, in a rank's own order


def runs_of(places: list[int]) -> Runs:
    """The runs of places in this order."""
    runs: Runs = []
    for place in places:
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs or [(0, 0)]


def blocks(local: torch.Tensor, runs: list[Runs]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(start in the full tensor, block) of the blocks of a part that has these runs along its dims."""
    found: list[tuple[tuple[int, ...], torch.Tensor]] = [((), local)]
    for dim, along in enumerate(runs):
        lengths = [length for _, length in along]
        found = [
            ((*start, first), piece)
            for start, block in found
            for (first, _), piece in zip(along, block.split(lengths, dim), strict=True)
        ]
    return found
