"""What is planted in a real distributed run to see the loop's own guards and DDP's verdict go red.

`fault(name, config, inputs, make_strategy)` is a context that yields what makes the live strategy. Faults of AutoTP and FSDP
are in lockstep/faults, bugs that the diagnosis does not know in foreign.py; names from there are good here, too.
"""

import contextlib
import dataclasses
import types
from unittest import mock

import torch
import torch.distributed as dist
from foreign import FOREIGN

from lockstep.faults import CATALOGUE, planted
from lockstep.plan.mesh import Geometry


@contextlib.contextmanager
def fault(name: str, config, inputs, make_strategy):
    """Yields make_strategy with the fault in what it makes."""
    if name in CATALOGUE or name in FOREIGN:
        with planted(FOREIGN.get(name, name), config, inputs, make_strategy) as make:
            yield make
        return
    with FAULTS[name](config, inputs) as wrap:
        yield lambda *arguments: wrap(make_strategy(*arguments))


def _wrapping(plant):
    """A fault that only changes the live strategy: plant(strategy, config, inputs)."""

    @contextlib.contextmanager
    def context(config, inputs):
        def wrap(strategy):
            plant(strategy, config, inputs)
            return strategy

        yield wrap

    return context


def _none(strategy, config, inputs):
    pass


def _no_clipping_admitted(strategy, config, inputs):
    strategy.config = dataclasses.replace(config, max_grad_norm=0.0)


def _other_weights(strategy, config, inputs):
    """The last dp replica starts a little elsewhere."""
    if strategy.geometry().coordinates.dp == config.dp_size - 1:
        with torch.no_grad():
            for parameter in strategy.parameters:
                parameter.mul_(1.01)


def _all_other_weights(strategy, config, inputs):
    """Re-initialised after loading: the live weights are not the file's."""
    with torch.no_grad():
        for parameter in strategy.parameters:
            parameter.mul_(1.01)


def _frozen(strategy, config, inputs):
    """Every update is undone."""
    real = strategy.update

    def update():
        before = [parameter.detach().clone() for parameter in strategy.parameters]
        grad_norm = real()
        with torch.no_grad():
            for parameter, old in zip(strategy.parameters, before, strict=True):
                parameter.copy_(old)
        return grad_norm

    strategy.update = update


def _first_rate(strategy, config, inputs):
    """Every step has the learning rate of the first."""
    real, rates = strategy.update, []

    def update():
        rates.append(strategy.optimizer.param_groups[0]["lr"])
        for group in strategy.optimizer.param_groups:
            group["lr"] = rates[0]
        return real()

    strategy.update = update


def _nan(strategy, config, inputs):
    """Rank 1 computes a NaN at step 3."""
    real, step = strategy.forward_backward, iter(range(10**6))

    def forward_backward(micro_batches):
        loss = real(micro_batches)
        return loss * float("nan") if next(step) == 2 and dist.get_rank() == 1 else loss

    strategy.forward_backward = forward_backward


def _norm_is_nan(step):
    """Rank 1 computes a NaN norm at one step, from 1."""

    def change(strategy, config, inputs):
        real, number = strategy.update, iter(range(1, 10**6))
        strategy.update = lambda: real() * (float("nan") if next(number) == step and dist.get_rank() else 1)

    return change


def _wrong_data(pick):
    """The data side itself hands out the wrong share: pick(batches, rank) -> dp_rank."""

    @contextlib.contextmanager
    def context(config, inputs):
        from lockstep.inputs.data import Batches

        real = Batches.micro_batches

        def micro_batches(self, step, dp_rank, device):
            return real(self, step, pick(self, dist.get_rank()), device)

        with mock.patch.object(Batches, "micro_batches", micro_batches):
            yield lambda strategy: strategy

    return context


def _elsewhere(strategy, config, inputs):
    """The strategy's groups do not lie as the mesh says."""
    here = strategy.geometry()
    there = dataclasses.replace(here.coordinates, dp=config.dp_size - 1 - here.coordinates.dp)
    strategy.geometry = lambda: Geometry(here.mesh, there)


def _no_room(strategy, config, inputs):
    """A disk that is full for one rank: files cannot grow beyond a hundred kilobytes."""
    import resource

    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def _own_collectives(strategy, config, inputs):
    """DeepSpeed has built its operator that sums in shared memory."""
    from deepspeed.comm import comm

    comm.cdb.shm_comm_op = object()


@contextlib.contextmanager
def _another_stage(config, inputs):
    """DeepSpeed is told another ZeRO stage than the options say."""
    from lockstep.plan import deepspeed_file

    real = deepspeed_file.of_zero
    with mock.patch.object(deepspeed_file, "of_zero", lambda own: {**real(own), "stage": own.zero_stage - 1}):
        yield lambda strategy: strategy


@contextlib.contextmanager
def _defaults(config, inputs):
    """The strategy takes the defaults of all options that only it has."""
    import ddp_strategy
    import fsdp_strategy
    from lockstep.plan import ddp, fsdp

    def deaf(module):
        return types.SimpleNamespace(**{**vars(module), "of": lambda config: module.Options()})

    with (
        mock.patch.object(ddp_strategy, "ddp", deaf(ddp)),
        mock.patch.object(fsdp_strategy, "fsdp", deaf(fsdp)),
    ):
        yield lambda strategy: strategy


FAULTS = {
    "learning rate of the first step": _wrapping(_first_rate),
    "another ZeRO stage": _another_stage,
    "collectives of its own": _wrapping(_own_collectives),
    "options are not passed on": _defaults,
    "no room for files on rank 1": _wrapping(_no_room),
    "none": _wrapping(_none),
    "one side clips, admitted": _wrapping(_no_clipping_admitted),
    "one replica with other weights": _wrapping(_other_weights),
    "weights changed after loading": _wrapping(_all_other_weights),
    "frozen": _wrapping(_frozen),
    "DP ranks really on the same batch": _wrong_data(lambda batches, rank: 0),
    "TP peers really on different batches": _wrong_data(lambda batches, rank: rank % batches.dp_size),
    "at another place in the mesh": _wrapping(_elsewhere),
    "nan": _wrapping(_nan),
    **{f"norm is nan in step {step}": _wrapping(_norm_is_nan(step)) for step in (1, 3, 4)},
}
