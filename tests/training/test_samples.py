"""Samples in which some positions have no label: the loss is the mean over the labels of the global batch, whoever has them."""

import collections
import dataclasses
import shlex
from types import SimpleNamespace

import pytest
import torch
from compared import compared
from families import architecture, built
from ranks import ROOT, run_ranks
from small_inputs import batches

from lockstep.diagnosis.attention import documents_together
from lockstep.diagnosis.case import Case
from lockstep.diagnosis.forward import BATCH_RULES
from lockstep.diagnosis.loss import counted_otherwise
from lockstep.dumps import history
from lockstep.dumps.dump import Dump
from lockstep.ground.errors import UserError
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.samples import IGNORED, PADDING, Samples
from lockstep.plan.command_line import parse_config
from lockstep.plan.config import BASELINE, CONTROL, history_file
from lockstep.plan.mesh import Mesh
from lockstep.running import jobs
from lockstep.training.preflight import load_inputs
from lockstep.verdict import loss_curves
from lockstep.verdict.model_check import keeps_apart

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
SAMPLES = {
    "completion": "--labels completion",
    "right": "--padding right",
    "left": "--padding left --labels completion",
    "apart": "--documents apart",
    "eager, left": "--attn_impl eager --padding left",
    "eager, apart": "--attn_impl eager --documents apart --labels completion",
}
# cp and sp have sdpa alone, and DeepSpeed's Ulysses gives attention no mask.
CASES = [
    *(("completion", name) for name in RUNS),
    *(("right", name) for name in ("fsdp, tp 2", "fsdp, pp 2 x cp 2")),
    *(("left", name) for name in ("fsdp, dp 2", "fsdp, sp 2", "fsdp, cp 2", "fsdp, pp 2", "deepspeed, tp 2")),
    *(("apart", name) for name in ("fsdp, tp 2", "fsdp, sp 2", "fsdp, pp 2", "fsdp, pp 2 x cp 2")),
    *(("apart", name) for name in ("contextddp, dp 2 x cp 2", "deepspeed, dp 2")),
    ("eager, left", "fsdp, pp 2"),
    ("eager, apart", "fsdp, tp 2"),
]


@pytest.fixture(scope="module")
def trained(new_folder):
    """FOLDER/SAMPLES/RUN: two steps of every run, of DDP with its control run, and the reference."""
    folder = new_folder("samples")
    starts, references = collections.defaultdict(list), []  # number of ranks and mesh -> jobs
    for samples, told in SAMPLES.items():
        own = folder / samples
        common = [*COMMON, *told.split(), "--capture_dir", str(own), "--loss_output_dir", str(own / "losses")]
        starts[2, (2,)].append({"strategy": BASELINE, "arguments": [*common, *TWO.split(), "--control"]})
        for name in (name for of, name in CASES if of == samples):
            strategy = CONTEXT if "context" in name else name.split(",")[0]
            arguments = [*common, *RUNS[name].split(), "--run_name", run_name(name)]
            mesh = parse_config(strategy, arguments).mesh
            key = mesh.world_size, tuple(mesh.sizes.values())
            starts[key].append({"strategy": strategy, "arguments": arguments})
        references.append({"strategy": jobs.REFERENCE, "arguments": [*common, *TWO.split()]})
    groups = [(ranks, told) for (ranks, _), told in starts.items()]
    jobs.start_all_groups([*groups, (None, references)], folder / "work")
    return folder


def run_name(name):
    return name.replace(" ", "").replace(",", "-")


@pytest.mark.parametrize(("samples", "name"), CASES)
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
    model = built(inputs.architecture, "sdpa", seed=config.seed)
    ranks = [inputs.batches.micro_batches(0, rank, "cpu") for rank in range(2)]
    counts = [[int((labels != IGNORED).sum()) for _, labels, *_ in micro] for micro in ranks]
    assert len({*counts[0], *counts[1]}) > 2 and sum(counts[0]) != sum(counts[1])
    ids, labels, *further = map(
        torch.cat, zip(*(micro for of_rank in ranks for micro in of_rank), strict=True)
    )
    given = dict(zip(config.samples.further, further, strict=True))
    # with a cache, transformers would not look where positions begin again
    logits = model.double()(ids, use_cache=False, **given).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    run = Dump(trained / samples / BASELINE)
    assert run.steps[1]["loss"] == pytest.approx(loss.item(), rel=3e-7)
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


@pytest.mark.parametrize(
    ("name", "flags", "why"),
    [
        ("OwnLoss", "--labels completion", "loss_is_mean_over is [64, 2, 2], not ["),
        ("OwnCountedLoss", "--labels completion", "not stopped"),
        ("OwnCountedLoss", "--padding left", "also_called_with is [], not ['attention_mask']"),
    ],
)
def test_a_loss_that_does_not_take_such_samples_is_refused(tmp_path, name, flags, why):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    arguments = [*COMMON, *TWO.split(), *flags.split()]
    told = {"strategy": f"{path}:{name}", "fault": "none", "arguments": arguments}
    run_ranks(2, "jobs:refused", tmp_path, told)
    said = (tmp_path / "error1.txt").read_text()
    assert why in said and said.endswith(("not stopped", "docs/your-own-strategy.md)"))


