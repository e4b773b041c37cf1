"""Histories made up for the tests of the comparison: the smallest thing that passes, to be spoilt one way at a time."""

import copy
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path

import lockstep
from lockstep.dumps.header import seal
from lockstep.dumps.history import History
from lockstep.ground import schemas
from lockstep.ground.flags import recorded
from lockstep.ground.origin import about
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import parameter_shapes
from lockstep.plan.config import Config
from lockstep.plan.strategies import SPECS

PARAMETERS = sorted(parameter_shapes(BUILT_IN["tiny-qwen2"]))
CONTRACT = {
    "optimizer": "AdamW",
    "max_grad_norm": 1.0,
    "biased_linear_dtype": ["torch.bfloat16"],
    "weight_decay": {"0.01": PARAMETERS},
}


def configuration(strategy="ddp", precision="fp32", steps=20, **changes):
    tp = 1 if strategy == "ddp" else 2
    mesh = {"num_workers": 2 * tp, "tp_size": tp, "dp_size": 2, "device": "cpu", "backend": "gloo"}
    spec = SPECS[strategy]
    return Config(
        spec=spec,
        own={each.name: each.default for each in recorded(spec.options)},
        precision=precision,
        debug_steps=steps,
        num_layers=2,
        **{**mesh, **changes},
    )


def history(strategy="ddp", precision="fp32", steps=20, shift=0.0, **changes):
    config = configuration(strategy, precision, steps, **changes)
    record = History(
        run={
            "label": config.label,
            "mesh": config.mesh.sizes,
            "config": config.recorded(),
            "architecture": copy.deepcopy(BUILT_IN["tiny-qwen2"]),
            "architecture_source": "built-in architecture tiny-qwen2",
            "corpus_sha256": "c" * 64,
            "tokenizer": "word-crc32",
            "num_steps": steps,
            "versions": {"torch": "2", "transformers": "5"},
            "threads": 1,
            "origin": about(),
            "initial_weights": "weights of a file",
        },
        contract=copy.deepcopy(CONTRACT),
        weights={
            "initial_sha256": "a" * 64,
            "final_sha256": "b" * 64,
            "moved": list(PARAMETERS),
        },
        ended="finished",
        steps=[
            {
                "step": n,
                "loss": 0.0,
                "rank_losses": [],
                "grad_norm": 1.5,
                "learning_rate": 1e-3,
                "tokens": config.dp_size
                * config.batch_size
                * config.gradient_accumulation_steps
                * config.seq_length,
                "seconds": 0.1,
                "batch_hash": f"{n:016x}",
            }
            for n in range(1, steps + 1)
        ],
    )
    for step in record.steps:
        set_loss(step, 7.5 - 0.1 * step["step"] + shift)
    return record


def set_loss(step, value):
    """Let every rank, and so the mean, have this loss."""
    step.update(loss=value, rank_losses=[value, value])


def spoil(strategy="fsdp", precision="fp32", **changes):
    other = history(strategy, precision)
    for step, values in changes.items():
        other.steps[int(step[1:]) - 1].update(values)
    return other


def control(gap=lambda step: 4e-7, precision="fp32", steps=20, **norms):
    """A control run whose loss is off by gap(step), and whose gradient norms are as given: s5=1.6."""
    run = history(precision=precision, steps=steps, noise_control=True)
    run.weights["initial_sha256"] = "d" * 64
    for step in run.steps:
        set_loss(step, step["loss"] + gap(step["step"]))
    for name, value in norms.items():
        run.steps[int(name[1:]) - 1]["grad_norm"] = value
    return run


def rewrite(path, change, *, sealed=True):
    """Change a history file: its content by change(content), sealed again, or not as damage would be."""
    content = json.loads(path.read_text())
    change(content)
    if sealed:
        content["sha256"] = seal(content)
    path.write_text(json.dumps(content))


def require_origin(versions, origin):
    """Of all that takes part: the libraries, Lockstep itself, and what the processor's kernels are chosen by."""
    libraries = {"torch", "transformers", "numpy", "safetensors", "tokenizers"}
    libraries |= {name for name in ("deepspeed", "ray", "accelerate") if importlib.util.find_spec(name)}
    assert versions == {name: importlib.metadata.version(name) for name in libraries}
    assert set(origin) == set(schemas.Origin.model_fields)
    assert (
        origin["lockstep"] == lockstep.__version__ and origin["commit"] and origin["cores"] == os.cpu_count()
    )
    if platform.machine() == "x86_64":
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n")[0].split()
        wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
        assert set(origin["instruction_sets"]) & set(wanted) == set(wanted) & set(flags)
