"""Modules, terms of a loss, choices of experts and plain shards of a recorded run."""

import re

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

import lockstep
from lockstep import judge, record
from lockstep.ground.blocks import blocks
from lockstep.recorded import step
from lockstep.recorder.plain_shards import PlainShards
from lockstep.recorder.recording import Recording

MIXTURE = """
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
def grouped():
    return DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=0,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)).train()
def main():
    torch.manual_seed(0)
    net = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.01)).train()
    {before}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        for number in range(2):
            ids = torch.randint(0, 64, (2, 16))
            with torch.autocast("cpu", torch.bfloat16, enabled={autocast}):
                out = net(input_ids=ids, labels=ids)
            loss = {loss}
            loss.backward()
        optimizer.step()
        {after}
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "fields, status, said",
    [
        ({}, 0, "PASS: 2 steps"),
        ({"autocast": True}, 0, "PASS: 2 steps"),
        (
            {
                "before": "net = grouped()",
                "autocast": True,
                "after": "net.model.layers[0].mlp.gate.e_score_correction_bias += torch.randn(8)",
            },
            0,
            "PASS: 2 steps",
        ),
        (
            {"loss": "out.loss / 2 + 0.01 * out.aux_loss"},
            1,
            "FAIL: step 1: aux_loss, a term of the loss, counts 3 times as often as the rest\n",
        ),
        (
            {"loss": "(out.loss - 0.01 * out.aux_loss) / 2"},
            1,
            "FAIL: step 1: aux_loss, a term of the loss, does not count\n",
        ),
        ({"loss": "out.loss"}, 1, "FAIL: step 1: the gradient is 2 times that of the mean over all tokens"),
        (
            {
                "before": "net.model.layers[0].mlp.gate.register_forward_hook(lambda module, given, out: (out[0], out[1], (out[2] + 1) % 8))"
            },
            1,
            "FAIL: step 1: forward/model.layers.0.mlp.gate.2 is another choice than the reference's",
        ),
    ],
)
def test_a_mixture_of_experts(tmp_path, capsys, fields, status, said):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(
        MIXTURE.format(**{"before": "", "after": "", "autocast": False, "loss": "out.loss / 2", **fields})
    )
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output)]) == status
    captured = capsys.readouterr()
    assert said in captured.out, captured.out + captured.err


@pytest.mark.parametrize(
    "rows, cut_bias",
    [
        ([4, 5, 6, 7], True),
        ([0, 1, 4, 5], True),
        ([7, 6, 5, 4], False),
    ],  # half of the rows; packed in groups; in reverse
)
def test_plain_shards_are_found_by_their_content(rows, cut_bias):
    net = torch.nn.Linear(6, 8)
    torch.nn.init.zeros_(net.bias)
    shards = PlainShards(net)
    part = net.weight.detach()[rows]
    gradient = torch.randn(8, 6)
    runs = shards.runs("weight", part.bfloat16())
    whole = torch.zeros(8, 6)
    for (row, _), block in blocks(gradient[rows], runs):
        whole[row : row + len(block)] = block
    assert (
        torch.equal(whole[rows], gradient[rows])
        and not whole[[row for row in range(8) if row not in rows]].any()
    )
    assert shards.runs("weight", gradient[rows]) == runs
    if cut_bias:  # of zeros, so its place is that of the weight's rows
        assert shards.runs("bias", net.bias.detach()[rows]) == [runs[0]]
    assert shards.runs("weight", net.weight.detach()) is None  # whole


def test_a_part_of_other_weights_is_not_found():
    shards = PlainShards(torch.nn.Linear(6, 8))
    assert shards.runs("weight", torch.randn(4, 6)) is None
    assert shards.runs("bias", torch.zeros(3)) is None


DENSE = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
def lower(module, given, out):
    x = given[0].bfloat16()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * module.weight.bfloat16()).to(out.dtype)
def main():
    torch.manual_seed(0)
    net = Qwen2ForCausalLM(Qwen2Config(vocab_size=256, hidden_size={width}, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1)).train()
    layers = net.model.layers
    {before}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        ids = torch.randint(0, 256, (2, {length}))
        with torch.autocast("cpu", torch.bfloat16, enabled={autocast}):
            out = net(input_ids=ids, labels=ids)
        out.loss.backward()
        {after}
        optimizer.step()
if __name__ == "__main__":
    main()
"""
LOWER = "layers[2].input_layernorm.register_forward_hook(lower)"
TWO = f"{LOWER}; layers[0].input_layernorm.register_forward_hook(lower)"
ROUNDED = (
    "layers[2].input_layernorm.register_forward_hook("
    "lambda module, given, out: out.bfloat16().to(torch.bfloat16 if torch.is_autocast_enabled('cpu') else out.dtype))"
)
SCALED = "layers[1].mlp.up_proj.weight.grad.mul_(1.05)"
SLIGHTLY = "layers[1].self_attn.q_proj.weight.grad.mul_(1.003)"
NORM = "layers[1].input_layernorm.weight.grad.mul_(1.001)"
SAMPLE = (
    "layers[1].self_attn.v_proj.register_forward_hook("
    "lambda module, given, out: out.register_hook(lambda g: torch.cat([g[:1], g[1:] * 0.99])) and None)"
)
EPSILON = (
    "mean = lambda x: x.float().pow(2).mean(-1, keepdim=True); layers[2].input_layernorm.register_forward_hook("
    "lambda module, given, out: out * torch.sqrt((mean(given[0]) + 1e-6) / (mean(given[0]) + 1e-5)))"
)
WINDOW = (
    "seen = torch.ones(32, 32, dtype=torch.bool).tril().triu(-29)[None, None]; layers[1].self_attn.register_forward_pre_hook("
    "lambda module, given, more: (given, more | {'attention_mask': seen}), with_kwargs=True)"
)
COLUMNS = (
    "layers[1].mlp.down_proj.register_forward_hook("
    "lambda module, given, out: torch.cat([out[..., :8] * 1.01, out[..., 8:]], -1))"
)
ALONE = (
    "are not what their modules compute from their recorded inputs: ",
    "is not what its module computes from its recorded inputs: ",
)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "before, after, wrong",
    [
        ("", "", set()),
        (LOWER, "", {"layers.2.input_layernorm"}),
        (ROUNDED, "", {"layers.2.input_layernorm"}),
        (TWO, "", {"layers.0.input_layernorm", "layers.2.input_layernorm"}),
        ("", SCALED, {"layers.1.mlp.up_proj"}),
        # In autocast, these are smaller than the rounding errors: the distance hides them, and a projection does not.
        ("", SLIGHTLY, {"layers.1.self_attn.q_proj"}),
        ("", NORM, {"layers.1.input_layernorm"}),
        (SAMPLE, "", {"layers.1.self_attn.v_proj"}),
        # In autocast, where the gradient leaves it: all of that is 1.0003 times too large
        (COLUMNS, "", {"layers.1.mlp"}),
        (EPSILON, "", {"layers.2.input_layernorm"}),
        (WINDOW, "", {"layers.1.self_attn"}),
    ],
)
def test_each_module_by_itself(tmp_path, capsys, before, after, wrong, autocast):
    """One norm in bfloat16 drowns in autocast's rounding errors, unless the module is computed from its own inputs."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    width, length = (256, 128) if before == COLUMNS else (32, 32)
    script.write_text(DENSE.format(before=before, after=after, autocast=autocast, width=width, length=length))
    assert record.main(["--output", str(output), "--steps", "1", str(script)]) == 0
    verdict = step.judge(Recording(output), 1)
    capsys.readouterr()
    assert bool(verdict.wrong) == bool(wrong)
    found = [row.name for row in verdict.alone if row.too_far]
    assert {one for one in wrong if any(one in name for name in found)} == wrong
    assert len(found) <= 6 * len(wrong)
    if before == COLUMNS:
        assert "forward/model.layers.1.mlp.down_proj" in found
    if wrong:
        assert any(one in sentence for one in ALONE for sentence in verdict.wrong)
    right = {row.name for row in verdict.alone if not row.too_far}
    follow = sum(row.too_far and row.name in right for row in verdict.rows)
    assert (
        f"; {follow} more are too far from the reference, but right by themselves" in str(verdict.wrong)
        or follow < 2
    )
    if autocast and before == LOWER:  # the free pass does not see it
        assert not any("forward" in row.name for row in verdict.rows if row.too_far)
    if autocast and (after in (SLIGHTLY, NORM) or before == SAMPLE):
        assert not any(row.too_far for row in verdict.rows)
        assert any("times what a factor may be off by)" in sentence for sentence in verdict.wrong)


def test_the_report_lists_all_that_is_wrong_by_itself(tmp_path, capsys):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(DENSE.format(before=TWO, after="", autocast=False, width=32, length=32))
    assert record.main(["--output", str(output), "--steps", "1", str(script)]) == 0
    assert judge.main([str(output)]) == 1
    verdict = step.judge(Recording(output), 1)
    capsys.readouterr()
    report = (output / "report.md").read_text()
    listed = re.findall(r"^\| 1 \| (\S+) \| ", report, re.MULTILINE)
    assert listed == [row.name for row in verdict.alone if row.too_far] and len(listed) == 4


@pytest.mark.parametrize("dropped", ["first", "second"])
def test_a_dropped_residual_in_autocast(tmp_path, monkeypatch, capsys, dropped):
    """The layer's output is then bfloat16, and what follows computes in that, as it should."""
    whole = Qwen2DecoderLayer.forward

    def forward(layer, hidden_states, **options):
        if layer.self_attn.layer_idx != 2:
            return whole(layer, hidden_states, **options)
        attended, _ = layer.self_attn(layer.input_layernorm(hidden_states), **options)
        if dropped != "first":
            attended = attended + hidden_states
        returned = layer.mlp(layer.post_attention_layernorm(attended))
        return returned if dropped == "second" else returned + attended

    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(DENSE.format(before="", after="", autocast=True, width=32, length=32))
    with monkeypatch.context() as patched:
        patched.setattr(Qwen2DecoderLayer, "forward", forward)
        assert record.main(["--output", str(output), "--steps", "1", str(script)]) == 0
    verdict = step.judge(Recording(output), 1)
    found = {row.name for row in verdict.alone if row.too_far and row.name.startswith("forward/")}
    assert found and all("layers.2" in name for name in found), found


