"""What public training scripts do that was judged wrongly at first, each in a few lines, beside what it must not hide."""

import copy
import decimal

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from trained import train, verdict

import lockstep
from lockstep import record
from lockstep.recorder.recording import Recording


def trained(folder, net, batches, between=lambda net: None, loss=lambda out: out.square().mean()):
    """`batches` makes what the model is called with; `between` is called after each update."""
    train(folder, net, lambda net: loss(net(*batches())).backward(), rate=1e-2, after=between)


def changed_between(net, kind):
    """What a loop does with the weights of two layers after each update."""
    with torch.no_grad():
        if kind == "merged":
            moved = net[2].weight * 0.3
            net[0].weight += moved
            net[0].weight -= moved
        elif kind == "normalised":
            net[2].weight.copy_(F.normalize(net[2].weight, dim=1))
        elif kind == "pruned":
            net[2].weight[net[2].weight.abs() < 0.1] = 0
        elif kind == "undone":
            net[2].weight[:4] = 0
        elif kind == "scaled":
            net[2].weight.mul_(1.001)
        elif kind == "frozen moves":
            net[0].weight += 1e-4 * net[2].weight


@pytest.mark.parametrize(
    "kind, status, said",
    [
        ("merged", 0, "note: 0.weight changed by rounding errors alone"),
        ("normalised", 0, "note: 2.weight was normalised"),
        ("pruned", 0, "elements of 2.weight were set to 0"),
        ("undone", 1, "FAIL: step 2: 2.weight changed between the update of step 1 and step 2"),
        ("scaled", 1, "FAIL: step 2: 2.weight changed between the update of step 1 and step 2"),
        ("frozen moves", 1, "FAIL: step 2: 0.weight changed between the update of step 1 and step 2"),
    ],
)
def test_weights_that_a_loop_changes_on_purpose(tmp_path, capsys, kind, status, said):
    """Adapters that are merged and taken off again, prototypes, masks; and what is none of these."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    net[0].weight.requires_grad = False
    net[2].weight.data[:4] *= kind != "undone"
    trained(tmp_path, net, lambda: (torch.randn(4, 8),), lambda net: changed_between(net, kind))
    found, out = verdict(tmp_path, capsys)
    assert found == status and said in out, out


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inside = nn.Embedding(12, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, ids):
        return self.head(self.inside(self.embedding(ids))[0])


class Masked(LM):
    """Returns its loss, a masked mean, too."""

    def forward(self, ids, labels, mask):
        logits = super().forward(ids)
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return logits, (each * mask).sum() / (mask.sum() + 1e-4)


class Sees(LM):
    """As many tokens stand for an image as it has parts."""

    def forward(self, ids, image, labels):
        x = self.embedding(ids).clone()
        x[ids == 4] = image.flatten(0, 1)
        logits = self.head(self.inside(x)[0])
        return logits, F.cross_entropy(logits.transpose(1, 2), labels)


@pytest.mark.parametrize("shift, status, said", [(1, 0, "PASS"), (0, 1, "labels are not shifted")])
def test_labels_of_a_masked_mean(tmp_path, capsys, shift, status, said):
    def batch():
        ids = torch.randint(12, (2, 13))
        return ids[:, :-1], ids[:, shift : shift + 12], (torch.arange(12) > 2).expand(2, 12)

    torch.manual_seed(0)
    trained(tmp_path, Masked(), batch, loss=lambda out: out[1])
    found, out = verdict(tmp_path, capsys)
    assert found == status and said in out, out


def test_tokens_that_stand_for_an_image(tmp_path, capsys):
    def batch():
        ids = torch.randint(5, 12, (2, 13))
        ids[:, 2:5] = 4
        return ids[:, :-1], torch.randn(2, 3, 16), ids[:, 1:]

    torch.manual_seed(0)
    trained(tmp_path, Sees(), batch, loss=lambda out: out[1])
    status, out = verdict(tmp_path, capsys)
    assert status == 0, out


@pytest.mark.parametrize("times, status", [(1, 0), (2, 1)])
def test_a_sum_over_the_tokens_of_each_sample(tmp_path, capsys, times, status):
    def loss(out):
        labels = torch.randint(12, out.shape[:2])
        labels[0, :5] = -100
        return times * F.cross_entropy(out.transpose(1, 2), labels, reduction="none").sum(1).mean()

    torch.manual_seed(0)
    trained(tmp_path, LM(), lambda: (torch.randint(12, (4, 9)),), loss=loss)
    found, out = verdict(tmp_path, capsys)
    assert found == status and ("over all samples of the sums over their tokens" in out) == (not status), out


def test_a_step_without_a_label_is_not_said_to_be_set_to_zero(tmp_path, capsys):
    def loss(out):
        return F.cross_entropy(out.flatten(0, 1), torch.full((36,), -100), reduction="sum") + 0 * out.sum()

    torch.manual_seed(0)
    trained(tmp_path, LM(), lambda: (torch.randint(12, (4, 9)),), loss=loss)
    status, out = verdict(tmp_path, capsys)
    assert status == 2 and "no label counts" in out, out


class Hidden(nn.Module):
    """Keeps a hidden output by a hook that it registers in its first call."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Linear(8, 4)
        self.kept, self.registered = {}, False

    def keep(self, _module, _inputs, output):
        self.kept["hidden"] = output

    def forward(self, x):
        if not self.registered:
            self.body[1].register_forward_hook(self.keep)
            self.registered = True
        self.body(x)
        return self.head(self.kept.pop("hidden"))


