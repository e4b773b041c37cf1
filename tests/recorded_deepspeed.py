"""Loops of DeepSpeed's engine, and bugs in what it does with gradients that are right: its norm, its clipping, its update."""

import os

import record_optimizers
import torch
from recorded_loops import MICRO, SIZE, STEPS, batch, model

import lockstep
from lockstep.ground.errors import UserError


def loop(folder, argument):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from lockstep.training.deepspeed_build import use_torch_collectives

    use_torch_collectives()
    deepspeed.init_distributed("gloo")
    net = model().train()
    with lockstep.record(net, folder / "run", modules=""):
        settings = {
            "train_micro_batch_size_per_gpu": SIZE,
            "gradient_accumulation_steps": MICRO,
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": argument["stage"], **argument.get("zero", {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": argument.get("bf16", False)},
        }
        optimizer, schedule = made(net, settings, argument)
        engine, *_ = deepspeed.initialize(
            model=net,
            model_parameters=net.parameters(),
            optimizer=optimizer,
            lr_scheduler=schedule,
            config=settings,
        )
        plant(engine, argument.get("bug"))
        for number in range(STEPS * MICRO):
            engine.backward(engine(**batch(number)).loss)
            engine.step()
            if argument.get("bug") == "schedule" and engine.is_gradient_accumulation_boundary():
                engine.lr_scheduler.step()


def refused(folder, argument):
    """A loop that cannot be recorded."""
    try:
        loop(folder, argument)
    except UserError as error:
        (folder / "said").write_text(str(error))


def made(net, settings, argument):
    """(the optimizer, its schedule) of the loop's own; None for those of the settings."""
    if "config" in argument:
        settings["optimizer"] = argument["config"]
        return None, None
    matrices = [one for one in net.parameters() if one.ndim > 1]
    others = [one for one in net.parameters() if one.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if "scheduler" in argument:
        settings["scheduler"] = argument["scheduler"]
        return torch.optim.AdamW(groups, lr=1e-3), None
    name = argument.get("optimizer", "AdamW")
    kind = getattr(record_optimizers, name, None) or getattr(torch.optim, name)
    optimizer = kind(groups, lr=1e-3, **argument.get("options", {}))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def plant(engine, bug):
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    real, rates = inner.step, [0.0]
    changes = {
        "beta": lambda group: {"betas": (0.9, 0.95)},
        "decay of all": lambda group: {"weight_decay": 0.1},
        "decay twice": lambda group: {"weight_decay": 2 * group["weight_decay"]},
        "stale rate": lambda group: {"lr": rates[-1] or group["lr"]},
    }

    def step(*arguments):
        before = [dict(group) for group in inner.param_groups]
        for group in inner.param_groups:
            group.update(changes[bug](group))
        real(*arguments)
        rates.append(before[0]["lr"])
        for group, own in zip(inner.param_groups, before, strict=True):
            group.update({key: own[key] for key in ("lr", "betas", "weight_decay")})

    if bug in changes:
        inner.step = step
    if bug == "partial norm":  # without the last group or parameter
        name = {0: "clip_fp32_gradients", 3: "_get_norm_groups"}.get(
            engine.zero_optimization_stage(), "get_grad_norm_direct"
        )
        owner = engine if name == "clip_fp32_gradients" else engine.optimizer
        plant_norm(owner, name, getattr(owner, name), len(inner.param_groups))
    if bug == "clipped otherwise":  # by another norm than it says
        clip = engine.optimizer.unscale_and_clip_grads
        engine.optimizer.unscale_and_clip_grads = lambda gradients, norm: clip(gradients, 1.5 * norm)


def plant_norm(owner, name, real, groups):
    from deepspeed.runtime import engine as file

    calls = []

    def partial(*arguments, **options):
        calls.append(1)
        norm = real(*arguments, **options)
        return norm * bool(len(calls) % groups) if name == "get_grad_norm_direct" else norm[:-1]

    def clip():
        own = list(owner.module.parameters())[:-1]
        return file.clip_grad_norm_(own, owner.gradient_clipping())

    setattr(owner, name, clip if name == "clip_fp32_gradients" else partial)
