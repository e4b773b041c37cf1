"""Samples in which some positions have no label: the loss is the mean over the labels of the global batch, whoever has them."""

import itertools
import shlex

import pytest
import torch
from compared import compared
from families import built
from ranks import ROOT, run_ranks
from test_data import batches

from lockstep.dumps import history
from lockstep.dumps.dump import Dump
from lockstep.inputs.data import IGNORED
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import BASELINE, CONTROL, history_file
from lockstep.running import jobs
from lockstep.training.preflight import load_inputs
from lockstep.verdict import loss_curves

COMMON = shlex.split(
    "--seq_length 32 --gradient_accumulation_steps 2 --debug_steps 2 --capture_steps 2 --max_grad_norm 0.5 --device cpu"
)
ONE, TWO = "--dp_size 1 --batch_size 4", "--dp_size 2 --batch_size 2"  # of the same global batch
CONTEXT = f"{ROOT}/examples/context_ddp.py:ContextDDP"
RUNS = {
    "fsdp, dp 2": f"{TWO} --tp_size 1",
    "fsdp, tp 2": f"{ONE} --tp_size 2",
    "fsdp, sp 2": f"{ONE} --tp_size 2 --sequence_parallel",
    "fsdp, cp 2": f"{ONE} --cp_size 2 --tp_size 1",
    "fsdp, pp 2": f"{ONE} --pp_size 2 --tp_size 1 --gradient_sync every --pp_microbatches 2",
    "deepspeed, dp 2": f"{TWO} --tp_size 1 --zero_stage 2",
    "deepspeed, tp 2": f"{ONE} --tp_size 2",
    "deepspeed, ulysses 2": f"{ONE} --sp_size 2 --tp_size 1",
    "deepspeed, ulysses 2, stage 3": f"{ONE} --sp_size 2 --tp_size 1 --zero_stage 3",
    "contextddp, dp 2 x cp 2": f"{TWO} --cp_size 2",
    "fsdp, pp 2 x cp 2": f"{ONE} --pp_size 2 --cp_size 2 --tp_size 1 --gradient_sync every",
}
SAMPLES = {"completion": "--labels completion"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """FOLDER/SAMPLES/RUN: two steps of every run, of DDP with its control run, and the reference."""
    folder = tmp_path_factory.mktemp("samples")
    starts, references = {2: [], 4: []}, []
    for samples, told in SAMPLES.items():
        own = folder / samples
        common = [*COMMON, *told.split(), "--capture_dir", str(own), "--loss_output_dir", str(own / "losses")]
        starts[2].append({"strategy": BASELINE, "arguments": [*common, *TWO.split(), "--control"]})
        for name, flags in RUNS.items():
            strategy = CONTEXT if "context" in name else name.split(",")[0]
            arguments = [*common, *flags.split(), "--run_name", run_name(name)]
            starts[parse_config(strategy, arguments).mesh.world_size].append(
                {"strategy": strategy, "arguments": arguments}
            )
        references.append({"strategy": jobs.REFERENCE, "arguments": [*common, *TWO.split()]})
    jobs.start_all_groups([*starts.items(), (None, references)], folder / "work")
    return folder


def run_name(name):
    return name.replace(" ", "").replace(",", "-")


@pytest.mark.parametrize(("samples", "name"), itertools.product(SAMPLES, RUNS))
def test_every_axis_computes_the_same(trained, samples, name):
    own = trained / samples
    result = compared(own, it=own / run_name(name))
    assert result.verdict("it") == "PASS", result.runs["it"].failures[:3]
    files = (BASELINE, run_name(name), CONTROL)
    baseline, it, control = (history.read(history_file(own / "losses", each)) for each in files)
    loss_curves.require_comparable_curves(baseline, it)
    assert loss_curves.compare_curves(baseline, it, loss_curves.tolerance_for(baseline, control)).passed


@pytest.mark.parametrize("samples", SAMPLES)
def test_the_loss_is_the_mean_over_all_labels(trained, samples):
    """One process, plain torch, float64, the whole batch at once."""
    config = parse_config(BASELINE, [*COMMON, *TWO.split(), *SAMPLES[samples].split()])
    inputs = load_inputs(config)
    model = built(inputs.architecture, "eager", seed=config.seed)
    ranks = [inputs.batches.micro_batches(0, rank, "cpu") for rank in range(2)]
    counts = [[int((labels != IGNORED).sum()) for _, labels in micro] for micro in ranks]
    assert len({*counts[0], *counts[1]}) == 4 and sum(counts[0]) != sum(counts[1])
    ids, labels = (torch.cat([pair[part] for micro in ranks for pair in micro]) for part in (0, 1))
    logits = model.double()(ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    run = Dump(trained / samples / BASELINE)
    assert run.steps["1"]["loss"] == pytest.approx(loss.item(), rel=3e-7)
    assert run.contract["loss_is_mean_over"] == [sum(map(sum, counts))]
    for name, parameter in model.named_parameters():
        if not name.endswith("k_proj.bias"):
            error = (run.tensor(1, f"gradient/{name}").double() - parameter.grad).norm()
            assert error < 5e-6 * parameter.grad.norm(), name


OWN = """
from torch.nn.parallel import DistributedDataParallel
from lockstep.inputs.model import causal_lm_loss
from lockstep.training.torch_strategy import TorchStrategy


class Plain(TorchStrategy):
    axes = ("dp",)

    def parallelize(self, model, device_mesh):
        return DistributedDataParallel(model, process_group=device_mesh["dp"].get_group())


class OwnLoss(Plain):
    def loss(self, input_ids, labels):
        return causal_lm_loss(self.wrapped, input_ids, labels)


class OwnCountedLoss(Plain):
    def loss(self, input_ids, labels):
        loss = causal_lm_loss(self.wrapped, input_ids, labels, num_labels=self.num_labels)
        return loss * self.num_shares
"""


@pytest.mark.parametrize(("name", "stopped"), [("OwnLoss", True), ("OwnCountedLoss", False)])
def test_a_loss_that_does_not_count_labels_is_refused(tmp_path, name, stopped):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    arguments = [*COMMON, *TWO.split(), "--labels", "completion"]
    told = {"strategy": f"{path}:{name}", "fault": "none", "arguments": arguments}
    run_ranks(2, "jobs:refused", tmp_path, told)
    said = (tmp_path / "error1.txt").read_text()
    if not stopped:
        assert said == "not stopped"
        return
    assert "loss_is_mean_over is [64, 2, 2], not [" in said and said.endswith("docs/your-own-strategy.md)")


class TestCompletion:
    def test_the_prompt_has_no_labels_and_the_rest_has_its_own(self):
        plain, mine = batches(), with_labels("completion")
        lengths = set()
        for (ids, labels), (same, ours) in zip(
            plain.micro_batches(0, 0, "cpu"), mine.micro_batches(0, 0, "cpu"), strict=True
        ):
            assert torch.equal(ids, same)
            for row, all_labels in zip(ours, labels, strict=True):
                prompt = int((row == IGNORED).sum())
                assert bool((row[:prompt] == IGNORED).all()) and torch.equal(
                    row[prompt:], all_labels[prompt:]
                )
                lengths.add(prompt)
        assert len(lengths) > 4 and max(lengths) <= 48  # three quarters of 64

    def test_the_prompts_depend_on_window_and_seed_alone(self):
        one, other = with_labels("completion"), with_labels("completion", dp_size=1, batch_size=8)
        (own,) = {one.num_labels(0), other.num_labels(0)}
        assert own < one.windows_per_step * 64 and own != with_labels("completion", seed=1).num_labels(0)

    def test_tokens_without_a_label_are_not_counted_as_independent(self):
        assert with_labels("completion").independent_tokens(0) < batches().independent_tokens(0)


def with_labels(labels, **options):
    plain = batches(**options)
    return type(plain)(
        plain.corpus, plain.seed, plain.dp_size, plain.batch_size, plain.num_micro_batches, labels=labels
    )