class Saves(nn.Module):
    """The loop puts tensors of its own into a list that is an attribute."""

    def __init__(self):
        super().__init__()
        self.net, self.saved = nn.Linear(8, 4), []

    def forward(self, x):
        return self.net(x).softmax(-1)


class Reads(nn.Module):
    """Reads a number of an object that is of no package of its own, and perhaps the object's class."""

    def __init__(self, asks):
        super().__init__()
        self.net, self.asks, self.context = nn.Linear(8, 4), asks, decimal.Context(prec=3)

    def forward(self, x):
        if self.asks and isinstance(self.context, decimal.Context):
            x = 2 * x
        return self.net(x) * self.context.prec


class Turned(nn.Module):
    """Its result is what rounding leaves of a number near 0, and its weight has its columns beside each other in memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0])
        self.net = nn.Linear(8, 8)

    def forward(self, x):
        return self.net(x @ self.weight) + torch.linalg.slogdet(self.weight)[1]


@pytest.mark.parametrize(
    "make, status, said",
    [
        (Hidden, 0, "PASS"),
        (lambda: Reads(False), 0, "PASS"),
        (lambda: Reads(True), 2, "what the class is of an object that was left out is not known"),
        (Turned, 0, "PASS"),
    ],
)
def test_models_with_oddities(tmp_path, capsys, make, status, said):
    torch.manual_seed(0)
    trained(tmp_path, make(), lambda: (torch.randn(6, 8),))
    found, out = verdict(tmp_path, capsys)
    assert found == status and said in out, out


def test_the_order_of_dims_in_memory_is_recorded(tmp_path, capsys):
    torch.manual_seed(0)
    trained(tmp_path, Turned(), lambda: (torch.randn(8, 6).T,))
    step = Recording(tmp_path).steps[0][0]
    assert step.orders == {"weight": [1, 0]} and step.micro_batches[0].orders == {"x": [1, 0]}
    assert verdict(tmp_path, capsys)[0] == 0


def test_tensors_that_the_loop_keeps_in_the_model(tmp_path, capsys):
    def go_backward(net):
        for _ in range(3):
            drawn = torch.distributions.Categorical(net(torch.randn(1, 8)))
            net.saved.append(drawn.log_prob(drawn.sample()))
        (-torch.cat(net.saved) * torch.randn(3)).sum().backward()

    torch.manual_seed(0)
    train(tmp_path, Saves(), go_backward, after=lambda net: net.saved.clear())
    status, out = verdict(tmp_path, capsys)
    assert status == 0, out


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [
            one
            for number in range(12)
            for one in (
                nn.Conv2d(8 if number else 3, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
            )
        ]
        self.body, self.out = nn.Sequential(*layers), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.out(self.body(x))


def test_a_weight_in_16_bits_is_off_by_rounding_alone(tmp_path, capsys):
    """The gradient at the logits depends on the run's rounding errors, so measured weights of losses are biased."""

    def loss(out):
        labels = torch.randint(2, (2, 32, 32))
        likely, wanted = F.softmax(out, 1).float(), F.one_hot(labels, 2).permute(0, 3, 1, 2)
        both = 2 * (likely * wanted).sum()
        return F.cross_entropy(out, labels) + 1 - (both + 1e-6) / (likely.sum() + wanted.sum() + 1e-6)

    torch.manual_seed(0)
    # Whose weights would be those of the first step
    with torch.autocast("cpu", cache_enabled=False):
        trained(tmp_path, Convolved(), lambda: (torch.rand(2, 3, 32, 32),), loss=loss)
    status, out = verdict(tmp_path, capsys)
    assert status == 0, out


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))


