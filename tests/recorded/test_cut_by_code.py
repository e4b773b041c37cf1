"""Where a rank's part of a parameter lies in the whole: by its values, or as what is beside it."""

import torch

from lockstep.recorded.cut_by_code import Cut, Run, runs_in, runs_like

WHOLE = torch.arange(24.0).view(12, 2)
THREE = [Run(0, 0, 2), Run(2, 4, 2), Run(4, 8, 2)]  # of three matrices on each other, half of each


def test_rows_are_found_by_their_values():
    part = WHOLE[[0, 1, 4, 5, 8, 9]]
    assert runs_in(part, WHOLE, 0) == runs_in(part.T, WHOLE.T, 1) == THREE
    padded = torch.cat([WHOLE[9:], torch.zeros(2, 2)])
    assert runs_in(padded, WHOLE, 0) == [Run(0, 9, 3)]
    assert runs_in(part.bfloat16(), WHOLE, 0) == THREE  # another dtype than the whole


def test_values_that_say_nothing():
    assert runs_in(torch.zeros(6), torch.zeros(12), 0) == []
    assert runs_in(WHOLE[:4] + 1, WHOLE, 0) == []


def test_a_bias_of_zeros_lies_as_its_weight():
    """Whether the weight has its outputs in rows or, as that of GPT-2's layers, in columns."""
    bias = Cut([6], [12], 0, [])
    for shape, dim in (([6, 5], 0), ([5, 6], 1)):
        full = [2 * size if at == dim else size for at, size in enumerate(shape)]
        assert runs_like({"h.weight": Cut(shape, full, dim, THREE)}, "h.bias", bias, alike=True) == THREE
    other = {"head.weight": Cut([6, 5], [12, 5], 0, [Run(0, 6, 6)])}
    assert runs_like(other, "h.bias", bias, alike=True) == [Run(0, 6, 6)]  # the second half, as of that one
    assert runs_like({"other.weight": Cut([6, 5], [12, 5], 0, THREE)}, "h.bias", bias, alike=True) == []
    several = {"other.weight": Cut([6, 5], [12, 5], 0, THREE), **other}
    assert runs_like(several, "h.bias", bias, alike=True) == []
    assert runs_like(several, "h.weight", Cut([6, 5], [12, 5], 0, []), alike=False) == [Run(0, 6, 6)]
