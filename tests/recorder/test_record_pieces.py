"""Pieces of samples: where they lie in the whole, as their positions say; and what a recording refuses."""

from types import SimpleNamespace

import pytest
import torch

from lockstep.recorded.pieces import explains, judge
from lockstep.recorder import pieces
from lockstep.recorder.micro_batch import JoinedMicroBatch, Piece

WHOLE = torch.arange(16)
PACKED = torch.cat([torch.arange(5), torch.arange(11)])  # two documents
OTHER = torch.cat([torch.arange(9), torch.arange(7)])
CHUNKS = WHOLE.chunk(4)
CONTIGUOUS = [WHOLE[:8], WHOLE[8:]]
BALANCED = [torch.cat([CHUNKS[0], CHUNKS[3]]), torch.cat([CHUNKS[1], CHUNKS[2]])]


@pytest.mark.parametrize(
    "places",
    [CONTIGUOUS, BALANCED, [WHOLE[::2], WHOLE[1::2]], [WHOLE[:5], WHOLE[5:]], [WHOLE[8:], WHOLE[:8]]],
)
def test_pieces_are_found_by_their_positions(places):
    found = pieces.find([one.expand(3, -1) for one in places])
    assert [one.tolist() for one in found.places] == [one.tolist() for one in places]
    whole = torch.rand(3, 16, 4)
    parts = [whole[:, own] for own in places]
    assert torch.equal(found.joined(parts), whole)
    assert all(torch.equal(found.cut(whole, place), part) for place, part in enumerate(parts))
    flat = [part.flatten(0, 1) for part in parts]  # as a router has it
    assert torch.equal(found.joined(flat, torch.Size([48, 4])), whole.flatten(0, 1))


@pytest.mark.parametrize("places", [CONTIGUOUS, BALANCED])
def test_pieces_of_packed_documents_are_found(places):
    found = pieces.find([torch.stack([PACKED[own], OTHER[own]]) for own in places])
    assert [one.tolist() for one in found.places] == [one.tolist() for one in places]


@pytest.mark.parametrize(
    "positions",
    [
        [WHOLE, WHOLE],  # of data-parallel ranks
        [PACKED, OTHER],
        [WHOLE[:8], WHOLE[9:]],
        [WHOLE[:8], WHOLE[:8] + 7],
    ],
)
def test_what_is_whole_or_no_piece_is_left(positions):
    assert pieces.find([one[None] for one in positions]) is None


def test_padding_is_no_piece():
    left = torch.tensor([[1, 1, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    assert pieces.find([left, left]) is None


def test_one_position_for_each_sample_is_none_of_a_piece():
    """Such as where the answer to a question begins; positions of all samples are a row, or one for each."""
    ids, starts = torch.zeros(2, 8, dtype=torch.long), torch.tensor([4, 5])
    assert pieces.positions_of({"input_ids": ids, "start_positions": starts, "end_positions": starts}) is None
    for positions in (torch.arange(8), torch.arange(8).expand(2, -1)):
        assert len(pieces.positions_of({"position_ids": positions, "input_ids": ids})[0]) == 8
    assert len(pieces.positions_of({"ids": ids.flatten(), "position_ids": torch.arange(16)})[0]) == 16


@pytest.mark.parametrize(
    "at, said", [(15, ""), (7, "the last position of the piece of rank 0 is not trained")]
)
def test_which_token_follows_a_window_is_not_known(at, said):
    """Windows are often cut with one token more, which the last position is trained to give. The seam of two pieces is inside."""
    window = torch.arange(17).expand(2, -1)
    targets = window[:, 1:].clone()
    targets[:, at] = 99
    called = [JoinedMicroBatch(0, [rank], None, {}) for rank in range(2)]
    piece = Piece(pieces.find([one.expand(2, -1) for one in CONTIGUOUS]), 0, called, {}, 16)
    verdict, found = (
        SimpleNamespace(wrong=[]),
        SimpleNamespace(mean=SimpleNamespace(targets=targets, labels=None)),
    )
    judge(verdict, called[0], piece, window[:, :-1], found)
    assert len(verdict.wrong) == bool(said) and said in "".join(verdict.wrong)


def test_what_explains_an_error():
    """Negative controls: a tensor without an error, others of another shape, and one that leaves a tenth."""
    reference, wrong, near = ([torch.full((4, 2), value)] for value in (1.0, 3.0, 2.8))
    assert explains(wrong, wrong, reference)
    assert not explains(reference, reference, reference)
    assert not explains(wrong, [torch.ones(2, 2)], [torch.ones(2, 2)])
    assert not explains(wrong, near, reference)
    assert not explains(wrong, near, [torch.ones(2, 2)])