def noised(folder, kind):
    """As diffusion: noise hides that the loaders give all ranks the same."""
    net, data = small(), TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    sampler = None if kind == "wrong" else DistributedSampler(data, shuffle=False)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    with lockstep.record(net, folder):
        ddp = DistributedDataParallel(net)
        for (x,) in DataLoader(data, 4, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(ddp(x + torch.randn_like(x)), x).backward()
            optimizer.step()


def left_early(folder, kind):
    """Epochs of 6 of 8 batches."""
    net, data = small(), TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    with lockstep.record(net, folder):
        ddp = DistributedDataParallel(net)
        for epoch in range(2):
            sampler.set_epoch(0 if kind == "wrong" else epoch)
            for number, (x,) in enumerate(loader):
                if number == 6:
                    break
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()


def adversary(folder, kind):
    """A second model, whose optimizer is its own, and which DDP may not be around."""
    net, other = small(), small()
    optimizers = [torch.optim.Adam(one.parameters(), 1e-3) for one in (net, other)]
    torch.manual_seed(dist.get_rank())
    with lockstep.record(net, folder):
        ddp = DistributedDataParallel(net)
        judged = other if kind == "wrong" else DistributedDataParallel(other)
        for _ in range(2):
            made = ddp(torch.randn(4, 8))
            optimizers[1].zero_grad()
            judged(made.detach()).square().mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            judged(made).mean().backward()
            optimizers[0].step()


def casts_inputs(folder, kind):
    """FSDP2 casts inputs of float32 to the dtype of its parameters."""
    net = small()
    torch.manual_seed(dist.get_rank())
    with lockstep.record(net, folder):
        fully_shard(
            net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        )
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(4, 8)
            loss = F.mse_loss(net(x).float(), x)
            (loss * (2 if kind == "wrong" else 1)).backward()
            optimizer.step()


SAID = {
    noised: "the loaders give ranks 0 and 1 the same samples",
    left_early: "samples were seen again after 48 different ones",
    adversary: "has another gradient on each: it was not reduced",
    casts_inputs: "2 times that of the mean over all elements",
}


def both(folder, _):
    for loop in SAID:
        for kind in ("right", "wrong"):
            loop(folder / loop.__name__ / kind, kind)


@pytest.fixture(scope="module")
def runs(new_folder):
    folder = new_folder("public")
    run_ranks(2, "recorded.test_public_scripts:both", folder)
    return folder


@pytest.mark.parametrize("loop", SAID)
def test_loops_on_two_ranks(runs, loop, capsys):
    status, out = verdict(runs / loop.__name__ / "right", capsys)
    assert status == 0, out
    status, out = verdict(runs / loop.__name__ / "wrong", capsys)
    assert status == 1 and SAID[loop] in out, out


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        return self.net(x)


def test_a_weight_with_one_row_is_not_said_to_be_normalised(tmp_path, capsys):
    def halve(net):
        with torch.no_grad():
            net[2].weight.mul_(0.5)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    trained(tmp_path, net, lambda: (torch.randn(4, 8),), halve)
    status, out = verdict(tmp_path, capsys)
    assert status == 1 and "2.weight changed between the update of step 1 and step 2" in out, out


def test_an_update_that_is_undone_in_16_bits(tmp_path, capsys):
    """Rows that are drawn have norms within a few percent of each other, and rounding is no less than that of an update."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64).bfloat16()
    begun = net.weight.detach().clone()
    trained(tmp_path, net, lambda: (torch.randn(4, 64).bfloat16(),), lambda net: net.weight.data.copy_(begun))
    status, out = verdict(tmp_path, capsys)
    assert status == 1 and "weight changed between the update of step 1 and step 2" in out, out


def test_a_recording_is_not_put_beside_its_script(tmp_path, capsys):
    """Whose code the judge would not run."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it runs')")
    assert record.main(["--output", str(tmp_path), str(script)]) == 2
    assert "the script is in this folder" in capsys.readouterr().err


def test_an_average_of_another_shape_is_compared_with_its_own_layer(tmp_path, capsys):
    """Two layers have one shape, and the average of each moves to its own."""

    def follow(net):
        with torch.no_grad():
            for one, other in zip(net.average.parameters(), net.net.parameters(), strict=True):
                one.lerp_(other, 0.02)

    torch.manual_seed(0)
    trained(tmp_path, Averaged(), lambda: (torch.randn(4, 8),), follow)
    status, out = verdict(tmp_path, capsys)
    assert status == 0 and "moved by 0.02 to 0.02 of the way to trained weights" in out, out
