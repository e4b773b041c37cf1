"""Every strategy on every mesh against a float64 single-process reference: loss, full gradients, norm, weights."""

import dataclasses
import functools

import pytest
import torch
from families import built
from ranks import run_groups

from lockstep.dumps.dump import Dump
from lockstep.inputs import weights
from lockstep.inputs.model import causal_lm_loss
from lockstep.plan import command_line
from lockstep.plan.config import BETAS, EPS
from lockstep.training import preflight

STEPS = 3
ARGUMENTS = (
    "--precision fp32 --batch_size 2 --seq_length 64 --gradient_accumulation_steps 2 --max_grad_norm 0.5 --weight_decay 0.1 "
    f"--learning_rate 1e-3 --debug_steps {STEPS}"
).split()
MESHES = [(2, 1), (1, 2), (2, 2)]
CASES = [
    ("ddp", 2, 1),
    *(("fsdp", *m) for m in MESHES),
    *(("deepspeed", *m) for m in MESHES),
]
# A float32 gradient is a sum of products, each rounded by 6e-8, through a dozen layers of them: errors of a few 1e-7.
GRADIENT = 5e-6
# AdamW turns a relative gradient error into an equal error of the update, except where a gradient is all noise.
UPDATE = 1e-3
# linear in the gradient, and a square of it
MOMENTS = {"exp_avg": GRADIENT, "exp_avg_sq": 2 * GRADIENT}


@functools.cache
def reference(dp_size: int) -> dict:
    """One process, float64, the whole global batch, plain torch: what every strategy must compute."""
    config = command_line.parse_config("ddp", [*ARGUMENTS, "--dp_size", str(dp_size)])
    inputs = preflight.load_inputs(config)
    model = built(inputs.architecture, "eager", seed=config.seed)
    model.double()
    parameters = dict(model.named_parameters())
    decayed = [p for p in parameters.values() if p.ndim >= 2]
    plain = [p for p in parameters.values() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-3,
        betas=BETAS,
        eps=EPS,
    )
    kept = {"losses": [], "grad_norms": [], "gradients": [], "moments": [], "before": _copy(parameters)}
    for step in range(STEPS):
        optimizer.zero_grad()
        ranks = [inputs.batches.micro_batches(step, dp_rank, "cpu") for dp_rank in range(dp_size)]
        ids, labels = (torch.cat([pair[i] for micro in ranks for pair in micro]) for i in (0, 1))
        loss = causal_lm_loss(model, ids, labels)
        loss.backward()
        kept["losses"].append(loss.item())
        kept["gradients"].append({name: p.grad.clone() for name, p in parameters.items()})
        norm = sum(p.grad.square().sum() for p in parameters.values()).sqrt()
        kept["grad_norms"].append(norm.item())
        for p in parameters.values():
            p.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))
        optimizer.step()
        moments = {
            kind: {n: optimizer.state[p][kind].clone() for n, p in parameters.items()} for kind in MOMENTS
        }
        kept["moments"].append(moments)
    kept["after"] = _copy(parameters)
    return kept


def _copy(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def dumped(new_folder):
    """What every strategy on every mesh really computed, from its capture, by case."""
    top = new_folder("strategies")
    groups, dumps = [], {}
    for strategy, dp, tp in CASES:
        folder = top / "-".join(map(str, (strategy, dp, tp)))
        arguments = [*ARGUMENTS, "--dp_size", str(dp), *(["--tp_size", str(tp)] if strategy != "ddp" else [])]
        arguments += ["--capture_dir", str(folder), "--capture_steps", str(STEPS)]
        run = {"name": "losses", "strategy": strategy, "fault": "none", "arguments": arguments}
        groups.append((dp * tp, "jobs:histories", folder, {"runs": [run]}))
        dumps[strategy, dp, tp] = folder / strategy
    run_groups(groups)
    return lambda *case: Dump(dumps[case])


def distance(actual, exact, scale=None):
    scale = exact if scale is None else scale
    return ((actual.double() - exact).norm() / scale.norm()).item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{}-dp{}-tp{}".format(*case))
class TestAgainstReference:
    def test_initial_weights_are_bit_identical(self, dumped, case):
        wanted = {
            name: weights.tensor_sha256(tensor.float())
            for name, tensor in reference(case[1])["before"].items()
        }
        assert dumped(*case).manifest["initial_sha256"] == weights.combined_sha256(wanted)

    def test_loss(self, dumped, case):
        steps = dumped(*case).steps.values()
        for step, exact in zip(steps, reference(case[1])["losses"], strict=True):
            assert step["loss"] == pytest.approx(exact, rel=3e-7)

    def test_full_gradients(self, dumped, case):
        dump, wanted = dumped(*case), reference(case[1])["gradients"][0]
        assert {f"gradient/{name}" for name in wanted} == {
            n for n in dump.steps[1]["tensors"] if n.startswith("gradient/")
        }
        whole = torch.cat([g.flatten() for g in wanted.values()])
        for name, exact in wanted.items():
            mine = dump.tensor(1, f"gradient/{name}")
            assert mine.shape == exact.shape, name
            # the bias of k is cancelled by the softmax: its gradient is judged against the whole model's
            scale = whole if name.endswith("k_proj.bias") else None
            assert distance(mine, exact, scale) < GRADIENT, name

    def test_grad_norm(self, dumped, case):
        steps = dumped(*case).steps.values()
        for step, exact in zip(steps, reference(case[1])["grad_norms"], strict=True):
            assert step["grad_norm"] == pytest.approx(exact, rel=2e-6)

    def test_moments(self, dumped, case):
        for kind, bound in MOMENTS.items():
            for name, exact in reference(case[1])["moments"][0][kind].items():
                if not name.endswith("k_proj.bias"):
                    mine = dumped(*case).tensor(1, f"{kind}/{name}")
                    assert distance(mine, exact) < bound, (kind, name)

    def test_weights_after_training(self, dumped, case):
        wanted, start = reference(case[1])["after"], reference(case[1])["before"]
        for name, exact in wanted.items():
            if not name.endswith("k_proj.bias"):
                mine = dumped(*case).tensor(STEPS, f"parameter/{name}")
                assert distance(mine, exact, exact - start[name]) < UPDATE, name


def test_the_reference_comparison_can_fail():
    """Negative control: a gradient divided by dp once too often, and a missing shard, are far outside the bounds."""
    wanted = reference(2)["gradients"][0]["model.layers.0.mlp.up_proj.weight"]
    assert distance(wanted / 2, wanted) > 1e4 * GRADIENT
    half = wanted.clone()
    half[half.shape[0] // 2 :] = 0
    assert distance(half, wanted) > 1e4 * GRADIENT


def test_reference_batches_cover_every_rank():
    inputs = preflight.load_inputs(command_line.parse_config("ddp", ARGUMENTS))
    assert dataclasses.asdict(inputs.batches)["num_micro_batches"] == 2
    assert not (inputs.batches.windows(0, 0) == inputs.batches.windows(0, 1)).all()
