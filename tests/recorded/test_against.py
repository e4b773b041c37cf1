"""A run is held against one process on the same samples: --against finds what only a second run shows."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep import judge

SAMPLES, LENGTH, VOCABULARY, STEPS = 8, 12, 64, 4


class LM(torch.nn.Module):
    def __init__(self, eps=1e-5, dropout=0.0):
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(VOCABULARY, 32), torch.nn.LayerNorm(32, eps=eps)
        self.inside, self.head = torch.nn.Linear(32, 32), torch.nn.Linear(32, VOCABULARY)
        self.dropout, self.ranks = torch.nn.Dropout(dropout), 1

    def forward(self, input_ids, labels, attention_mask=None):
        x = self.norm(self.embedding(input_ids))
        x = self.head(x + self.dropout(F.gelu(self.inside(x))))
        return F.cross_entropy(x.flatten(0, 1), labels.flatten()), x


def batches(kind):
    draws = torch.Generator().manual_seed(5)
    for number in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=draws)
        if kind == "samples" or (kind == "samples of step 3" and number == 2):
            ids = ids.flip(1)
        ids, labels = ids[:, :-1], ids[:, 1:].clone()
        lengths = torch.arange(SAMPLES) % 4 + 9
        padding = torch.arange(LENGTH) >= lengths[:, None]
        labels[padding] = -100
        if kind == "mask":
            padding = padding.roll(1, 1)
        yield ids, labels, (~padding).long()


def train(folder, kind="", world=1, rank=0):
    """`kind` is what is not as it should be, if anything."""
    torch.manual_seed(kind == "seed")
    model = LM(1e-3 if kind == "eps" else 1e-5, 0.1 if kind == "dropout" else 0.0)
    model.ranks = world
    if kind == "frozen":
        model.norm.bias.requires_grad = False
    decayed = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim < 2 and one.requires_grad]
    decay = 0.1 if kind == "decay" else 0.0
    optimizer = (torch.optim.Adam if kind == "Adam" else torch.optim.AdamW)(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": decay}],
        lr=2e-3 if kind == "rate" else 1e-3,
        betas=(0.9, 0.95 if kind == "beta" else 0.999),
    )
    with lockstep.record(model, folder):
        wrapped = DistributedDataParallel(model) if world > 1 else model
        for number, batch in enumerate(batches(kind)):
            own = slice(rank, None, world)
            for micro in zip(*(one[own].split(SAMPLES // 2 // world) for one in batch), strict=True):
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    loss, logits = wrapped(*micro)
                # The mean over the tokens of all ranks and micro batches; or each micro batch alike
                counted = (batch[1] != -100).sum()
                total = F.cross_entropy(logits.float().flatten(0, 1), micro[1].flatten(), reduction="sum")
                (loss / 2 if kind == "mean" else total * world / counted).backward()
            if kind == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if kind == "later rate" and number == 2:
                optimizer.param_groups[0]["lr"] *= 3
            optimizer.step()
            optimizer.zero_grad()


def two_ranks(folder, kind):
    train(folder, kind, dist.get_world_size(), dist.get_rank())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    train(folder)
    return folder


def verdict(folder, other, capsys):
    status = judge.main([str(folder), "--against", str(other)])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("kind", ["", "mean"])
def test_two_ranks_against_one_process(tmp_path, capsys, one_process, kind):
    run_ranks(2, "recorded.test_against:two_ranks", tmp_path / "run", kind)
    status, out = verdict(tmp_path / "run", one_process, capsys)
    if kind:
        assert status == 1 and "the gradient differs: " in out
        assert "here it is that of the mean of the ranks' token means" in out
    else:
        assert status == 0, out
        assert "the same weights, samples and settings in 2 steps; the first gradient differs by " in out
        assert "ranks is 2, and 1 there, and the first gradient is the same" in out


def test_the_number_of_ranks_is_no_difference_where_gradients_are_not_compared(tmp_path, capsys):
    train(tmp_path / "one", "dropout")
    run_ranks(2, "recorded.test_against:two_ranks", tmp_path / "two", "dropout")
    status, out = verdict(tmp_path / "two", tmp_path / "one", capsys)
    assert status == 0 and "as the model draws random numbers" in out, out


WRONG = {
    "seed": "step 1 differs from that run: it begins with other weights: embedding.weight by a relative ",
    "samples": "step 1 differs from that run: it trains on 8 samples, and that run on 8; 0 are in both",
    "samples of step 3": "step 3 differs from that run: other samples",
    "mask": "step 1 differs from that run: the samples are the same, and attention_mask of them not",
    "rate": "step 1 differs from that run: lr is 0.002, and 0.001 there",
    "later rate": "step 3 differs from that run: the learning rate is 0.001, 0.003, and 0.001 there",
    "beta": "step 1 differs from that run: betas is (0.9, 0.95), and (0.9, 0.999) there",
    "decay": "weight_decay of head.bias and 3 more is 0.1, and 0.0 there",
    "Adam": "the optimizer is Adam, and AdamW there",
    "clip": "step 1 differs from that run: gradients are clipped to 0.1, and to no bound there",
    "eps": "norm.eps is 0.001, and 1e-05 there",
    "frozen": "step 1 differs from that run: norm.bias is frozen here alone",
    "autocast": "the model is computed in bfloat16, and in float32 there",
    "dropout": "dropout.p is 0.1, and 0.0 there",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_only_a_second_run_shows(tmp_path, capsys, one_process, kind):
    train(tmp_path / "run", kind)
    assert judge.main([str(tmp_path / "run")]) == 0  # by itself
    status, out = verdict(tmp_path / "run", one_process, capsys)
    assert status == 1 and f"FAIL: against {one_process}, " in out and WRONG[kind] in out


def test_padding_of_samples_may_differ(tmp_path, capsys, one_process):
    """Each micro batch is cut to its longest sample."""
    torch.manual_seed(0)
    model = LM()
    model.ranks = 1
    decayed = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    with lockstep.record(model, tmp_path):
        for ids, labels, mask in batches(""):
            order = mask.sum(1).argsort()
            for rows in order.split(SAMPLES // 2):
                longest = int(mask[rows].sum(1).max())
                loss, _ = model(*(one[rows, :longest] for one in (ids, labels, mask)))
                (loss * (labels[rows] != -100).sum() / (labels != -100).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    status, out = verdict(tmp_path, one_process, capsys)
    assert status == 0, out


def test_a_recording_of_another_model_is_refused(tmp_path, capsys, one_process):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lockstep.record(model, tmp_path):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    assert judge.main([str(tmp_path), "--against", str(one_process)]) == 2
    assert "has another model: weight is [2, 4] here and missing there" in capsys.readouterr().err


def drops(folder, seed_of_rank):
    torch.manual_seed(0)
    model = LM(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with lockstep.record(model, folder):
        wrapped, rank = DistributedDataParallel(model), dist.get_rank()
        torch.manual_seed(1 + rank * seed_of_rank)
        for batch in batches(""):
            optimizer.zero_grad()
            wrapped(*(one[rank::2] for one in batch))[0].backward()
            optimizer.step()


@pytest.mark.parametrize("seed_of_rank", [0, 1])
def test_ranks_that_draw_the_same_numbers_are_noted(tmp_path, capsys, seed_of_rank):
    run_ranks(2, "recorded.test_against:drops", tmp_path / "run", seed_of_rank)
    assert judge.main([str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert out.count("ranks 0 and 1 draw the same random numbers") == (seed_of_rank == 0)


class OfPlaces(torch.nn.Module):
    """Of places first, as recurrent layers have them, or of positions beside the samples; one weight is frozen, of integers."""

    def __init__(self):
        super().__init__()
        self.inside, self.embedding = torch.nn.LSTM(4, 8), torch.nn.Embedding(6, 8)
        self.whole = torch.nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)

    def forward(self, x, positions):
        return self.inside(x)[0] * self.whole.float() + self.embedding(positions)[:, None]


@pytest.mark.parametrize("wrong", [False, True])
def test_samples_along_the_second_dim(tmp_path, capsys, wrong):
    def run(folder, sizes, seed):
        torch.manual_seed(0)
        model = OfPlaces()
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)
        draws = torch.Generator().manual_seed(seed)
        with lockstep.record(model, folder):
            for _ in range(2):
                optimizer.zero_grad()
                for x in torch.randn(6, 4, 4, generator=draws).split(sizes, 1):
                    (model(x, torch.arange(6)).square().mean() / (4 // sizes)).backward()
                optimizer.step()

    run(tmp_path / "one", 4, 1)
    run(tmp_path / "two", 2, 1 + wrong)
    status, out = verdict(tmp_path / "two", tmp_path / "one", capsys)
    assert status == wrong and ("; 0 are in both" in out) == wrong, out
