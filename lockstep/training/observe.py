"""Read back what a run really does from its live objects: dtypes, optimizer, decay groups, versions, memory."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from lockstep.ground import origin
from lockstep.ground.collective import gather_objects
from lockstep.inputs import modules, shapes
from lockstep.inputs.data import Inputs
from lockstep.plan import compiled, rates, strategies
from lockstep.plan.config import OPTIMIZERS, Config
from lockstep.plan.contract import expected_contract
from lockstep.training.optim import (
    AnyOptimizer,
    Several,
    build_optimizer,
    is_own_adam,
    named_trained,
    parameter_groups,
    require_supported,
    set_rate,
    trained,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def collectives() -> Iterator[dict[str, int]]:
    """Count this process's collectives: yields a dict, filled at the end, of operation ("c10d::allreduce_") -> number of calls."""
    counted: dict[str, int] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield counted
    calls = {event.key: event.count for event in profiler.key_averages()}
    counted |= {key: count for key, count in sorted(calls.items()) if key.startswith("c10d::")}


def model_contract(model: "PreTrainedModel") -> dict[str, Any]:
    """The live model's entries of the contract: attention implementation, dropout, mode, parameter dtypes, tie and more."""
    return {
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", "own"),
        "dropout": max(map(_dropout, model.modules())),
        "training_mode": model.training,
        "compiled": compiled.observed(model),
        "activation_checkpointing": getattr(model, "is_gradient_checkpointing", False),
        "parameter_dtype": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "tied_embeddings": modules.is_tied(model),
        "module_settings": shapes.settings_of(model),
    }


def _dropout(module: torch.nn.Module) -> float:
    """The probability with which an nn.Dropout or an attention module drops elements; 0 for other modules."""
    p = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    # Some modules have a module under the name attention_dropout.
    return p if isinstance(p, float) else 0.0


# A clipped norm must be as near to its bound as this, relatively.
CLIPPED = 1e-3
# Clipping rounds each element to bfloat16, with at most this relative error; so the norm has at most this error, too.
ROUNDED = torch.finfo(torch.bfloat16).eps / 2
# Options of torch's optimizers that change what a step computes. A run of Lockstep has none of them.
OPTIONS = ("amsgrad", "maximize", "nesterov", "dampening")


def optimizer_contract(
    model: torch.nn.Module,
    optimizer: AnyOptimizer,
    asked: str,
    members: list[list[torch.nn.Parameter]] | None = None,
) -> dict[str, Any]:
    """The contract's entries of the live optimizer: class, settings, state dtypes. Call it after a first step, when there is state.

    `asked` is --optimizer. `members` are the model's parameters by group of the optimizer, if it holds other tensors.
    """
    if asked not in OPTIMIZERS:
        return own_optimizer_contract(model, optimizer)
    require_supported(optimizer)
    groups = optimizer.param_groups
    names_by_group = _names_by_group(model, members or [group["params"] for group in groups])

    def setting(key: str) -> Any:
        """The value that all groups have, or each value with the parameters that have it."""
        by_value: dict[str, list[str]] = {}
        for group, names in zip(groups, names_by_group, strict=True):
            by_value.setdefault(json.dumps(group.get(key)), []).extend(names)
        return json.loads(next(iter(by_value))) if len(by_value) == 1 else _sorted(by_value)

    state_dtypes = {
        str(value.dtype)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    }
    return {
        **_groups_contract(groups, names_by_group),
        "optimizer": _class_of(optimizer),
        "optimizer_options": sorted({key for key in OPTIONS for group in groups if group.get(key)}),
        "betas": setting("betas") or [],
        "eps": setting("eps"),
        "momentum": setting("momentum"),
        "optimizer_dtype": sorted(state_dtypes),
    }


def _names_by_group(model: torch.nn.Module, groups: list[list[torch.nn.Parameter]]) -> list[list[str]]:
    """The names of the model's parameters in each group."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group if id(p) in names] for group in groups]


def _groups_contract(groups: list[dict[str, Any]], names_by_group: list[list[str]]) -> dict[str, Any]:
    """The contract's entries of the groups of any optimizer."""
    decay: dict[str, list[str]] = {}
    for group, names in zip(groups, names_by_group, strict=True):
        decay.setdefault(str(group.get("weight_decay", 0.0)), []).extend(names)
    return {
        "optimizer_implementation": ", ".join(sorted({_implementation(group) for group in groups})),
        "learning_rates": sorted({learning_rate(group) for group in groups}),
        "weight_decay": _sorted(decay),
    }


# Settings of a group that are not compared: they say how a step is computed, or differ from rank to rank.
NOT_SETTINGS = (
    "params", "param_names", "lr", "initial_lr", "weight_decay", "fused", "foreach", "capturable", "differentiable", "ns_coefficients",
)  # fmt: skip


def own_optimizer(config: Config, architecture: dict) -> dict[str, Any] | None:
    """The contract's entries of a user's own optimizer, made for the model on the meta device; None for adamw and sgd."""
    if not config.has_own_optimizer:
        return None
    model = shapes.build_empty(architecture, attn_impl="eager")
    optimizer = build_optimizer(
        parameter_groups(trained(model), config.weight_decay),
        optimizer=config.optimizer,
        learning_rate=config.learning_rate,
        named=named_trained(model),
    )
    set_rate(optimizer, rates.rate_of(vars(config), 1, 1 + config.warmup_steps), config.learning_rate)
    return own_optimizer_contract(model, optimizer)


