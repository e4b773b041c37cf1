import pytest
import torch
from ranks import run_groups


@pytest.fixture(scope="module")
def all_shards(new_folder):
    folders = {size: new_folder(f"loss{size}") for size in (2, 4)}
    run_groups([(size, "jobs:sharded_loss", folder, None) for size, folder in folders.items()])
    return {
        size: [torch.load(folder / f"loss{rank}.pt", weights_only=True) for rank in range(size)]
        for size, folder in folders.items()
    }


@pytest.fixture(params=[2, 4])
def shards(request, all_shards):
    return all_shards[request.param]


@pytest.mark.parametrize("vocab", [64, 61])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_unsharded_loss(shards, vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(5, 7, vocab, generator=generator)).to(dtype).double().requires_grad_()
    labels = torch.randint(vocab, (5, 7), generator=generator)
    exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (2.5 * exact).backward()
    mine = [shard[f"{vocab} {dtype}"] for shard in shards]
    assert len({shard["loss"].item() for shard in mine}) == 1, "every rank must hold the same loss"
    assert mine[0]["loss"].item() == pytest.approx(exact.item(), rel=3e-7)
    gradient = torch.cat([shard["gradient"].double() for shard in mine], dim=-1)
    rounding = 1e-6 if dtype == torch.float32 else 2.0**-8
    assert torch.allclose(gradient, logits.grad, rtol=rounding, atol=rounding * 1e-3)
