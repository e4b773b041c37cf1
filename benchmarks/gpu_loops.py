"""Training loops as people have them on one GPU, recorded and judged: precisions, attention kernels, compilers, optimizers, and bugs.

    PYTHONPATH=. python benchmarks/gpu_loops.py --output results/gpu_loops.json
    PYTHONPATH=. python benchmarks/gpu_loops.py "llama autocast" "conv"            loops by their names

A loop is a model and what is special about it, in the words of WORDS. Each is recorded for a step (`--steps`) in a process of its own, which is
forked after the imports, and judged on the CPU. On a machine without a GPU, the loops that need none run on the CPU. The loops of the tests are
recorded by benchmarks/gpu_tests.py. Exit status: 0 every right loop has PASS, and every other FAIL; 1 one has not.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from outputs import output
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and torch.version.cuda else "cpu"
WORDS = """
autocast bfloat16 by autocast | fp16 float16 by autocast, with a GradScaler | bf16 all weights in bfloat16 | high float32 matmul precision
ieee no TF32 | clip a gradient norm of 0.5 | accumulate 4 micro batches | fused foreach capturable sgd muon the optimizer | padded long eager tied
checkpoint of transformers | flash efficient cudnn math flex the attention | compile overhead in-place layers what torch.compile is given
DDP FSDP2 mixed offload over NCCL, one rank | prefetch batches copied on another stream | channels-last
bug-loss the loss times 2 | bug-grad one gradient times 1.003
"""
BUG = "bug-"
LOOPS = [
    *(f"llama {words}".strip() for words in ("", "autocast", "autocast high", "high", "fp16 clip", "bf16")),
    *(
        f"llama {words}"
        for words in ("autocast fused clip accumulate", "autocast foreach", "capturable", "sgd")
    ),
    *(f"llama autocast {words}" for words in ("checkpoint", "padded", "eager", "tied", "long high")),
    *(f"llama {words}" for words in ("padded", "long", "compile", "autocast compile", "compile overhead")),
    *(f"llama {words}" for words in ("autocast compile in-place", "autocast prefetch", "fused")),
    *(f"llama {words}" for words in ("DDP", "FSDP2", "FSDP2 mixed", "FSDP2 offload")),
    *("gpt2", "gpt2 no-dropout", "gpt2 no-dropout autocast", "gpt2 residual", "gpt2 residual autocast"),
    *("experts", "experts autocast", "experts bf16"),
    *("conv", "conv ieee", "conv autocast", "conv autocast channels-last", "conv channels-last ieee"),
    *("lstm", "lstm ieee", "lstm autocast", "graph", "graph autocast"),
    *(f"own {words}".strip() for words in ("", "autocast", "bf16", "fp16", "muon", "autocast prefetch")),
    *(f"own {words}" for words in ("flash autocast", "efficient", "efficient autocast", "cudnn autocast")),
    *(f"own {words}" for words in ("math", "math autocast", "flex", "flex autocast")),
    *(
        f"own {words}"
        for words in ("layers compile", "autocast layers compile", "FSDP2 mixed layers compile")
    ),
    *(f"{size} {words}".strip() for size in ("vocabulary", "wide") for words in ("", "autocast", "bf16")),
    *(
        "wide fp16 clip",
        "own bug-loss",
        "own autocast clip bug-loss",
        "own bug-grad",
        "own autocast bug-grad",
    ),
    *("own bf16 bug-grad", "llama autocast bug-grad", "llama fp16 bug-grad", "vocabulary autocast bug-grad"),
]


def llama(words: list[str]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    more = {"attn_implementation": "eager"} if "eager" in words else {}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, tie_word_embeddings="tied" in words, **more))


def gpt2(words: list[str]) -> nn.Module:
    """With dropout everywhere, nowhere, or in its modules alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    p = 0.0 if "no-dropout" in words else 0.1
    rates = {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": 0.0 if "residual" in words else p}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=1, n_head=2, **rates)
    )


def experts(_words: list[str]) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    size = {"vocab_size": 256, "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, **heads, num_experts=8, num_experts_per_tok=2))


class Block(nn.Module):
    def __init__(self, width: int, kind: str):
        super().__init__()
        self.n1, self.n2, self.kind = nn.RMSNorm(width), nn.RMSNorm(width), kind
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        if self.kind == "flex":
            y = flex(q, k, v)
        elif self.kind:
            with sdpa_kernel(BACKENDS[self.kind]):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.n2(x))))


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
compiled: list[Callable] = []


def flex(q, k, v):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        compiled.append(torch.compile(flex_attention))
    mask = create_block_mask(causal, None, None, q.shape[2], q.shape[2], device=q.device)
    return compiled[0](q, k, v, block_mask=mask)