def demanded(config: Config, inputs: Inputs) -> dict[str, Any]:
    """The contract that a run's configuration demands (lockstep/plan/contract.py)."""
    architecture = inputs.architecture
    optimizer = own_optimizer(config, architecture)
    num_labels = inputs.batches.num_labels(0) if config.samples.counted else None
    return expected_contract(config, architecture, shapes.describe(architecture), optimizer, num_labels)


def own_optimizer_contract(model: torch.nn.Module, optimizer: AnyOptimizer) -> dict[str, Any]:
    """The contract's entries of a user's own optimizer, which may not have stepped yet: classes and settings."""
    settings: dict[str, dict[str, list[str]]] = {}
    groups = optimizer.param_groups
    names_by_group = _names_by_group(model, [group["params"] for group in groups])
    for group, names in zip(groups, names_by_group, strict=True):
        for key, value in group.items():
            if key not in NOT_SETTINGS:
                settings.setdefault(key, {}).setdefault(json.dumps(value, default=str), []).extend(names)
    optimizers = optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]
    return {
        **_groups_contract(groups, names_by_group),
        "optimizer": " and ".join(sorted(type(member).__name__ for member in optimizers)),
        "optimizer_settings": {key: _sorted(by_value) for key, by_value in settings.items()},
    }


def _sorted(by_value: dict[str, list[str]]) -> dict[str, list[str]]:
    return {value: sorted(names) for value, names in by_value.items()}


def learning_rate(group: dict[str, Any]) -> float:
    """The learning rate of a group. A float32 tensor gives the shortest decimal number that rounds to it."""
    rate = group["lr"]
    return float(str(rate.detach().cpu().reshape(()).numpy())) if isinstance(rate, torch.Tensor) else rate


def _class_of(optimizer: AnyOptimizer) -> str:
    """The kind of an optimizer. Adam whose weight decay is decoupled is AdamW, whatever its class is called.

    A user's own optimizer that keeps Adam's moments counts as AdamW. The tensors show whether it computes the same.
    """
    if not isinstance(optimizer, torch.optim.Adam):
        return "AdamW" if is_own_adam(optimizer) else type(optimizer).__name__
    decoupled = {bool(group["decoupled_weight_decay"]) for group in optimizer.param_groups}
    return " and ".join("AdamW" if is_decoupled else "Adam" for is_decoupled in sorted(decoupled))


def _implementation(group: dict[str, Any]) -> str:
    """How torch steps a group. If nothing was chosen, torch chooses, and the group does not show what."""
    chosen = [name for name in ("fused", "foreach") if group.get(name)]
    return chosen[0] if chosen else "for-loop" if group.get("foreach") is False else "torch's choice"


def clipping_problem(configured: float, before: float, after: float | None, precision: str) -> str:
    """Return what is wrong with the gradient norm before and after an update that clips to `configured`; "" if nothing is.

    0 means no clipping. `after` is None if the gradients are gone.
    """
    expected = min(before, configured) if configured > 0 else before
    tolerance = CLIPPED + (ROUNDED if precision == "bf16" else 0)
    if after is None or math.isclose(after, expected, rel_tol=tolerance):
        return ""
    return (
        f"the gradient norm is {before:.6g} before clipping to {configured:g} and {after:.6g} after it; the gradients differ between ranks, "
        "or another norm was used; run_verification.py finds the first wrong tensor"
    )


def torch_contract(model: "PreTrainedModel", optimizer: AnyOptimizer, asked: str) -> dict[str, Any]:
    """The contract's entries of a strategy that steps a torch optimizer itself. Gradients are reduced in their own dtype."""
    return {
        **model_contract(model),
        **optimizer_contract(model, optimizer, asked),
        "reduction_dtype": sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None}),
    }


_version = functools.cache(importlib.metadata.version)  # it reads a file


def versions() -> dict[str, str]:
    """Versions of the installed libraries that take part; runs with other versions are not comparable."""
    installed = {}
    libraries = (spec.library for spec in strategies.SPECS.values() if spec.library)
    for name in (
        "torch",
        "transformers",
        *libraries,
        "ray",
        "numpy",
        "safetensors",
        "tokenizers",
        "accelerate",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = _version(name)
    return installed


def peak_memory(device: torch.device) -> dict:
    """Peak memory of every rank in bytes, in rank order: allocated and reserved on a GPU, the resident set on a CPU."""
    peaks = gather_objects(own_peak_memory(device))
    if device.type != "cuda":
        return {"kind": "ru_maxrss", "bytes_by_rank": peaks}
    reserved = gather_objects(torch.cuda.max_memory_reserved(device))
    return {"kind": "torch.cuda.max_memory_allocated", "bytes_by_rank": peaks, "reserved_by_rank": reserved}


def own_peak_memory(device: torch.device) -> int:
    """Peak memory of this rank so far, in bytes: allocated on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def provenance(config: Config, inputs: Inputs, told: str = "") -> dict[str, Any]:
    """What a history and a dump record of a run before it begins. `told` is the configuration that its library is given, as text."""
    return {
        **({"told_sha256": hashlib.sha256(told.encode()).hexdigest()} if told else {}),
        "label": config.label,
        "mesh": config.mesh.sizes,
        "config": config.recorded(),
        "architecture": inputs.architecture,
        "architecture_source": inputs.architecture_source,
        "initial_weights": inputs.start.origin(),
        "corpus_sha256": inputs.batches.corpus.sha256,
        "tokenizer": inputs.batches.corpus.tokenizer_name,
        "num_steps": inputs.num_steps,
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "origin": origin.about(),
    }
