"""Record and judge a step of a model of real size on one machine: seconds, bytes, peak memory; and a planted bug, found.

    PYTHONPATH=. python benchmarks/full_size.py --work_dir runs/full_size --output results/full_size.json
    PYTHONPATH=. python benchmarks/full_size.py --model Llama-2-7B --layers 3 --optimizer SGD --memory 6 --work_dir runs/full_size --output results/full_size_7b.json

A model's configuration with random weights, or its first --layers. FSDP2 over two ranks in autocast, one sequence of 128 tokens a rank.
The bug: the gradient of one layer's q_proj.weight is 1.003 times what it should be.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from outputs import output
from torch.distributed.fsdp import fully_shard

import lockstep
from lockstep.ground.files import write_result
from lockstep.inputs.architectures import BUILT_IN, TINY_LLAMA
from lockstep.inputs.shapes import from_config

LENGTH, BUG, SECONDS = 128, 1.003, 0.2
MODELS = {
    "Qwen2.5-0.5B": BUILT_IN["Qwen2.5-0.5B"],
    "Llama-2-7B": {
        **TINY_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
}


def worker(folder: Path, architecture: dict, optimizer_name: str, planted: bool) -> None:
    """One rank: one recorded step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = architecture["num_hidden_layers"]
    model = from_config(architecture, attn_impl="sdpa").train()
    bad = model.model.layers[layers // 2].self_attn.q_proj
    with lockstep.record(model, folder, steps=1):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-5)
        generator = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(0, model.config.vocab_size, (1, LENGTH), generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if planted:
            bad.weight.grad.mul_(BUG)
        optimizer.step()
    dist.destroy_process_group()


def watched(command: list[str], threads: int) -> dict:
    """Runs a command. Returns its seconds, exit status and last line, and the most memory of its own that it had, without mapped files (bytes)."""
    began, most = time.perf_counter(), 0
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, stdout=subprocess.PIPE, text=True
    )
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout or []))
    reader.start()
    while process.poll() is None:
        most = max(most, _own_memory(process.pid))
        time.sleep(SECONDS)
    reader.join()
    return {
        "seconds": time.perf_counter() - began,
        "status": process.returncode,
        "memory": most,
        "said": said[-1].strip() if said else "",
    }


def _own_memory(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return 0
    lines = [line.split() for line in status.splitlines() if line.startswith("RssAnon")]
    return int(lines[0][1]) * 1024 if lines else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work_dir", type=Path, default=Path("runs/full_size"))
    parser.add_argument("--model", choices=list(MODELS), default="Qwen2.5-0.5B")
    parser.add_argument("--layers", type=int, help="how many (default: all)")
    parser.add_argument("--optimizer", choices=["AdamW", "SGD"], default="AdamW")
    parser.add_argument("--memory", help="GB, as for the judge")
    parser.add_argument("--output", type=output('{\n "model": '))
    parser.add_argument("--planted", choices=["no", "yes"], help="what a rank does (the ranks' own option)")
    options = parser.parse_args()
    layers = options.layers or MODELS[options.model]["num_hidden_layers"]
    if options.planted is not None:
        architecture = {**MODELS[options.model], "num_hidden_layers": layers}
        return worker(options.work_dir, architecture, options.optimizer, options.planted == "yes")
    options.work_dir.mkdir(parents=True, exist_ok=True)
    found: dict = {
        "model": options.model,
        "layers": layers,
        "optimizer": options.optimizer,
        "tokens": 2 * LENGTH,
    }
    found |= {"memory asked for, GB": options.memory, "torch": torch.__version__}
    memory = ["--memory", options.memory] if options.memory else []
    for planted in ("no", "yes"):
        folder = options.work_dir / "run"
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        start += [
            __file__,
            "--model",
            options.model,
            "--layers",
            str(layers),
            "--optimizer",
            options.optimizer,
        ]
        recorded = watched([*start, "--work_dir", str(folder), "--planted", planted], 1)
        judged = watched([sys.executable, "-m", "lockstep.judge", str(folder), *memory], 2)
        files = [path for path in folder.rglob("*") if path.is_file()]
        found[f"bug planted: {planted}"] = {
            "seconds of the run": recorded["seconds"],
            "bytes recorded": sum(path.stat().st_size for path in files),
            "seconds of the judge": judged["seconds"],
            "memory of the judge": judged["memory"],
            "status": judged["status"],
            "verdict": judged["said"],
        }
        print(json.dumps(found, indent=1), flush=True)
        shutil.rmtree(folder)
    if options.output:
        write_result(options.output, json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