def test_a_forward_backward_for_pairs_is_refused_where_there_are_masks(tmp_path):
    def parsed(name, body):
        path = tmp_path / f"{name}.py"
        path.write_text(f"{OWN}\n    def forward_backward(self, micro_batches):\n        {body}\n")
        return parse_config(f"{path}:OwnCountedLoss", ["--padding", "left", "--device", "cpu"])

    refused = parsed("pairs", "return [self.loss(ids, labels) for ids, labels in micro_batches]")
    with pytest.raises(UserError, match="has a forward_backward of its own .* have attention_mask, too"):
        load_inputs(refused)
    load_inputs(dataclasses.replace(refused, padding="none", labels="completion"))
    load_inputs(parsed("reduces_later", "return super().forward_backward(micro_batches)"))


@pytest.mark.parametrize(
    ("strategy", "flags", "why"),
    [
        ("fsdp", "--padding left --documents apart", "documents see each other; leave one of them out"),
        ("deepspeed", "--sp_size 2 --tp_size 1 --documents apart", "Ulysses gives attention no mask"),
        ("deepspeed", "--sp_size 2 --tp_size 1 --padding right", "Ulysses gives attention no mask"),
        (
            "fsdp",
            f"--tp_size 1 --model {ROOT}/examples/own_model.py:make_model --padding right",
            "is called with ids and labels alone",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(strategy, flags, why):
    config = parse_config(strategy, ["--device", "cpu", *flags.split()])
    with pytest.raises(UserError, match=why):
        inputs = load_inputs(config)
        config.spec.require(config, inputs.architecture)


class Seen:
    """What a rule reads of a run on dp 2 with two micro batches, of which it computed `own` in the place of `reference`."""

    mesh, micro_batches, dump = Mesh(dp=2), 2, SimpleNamespace(contract={})
    pieces, cp_rank_of = Case.pieces, Case.cp_rank_of
    names = SimpleNamespace(logits_gradient="backward/lm_head")

    def __init__(self, first, own, reference, **batch):
        self.first, self.tensors = (
            first,
            {first: own, **{f"batch/{name}": one for name, one in batch.items()}},
        )
        self.path = first.partition("/")[2]
        self._reference, self.rows = reference, {first: SimpleNamespace(tolerated_largest=1e-6)}

    def has(self, name):
        return name in self.tensors

    def own(self, name):
        return self.tensors[name]

    def reference(self, name):
        return self._reference if name == self.first else self.tensors[name]

    def explains(self, _name, value):
        return torch.allclose(self.tensors[self.first], value, rtol=1e-6, atol=0)


class TestCountedOtherwise:
    labels = torch.zeros(4, 8).masked_fill(torch.arange(8) < torch.tensor([[1], [4], [2], [6]]), IGNORED)
    # Of each micro batch: of DP rank 0, then of DP rank 1
    counts = torch.tensor([7.0, 4.0, 6.0, 2.0])
    by_rank = (19 / (2 * torch.tensor([11.0, 11.0, 8.0, 8.0])))[:, None, None]

    def cause(self, weights, labels=labels):
        reference = torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        reference = reference * (labels != IGNORED)[..., None]
        return counted_otherwise(Seen("backward/lm_head", weights * reference, reference, labels=labels))

    @pytest.mark.parametrize(
        ("weights", "said"),
        [
            (
                by_rank,
                "2 DP ranks of means over their own labels (11, 8), not of the mean over all 19 labels",
            ),
            (
                (19 / (2 * torch.tensor([13.0, 6.0, 13.0, 6.0])))[:, None, None],
                "2 micro batches of means over their own labels (13, 6), not",
            ),
            (
                (19 / (4 * counts))[:, None, None],
                "2 DP ranks and 2 micro batches of means over their own labels (7, 4, 6, 2)",
            ),
            (19 / 32, "divided by 32, which is the number of all tokens, not by the 19 labels"),
            (19 / 23, "divided by 23, which is one more for each sequence, not by the 19 labels"),
        ],
    )
    def test_is_named(self, weights, said):
        assert said in self.cause(weights).evidence

    def test_other_weights_are_not(self):
        assert self.cause(self.by_rank * torch.tensor([1.01, 1, 1, 1])[:, None, None]) is None
        assert self.cause(torch.tensor([2.0, 2, 1, 1])[:, None, None]) is None
        assert self.cause(0.5) is None

    def test_where_all_tokens_have_labels_nothing_is(self):
        assert self.cause(19 / 32, labels=torch.zeros(4, 8)) is None


class TestBatch:
    ids = torch.arange(32).view(4, 8)

    @pytest.mark.parametrize("labels_too", [True, False])
    def test_whose_samples_a_dp_rank_was_given(self, labels_too):
        own, labels = (torch.cat([x[2:], x[2:]]) for x in (self.ids, self.ids + 100))
        seen = Seen("batch/input_ids", own, self.ids, labels=labels if labels_too else self.ids + 100)
        right = {"batch/input_ids": self.ids, "batch/labels": self.ids + 100}
        seen.reference, seen.odd_ranks, seen.is_wrong = right.__getitem__, lambda name: [], lambda name: False
        what = "samples of DP rank 1" if labels_too else "input ids of DP rank 1 alone"
        (found,) = (rule(seen) for rule in BATCH_RULES)
        assert found.evidence == f"DP rank 0 was given the {what}"

    def test_labels_alone(self):
        seen = Seen("batch/labels", torch.cat([self.ids[2:], self.ids[2:]]), self.ids)
        seen.odd_ranks = lambda name: []
        (found,) = (rule(seen) for rule in BATCH_RULES)
        assert found.evidence == "DP rank 0 was given the labels of DP rank 1 alone"


class TestDocumentsTogether:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]], True),
            ([[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]], False),  # in a first document, too
            ([[0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1]], False),  # not where a document begins
            ([[0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0]], False),  # only where a document begins
        ],
    )
    @pytest.mark.parametrize("value", [2.0, 0.0])  # where first tokens see nothing, they do not see others
    def test_is_named_where_first_tokens_see_others(self, wrong, named, value):
        reference = torch.ones(2, 6, 3)
        own = torch.where(torch.tensor(wrong)[..., None] > 0, value, reference)
        found = documents_together(
            Seen("forward/attention.input", own, reference, position_ids=self.positions)
        )
        named = named and value > 0
        assert (found is not None) == named
        if found:
            assert "wrong at 3 of 3 first tokens of later ones" in found.evidence


