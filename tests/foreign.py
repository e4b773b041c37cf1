"""Bugs that the catalogue (lockstep/faults) does not have: whatever is said of them must be true.

Each is a function of a `Planting` and the live strategy. test_foreign_bugs.py says what each breaks first.
"""

import itertools
from collections.abc import Callable

import torch

from lockstep.training.torch_strategy import local

FOREIGN: dict[str, str] = {}  # name -> path/to/file.py:FUNCTION
UP = "model.layers.1.mlp.up_proj.weight"
LAYER = "model.layers.1"


def bug(plant: Callable) -> Callable:
    """A planted fault of a function that changes the live strategy."""
    FOREIGN[plant.__name__.replace("_", " ")] = f"{__file__}:{plant.__name__}"

    def planter(run):
        plant(run, (yield))

    return planter


def _module(strategy, name: str) -> torch.nn.Module:
    return strategy.model.get_submodule(name)


def _at(strategy, axis: str) -> int:
    return strategy.geometry().coordinates.along(axis)


# Forward


@bug
def wrong_attention_scale(run, strategy):
    _module(strategy, f"{LAYER}.self_attn").scaling *= 1.25


@bug
def lost_causal_mask(run, strategy):
    _module(strategy, f"{LAYER}.self_attn").is_causal = False


@bug
def causal_mask_off_by_one(run, strategy):
    """Every position sees the one behind it, too."""

    def see_more(_module, arguments, options):
        length = options["hidden_states"].shape[1]
        return arguments, {**options, "attention_mask": torch.ones(length, length).tril(1).bool()[None, None]}

    _module(strategy, f"{LAYER}.self_attn").register_forward_pre_hook(see_more, with_kwargs=True)


@bug
def another_norm_epsilon(run, strategy):
    _module(strategy, f"{LAYER}.input_layernorm").variance_epsilon = 1e-5


@bug
def another_norm_epsilon_on_one_tp_rank(run, strategy):
    if _at(strategy, "tp") == 1:
        _module(strategy, f"{LAYER}.input_layernorm").variance_epsilon = 1e-5


@bug
def other_rotary_theta(run, strategy):
    frequencies = _module(strategy, "model.rotary_emb").inv_freq
    frequencies.copy_(1e4 ** -torch.linspace(0, 1, len(frequencies) + 1)[:-1])


@bug
def rotary_angles_of_one_layer_doubled(run, strategy):
    def double(_module, arguments, options):
        cos, sin = options["position_embeddings"]
        return arguments, {**options, "position_embeddings": (cos * cos - sin * sin, 2 * sin * cos)}

    _module(strategy, f"{LAYER}.self_attn").register_forward_pre_hook(double, with_kwargs=True)


@bug
def two_heads_swapped(run, strategy):
    """On every tp rank, which has two."""
    run.change_output(
        f"{LAYER}.self_attn.q_proj", lambda output: output.unflatten(-1, (-1, 16)).flip(-2).flatten(-2)
    )


@bug
def bias_left_out(run, strategy):
    layer = f"{LAYER}.self_attn.k_proj"
    run.change_output(layer, lambda output: output - local(_module(strategy, layer).bias))


@bug
def residual_added_twice(run, strategy):
    _module(strategy, LAYER).register_forward_hook(lambda _module, inputs, output: output + inputs[0])


@bug
def gelu_for_silu(run, strategy):
    _module(strategy, f"{LAYER}.mlp").act_fn = torch.nn.GELU()


@bug
def last_position_zeroed(run, strategy):
    def zero(output):
        keep = torch.ones(output.shape[1])
        keep[-1] = 0
        return output * keep[:, None]

    run.change_output(f"{LAYER}.post_attention_layernorm", zero)


@bug
def embedding_scaled(run, strategy):
    run.change_output("model.embed_tokens", lambda output: 8 * output)


@bug
def activations_of_one_replica_scaled(run, strategy):
    if _at(strategy, "dp") == 1:
        run.change_output(f"{LAYER}.mlp.down_proj", lambda output: 1.001 * output)


@bug
def share_of_one_tp_rank_counted_twice(run, strategy):
    """In the sum over tp, y = y_0 + 2 y_1; what enters is right."""
    layer = _module(strategy, f"{LAYER}.mlp.down_proj")
    before = {}

    def note(_module, arguments):
        before["x"] = local(arguments[0])

    def add(output):
        share = before["x"] @ local(layer.weight).detach().T
        if _at(strategy, "tp") == 0:
            share = torch.zeros_like(share)
        torch.distributed.all_reduce(share, group=run.handles.group("tp"))
        return output + share.detach()

    layer.register_forward_pre_hook(note)
    run.change_output(f"{LAYER}.mlp.down_proj", add)


