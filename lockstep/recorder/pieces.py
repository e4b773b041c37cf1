"""Pieces of samples, as context parallelism cuts a sequence: where each lies in the whole.

Tensors are joined from all pieces, or cut into them. Positions say where a piece belongs.
"""

from collections.abc import Iterator

import torch

Sizes = torch.Size | list[int]


class Pieces:
    """The pieces of a sequence.

    `places[i]` (n_i) are the positions in the whole sequence that piece i has, in its order.
    """

    def __init__(self, places: list[torch.Tensor]):
        self.places, self.length = places, sum(map(len, places))

    def seams(self) -> torch.Tensor:
        """Return the positions whose next position is in another piece."""
        owner = torch.empty(self.length)
        for number, positions in enumerate(self.places):
            owner[positions] = number
        return owner.diff().nonzero()[:, 0]

    def joined(self, parts: list[torch.Tensor], shape: Sizes | None = None) -> torch.Tensor | None:
        """Join the tensors of all pieces, in the order of `places`. None if they are not parts of one tensor.

        `shape` is that of the whole tensor, if it is known. Otherwise, the tensors are joined along the first
        dim that is as long as a piece. The dim of samples does not count.
        """
        sizes = parts[0].shape
        if shape is None:
            cut_dims = [dim for dim in range(len(sizes) > 1, len(sizes)) if sizes[dim] == len(self.places[0])]
            if not cut_dims:
                return None
            shape = [*sizes[: cut_dims[0]], self.length, *sizes[cut_dims[0] + 1 :]]
        dims = [self._cut_dim(part.shape, shape, number) for number, part in enumerate(parts)]
        if any(dim is None for dim in dims) or len({part.dtype for part in parts}) > 1:
            return None
        whole = parts[0].new_empty(shape)
        for dim, positions, part in zip(dims, self.places, parts, strict=True):
            assert dim is not None
            whole.unflatten(dim, (-1, self.length)).index_copy_(
                dim + 1, positions, part.unflatten(dim, (-1, len(positions)))
            )
        return whole

    def joined_rows(self, parts: list[torch.Tensor]) -> torch.Tensor | None:
        """Like `joined`, for tensors whose first dim may have the positions of all samples, as a router's do."""
        rows, *rest = parts[0].shape
        return (
            self.joined(parts)
            if rest and len(self.places[0]) in rest
            else self.joined(parts, [rows * self.length // len(self.places[0]), *rest])
        )

    def cut(self, whole: torch.Tensor, number: int, shape: Sizes | None = None) -> torch.Tensor:
        """Return the part of a tensor that piece `number` has.

        `shape` is that of the part, if it is known. Otherwise, the tensor is cut along one dim that is as
        long as the whole sequence: the dim of samples only if there is no other. A tensor without a dim of
        positions is returned whole.
        """
        if shape is None:
            sizes = [len(self.places[number]) if size == self.length else size for size in whole.shape]
            at = next((dim for dim in range(1, whole.ndim) if sizes[dim] != whole.shape[dim]), 0)
            shape = [*whole.shape[:at], *sizes[at : at + 1], *whole.shape[at + 1 :]]
        dim = self._cut_dim(shape, whole.shape, number)
        if dim is None:
            return whole
        by_sample = whole.unflatten(dim, (-1, self.length))
        return by_sample.index_select(dim + 1, self.places[number]).flatten(dim, dim + 1)

    def _cut_dim(self, part: Sizes, whole: Sizes, number: int) -> int | None:
        """Return the dim along which a tensor is cut; None if there is none.

        `part` and `whole` are the shapes of what piece `number` has and of the whole tensor. The dim has the
        positions of one sample, or those of all samples, one after the other.
        """
        if len(part) != len(whole):
            return None
        dims = [dim for dim, sizes in enumerate(zip(part, whole, strict=True)) if sizes[0] != sizes[1]]
        # How many samples the part and the whole have along each of these dims
        samples = [(part[dim] / len(self.places[number]), whole[dim] / self.length) for dim in dims]
        return dims[0] if len(dims) == 1 and samples[0][0] == samples[0][1] == int(samples[0][0]) else None


def positions_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the positions in a micro batch, (rows, n), one row for each sample or for all; None without any.

    Another input must be as long. A tensor with one value for each sample has no positions of tokens: it may
    say where an answer begins in a text.
    """
    names = {name for name in tensors if "position" in name or "input_pos" in name}
    lengths = {
        tensor.shape[1] if tensor.ndim > 1 else len(tensor)
        for name, tensor in tensors.items()
        if name not in names and tensor.ndim
    }
    for name, tensor in tensors.items():
        if name in names and not tensor.is_floating_point() and tensor.ndim and tensor.shape[-1] in lengths:
            return tensor.reshape(-1, tensor.shape[-1]).long()
    return None


def find(positions: list[torch.Tensor]) -> Pieces | None:
    """Return the pieces that have these positions; None if they do not make a whole sequence.

    `positions` has a tensor (rows, n) for each piece, whose order the pieces have, too. Where documents are
    packed, positions begin again and do not say where a piece belongs. So each of `layouts` is tried.
    """
    if len({len(rows) for rows in positions}) > 1:
        return None
    lengths = [rows.shape[1] for rows in positions]
    sequence = torch.cat([rows[0] for rows in positions])
    if all(bool((rows == rows[0]).all()) for rows in positions) and torch.equal(
        sequence.sort().values, torch.arange(len(sequence))
    ):
        return Pieces(list(sequence.split(lengths)))
    for pieces in layouts(lengths):
        whole = pieces.joined(positions)
        assert whole is not None
        steps = whole.diff(dim=1)
        # Padding may repeat a position, and a document begins at 0.
        is_valid = (steps == 1) | (steps == 0) | (whole[:, 1:] == 0)
        if not whole[:, 0].any() and bool(is_valid.all()) and bool((steps == 1).any(0)[pieces.seams()].all()):
            return pieces
    return None


def layouts(lengths: list[int]) -> Iterator[Pieces]:
    """Yield pieces that follow each other, and then pieces that have an early and a late half each.

    With the latter, all ranks have equal work.
    """
    positions = torch.arange(sum(lengths))
    yield Pieces(list(positions.split(lengths)))
    if len(set(lengths)) == 1 and lengths[0] % 2 == 0:
        halves = positions.split(lengths[0] // 2)
        yield Pieces([torch.cat([halves[number], halves[-1 - number]]) for number in range(len(lengths))])