class TestPadding:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_what_is_inside_is_the_text_and_the_rest_has_no_labels(self, side):
        plain, lengths = batches().windows(0, 0)[0], set()
        ((ids, labels, mask), *_) = made(padding=side).micro_batches(0, 0, "cpu")
        for window, *row in zip(plain, ids, labels, mask, strict=True):
            inside = row[2].bool()
            length = int(inside.sum())
            assert torch.equal(inside, inside.sort(descending=side == "right").values)
            assert row[0][inside].tolist() == window[:length].tolist()
            assert row[1][inside].tolist() == window[1 : length + 1].tolist()
            assert set(row[0][~inside].tolist()) <= {PADDING} and set(row[1][~inside].tolist()) <= {IGNORED}
            lengths.add(length)
        assert len(lengths) > 2 and min(lengths) >= 16

    def test_a_prompt_leaves_labels(self):
        ((_, labels, mask), *_) = made(padding="left", labels="completion").micro_batches(0, 0, "cpu")
        assert bool(((labels != IGNORED).sum(1) >= mask.sum(1) / 4).all())


class TestDocuments:
    def test_no_label_is_of_another_document(self):
        ((ids, labels, positions), *_) = made(documents="apart").micro_batches(0, 0, "cpu")
        ((_, all_labels), *_) = batches().micro_batches(0, 0, "cpu")
        last = torch.zeros_like(labels, dtype=bool)
        last[:, :-1] = positions[:, 1:] == 0
        assert torch.equal(labels, all_labels.masked_fill(last, IGNORED)) and int(last.sum()) > len(ids)
        assert bool(((positions.diff() == 1) | (positions[:, 1:] == 0)).all())

    @pytest.mark.parametrize("documents", ["apart", "joined"])
    @pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-mistral", "tiny-gpt2"])
    def test_they_do_not_see_each_other(self, name, documents):
        ((ids, _, positions), *_) = made(documents="apart").micro_batches(0, 0, "cpu")
        given = {"position_ids": positions} if documents == "apart" else {}
        model, number = built(BUILT_IN[name], "sdpa").double(), (positions == 0).cumsum(1)
        other = torch.where(number == 1, ids + 1, ids)  # in the first documents alone
        with torch.no_grad():
            one, two = (model(each, use_cache=False, **given).logits for each in (ids, other))
        alike = torch.allclose(one[number > 1], two[number > 1], rtol=1e-9, atol=1e-12)
        assert alike == (documents == "apart")


@pytest.mark.parametrize(
    ("name", "apart"), [("llama", True), ("mixtral", True), ("mamba2", False), ("gpt_oss", False)]
)
def test_a_model_that_does_not_keep_documents_apart_is_seen(name, apart):
    assert keeps_apart(architecture(name), "eager") == apart


class TestCompletion:
    def test_the_prompt_has_no_labels_and_the_rest_has_its_own(self):
        plain, mine = batches(), made(labels="completion")
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
        one, other = made(labels="completion"), made(labels="completion", dp_size=1, batch_size=8)
        (own,) = {one.num_labels(0), other.num_labels(0)}
        assert own < one.windows_per_step * 64 and own != made(labels="completion", seed=1).num_labels(0)

    def test_tokens_without_a_label_are_not_counted_as_independent(self):
        assert made(labels="completion").independent_tokens(0) < batches().independent_tokens(0)


def made(*, labels="all", padding="none", documents="joined", seed=0, **options):
    return dataclasses.replace(batches(seed=seed, **options), made=Samples(labels, padding, documents, seed))
