"""Bugs planted below the loop's own guards, in the real distributed run, to see that the verdict goes red.

`fault(name, config, inputs)` is a context that patches a library call where need be and yields a function that
wraps the live strategy.
"""

import contextlib
import types
from unittest import mock

import torch
import torch.distributed as dist


@contextlib.contextmanager
def fault(name: str, config, inputs):
    with FAULTS[name](config, inputs) as wrap:
        yield wrap


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


class _LocalReduceScatter:
    """Keeps this rank's own chunk: no gradient crosses the dp axis."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)])
        return None


def _no_dp_sync(strategy, config, inputs):
    """TP applied, data-parallel synchronisation forgotten."""
    for module in strategy.model.modules():
        if hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_reduce_scatter(_LocalReduceScatter())


def _feed(pick):
    """Train on another batch than the one the loop hashed: pick(config, rank) -> dp_rank to read."""

    def plant(strategy, config, inputs):
        real, step = strategy.forward_backward, iter(range(10**6))

        def forward_backward(_):
            return real(inputs.batches.micro_batches(next(step), pick(config, dist.get_rank()), torch.device("cpu")))

        strategy.forward_backward = forward_backward

    return plant


def _no_clipping(strategy, config, inputs):
    """One side clips, the other does not, and says it does."""
    contract = strategy.effective_contract
    strategy.config = types.SimpleNamespace(max_grad_norm=0.0, autocast=config.autocast)
    strategy.effective_contract = lambda: {**contract(), "max_grad_norm": config.max_grad_norm}


def _no_clipping_admitted(strategy, config, inputs):
    strategy.config = types.SimpleNamespace(max_grad_norm=0.0, autocast=config.autocast)


def _other_weights(strategy, config, inputs):
    """The last dp replica starts a little elsewhere."""
    if strategy.geometry()[0] == config.dp_size - 1:
        with torch.no_grad():
            for parameter in strategy.parameters:
                parameter.mul_(1.01)


def _all_other_weights(strategy, config, inputs):
    """Re-initialised after loading: the live weights are not the file's."""
    with torch.no_grad():
        for parameter in strategy.parameters:
            parameter.mul_(1.01)


@contextlib.contextmanager
def _dropped_row_parallel(config, inputs):
    """o_proj's partial products are used without their sum over tp."""
    import fsdp_strategy
    from torch.distributed.tensor.parallel import RowwiseParallel

    class Unreduced(RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
            return outputs.to_local()

    with mock.patch.dict(fsdp_strategy.TP_PLAN, {"model.layers.*.self_attn.o_proj": ("rowwise", Unreduced())}):
        yield lambda strategy: strategy


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


def _nan(strategy, config, inputs):
    """Rank 1 computes a NaN at step 3."""
    real, step = strategy.forward_backward, iter(range(10**6))

    def forward_backward(micro_batches):
        loss = real(micro_batches)
        return loss * float("nan") if next(step) == 2 and dist.get_rank() == 1 else loss

    strategy.forward_backward = forward_backward


def _wrong_data(pick):
    """The data side itself hands out the wrong share: pick(batches, rank) -> dp_rank."""

    @contextlib.contextmanager
    def context(config, inputs):
        from lockstep.data import Batches

        real = Batches.micro_batches

        def micro_batches(self, step, dp_rank, device):
            return real(self, step, pick(self, dist.get_rank()), device)

        with mock.patch.object(Batches, "micro_batches", micro_batches):
            yield lambda strategy: strategy

    return context


def _elsewhere(strategy, config, inputs):
    """The strategy's groups do not lie as the mesh says."""
    dp_rank, *rest = strategy.geometry()
    strategy.geometry = lambda: (config.dp_size - 1 - dp_rank, *rest)


FLIPPED = "model.layers.1.mlp.up_proj.weight"


def _flipped_bit(strategy, config, inputs):
    """The lowest exponent bit of one middling element of one shard of one gradient."""
    real = strategy.forward_backward
    parameter = dict(strategy.model.named_parameters())[FLIPPED]

    def shard():
        if hasattr(strategy, "engine"):
            place = parameter._hp_mapping
            if place is None or place.lp_fragment_address.start:
                return None
            return place.get_lp_grad_fragment(parameter._index_in_param_group)
        return parameter.grad.to_local() if strategy.geometry()[0] == 0 else None

    def forward_backward(micro_batches):
        loss = real(micro_batches)
        gradient = shard() if strategy.geometry()[2] == 1 else None
        if gradient is not None:
            flat = gradient.view(-1)
            middling = int(flat.abs().median(dim=0).indices)
            flat[middling : middling + 1].view(torch.int32).bitwise_xor_(1 << 23)
        return loss

    strategy.forward_backward = forward_backward


def _norm_weight_off(strategy, config, inputs):
    """One norm weight is 1e-3 larger on the second tp rank."""
    weight = dict(strategy.model.named_parameters())["model.layers.1.input_layernorm.weight"]
    if strategy.geometry()[2] == 1:
        with torch.no_grad():
            (weight.to_local() if hasattr(weight, "to_local") else weight)[3] += 1e-3


def _one_reduction_dropped(strategy, config, inputs):
    """The partial products of o_proj are not summed over tp, in layer 1 only."""
    module = dict(strategy.model.named_modules())["model.layers.1.self_attn.o_proj"]
    if hasattr(strategy, "engine"):
        module.mp_group = None
    else:
        module._forward_hooks.clear()
        module.register_forward_hook(lambda _module, _inputs, output: output.to_local())


def _samples_swapped(strategy, config, inputs):
    """DP rank 1 trains on its samples in another order."""
    real = strategy.forward_backward

    def forward_backward(micro_batches):
        if strategy.geometry()[0] == 1:
            micro_batches = [tuple(part.flip(0) for part in pair) for pair in micro_batches]
        return real(micro_batches)

    strategy.forward_backward = forward_backward


def _no_room(strategy, config, inputs):
    """A disk that is full for one rank: files cannot grow beyond a hundred kilobytes."""
    import resource

    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


FAULTS = {
    "no room for files on rank 1": _wrapping(_no_room),
    "a flipped exponent bit": _wrapping(_flipped_bit),
    "a norm weight off on one tp rank": _wrapping(_norm_weight_off),
    "one row-parallel reduction dropped": _wrapping(_one_reduction_dropped),
    "two samples swapped": _wrapping(_samples_swapped),
    "none": _wrapping(_none),
    "no DP synchronisation": _wrapping(_no_dp_sync),
    "DP ranks on the same batch": _wrapping(_feed(lambda config, rank: 0)),
    "TP peers on different batches": _wrapping(_feed(lambda config, rank: rank % config.dp_size)),
    "one side clips": _wrapping(_no_clipping),
    "one side clips, admitted": _wrapping(_no_clipping_admitted),
    "one replica with other weights": _wrapping(_other_weights),
    "weights changed after loading": _wrapping(_all_other_weights),
    "dropped row-parallel reduction": _dropped_row_parallel,
    "frozen": _wrapping(_frozen),
    "DP ranks really on the same batch": _wrong_data(lambda batches, rank: 0),
    "TP peers really on different batches": _wrong_data(lambda batches, rank: rank % batches.dp_size),
    "at another place in the mesh": _wrapping(_elsewhere),
    "nan": _wrapping(_nan),
}
