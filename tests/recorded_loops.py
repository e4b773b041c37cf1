"""Training loops of users, each a function that ranks run (ranks.py): right, and with a bug that `argument["bug"]` names."""

import contextlib

import torch
import torch.distributed as dist
from ranks import ROOT

import lockstep
from lockstep.ground.user_file import import_file

EXAMPLE = import_file(ROOT / "examples" / "record" / "trainer.py")
Samples, model = EXAMPLE.Samples, EXAMPLE.model

STEPS, MICRO, SIZE = 3, 2, 2


def batch(number, *, shares=None):
    """Micro batch `number` of this rank. `shares`: the samples are divided among so many ranks (default: all)."""
    shares = dist.get_world_size() if shares is None else shares
    first = (number * shares + dist.get_rank() % shares) * SIZE
    samples = [Samples()[first + place] for place in range(SIZE)]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def plain(folder, argument):
    """PyTorch alone: DDP, FSDP2, or tensor parallelism of the MLPs, with LoRA of peft or without."""
    bug, kind = argument.get("bug", ""), argument.get("kind", "ddp")
    net = model().train()
    if bug == "frozen moves":
        net.model.norm.weight.requires_grad_(False)
    if argument.get("lora"):
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(net, LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    if bug.startswith("module"):
        change_module(net, bug)
    with lockstep.record(net, folder / "run"):
        stale = [torch.nn.Parameter(one.detach().clone()) for one in net.parameters()]
        wrapped = wrap(net, kind)
        held = stale if bug == "stale optimizer" else list(net.parameters())
        if bug == "left out":
            held = held[1:]
        held = [one for one in held if one.requires_grad]
        optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[argument.get("optimizer", "adamw")](
            held, lr=1e-3, **argument.get("options", {})
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(MICRO):
                alike = bug.startswith("same samples") or kind == "tensor parallel"
                given = batch(step * MICRO + number, shares=1 if alike else None)
                with wrapped.no_sync() if bug == "no sync" else contextlib.nullcontext():
                    loss = loss_of(wrapped, given, argument)
                    factor = {"accumulation": 1.0, "world": dist.get_world_size() / MICRO}.get(bug, 1 / MICRO)
                    (loss * factor).backward()
            change_gradients(net, bug)
            if "clip" in argument:
                clip(net, argument["clip"], bug)
            optimizer.step()
            change_weights(net, bug)


def wrap(net, kind):
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in net.model.layers:
            fully_shard(layer)
        return fully_shard(net)
    assert kind == "tensor parallel"
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in net.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return net


def loss_of(wrapped, given, argument):
    if not argument.get("own loss"):
        return wrapped(**given, use_cache=False).loss
    logits = wrapped(input_ids=given["input_ids"], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten(), label_smoothing=0.1
    )


def change_module(net, bug):
    """Of rank 1 alone: a module that is off in its forward or its backward pass."""

    def forward(_module, _arguments, output):
        return output * 1.0005

    def backward(_module, _arguments, output):
        return output + 0.0005 * (output - output.detach())

    if dist.get_rank() == 1:
        net.model.layers[1].mlp.up_proj.register_forward_hook(forward if bug == "module" else backward)


def change_gradients(net, bug):
    if bug == "one norm":
        net.model.norm.weight.grad.mul_(1.001)
    if bug == "reduced twice":
        for one in net.parameters():
            one.grad.mul_(2)
    if bug == "zero":
        for one in net.parameters():
            one.grad.zero_()
    if bug == "not finite":
        net.model.norm.weight.grad[0] = torch.inf
    if bug == "twice reduced":
        net.model.layers[1].mlp.down_proj.weight.grad.mul_(2)
    if bug == "one shard" and dist.get_rank() == 1:
        net.model.layers[1].mlp.down_proj.weight.grad.to_local().mul_(1.5)


def clip(net, bound, bug):
    if bug == "norm of each rank" and dist.get_rank() == 1:
        norm = torch.nn.utils.get_total_norm([one.grad for one in net.parameters()]) * 1.1
        torch.nn.utils.clip_grads_with_norm_(net.parameters(), bound, norm)
    elif bug == "norm of one layer":
        norm = torch.nn.utils.get_total_norm([one.grad for one in net.model.layers[0].parameters()])
        torch.nn.utils.clip_grads_with_norm_(net.parameters(), bound, norm)
    else:
        torch.nn.utils.clip_grad_norm_(net.parameters(), bound)


def change_weights(net, bug):
    with torch.no_grad():
        if bug == "frozen moves":
            net.model.norm.weight.mul_(1.01)
        if bug == "decay twice":
            net.model.embed_tokens.weight.mul_(1 - 1e-5)


def deepspeed_engine(folder, argument):
    import os

    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from lockstep.training.deepspeed_build import use_torch_collectives

    use_torch_collectives()
    deepspeed.init_distributed("gloo")
    net = model().train()
    with lockstep.record(net, folder / "run"):
        settings = {
            "train_micro_batch_size_per_gpu": SIZE,
            "gradient_accumulation_steps": MICRO,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": argument["stage"]},
            "zero_allow_untested_optimizer": True,
        }
        parameters = list(net.parameters())
        engine, *_ = deepspeed.initialize(
            model=net, model_parameters=parameters, optimizer=torch.optim.AdamW(parameters), config=settings
        )
        for number in range(STEPS * MICRO):
            loss = engine(**batch(number)).loss
            engine.backward(loss * (2 if argument.get("bug") == "twice" else 1))
            engine.step()


def accelerated(folder, argument):
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(MICRO))
    net = model().train()
    with lockstep.record(net, folder / "run"):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(Samples(), batch_size=SIZE)
        wrapped, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        for given, _ in zip(loader, range(STEPS * MICRO), strict=False):
            with accelerator.accumulate(wrapped):
                loss = wrapped(**given).loss
                accelerator.backward(loss / MICRO if argument.get("bug") == "divided twice" else loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
