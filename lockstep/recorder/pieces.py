"""Pieces of samples, as context parallelism cuts a sequence: where each lies in the whole, and tensors put together of all pieces, or cut.

Positions say where a piece belongs.
"""

from collections.abc import Iterator

import torch

Sizes = torch.Size | list[int]


class Pieces:
    """`places[i]` are the positions (n_i) in the whole sequence that piece i has, in its order."""

    def __init__(self, places: list[torch.Tensor]):
        self.places, self.length = places, sum(map(len, places))

    def seams(self) -> torch.Tensor:
        """The positions whose next one another piece has."""
        owner = torch.empty(self.length)
        for number, own in enumerate(self.places):
            owner[own] = number
        return owner.diff().nonzero()[:, 0]

    def joined(self, parts: list[torch.Tensor], shape: Sizes | None = None) -> torch.Tensor | None:
        """The whole of the pieces' tensors, of a `shape` if it is known; None if they are not parts of one."""
        first = parts[0].shape
        if shape is None:  # along one dim, but that of samples
            along = [dim for dim in range(len(first) > 1, len(first)) if first[dim] == len(self.places[0])]
            if not along:
                return None
            shape = [*first[: along[0]], self.length, *first[along[0] + 1 :]]
        dims = [self._dim(part.shape, shape, number) for number, part in enumerate(parts)]
        if any(dim is None for dim in dims) or len({part.dtype for part in parts}) > 1:
            return None
        whole = parts[0].new_empty(shape)
        for dim, own, part in zip(dims, self.places, parts, strict=True):
            assert dim is not None
            whole.unflatten(dim, (-1, self.length)).index_copy_(
                dim + 1, own, part.unflatten(dim, (-1, len(own)))
            )
        return whole

    def joined_rows(self, parts: list[torch.Tensor]) -> torch.Tensor | None:
        """The same of tensors whose first dim may be that of all samples' positions, as that of what a router chose."""
        rows, *rest = parts[0].shape
        return (
            self.joined(parts)
            if rest and len(self.places[0]) in rest
            else self.joined(parts, [rows * self.length // len(self.places[0]), *rest])
        )

    def cut(self, whole: torch.Tensor, number: int, shape: Sizes | None = None) -> torch.Tensor:
        """What a piece has of a tensor, of a `shape` if it is known; the whole, if it has no dim of positions."""
        if shape is None:
            own = [len(self.places[number]) if size == self.length else size for size in whole.shape]
            at = next((dim for dim in range(1, whole.ndim) if own[dim] != whole.shape[dim]), 0)
            shape = [*whole.shape[:at], *own[at : at + 1], *whole.shape[at + 1 :]]
        dim = self._dim(shape, whole.shape, number)
        if dim is None:
            return whole
        of_all = whole.unflatten(dim, (-1, self.length))
        return of_all.index_select(dim + 1, self.places[number]).flatten(dim, dim + 1)

    def _dim(self, part: Sizes, whole: Sizes, number: int) -> int | None:
        """The dim along which a tensor is cut: positions alone, or those of all samples, one after the other."""
        if len(part) != len(whole):
            return None
        differ = [dim for dim, sizes in enumerate(zip(part, whole, strict=True)) if sizes[0] != sizes[1]]
        times = [(part[dim] / len(self.places[number]), whole[dim] / self.length) for dim in differ]
        return differ[0] if len(differ) == 1 and times[0][0] == times[0][1] == int(times[0][0]) else None


def positions_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The positions that a micro batch is given: (rows, n), each row those of a sample or of all.

    Another input has as many: what has one for each sample is no such thing, such as where an answer begins in a text.
    """
    named = {name for name in tensors if "position" in name or "input_pos" in name}
    lengths = {
        one.shape[1] if one.ndim > 1 else len(one)
        for name, one in tensors.items()
        if name not in named and one.ndim
    }
    for name, tensor in tensors.items():
        if name in named and not tensor.is_floating_point() and tensor.ndim and tensor.shape[-1] in lengths:
            return tensor.reshape(-1, tensor.shape[-1]).long()
    return None


def find(positions: list[torch.Tensor]) -> Pieces | None:
    """The pieces that have these positions, in the order of their ranks; None if they are not those of one whole.

    Where documents are packed, positions begin again, so it is tried whether pieces follow each other, or each has an early and a late half.
    """
    if len({len(one) for one in positions}) > 1:
        return None
    lengths = [one.shape[1] for one in positions]
    of_all = torch.cat([one[0] for one in positions])
    if all(bool((one == one[0]).all()) for one in positions) and torch.equal(
        of_all.sort().values, torch.arange(len(of_all))
    ):
        return Pieces(list(of_all.split(lengths)))
    for pieces in layouts(lengths):
        whole = pieces.joined(positions)
        assert whole is not None
        follows = whole.diff(dim=1)
        # Of padding, it may be the same
        right = (follows == 1) | (follows == 0) | (whole[:, 1:] == 0)
        if not whole[:, 0].any() and bool(right.all()) and bool((follows == 1).any(0)[pieces.seams()].all()):
            return pieces
    return None


def layouts(lengths: list[int]) -> Iterator[Pieces]:
    """Pieces that follow each other; or that have an early and a late part each, so that all ranks have equal work."""
    every = torch.arange(sum(lengths))
    yield Pieces(list(every.split(lengths)))
    if len(set(lengths)) == 1 and lengths[0] % 2 == 0:
        halves = every.split(lengths[0] // 2)
        yield Pieces([torch.cat([halves[place], halves[-1 - place]]) for place in range(len(lengths))])
