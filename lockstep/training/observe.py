"""Read back what a run really does from its live objects: dtypes, optimizer, decay groups, versions, memory."""

import contextlib
import functools
import importlib.metadata
import math
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from lockstep import strategies
from lockstep.collective import gather_objects
from lockstep.inputs import modules
from lockstep.training import compiled
from lockstep.training.optim import require_supported

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def collectives() -> Iterator[dict[str, int]]:
    """Yields a dict that is filled at the end: operation of torch.distributed, such as "c10d::allreduce_" -> calls in this process."""
    counted: dict[str, int] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield counted
    averages = {event.key: event.count for event in profiler.key_averages()}
    counted |= {key: count for key, count in sorted(averages.items()) if key.startswith("c10d::")}


class ComputeDtypes:
    """Watches one forward pass and records the dtypes that linear layers and the embedding return."""

    def __init__(self, model: "PreTrainedModel", compile_backend: str):
        self._seen: dict[str, set[str]] = {
            "compute_dtype": set(),
            "biased_linear_dtype": set(),
            "embedding_dtype": set(),
        }
        self._handles: list[RemovableHandle] = []
        names = modules.names_in(model)
        for name, module in model.named_modules():
            if compiled.is_hidden(names, compile_backend, name):
                continue
            own = dict(module.named_parameters(recurse=False))
            if isinstance(module, torch.nn.Embedding) or name == names.embedding:
                self._watch(module, "embedding_dtype")
            elif "weight" in own and len(getattr(own["weight"], "ds_shape", own["weight"].shape)) == 2:
                self._watch(module, "biased_linear_dtype" if "bias" in own else "compute_dtype")

    def _watch(self, module: torch.nn.Module, key: str) -> None:
        seen = self._seen[key]
        self._handles.append(module.register_forward_hook(lambda _m, _i, output: seen.add(str(output.dtype))))

    def stop(self) -> dict:
        for handle in self._handles:
            handle.remove()
        return {key: sorted(seen) for key, seen in self._seen.items()}


def model_contract(model: "PreTrainedModel") -> dict[str, Any]:
    """The live model's attention implementation, dropout, mode, parameter dtypes and tie."""
    return {
        "attention": model.config._attn_implementation,
        "dropout": max(map(_dropout, model.modules())),
        "training_mode": model.training,
        "compiled": compiled.observed(model),
        "activation_checkpointing": model.is_gradient_checkpointing,
        "parameter_dtype": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "tied_embeddings": modules.is_tied(model),
    }


def _dropout(module: torch.nn.Module) -> float:
    """The probability with which a module drops elements, be it nn.Dropout or an attention."""
    own = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    return float(own)


def optimizer_contract(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Class, rates and state dtypes of the live optimizer. Call it after a first step, when the state exists."""
    require_supported(optimizer)
    first = optimizer.param_groups[0]
    state_dtypes = {
        str(value.dtype)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    }
    return {
        "optimizer": type(optimizer).__name__,
        "fused": bool(first["fused"]),
        "learning_rates": sorted({group["lr"] for group in optimizer.param_groups}),
        "betas": list(first.get("betas", ())),
        "eps": first.get("eps"),
        "momentum": first.get("momentum"),
        "optimizer_dtype": sorted(state_dtypes),
    }


def decay_by_name(model: torch.nn.Module, groups: list[tuple[list, float]]) -> dict[str, list[str]]:
    """Weight decay -> names of the parameters it acts on, from the optimizer's own groups (parameters, decay)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay: dict[str, list[str]] = {}
    for parameters, rate in groups:
        decay.setdefault(str(rate), []).extend(names[id(parameter)] for parameter in parameters)
    return {rate: sorted(members) for rate, members in decay.items()}


def observed_max_grad_norm(configured: float, before: float, after: float) -> float:
    """The clipping bound that follows from the norms before and after an update.

    It is the configured one if nothing had to be clipped and nothing was.
    """
    if math.isclose(before, after, rel_tol=1e-6):
        return 0.0 if 0 < configured < before * (1 - 1e-6) else configured
    return configured if math.isclose(after, configured, rel_tol=1e-3) else after


def torch_contract(model: "PreTrainedModel", optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer of a strategy that steps a torch optimizer itself; gradients are reduced in their own dtype."""
    return {
        **model_contract(model),
        **optimizer_contract(optimizer),
        "weight_decay": decay_by_name(
            model, [(g["params"], g["weight_decay"]) for g in optimizer.param_groups]
        ),
        "reduction_dtype": sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None}),
    }


_version = functools.cache(importlib.metadata.version)  # it reads a file


def versions() -> dict[str, str]:
    """Versions of the installed libraries that take part; runs with other versions are not comparable."""
    found = {}
    of_strategies = (row.library for row in strategies.ROWS.values() if row.library)
    for name in (
        "torch",
        "transformers",
        *of_strategies,
        "ray",
        "numpy",
        "safetensors",
        "tokenizers",
        "accelerate",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = _version(name)
    return found


def peak_memory(device: torch.device) -> dict:
    """Peak memory of every rank in bytes, in rank order: allocated and reserved on a GPU, the resident set on a CPU."""
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"kind": "ru_maxrss", "bytes_by_rank": gather_objects(resident)}
    mine = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    allocated, reserved = zip(*gather_objects(mine), strict=True)
    kind = "torch.cuda.max_memory_allocated"
    return {"kind": kind, "bytes_by_rank": list(allocated), "reserved_by_rank": list(reserved)}
