"""flash_attn's kernels need a GPU: what a run computed with them is judged by the same attention in plain torch."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from ranks import ROOT
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lockstep import judge
from lockstep.ground.errors import UserError
from lockstep.verdict import gpu_kernels
from lockstep.verdict.float64 import Float64

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Stands in for the package of that name, as a GPU has it.
FLASH = """
import torch.nn.functional as F
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return {times} * F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
"""
CALLS_FLASH = """
from flash_attn import flash_attn_func
def attention(q, k, v):
    return flash_attn_func(q, k, v, causal=True)
"""
CALLS_FLEX = """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
import numbers_of_a_gpu
flex_attention = torch.compile(flex_attention)
def attention(q, k, v):
    device = numbers_of_a_gpu.Own.DEVICE
    q = (q + torch.zeros(1, device=device) + torch.zeros(1).to(device)).to(device=device)
    q = q.cuda() if device == "cuda" else q
    mask = create_block_mask(lambda batch, head, query, key: query >= key, None, None, q.shape[1], q.shape[1], device="cpu")
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    flexible = numbers_of_a_gpu.Own.TIMES * flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return flexible + scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
"""
# CPUs do not differentiate it, do not compile it, and have neither that kernel nor that device. The judge would be given plain values of the file.
FLEX = """
import sys
import torch
from torch.nn.attention import flex_attention
class Own:
    TIMES, DEVICE = 1.0, "cuda"
if "lockstep.judge" not in sys.modules:
    Own.TIMES, Own.DEVICE = {times}, "cpu"
    flex_attention._validate_device = lambda *_: None
    torch.nn.attention._sdpa_kernel = lambda *_, **__: None
    torch.compiler.set_stance("force_eager")
"""
SCRIPT = """
import torch
{calls}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32), torch.nn.Linear(16, 32)
    def forward(self, ids):
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (8, 4)).split([4, 2, 2], 2)
        return self.out(attention(q, k, v).flatten(2))
def main():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        ids = torch.randint(0, 32, (4, 9))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
if __name__ == "__main__":
    main()
"""


def recorded(folder):
    """The recording of the folder's script, as of a GPU."""
    command = [sys.executable, "-m", "lockstep.record", "--output", str(folder / "run"), "train.py"]
    subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, check=True)
    about = folder / "run" / "model.json"
    about.write_text(about.read_text().replace('"device": "cpu"', '"device": "cuda:0"'))
    return folder / "run"


@pytest.mark.parametrize(
    "file, kernel, calls", [("flash_attn.py", FLASH, CALLS_FLASH), ("numbers_of_a_gpu.py", FLEX, CALLS_FLEX)]
)
@pytest.mark.parametrize(
    "times, status, said",
    [(1.0, 0, "PASS: 2 steps"), (1.01, 1, "FAIL: step 1: forward/out (micro batch 0, rank 0) is the")],
)
def test_a_model_that_calls_kernels_is_judged(tmp_path, capsys, file, kernel, calls, times, status, said):
    (tmp_path / file).write_text(kernel.format(times=times))
    (tmp_path / "train.py").write_text(SCRIPT.format(calls=calls))
    assert judge.main([str(recorded(tmp_path))]) == status
    assert said in capsys.readouterr().out.splitlines()[-1]
    assert "flash_attn" not in sys.modules
    sys.modules.pop("numbers_of_a_gpu", None)


CALLS_AUTOCAST = """
import torch
import numbers_of_a_gpu
@torch.autocast(numbers_of_a_gpu.Own.DEVICE, enabled=False)
def scores(q, k):
    found = q.float() @ k.float().transpose(1, 2)
    return found.masked_fill(torch.ones_like(found).triu(1).bool(), -1e9).softmax(-1)
def attention(q, k, v):
    q, k, v = (one.flatten(2)[..., :8] for one in (q, k, v))
    with torch.autocast(numbers_of_a_gpu.Own.DEVICE, torch.bfloat16):
        q, k = 3 * (q @ torch.eye(8)), k @ torch.eye(8)
        return torch.cat([numbers_of_a_gpu.Own.TIMES * scores(q, k) @ v, v], -1).float()
"""
CUDA = """
import sys
class Own:
    TIMES, DEVICE = 1.0, "cuda"
if "lockstep.judge" not in sys.modules:
    Own.TIMES, Own.DEVICE = {times}, "cpu"
"""


@pytest.mark.parametrize(("times", "status"), [(1.0, 0), (1.05, 1)])
def test_code_that_turns_autocast_on_and_off(tmp_path, capsys, monkeypatch, times, status):
    (tmp_path / "numbers_of_a_gpu.py").write_text(CUDA.format(times=times))
    (tmp_path / "train.py").write_text(SCRIPT.format(calls=CALLS_AUTOCAST))
    assert judge.main([str(recorded(tmp_path))]) == status, capsys.readouterr().out
    sys.modules.pop("numbers_of_a_gpu", None)


@torch.amp.custom_fwd(device_type="cuda")
def forwards(ctx, x):
    return x @ x


