"""Steady-state step time in THE loop against a bare loop of the same strategy, in alternation.

    torchrun --nproc_per_node 2 benchmarks/loop_overhead.py ddp --steps 200
    torchrun --nproc_per_node 4 benchmarks/loop_overhead.py fsdp --steps 200
    torchrun --nproc_per_node 2 benchmarks/loop_overhead.py fsdp --steps 200 --tp_size 1 --dp_size 1 --cp_size 2

Both use the same live objects, in turn, and the same batches. A step of the loop is a whole `training.train_step` with data, hashes,
gathering and history file. A bare step is what a person would write: zero_grad, forward, backward, clip, step on batches in memory. Prints
the ratio of the median times.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.dumps import history
from lockstep.inputs.model import build_model, causal_lm_loss
from lockstep.plan import command_line
from lockstep.plan.resources import training_device
from lockstep.plan.strategies import SPECS
from lockstep.training import loop as training
from lockstep.training import preflight
from lockstep.training.strategy import factory_of
from lockstep.training.torch_strategy import TorchStrategy


def bare_step(strategy, config, device, batch):
    """One step as written by hand. Only the norm of shards is the strategy's, because torch cannot take it over two meshes."""
    input_ids, labels = batch
    positions = None
    if not isinstance(strategy, TorchStrategy):  # an engine holds model and optimizer
        if strategy.sequence is not None:
            input_ids, labels, positions = strategy.sequence.cut(input_ids, labels)
        loss = causal_lm_loss(strategy.engine, input_ids, labels, positions)
        strategy.engine.backward(loss)
        strategy.engine.step()
        return loss.item()
    strategy.optimizer.zero_grad()
    input_ids, labels, positions = strategy.cut(input_ids, labels)
    if strategy.pipeline is not None:
        places = torch.arange(labels.shape[1])[None] if positions is None else positions
        loss = strategy.pipeline.step(input_ids, labels, places)
        strategy.pipeline.sum_tied()
        strategy.update()
    else:
        with config.autocast(device):
            loss = causal_lm_loss(strategy.wrapped, input_ids, labels, positions)
        loss.backward()
        if config.spec.whole_replicas:
            torch.nn.utils.clip_grad_norm_(strategy.parameters, config.max_grad_norm)
            strategy.optimizer.step()
        else:
            strategy.update()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("strategy", choices=SPECS)
    parser.add_argument("--steps", type=int, default=200)
    options, flags = parser.parse_known_args()
    config = command_line.parse_config(options.strategy, [*flags, "--device", "cpu"])
    inputs = preflight.load_inputs(config)
    device = training_device(config)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, _ = build_model(inputs.architecture, seed=0, attn_impl=config.attn_impl, init_weights_path=None)
    strategy = factory_of(config.spec)(model, config, config.mesh, device)
    dp_rank = config.mesh.sample_share(rank)
    in_memory = iter(
        [inputs.batches.micro_batches(index, dp_rank, device)[0] for index in range(options.steps)]
    )
    record = history.History(run={})
    path = Path(tempfile.mkdtemp()) / "history.json"

    def loop_step():
        record.steps.append(
            training.train_step(strategy, inputs.batches, config.mesh, device, len(record.steps))[0]
        )
        if rank == 0:
            record.save_if_due(path)

    def timed(step):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - start

    def bare():
        bare_step(strategy, config, device, next(in_memory))

    pairs = []
    for index in range(options.steps):  # each goes first in half of the pairs
        if index % 2:
            pairs.append((timed(loop_step), timed(bare)))
        else:
            pairs.append(tuple(reversed((timed(bare), timed(loop_step)))))
    pairs = pairs[10:]  # the first ten warm up
    if rank == 0:
        loop, bare_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
        spread = statistics.quantiles([a / b for a, b in pairs], n=4)
        print(
            f"{options.strategy}: loop {1e3 * loop:.1f} ms, bare {1e3 * bare_seconds:.1f} ms, ratio of medians "
            f"{loop / bare_seconds:.3f} (pair by pair: quartiles {', '.join(f'{q:.3f}' for q in spread)})"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
