"""Check a user's model before it is judged: can its own code compute a reference?

A copy with at most two layers of each kind and random weights runs on a few tokens in the float64 mode. It must be repeatable, use all of
its parameters, and have a gradient that agrees with central differences of its loss. Where a part still computes in float32 or bfloat16,
the differences are noise: at a step of 1e-6, a float32 loss is off by 1e-7 and its difference by a tenth.
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
from lockstep.training.optim import named_trained
from lockstep.verdict.float64 import Float64, make_exact

# Of the differences; where a router jumps within one of them, another serves
STEPS = (1e-5, 1e-6, 1e-7)
# Relative. In float64 the differences are off by 1e-8 at 1e-6 (truncation falls as the step squared), and by 1e-2 and more in float32.
TOLERANCE = 1e-6
APART = 1e-12  # relative: what another grouping of tokens, as to experts, changes in float64
BATCH, LONGEST = 2, 16  # sequences, and tokens in each


def check(config: Config, inputs: Inputs) -> None:
    """Raise UserError if the model cannot be judged. Does nothing for built-in models, which the tests check."""
    if architectures.is_built_in(inputs.architecture_source):
        return
    problem = problem_of(inputs.architecture, config.attn_impl, min(config.seq_length, LONGEST))
    if not problem and config.documents == "apart" and not keeps_apart(inputs.architecture, config.attn_impl):
        problem = "a document sees those before it, though positions begin again; leave --documents apart out"
    if problem:
        raise UserError(f"--model_name {printable(config.model_name, 200)}: {problem}")


def keeps_apart(architecture: dict, attn_impl: str) -> bool:
    """Whether the second of two documents is computed as if there were no first, by their positions alone."""
    ids = torch.arange(8)[None] % architecture["vocab_size"]
    positions = torch.arange(4).repeat(2)[None]
    with torch.random.fork_rng(devices=[]), quiet(), torch.no_grad(), Float64():
        torch.manual_seed(0)
        model = from_config(shallow(architecture), attn_impl=attn_impl)
        make_exact(model, ())
        both = (ids, torch.where(torch.arange(8) < 4, ids.flip(1), ids))
        one, two = (model(each, position_ids=positions, use_cache=False).logits[:, 4:] for each in both)
    return float((one - two).abs().max()) <= APART * float(one.abs().max())


def problem_of(architecture: dict, attn_impl: str, seq_length: int) -> str:
    """Why no reference of the model can be computed, in a sentence; "" if it can."""
    small = shallow(architecture)
    generator = torch.Generator().manual_seed(0)
    try:
        ids = torch.randint(0, architecture["vocab_size"], (BATCH, seq_length + 1), generator=generator)
        tables = layout_of(small, attn_impl).tables
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(0)
            model = from_config(small, attn_impl=attn_impl)
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
    # along the gradient and across it: an error of either part shows
    direction = [
        part + other
        for part, other in zip(
            _unit(gradients),
            _unit([torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in gradients]),
            strict=True,
        )
    ]
    along = sum(float((a * b).sum()) for a, b in zip(gradients, direction, strict=True))
    errors = []
    for step in STEPS:
        ends = []
        for sign in (step, -2 * step):
            with torch.no_grad():
                torch._foreach_add_([*parameters.values()], direction, alpha=sign)
                ends.append(float(loss()))
        with torch.no_grad():
            torch._foreach_add_([*parameters.values()], direction, alpha=step)
        errors.append(abs((ends[0] - ends[1]) / (2 * step) - along) / abs(along))
    if min(errors) <= TOLERANCE:
        return ""
    return (
        f"its gradient is {min(errors):.1e} off central differences of its loss in float64 (at most {TOLERANCE:.0e} in a model that computes in "
        "the precision of its weights); a part of it computes in lower precision, or has another backward pass than its forward pass"
    )


def _unit(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    norm = math.sqrt(sum(float(each.square().sum()) for each in tensors))
    return [each / norm for each in tensors]


def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Random weights that give outputs of about 1 everywhere, so that every part of the model matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith(".weight"):  # of a norm
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.5, generator=generator)


def shallow(architecture: dict) -> dict:
    """The model with at most two layers, or one of each kind that it lists."""
    depth = architecture.get("num_hidden_layers")
    if not isinstance(depth, int) or depth <= 2:
        return architecture
    lists = architectures.of_layers(architecture)
    kinds = [tuple(map(str, of_layer)) for of_layer in zip(*lists.values(), strict=True)]
    chosen = sorted({kinds.index(kind) for kind in kinds})
    return architectures.with_layers(architecture, chosen if len(chosen) > 1 else [0, 1])
