"""The base of the torch strategies, in one process whose collectives do nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.ground.errors import TrainingFailure
from lockstep.training.optim import held_tensors
from lockstep.training.torch_strategy import laid_out_like


@pytest.fixture
def mesh():
    """A mesh of two tp ranks, of which this process is the second."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_a_whole_gradient_of_a_cut_parameter_is_cut(mesh):
    """transformers' own tensor parallelism leaves the gradient of an untied embedding whole; the norm would count it twice."""
    whole = torch.arange(8.0).reshape(4, 2)
    parameter = DTensor.from_local(whole[2:], mesh, [Shard(0)])
    gradient = DTensor.from_local(whole, mesh, [Replicate()])
    cut = laid_out_like(parameter, gradient)
    assert cut.placements == (Shard(0),) and torch.equal(cut.to_local(), whole[2:])
    assert laid_out_like(parameter, parameter) is parameter and laid_out_like(whole, None) is None


def test_a_parameter_without_a_gradient_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(TrainingFailure, match=r"^1\.weight has no gradient: .*; freeze it"):
        list(held_tensors(model, optimizer, "gradient"))