OWN = """
import copy, functools, io
import torch
from torch import nn
import torch.nn.functional as F

@torch.jit.script
def scripted(x):
    return x.float() * torch.sigmoid(1.7 * x)

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.balance, self.state, self.length, self.angles, self.p = None, None, 0, None, 3.0
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x):
        if self.length != x.shape[1]:
            self.length, self.angles = x.shape[1], torch.arange(x.shape[1]).cos()[:, None]
        if self.mask is None:
            self.register_buffer("mask", torch.ones(8).cumsum(0), persistent=False)
        if not hasattr(self, "tables"):
            self.tables = {{}}
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1]).sin()[:, None]
        gate = torch.sigmoid(self.gate(x)) / self.mask
        before, self.state = self.state, x.detach().mean((0, 1))
        self.balance = gate.mean((0, 1)).square().sum()
        return self.drop(x * gate * self.angles + self.tables[x.shape[1]] + (0 if before is None else before))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.take, self.mixer, self.give = nn.Linear(4, 8), Mixer(), nn.LazyLinear(3)
        self.teacher = nn.Linear(4, 8).requires_grad_(False)

    def forward(self, words, /, *more):
        (x,) = more
        {in_forward}
        y = self.mixer(scripted(self.take(x)) + words[:, None, None] / 100)
        return {{"y": self.give(y), "target": self.teacher(x.to(self.teacher.weight.dtype)).mean(-1) * TWICE}}

def louder(module, given, out):
    return out * 1.001

def steeper(module, given, out):
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * 1.01)

def scaled(forward):
    @functools.wraps(forward)
    def call(*given):
        out = forward(*given)
        return {{**out, "target": out["target"] * 1.01}}
    return call

def main():
    torch.manual_seed(0)
    net = Net(){dtype}
    net.mixer.drop.eval()
    net(torch.zeros(2), torch.zeros(2, 5, 4){dtype})
    net.mixer.balance = None
    {before}
    optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(2):
            x = torch.randn(2, 5, 4){dtype}
            out = net(torch.randint(0, 3, (2,)), x)
            loss = (out["y"].square().mean(-1) - out["target"]).square().mean() + net.mixer.balance
            (loss / 2).backward()
        optimizer.step()
        net.mixer.balance, file = None, io.BytesIO()
        torch.save(copy.deepcopy(net), file)
        assert b"lockstep" not in file.getvalue().replace(b"lockstep.no_hook", b"")
        with torch.no_grad():
            copy.deepcopy(net)(torch.zeros(2), x)
TWICE = 2
if __name__ == "__main__":
    main()
"""
MOVES = "self.teacher.weight.data.lerp_(self.take.weight.data, 0.5)"


