"""Check a user's model before it is judged: whether its own code can compute a reference.

A copy of the model with at most two layers, or one of each kind, and random weights runs on a few tokens in the float64 mode. It must be
repeatable, use all of its parameters, and have a gradient that agrees with central differences of its loss. Where a part still computes
in float32 or bfloat16, the differences are noise: at a step of 1e-6, a float32 loss is off by 1e-7 and its difference by a tenth.
"""

import math

import torch

from lockstep.dumps.trace import layout_of
from lockstep.ground.errors import UserError, first_line, printable
from lockstep.inputs import architectures
from lockstep.inputs.data import Inputs
from lockstep.inputs.model import causal_lm_loss
from lockstep.inputs.shapes import from_config, quiet
from lockstep.plan.config import Config
from lockstep.training.optim import named_trained, total_norm
from lockstep.verdict.float64 import Float64, make_exact

# Step sizes of the central differences. If a router jumps within one step, another step serves.
STEPS = (1e-5, 1e-6, 1e-7)
# Relative error of the differences that is tolerated. In float64 they are off by 1e-8 at a step of 1e-6 (the truncation error falls as the
# step squared), and in float32 by 1e-2 and more.
TOLERANCE = 1e-6
APART = 1e-12  # relative change of logits in float64 by another grouping of tokens, such as to experts
BATCH, LONGEST = 2, 16  # number of sequences, and of tokens in each, at most


def check(config: Config, inputs: Inputs) -> None:
    """Raise UserError if the model cannot be judged. Built-in models are not checked here: tests check them."""
    if architectures.is_built_in(inputs.architecture_source):
        return
    problem = problem_of(inputs.architecture, config.attn_impl, min(config.seq_length, LONGEST))
    if not problem and config.documents == "apart" and not keeps_apart(inputs.architecture, config.attn_impl):
        problem = (
            "a document sees those before it, although its positions begin again; leave --documents apart out"
        )
    if problem:
        raise UserError(f"--model_name {printable(config.model_name, 200)}: {problem}")


def keeps_apart(architecture: dict, attn_impl: str) -> bool:
    """Whether positions that begin again are enough for the second of two documents to be computed as if there were no first."""
    ids = torch.arange(8)[None] % architecture["vocab_size"]
    positions = torch.arange(4).repeat(2)[None]
    with torch.random.fork_rng(devices=[]), quiet(), torch.no_grad(), Float64():
        torch.manual_seed(0)
        model = from_config(shallow(architecture), attn_impl=attn_impl)
        make_exact(model, ())
        both = (ids, torch.where(torch.arange(8) < 4, ids.flip(1), ids))
        first, other = (model(x, position_ids=positions, use_cache=False).logits[:, 4:] for x in both)
    return float((first - other).abs().max()) <= APART * float(first.abs().max())


def problem_of(architecture: dict, attn_impl: str, seq_length: int) -> str:
    """Return why no reference of the model can be computed, as a sentence; "" if it can."""
    shallow_architecture = shallow(architecture)
    generator = torch.Generator().manual_seed(0)
    try:
        ids = torch.randint(0, architecture["vocab_size"], (BATCH, seq_length + 1), generator=generator)
        tables = layout_of(shallow_architecture, attn_impl).tables
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(0)
            model = from_config(shallow_architecture, attn_impl=attn_impl)
            _fill(model, generator)
            make_exact(model, tables)
            return _problem(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), generator)
    except UserError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a user's model may raise anything
        return f"it cannot be run in float64 ({first_line(error)})"


def _problem(
    model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, generator: torch.Generator
) -> str:
    """Return why the gradients of a model in float64 cannot be a reference, as a sentence; "" if they can."""

    def loss() -> torch.Tensor:
        with Float64():
            return causal_lm_loss(model, input_ids, labels)

    with torch.no_grad():
        first, again = float(loss()), float(loss())
    if not math.isfinite(first):
        return f"its loss is {first} with random weights"
    if first != again:
        return f"two forward passes of the same batch have the losses {first} and {again}: it draws random numbers or keeps a state; turn dropout off"
    with Float64():
        loss().backward()
    parameters = dict(named_trained(model))
    unused = next((name for name, parameter in parameters.items() if parameter.grad is None), None)
    if unused:
        return f"its loss does not depend on {unused}, which no strategy could then train; leave the parameter out"
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    # The direction of the differences is along the gradient and across it, so that an error of either part shows.
    direction = [
        along + across
        for along, across in zip(
            _unit(gradients),
            _unit([torch.randn(dw.shape, generator=generator, dtype=torch.float64) for dw in gradients]),
            strict=True,
        )
    ]
    # An embedding gives the row of its padding no gradient, whatever the loss depends on.
    padding = {id(m.weight): m.padding_idx for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for parameter, part in zip(parameters.values(), direction, strict=True):
        if padding.get(id(parameter)) is not None:
            part[padding[id(parameter)]] = 0.0
    slope = sum(float((dw * part).sum()) for dw, part in zip(gradients, direction, strict=True))
    errors = []
    for step in STEPS:
        losses = []
        for shift in (step, -2 * step):
            with torch.no_grad():
                torch._foreach_add_([*parameters.values()], direction, alpha=shift)
                losses.append(float(loss()))
        with torch.no_grad():
            torch._foreach_add_([*parameters.values()], direction, alpha=step)
        errors.append(abs((losses[0] - losses[1]) / (2 * step) - slope) / abs(slope))
    if min(errors) <= TOLERANCE:
        return ""
    return (
        f"its gradient is {min(errors):.1e} off central differences of its loss in float64 (at most {TOLERANCE:.0e} in a model that computes in "
        "the precision of its weights); a part of it computes in lower precision, or has another backward pass than its forward pass"
    )


def _unit(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors divided by their norm, that of all together."""
    norm = total_norm(tensors)
    return [tensor / norm for tensor in tensors]


def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw weights that give outputs of about 1 everywhere, so that every part of the model matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith(".weight"):  # of a norm
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.5, generator=generator)


def shallow(architecture: dict) -> dict:
    """Return the architecture with at most two layers, or with one layer of each kind that it lists if there are several kinds."""
    depth = architecture.get("num_hidden_layers")
    if not isinstance(depth, int) or depth <= 2:
        return architecture
    lists = architectures.of_layers(architecture)
    kinds = [tuple(map(str, entries)) for entries in zip(*lists.values(), strict=True)]
    chosen = sorted({kinds.index(kind) for kind in kinds})
    return architectures.with_layers(architecture, chosen if len(chosen) > 1 else [0, 1])
