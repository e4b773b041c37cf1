"""Wrong samples, exchanged after all checks of the batches; wrong reported losses; wrong random numbers."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.faults.catalogue import fault
from lockstep.faults.evidence import agrees
from lockstep.faults.planting import Plant, Planting
from lockstep.inputs.data import Batches
from lockstep.training.strategy import MicroBatch

DATA, RANDOM = "data", "random state"
# (run, micro batches, step from 0) -> the micro batches instead
Change = Callable[[Planting, list[MicroBatch], int], list[MicroBatch]]


def _feed(change: Change) -> Callable[[Planting], Plant]:
    """Train on change(run, micro_batches, step from 0) instead of the loop's micro batches."""

    def plant(run: Planting) -> Plant:
        strategy = yield
        real, steps = strategy.forward_backward, itertools.count()
        run.patch(
            strategy,
            "forward_backward",
            lambda micro_batches: real(change(run, micro_batches, next(steps))),
        )

    return plant


def _of(run: Planting, step: int, share: int, batches: Batches | None = None) -> list[MicroBatch]:
    return (batches or run.inputs.batches).micro_batches(step, share, torch.device("cpu"))


@fault(
    seen_in="ray-project/ray 64315",
    bug_class=DATA,
    cause="data",
    evidence="DP rank 1 was given the samples of DP rank 0",
    first="batch/input_ids",
)
def dp_ranks_replay_one_batch(run: Planting) -> Plant:
    """Every data-parallel rank trains on the first one's samples."""
    return _feed(lambda run, _, step: _of(run, step, 0))(run)


@fault(
    seen_in="deepspeedai/DeepSpeed 7199",
    bug_class=DATA,
    cause="data",
    evidence="tensor-parallel peers were given different batches: ranks [1, 3] differ",
    first="batch/input_ids",
    axes=("tp",),
    needs=("batches_are_not_checked",),
)
def tp_peers_read_different_samples(run: Planting) -> Plant:
    """The samples are chosen by the rank in the world, so tensor-parallel peers do not share theirs.

    (Not planted where the strategy checks the batches itself.)
    """
    return _feed(lambda run, _, step: _of(run, step, dist.get_rank() % run.config.dp_size))(run)


@fault(
    seen_in="verl-project/verl 4697",
    bug_class=DATA,
    cause="data",
    evidence="the samples are not those of this step",
    first="batch/input_ids",
    axes=("tp",),
)
def sampler_counts_all_ranks(run: Planting) -> Plant:
    """The sampler takes the world size for the data-parallel size and skips the shares in between."""
    wide = dataclasses.replace(run.inputs.batches, dp_size=run.config.num_workers)

    def change(run: Planting, _: list[MicroBatch], step: int) -> list[MicroBatch]:
        return _of(run, step, run.config.mesh.sample_share(dist.get_rank()) * run.config.tp_size, wide)

    return _feed(change)(run)


@fault(
    seen_in="ray-project/ray 64315",
    bug_class=DATA,
    cause="data",
    evidence="the right samples in another order",
    first="batch/input_ids",
)
def samples_in_another_order(run: Planting) -> Plant:
    """One data-parallel rank has its samples in another order: the same loss, and other tensors."""

    def change(run: Planting, micro_batches: list[MicroBatch], _step: int) -> list[MicroBatch]:
        mine = run.config.mesh.sample_share(dist.get_rank()) == 1
        return [(ids.flip(0), labels.flip(0)) for ids, labels in micro_batches] if mine else micro_batches

    return _feed(change)(run)


@fault(
    seen_in="huggingface/transformers 34191",
    bug_class=DATA,
    cause="data",
    evidence="the input ids are right, the labels are not",
    first="batch/labels",
)
def labels_shifted_twice(run: Planting) -> Plant:
    """The labels, shifted by one already, are shifted again: the model learns to skip a token."""

    def change(run: Planting, micro_batches: list[MicroBatch], _step: int) -> list[MicroBatch]:
        return [
            (input_ids, torch.cat([labels[:, 1:], labels[:, :1]], dim=1))
            for input_ids, labels in micro_batches
        ]

    return _feed(change)(run)


@fault(
    seen_in="ray-project/ray 31409",
    bug_class=DATA,
    cause="reported loss",
    evidence="every tensor is right, but all DP ranks report the same loss",
    first="loss of DP rank 1",
)
def only_the_first_rank_reports(run: Planting) -> Plant:
    """Every rank reports the first rank's loss; training is right."""
    from lockstep.training import loop as training

    start_gathering = training.start_gathering

    def first_for_all(
        loss: torch.Tensor, others: list[float], device: torch.device
    ) -> Callable[[], list[list[float]]]:
        gathered = start_gathering(loss, others, device)

        def of_the_first() -> list[list[float]]:
            everyone = gathered()
            return [[everyone[0][0], *row[1:]] for row in everyone]

        return of_the_first

    run.patch(training, "start_gathering", first_for_all)
    yield


def _a_tenth(where: str = "") -> Callable[[str], bool]:
    """Evidence of dropout: about a tenth of the elements."""
    shown = (
        "# % of the elements of model.layers.0.self_attn.o_proj's output are zero, scattered, and the others larger to make up for it"
        f"{where}: dropout"
    )
    return lambda said: agrees(shown, said) and 9 < float(said.split()[0]) < 11


def _dropout(run: Planting, seed: Callable[[], int]) -> Plant:
    """Dropout of one tenth on an attention block's output, which the other strategies do not have."""
    strategy = yield
    generator = torch.Generator().manual_seed(seed())

    def drop(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        keep = torch.rand(output.shape, generator=generator) >= 0.1
        return output * keep / 0.9

    layer = "model.layers.0.self_attn.o_proj"
    strategy.model.get_submodule(layer).register_forward_hook(run.recorded(f"the output of {layer}", drop))


@fault(
    seen_in="pytorch/pytorch 168058",
    bug_class=RANDOM,
    cause="random numbers",
    evidence=_a_tenth(", not the same on all ranks that hold it"),
    first="forward/model.layers.0.self_attn.o_proj",
    axes=("tp",),
    named=True,
)
def dropout_differs_between_tp_peers(run: Planting) -> Plant:
    """Tensor-parallel peers draw different dropout masks for the same activation."""
    return _dropout(run, dist.get_rank)


@fault(
    seen_in="pytorch/pytorch 168058",
    bug_class=RANDOM,
    cause="random numbers",
    evidence=_a_tenth(),
    first="forward/model.layers.0.self_attn.o_proj",
    named=True,
)
def dropout_in_one_strategy_only(run: Planting) -> Plant:
    """Dropout is on in one strategy and off in the other; tensor-parallel peers agree."""
    return _dropout(run, lambda: run.config.mesh.sample_share(dist.get_rank()))


@fault(
    seen_in="pytorch/pytorch 168058",
    bug_class=RANDOM,
    cause="random numbers",
    evidence="configured differently: dropout is 0.1, not 0.0",
    first="forward/model.layers.0.self_attn.o_proj.input",
    named=True,
)
def attention_dropout_in_one_strategy_only(run: Planting) -> Plant:
    """The attention layers drop a tenth of their probabilities, though the configuration says none."""
    strategy = yield
    torch.manual_seed(dist.get_rank())
    for layer in strategy.model.model.layers:
        run.patch(layer.self_attn, "attention_dropout", 0.1)