@pytest.mark.parametrize("dtype", ["", ".double()"])
@pytest.mark.parametrize(
    "fields, status, said",
    [
        ({}, 0, "PASS: 2 steps"),
        ({"before": "net.teacher.double()"}, 0, "PASS: 2 steps"),
        ({"before": "net.mixer.register_forward_hook(louder)"}, 1, "forward/mixer"),
        ({"before": "net.mixer.gate.register_forward_hook(steeper)"}, 1, "backward/mixer.gate"),
        ({"before": "Net.forward = scaled(Net.forward)"}, 1, "forward/returned.target"),
        (
            {"in_forward": MOVES},
            2,
            "teacher.weight requires no gradient, and is not what it was when the step",
        ),
    ],
)
def test_a_model_that_keeps_things(tmp_path, capsys, fields, status, said, dtype):
    """Tables and states that a forward pass makes, a loss that it leaves, a target without a gradient, samples by rows, copies of the model."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(OWN.format(**{"in_forward": "pass", "before": "", "dtype": dtype, **fields}))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output)]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err, captured.out + captured.err


ODD = """
import torch
from torch import nn
import torch.nn.functional as F

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.inner.weight.data.mul_(0.3)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.take, self.cell, self.give = nn.Linear(4, 8), Cell(), nn.Linear(8, 3)
        self.teacher = nn.Linear(4, 8).requires_grad_(False)

    def forward(self, x):
        taken = torch.func.vmap(self.take)(x)
        with torch.no_grad():
            z = torch.zeros_like(taken)
            for _ in range(60):
                z = self.cell(z, taken)
        z = self.cell(z, taken)
        last = z.detach().requires_grad_()
        again = self.cell(last, taken)
        def solve(gradient):
            found = gradient
            for _ in range(60):
                found = torch.autograd.grad(again, last, found, retain_graph=True)[0] + gradient
            return found
        z.register_hook(solve)
        return F.mse_loss(self.give(z).mean(-1), self.teacher(x).mean(-1).detach()), z