def causal(_batch, _head, query, key):
    return query >= key


class Own(nn.Module):
    def __init__(self, kind: str = "", width: int = 128, vocabulary: int = 256):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList([Block(width, kind)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, labels=None):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.two, self.head = nn.Conv2d(32, 64, 3, stride=2), nn.Linear(64, 10)

    def forward(self, x, labels):
        x = F.relu(self.norm(self.one(x)))
        return F.cross_entropy(self.head(F.relu(self.two(x)).mean((2, 3))).float(), labels)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(128, 256)
        self.rnn = nn.LSTM(64, 128, 2, batch_first=True)

    def forward(self, ids, labels):
        x, _ = self.rnn(self.embedding(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


class Graph(nn.Module):
    """Sums over edges, by atomic additions on a GPU."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x, edges, labels):
        for layer in (self.one, self.two):
            x = layer(x)
            x = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]).relu()
        return F.cross_entropy(self.head(x), labels)


MODELS: dict[str, Callable[[list[str]], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "experts": experts,
    "own": lambda words: Own(next((word for word in words if word in (*BACKENDS, "flex")), "")),
    "vocabulary": lambda _: Own(vocabulary=50304),
    "wide": lambda _: Own(width=1024, vocabulary=2048),
    "conv": lambda _: Conv(),
    "lstm": lambda _: Lstm(),
    "graph": lambda _: Graph(),
}
VOCABULARY = {"vocabulary": 50304, "wide": 2048}


def batch(model: str, words: list[str], number: int) -> dict:
    generator = torch.Generator().manual_seed(number)
    if model == "conv":
        labels = torch.randint(0, 10, (8,), generator=generator)
        return {"x": torch.randn(8, 3, 16, 16, generator=generator), "labels": labels}
    if model == "graph":
        edges = torch.randint(0, 64, (2, 512), generator=generator)
        labels = torch.randint(0, 4, (64,), generator=generator)
        return {"x": torch.randn(64, 32, generator=generator), "edges": edges, "labels": labels}
    size = (2, 400) if "long" in words else (4, 256 if model == "wide" else 64)
    ids = torch.randint(1, VOCABULARY.get(model, 256), size, generator=generator)
    if model in ("own", "vocabulary", "wide", "lstm"):
        return {"ids": ids, "labels": ids.roll(-1, 1)}
    given = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    if "padded" in words:
        mask = torch.ones_like(ids)
        mask[1, 40:] = mask[2, 50:] = 0
        given |= {"labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    return given


class Both:
    """Muon takes matrices alone."""

    def __init__(self, net: nn.Module):
        matrices, others = (
            [one for one in net.parameters() if (one.ndim == 2) is two] for two in (True, False)
        )
        self.each = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]

    def step(self):
        for one in self.each:
            one.step()

    def zero_grad(self):
        for one in self.each:
            one.zero_grad()


def optimizer_of(net: nn.Module, words: list[str]):
    if "muon" in words:
        return Both(net)
    if "sgd" in words:
        return torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True)
    ways = {word: True for word in ("fused", "foreach", "capturable") if word in words}
    return torch.optim.AdamW(net.parameters(), lr=1e-3, **ways)


def prepared(net: nn.Module, words: list[str]) -> nn.Module:
    """What the loop calls."""
    layers = getattr(net, "blocks", None) or getattr(getattr(net, "model", None), "layers", ())
    if "checkpoint" in words:
        net.gradient_checkpointing_enable()
    if "DDP" in words or "FSDP2" in words:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000)
        )
        torch.distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if "compile" in words and "layers" in words:
        for number, one in enumerate(layers):
            layers[number] = torch.compile(one)
    if "FSDP2" in words:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        more = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if "mixed" in words else {}
        more |= {"offload_policy": CPUOffloadPolicy()} if "offload" in words else {}
        for one in layers:
            fully_shard(one, **more)
        fully_shard(net, **more)
    if "DDP" in words:
        return nn.parallel.DistributedDataParallel(net)
    if "in-place" in words:
        net.compile()
    elif "compile" in words and "layers" not in words:
        return torch.compile(net, mode="reduce-overhead" if "overhead" in words else None)
    return net


def on_device(given: dict, side) -> dict:
    if side is None:
        return {key: one.to(DEVICE) if isinstance(one, torch.Tensor) else one for key, one in given.items()}
    with torch.cuda.stream(side):
        moved = {
            key: one.pin_memory().to(DEVICE, non_blocking=True) if isinstance(one, torch.Tensor) else one
            for key, one in given.items()
        }
    torch.cuda.current_stream().wait_stream(side)
    return moved


def train(name: str, folder: Path, steps: int) -> None:
    import lockstep

    model, *words = name.split()
    torch.manual_seed(0)
    if "ieee" in words:
        torch.backends.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = "ieee"
    if "high" in words:
        torch.set_float32_matmul_precision("high")
    lower = {"autocast": torch.bfloat16, "fp16": torch.float16}
    dtype = next((lower[word] for word in words if word in lower), None)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled="fp16" in words)
    net = MODELS[model](words).to(DEVICE).train()
    net = net.bfloat16() if "bf16" in words else net
    net = net.to(memory_format=torch.channels_last) if "channels-last" in words else net
    called = prepared(net, words)
    optimizer = optimizer_of(net, words)
    micro = 4 if "accumulate" in words else 1
    side = torch.cuda.Stream() if "prefetch" in words and DEVICE == "cuda" else None
    with lockstep.record(net, folder, steps):
        for step in range(steps + 1):
            for number in range(micro):
                given = on_device(batch(model, words, step * micro + number), side)
                with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
                    returned = called(**given)
                loss = getattr(returned, "loss", returned) / micro * (2 if "bug-loss" in words else 1)
                scaler.scale(loss).backward()
            if "fp16" in words:
                scaler.unscale_(optimizer)
            if "bug-grad" in words:
                bad = net.model.layers[0].self_attn.q_proj if model == "llama" else net.blocks[0].down
                bad.weight.grad.mul_(1.003)
            if "clip" in words:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            if "fp16" in words:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()


def judged(folder: Path) -> int:
    from lockstep import judge

    torch.set_num_threads(1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = judge.main([str(folder)])
    (folder / "said.txt").write_text(said.getvalue())
    return status


def in_processes(
    tasks: dict[str, Callable[[], int | None]], lanes: int, limit: float, logs: Path
) -> dict[str, int]:
    """The exit status of each task, in a process that is forked for it; one that takes longer than `limit` seconds is killed."""
    waiting, running, status = list(tasks), dict[int, tuple[str, float]](), dict[str, int]()
    while waiting or running:
        while waiting and len(running) < lanes:
            name = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                _be_task(tasks[name], logs / f"{name.replace(' ', '_')}.log")
            running[pid] = name, time.monotonic()
        for pid, (name, began) in list(running.items()):
            if time.monotonic() - began > limit:
                os.kill(pid, signal.SIGKILL)
            done, ended = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                status[name] = os.waitstatus_to_exitcode(ended)
        time.sleep(0.03)
    return status


def _be_task(task: Callable[[], int | None], log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    status = 1
    try:
        torch.set_num_threads(1)
        status = task() or 0
    except BaseException:  # noqa: BLE001 - this is where the process ends
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loops", nargs="*", help="parts of names (default: all)")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=120, help="seconds of a loop")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/gpu_loops"))
    parser.add_argument("--output", type=output('{\n "device": '), default=Path("runs/gpu_loops.json"))
    options = parser.parse_args()
    # Imported, and no CUDA context made: this process forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import transformers.models.llama.modeling_llama  # noqa: F401

    from lockstep.ground.files import write_result

    names = [one for one in LOOPS if not options.loops or any(part in one for part in options.loops)]
    options.work_dir.mkdir(parents=True)
    folders = {name: options.work_dir / name.replace(" ", "_") for name in names}
    begun = {name: (lambda name=name: train(name, folders[name], options.steps)) for name in names}
    recorded = in_processes(begun, options.lanes, options.limit, options.work_dir)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    there = {name: folder for name, folder in folders.items() if (folder / "model.json").is_file()}
    status = in_processes(
        {name: (lambda folder=folder: judged(folder)) for name, folder in there.items()},
        options.lanes,
        options.limit,
        options.work_dir,
    )
    found = {}
    for name in names:
        said = (folders[name] / "said.txt").read_text().splitlines() if name in status else []
        last = next((line for line in reversed(said) if line.strip() and not line.startswith("report")), "")
        log = (options.work_dir / f"{name.replace(' ', '_')}.log").read_text().splitlines()
        found[name] = {
            "verdict": {0: "PASS", 1: "FAIL", 2: "not judged"}.get(status.get(name, -1), "not recorded"),
            "said": last if name in status else (log or [f"killed: {recorded[name]}"])[-1],
        }
        print(f"{name}: {found[name]['verdict']} {found[name]['said'][:150]}", flush=True)
    counts = collections.Counter((BUG in name, one["verdict"]) for name, one in found.items())
    print({f"{'with a bug' if bug else 'right'}, {what}": number for (bug, what), number in counts.items()})
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    content = {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "loops": found,
    }
    write_result(options.output, json.dumps(content, indent=1) + "\n")
    return int(any((one["verdict"] == "FAIL") is not (BUG in name) for name, one in found.items()))


if __name__ == "__main__":
    sys.exit(main())
