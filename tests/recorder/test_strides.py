"""Tensors are given back to a model in the layout that they had in memory."""

import itertools

import pytest
import torch

from lockstep.recorder.step_tensors import in_order, order_of

LAYOUTS = {
    "usual": torch.Tensor.contiguous,
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_what_they_were(layout):
    """Those of dims of size 1, too: by these alone, convolutions of one channel choose their kernels."""
    for shape in itertools.product((1, 2, 3), repeat=4):
        tensor = LAYOUTS[layout](torch.randn(shape))
        order = order_of(tensor)
        usual = tensor.clone(memory_format=torch.contiguous_format)
        again = in_order(usual, order) if order else usual
        assert again.stride() == tensor.stride() and torch.equal(again, tensor)
