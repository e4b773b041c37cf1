"""Training loops of users, each a function that ranks run (ranks.py): right, and with a bug that `argument["bug"]` names."""

import torch
import torch.distributed as dist
from ranks import ROOT

import lockstep
from lockstep.ground.user_file import import_file

EXAMPLE = import_file(ROOT / "examples" / "record" / "trainer.py")
Samples, model = EXAMPLE.Samples, EXAMPLE.model

STEPS, MICRO, SIZE = 3, 2, 2


def batch(number):
    """Micro batch `number` of this rank."""
    first = (number * dist.get_world_size() + dist.get_rank()) * SIZE
    samples = [Samples()[first + place] for place in range(SIZE)]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def plain(folder, argument):
    """PyTorch alone: DDP or FSDP2."""
    net = model().train()
    with lockstep.record(net, folder / "run"):
        wrapped = wrap(net, argument.get("kind", "ddp"))
        made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[argument.get("optimizer", "adamw")]
        optimizer = made(net.parameters(), lr=1e-3, **argument.get("options", {}))
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(MICRO):
                loss = wrapped(**batch(step * MICRO + number), use_cache=False).loss
                (loss / MICRO).backward()
            if argument.get("bug") == "one shard" and dist.get_rank() == 1:
                net.model.layers[1].mlp.down_proj.weight.grad.to_local().mul_(1.5)
            if "clip" in argument:
                clip(net, argument["clip"], argument.get("bug"))
            optimizer.step()


def wrap(net, kind):
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    for layer in net.model.layers:
        fully_shard(layer)
    return fully_shard(net)


def clip(net, bound, bug):
    if bug == "norm of each rank" and dist.get_rank() == 1:
        norm = torch.nn.utils.get_total_norm([one.grad for one in net.parameters()]) * 1.1
        torch.nn.utils.clip_grads_with_norm_(net.parameters(), bound, norm)
    else:
        torch.nn.utils.clip_grad_norm_(net.parameters(), bound)