def louder(module, given, out):
    return out * 1.001

def steeper(module, given, out):
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * 1.01)

def main():
    torch.manual_seed(0)
    net = Net()
    {before}
    optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr={rate})
    for step in range(3):
        optimizer.zero_grad()
        for number in range(2):
            loss, hidden = net(torch.randn(6, 4))
            if number or {first}:
                asked = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
                assert asked.any()
                (loss / 2).backward()
        optimizer.step()
        with torch.no_grad():
            net.teacher.weight.lerp_(net.take.weight, 0.01)
            net.teacher.bias.lerp_(net.take.bias, {share})
if __name__ == "__main__":
    main()
"""
TRIAL = "net(torch.randn(6, 4))"
COPY = "net.teacher.load_state_dict(net.take.state_dict())"


@pytest.mark.parametrize(
    "fields, status, said",
    [
        ({}, 0, "moved by 0.01 to 0.01 of the way to trained weights"),
        # Where it has been a copy, what it moves by may be no more than rounding errors.
        ({"before": COPY, "rate": 1e-5}, 0, "teacher.weight changed by rounding errors alone"),
        (
            {"before": "net.teacher.requires_grad_()"},
            0,
            "moved by 0.01 to 0.01 of the way to trained weights",
        ),
        ({"share": 1.0}, 1, "changed between the update of step 1"),
        ({"before": TRIAL}, 0, "the first call of the model counts for nothing"),
        ({"first": "False"}, 1, "micro batch 0 of rank 0 does not count"),
        ({"first": "False", "before": TRIAL}, 1, "micro batch 1 of rank 0 does not count"),
        ({"before": "net.take.register_forward_hook(louder)"}, 1, "forward/cell.inner@61 (micro batch 0"),
        ({"before": "net.cell.register_forward_hook(steeper)"}, 1, "backward/cell"),
        ({"share": 0.02}, 1, "teacher.bias and teacher.weight changed between the update of step 1"),
    ],
)
def test_a_model_with_oddities(tmp_path, capsys, fields, status, said):
    """Gradients of a fixed point, solved for in a hook; a module inside of vmap; a teacher that is an average; a trial before the training;
    a gradient that the loop asks for at what the model returns."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(ODD.format(**{"before": "pass", "first": True, "share": 0.01, "rate": 1e-2, **fields}))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output)]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err, captured.out + captured.err


PARTS = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.back = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x):
        mean, spread = self.code(x).chunk(2, -1)
        rebuilt, size = F.mse_loss(self.back(mean), x), mean.square().mean()
        balance = size.square() + spread.square().mean()
        return {{"loss": rebuilt + 0.1 * balance, "rebuilt": rebuilt, "size": size, "balance": balance}}

def main():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        out = net(torch.randn(16, 12))
        (out["loss"] + {more}).backward()
        optimizer.step()
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "more, status, said", [("0", 0, "PASS: 2 steps"), ("out['balance']", 1, "FAIL: step 1: ")]
)
def test_a_loss_that_is_returned_with_its_parts_and_theirs(tmp_path, capsys, more, status, said):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(PARTS.format(more=more))
    assert record.main(["--output", str(output), str(script)]) == 0
    assert judge.main([str(output)]) == status
    assert said in capsys.readouterr().out


def test_a_weight_that_no_optimizer_holds_is_named_before_the_norm_without_it(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
    with lockstep.record(net, tmp_path, steps=1):
        net(torch.randn(8, 4)).square().mean().backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in net[1].parameters()])
        torch.nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, norm)
        optimizer.step()
    unheld, clipped = step.judge(Recording(tmp_path), 1).wrong
    assert unheld == "no optimizer holds 0.bias and 0.weight, with a gradient each"
    assert clipped.startswith("the gradient was clipped by a norm of")
