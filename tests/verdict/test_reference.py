"""The reference is float64 throughout, and it is the model that transformers runs."""

import pytest
import torch
from families import built

from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.model import causal_lm_loss
from lockstep.plan import command_line
from lockstep.training import preflight
from lockstep.verdict.reference import ReferenceStrategy, build_reference

# without a term of the loss that is a mean over micro batches
MODELS = [
    name
    for name, content in BUILT_IN.items()
    if name.startswith("tiny") and not content.get("output_router_logits")
]


def inputs_of(name):
    config = command_line.parse_config(
        "ddp", ["--model_name", name, "--batch_size", "2", "--seq_length", "32", "--dp_size", "2"]
    )
    return config, preflight.load_inputs(config)


def micro_batches_of(inputs):
    """Those of both DP ranks, rank by rank."""
    return [micro for dp in (0, 1) for micro in inputs.batches.micro_batches(0, dp, "cpu")]


def batch_of(inputs):
    return [torch.cat(halves) for halves in zip(*micro_batches_of(inputs), strict=True)]


@pytest.fixture(params=MODELS)
def case(request):
    config, inputs = inputs_of(request.param)
    model = build_reference(inputs, seed=0, attn_impl="sdpa", init_weights_path=None)
    return config, inputs, ReferenceStrategy(model, config, {})


def test_it_is_the_same_model(case):
    config, inputs, strategy = case
    theirs = built(inputs.architecture, "eager")
    ids, labels = batch_of(inputs)
    losses = strategy.forward_backward(micro_batches_of(inputs))
    assert len(losses) == config.dp_size
    assert sum(losses) / 2 == pytest.approx(causal_lm_loss(theirs, ids, labels).item(), rel=3e-7)


def test_it_clips_and_decays_like_the_others():
    config, inputs = inputs_of("tiny-qwen2")
    model = build_reference(inputs, seed=0, attn_impl="sdpa", init_weights_path=None)
    strategy = ReferenceStrategy(model, config, {})
    strategy.forward_backward(micro_batches_of(inputs))
    norm = strategy.update()
    after = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    assert after == pytest.approx(min(norm, config.max_grad_norm), rel=1e-5)
    assert [group["weight_decay"] for group in strategy.optimizer.param_groups] == [config.weight_decay, 0.0]


def test_micro_batches_make_up_the_batch(case):
    """Losses rank by rank, and the gradient of the mean over all of them."""
    config, inputs, strategy = case
    whole = [batch_of(inputs)]
    micros = [(ids[row : row + 1], labels[row : row + 1]) for ids, labels in whole for row in range(len(ids))]
    losses = strategy.forward_backward(micros)
    found = [p.grad.clone() for p in strategy.model.parameters()]
    single = [strategy.forward_backward([micro] * config.dp_size)[0] for micro in micros]
    assert losses == pytest.approx([sum(single[:2]) / 2, sum(single[2:]) / 2], rel=1e-12)
    halves = strategy.forward_backward(micro_batches_of(inputs))
    assert losses == pytest.approx(halves, rel=1e-12) and losses[0] != pytest.approx(losses[1], rel=1e-6)
    largest = max(float(p.grad.norm()) for p in strategy.model.parameters())
    for gradient, parameter in zip(found, strategy.model.parameters(), strict=True):
        assert float((gradient - parameter.grad).norm()) <= 1e-12 * largest