# Loss and backward


@bug
def loss_of_one_replica_counts_twice(run, strategy):
    run.scale_backward(lambda _call: 1 + _at(strategy, "dp"))


@bug
def gradient_of_one_activation_scaled(run, strategy):
    def scale(output):
        return output + 0.5 * (output - output.detach())

    run.change_output(f"{LAYER}.post_attention_layernorm", scale)


@bug
def gradient_of_some_positions_lost(run, strategy):
    def lose(output):
        return torch.cat([output[:, :8].detach(), output[:, 8:]], dim=1)

    run.change_output(f"{LAYER}.input_layernorm", lose)


# Gradients


@bug
def one_stale_gradient(run, strategy):
    """In the second step, one weight has the gradient of the first."""
    kept: dict[str, torch.Tensor] = {}

    def change(step, name, gradient):
        if name == UP:
            kept["old"] = gradient.copy_(kept["old"]) if step == 2 else gradient.clone()

    run.change_gradients(change)


@bug
def gradient_of_one_parameter_zeroed(run, strategy):
    run.change_gradients(lambda _step, name, gradient: gradient.zero_() if name == UP else None)


@bug
def sign_of_one_gradient_element(run, strategy):
    def change(_step, name, gradient):
        if name == UP and _at(strategy, "tp") == 0 and _at(strategy, "dp") == 0:
            gradient.view(-1)[5].neg_()

    run.change_gradients(change)


@bug
def exponent_bit_of_one_gradient_element(run, strategy):
    """The lowest one, of a middling element, on one tp rank."""

    def flip(_step, name, gradient):
        if name == UP and _at(strategy, "tp") == 1:
            flat = gradient.view(-1)
            middling = int(flat.abs().median(dim=0).indices)
            flat[middling : middling + 1].view(torch.int32).bitwise_xor_(1 << 23)

    run.change_gradients(flip)


@bug
def gradient_of_one_tp_rank_negated(run, strategy):
    run.change_gradients(
        lambda _step, name, gradient: gradient.neg_() if name == UP and _at(strategy, "tp") == 1 else None,
    )


@bug
def one_dp_rank_has_noise_in_its_gradient(run, strategy):
    """The rank's part of one gradient is a little off."""

    def change(_step, name, gradient):
        if name == UP and _at(strategy, "dp") == 1:
            gradient.mul_(1 + 1e-3 * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1)))

    run.change_gradients(change)


# The update


@bug
def sign_of_one_weight_element(run, strategy):
    def flip(step):
        if (
            step == 1
            and _at(strategy, "tp") == 0
            and (run.config.spec.name != "fsdp" or _at(strategy, "dp") == 0)
        ):
            for name, tensor in run.handles.weights():
                if name == UP and tensor.ndim == 2:
                    with torch.no_grad():
                        tensor[3, 4].neg_()

    run.around(strategy, "update", after=flip)


@bug
def replica_missed_one_update(run, strategy):
    """In the second step. (In DDP the replicas part; in FSDP it is this rank's shards.)"""
    if _at(strategy, "dp") == 1:
        run.undo_updates(lambda step, _name: step == 2)


@bug
def one_weight_never_updated(run, strategy):
    run.undo_updates(lambda step, name: name == UP and step == 1)


@bug
def first_moment_of_one_parameter_lost(run, strategy):
    def forget(step):
        if step == 2:
            moments = run.handles.torch_optimizer().state
            next(itertools.islice(moments.values(), 3, None))["exp_avg"].zero_()

    run.around(strategy, "update", before=forget)


@bug
def updates_of_one_weight_doubled(run, strategy):
    old: dict[str, torch.Tensor] = {}

    def weights():
        return {number: tensor for number, (name, tensor) in enumerate(run.handles.weights()) if name == UP}

    def keep(_step):
        old.update({number: tensor.clone() for number, tensor in weights().items()})

    def double(_step):
        with torch.no_grad():
            for number, tensor in weights().items():
                tensor.add_(tensor - old[number])

    run.around(strategy, "update", before=keep, after=double)


# What replaces nothing that the run uses


@bug
def replaces_what_nobody_calls(run, strategy):
    """Without a dump, nobody asks what a rank holds."""
    run.patch(strategy, "held", list)


@bug
def replaces_what_nobody_reads(run, strategy):
    """The parameters are read elsewhere, but not for the norm."""
    run.patch_during(strategy, "grad_norm", strategy, "parameters", [])