def test_code_that_asks_for_the_state_of_autocast():
    """On a machine without a GPU, as the judge's, torch says for "cuda" that it is off, and turns nothing on."""
    x, ctx = torch.eye(2), torch.nn.Module()
    with gpu_kernels.in_place("cuda:0"):
        assert not torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") == torch.float16  # unless told
            assert forwards(ctx, x).dtype == ctx._dtype == torch.float16
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda"):
            assert (x @ x).dtype == torch.get_autocast_dtype("cuda") == torch.bfloat16
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.is_autocast_enabled("cuda")


def test_processes_that_judge_steps_compute_it_as_well(tmp_path, capsys):
    (tmp_path / "flash_attn.py").write_text(FLASH.format(times=1.01))
    (tmp_path / "train.py").write_text(SCRIPT.format(calls=CALLS_FLASH))
    run = recorded(tmp_path)
    assert judge.main([str(run), "--workers", "2"]) == 1
    assert "FAIL: step 1: forward/out" in capsys.readouterr().out


def test_nothing_stands_in_for_what_a_cpu_had():
    with gpu_kernels.in_place("cpu"):
        assert "flash_attn" not in sys.modules


def packed():
    ids = torch.randint(0, 64, (1, 20))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(7), torch.arange(13)])[None]}


def padded():
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5], mask[1, 14:] = 0, 0
    return {"input_ids": torch.randint(0, 64, (2, 20)), "attention_mask": mask}


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn2", "flex_attention"])
@pytest.mark.parametrize("given", [packed, padded])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_a_model_of_transformers_computes_what_it_does_without_them(name, given, kind):
    """Gemma 2 has a window and a soft cap."""
    torch.manual_seed(0)
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).double()
    else:
        config = Gemma2Config(
            **SIZES, head_dim=8, sliding_window=4, query_pre_attn_scalar=8, attn_logit_softcapping=0.1
        )
        model = Gemma2ForCausalLM(config).double()
    batch = given()
    model.config._attn_implementation = "eager"
    with Float64():
        right = model(**batch, use_cache=False).logits
    model.config._attn_implementation = name
    assert gpu_kernels.choose(model) == [name]
    with gpu_kernels.in_place("cuda:0"), Float64():
        found = model(**batch, use_cache=False).logits
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    assert (found - right)[seen].abs().max() < 1e-12 < right[seen].abs().max()
    assert gpu_kernels.choose(model) == ([] if name == "flex_attention" else [gpu_kernels.LOADED])


def test_attention_in_plain_torch():
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 9, 2, 8, dtype=torch.float64)
    offset = torch.arange(9) - torch.arange(5)[:, None] - 4
    options = {"enable_gqa": True, "scale": 0.3}

    def right(seen):
        q_, k_, v_ = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q_, k_, v_, seen, **options).transpose(1, 2)

    same = torch.testing.assert_close
    same(gpu_kernels.flash_attn_func(q, k, v, softmax_scale=0.3), right(offset > -99))
    same(gpu_kernels.flash_attn_func(q, k, v, softmax_scale=0.3, causal=True), right(offset <= 0))
    found = gpu_kernels.flash_attn_func(q, k, v, softmax_scale=0.3, window_size=(2, 1))
    same(found, right((offset >= -2) & (offset <= 1)))
    kv = torch.stack([k, v], 2)
    same(gpu_kernels.flash_attn_kvpacked_func(q, kv, softmax_scale=0.3, causal=True), right(offset <= 0))
    ends = torch.tensor([0, 5, 10]), torch.tensor([0, 9, 18])
    flat = gpu_kernels.flash_attn_varlen_kvpacked_func(
        q.flatten(0, 1), kv.flatten(0, 1), *ends, 5, 9, softmax_scale=0.3, causal=True
    )
    same(flat, right(offset <= 0).flatten(0, 1))
    qkv = torch.stack([k, k, v], 2)
    whole = gpu_kernels.flash_attn_func(k, k, v, causal=True)
    same(gpu_kernels.flash_attn_qkvpacked_func(qkv, causal=True), whole)
    flat = gpu_kernels.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), ends[1], 9, causal=True)
    same(flat, whole.flatten(0, 1))
    # A query that sees nothing gives zeros; a sink takes its part.
    early = gpu_kernels.flash_attn_func(k, q[..., :2, :], q[..., :2, :], causal=True)
    assert not early[:, :4].any() and early[:, 4:].all()
    sink = gpu_kernels.flash_attn_func(k, k, v, s_aux=torch.full((2,), 99.0))
    assert sink.abs().max() < 1e-9 < whole.abs().max()


@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.1}, {"alibi_slopes": torch.ones(4)}, {"return_attn_probs": True}]
)
def test_what_is_not_known_is_refused(options):
    q = torch.randn(1, 3, 4, 8)
    with pytest.raises(UserError, match=f"called with {next(iter(options)).removesuffix('_p')}, which the"):
        gpu_kernels.flash_attn_func(q, q, q, **options)
