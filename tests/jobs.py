"""What the test processes run. Imported in the ranks that `ranks.run_ranks` starts; no test is here."""

import dataclasses
import importlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.ground.errors import TrainingFailure, UserError
from lockstep.plan import command_line
from lockstep.training import loop as training
from lockstep.training import preflight, starting_weights
from lockstep.training.strategy import factory_of
from lockstep.training.vocab_parallel_loss import vocab_parallel_cross_entropy


def configuration(strategy: str, arguments: list[str]):
    config = command_line.parse_config(strategy, arguments)
    return config, preflight.load_inputs(config)


def histories(folder: Path, argument: dict) -> None:
    """Train through THE loop once per entry of `runs`: {"name", "strategy", "fault", "arguments"}."""
    import planted

    for run in argument["runs"]:
        config, inputs = configuration(run["strategy"], run["arguments"])
        config = dataclasses.replace(config, loss_output_dir=folder / run["name"])
        with planted.fault(run["fault"], config, inputs, factory_of(config.spec)) as make:
            training.run(config, inputs, make, torch.device("cpu"))


def reference(folder: Path, argument: dict) -> None:
    """The float64 reference under `arguments`, the flags of train_ddp.py; `replays` are dumps to replay besides the baseline's."""
    from lockstep.verdict import reference as reference_module

    torch.set_num_threads(os.cpu_count() or 1)
    replays = [Path(dump) for dump in argument["replays"]] if "replays" in argument else None
    reference_module.run(*configuration("ddp", argument["arguments"]), replays)


def refused(folder: Path, argument: dict) -> None:
    """A run that the loop itself must stop: the error of every rank is written down."""
    import planted

    config, inputs = configuration(argument["strategy"], argument["arguments"])
    config = dataclasses.replace(config, loss_output_dir=folder)
    try:
        with planted.fault(argument["fault"], config, inputs, factory_of(config.spec)) as make:
            training.run(config, inputs, make, torch.device("cpu"))
        message = "not stopped"
    except (TrainingFailure, UserError) as error:
        message = str(error)
    (folder / f"error{dist.get_rank()}.txt").write_text(message)


def stopped(folder: Path, argument: dict) -> None:
    """Runs in which one rank alone meets a UserError: what every rank raises is written down, by the case's name.

    A case: {"name", "arguments", and one of "file_limit" (bytes), "saves" (of the history, that go well), "unreadable" (a rank)}.
    """
    import resource

    from lockstep.dumps import history

    save, build, rank = history.write_text, starting_weights.build_model, dist.get_rank()
    history.SAVE_INTERVAL = 0  # a case says how many saves go well
    for case in argument["cases"]:
        config, inputs = configuration("ddp", case["arguments"])
        if "file_limit" in case:
            resource.setrlimit(resource.RLIMIT_FSIZE, (case["file_limit"], resource.RLIM_INFINITY))
        left = iter(range(case.get("saves", 10**9)))

        def full(path, text, left=left):
            if next(left, None) is None:
                raise UserError(f"cannot write {path}: No space left on device")
            save(path, text)

        def missing(*arguments, case=case, **options):
            if rank == case.get("unreadable"):
                raise UserError(f"rank {rank} has no such file")
            return build(*arguments, **options)

        history.write_text, starting_weights.build_model = full, missing
        try:
            training.run(config, inputs, factory_of(config.spec), torch.device("cpu"))
            message = "not stopped"
        except Exception as error:  # noqa: BLE001 - its type is part of what is written down
            message = f"{type(error).__name__}: {error}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        (folder / f"{case['name']}-{rank}.txt").write_text(message)


def replaced(folder: Path, argument: dict) -> None:
    """A run into FOLDER/good, then runs that fail at a moment, each into a copy of it. `argument` has the flags."""
    import shutil

    def run(name: str, fails_in: int | None = None) -> None:
        config, inputs = configuration("ddp", [*argument["arguments"], "--seed", str(len(name))])
        config = dataclasses.replace(
            config, loss_output_dir=folder / name, capture_dir=folder / name, overwrite=True
        )

        def make(*given):
            if fails_in == 0:
                raise RuntimeError("it fails")
            strategy = factory_of(config.spec)(*given)
            update, left = strategy.update, iter(range(1, fails_in or 100))

            def failing():
                if next(left, None) is None:
                    raise RuntimeError("it fails")
                return update()

            strategy.update = failing
            return strategy

        training.run(config, inputs, make, torch.device("cpu"))

    run("good")
    for step, name in enumerate(("constructor", "first", "second")):
        if dist.get_rank() == 0:
            shutil.copytree(folder / "good", folder / name)
        dist.barrier()
        try:
            run(name, fails_in=step)
        except RuntimeError as error:
            assert str(error) == "it fails"
        else:
            raise AssertionError("it did not fail")
        dist.barrier()


def in_turn(folder: Path, calls: list) -> None:
    """The calls ("module:function", name of a folder in `folder`, argument) one after the other in the same ranks."""
    for target, name, argument in calls:
        module, function = target.split(":")
        (folder / name).mkdir(parents=True, exist_ok=True)
        getattr(importlib.import_module(module), function)(folder / name, argument)


def sharded_loss(folder: Path, argument: dict) -> None:
    """The loss on vocabulary shards and its gradient, for even and uneven shards and two dtypes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}
    for vocab in (64, 61):
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(vocab)
            logits = (3 * torch.randn(5, 7, vocab, generator=generator)).to(dtype)
            labels = torch.randint(vocab, (5, 7), generator=generator)
            shards = logits.chunk(size, dim=-1)
            first = sum(shard.shape[-1] for shard in shards[:rank])
            mine = shards[rank].clone().requires_grad_()
            before = mine.detach().clone()
            loss = vocab_parallel_cross_entropy(mine, labels, first, dist.group.WORLD)
            (2.5 * loss).backward()
            assert torch.equal(mine.detach(), before), "the caller's logits were changed"
            results[f"{vocab} {dtype}"] = {"loss": loss.detach(), "gradient": mine.grad}
    torch.save(results, folder / f"loss{rank}.pt")
