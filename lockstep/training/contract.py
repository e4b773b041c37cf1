"""The effective contract: what a strategy really runs with.

This module says what a configuration demands of every strategy. `lockstep/training/observe.py` reads the live objects after the first
step, and the loop stops the run if the two differ. Two runs are compared only if their contracts agree.
"""

import math
from typing import Any

from lockstep import strategies
from lockstep.config import BETAS, EPS, PARAM_DTYPES, Config
from lockstep.inputs.shapes import has_biases, parameter_shapes
from lockstep.training import cuts, rates

# Entries in which strategies differ by design: recorded and shown, but no reason to refuse (docs/findings.md).
KNOWN_DIFFERENCES = (
    "biased_linear_dtype",
    "sharding",
    "cuts",
    "activation_checkpointing",  # it changes memory and time
    "compiled",
)
# Entries of which a rank knows only what concerns its own layers.
OF_LAYERS = (
    "weight_decay",
    "parameter_dtype",
    "reduction_dtype",
    "optimizer_dtype",
    "average_dtype",
    "compute_dtype",
    "biased_linear_dtype",
    "embedding_dtype",
    "compiled",
)


def expected_contract(config: Config, architecture: dict) -> dict[str, Any]:
    """The contract that this configuration demands of every strategy; one meaning for each option."""
    compute = "torch.float32" if config.precision == "fp32" else "torch.bfloat16"
    promoted = (
        config.row.float32_biases_under_autocast and config.precision == "autocast" and config.tp_size > 1
    )
    seen = has_biases(architecture) and config.compile == "off"
    biased = ["torch.float32" if promoted else compute] if seen else []
    storage = "torch.bfloat16" if config.precision == "bf16" else "torch.float32"
    adamw = config.optimizer == "adamw"
    divided = {axis: cut.expected(config, architecture) for axis, cut in cuts.of(config).items()}
    decay: dict[str, list[str]] = {}
    for name, shape in parameter_shapes(architecture).items():
        decay.setdefault(str(config.weight_decay if len(shape) >= 2 else 0.0), []).append(name)
    return {
        "optimizer": "AdamW" if adamw else "SGD",
        "fused": adamw,
        "learning_rates": [rates.rate_of(vars(config), 1, 1 + config.warmup_steps)],  # of the first step
        "betas": list(BETAS) if adamw else [],
        "eps": EPS if adamw else None,
        "momentum": None if adamw else 0,
        "weight_decay": {rate: sorted(names) for rate, names in decay.items()},
        "max_grad_norm": config.max_grad_norm,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "loss_is_mean_over": [
            config.batch_size * config.seq_length,
            config.gradient_accumulation_steps,
            config.dp_size,
        ],
        "parameter_dtype": [storage],
        "reduction_dtype": [storage],
        "optimizer_dtype": [storage] if adamw else [],
        **({"average_dtype": ["torch.float32"]} if config.ema_decay < 1 else {}),
        "compute_dtype": [compute],
        "biased_linear_dtype": biased,
        "embedding_dtype": [f"torch.{PARAM_DTYPES[config.precision]}"],
        "attention": config.attn_impl,
        "dropout": 0.0,
        "training_mode": True,
        "activation_checkpointing": config.activation_checkpointing,
        "compiled": [config.compile != "off"],
        "tied_embeddings": architecture.get("tie_word_embeddings", False),
        **({"sharding": strategies.load(config.row.sharding)(config)} if config.row.sharding else {}),
        **({"cuts": divided} if divided else {}),
        **(strategies.load(config.row.contract)(config) if config.row.contract else {}),
    }


# Entry -> what to do if the live objects contradict it
REMEDIES = {
    "optimizer": "give --optimizer what the strategy uses, adamw or sgd",
    **dict.fromkeys(
        ("biased_linear_dtype", "compute_dtype", "embedding_dtype", "reduction_dtype"),
        "--precision gives all strategies their dtypes (mixed: bfloat16 weights, float32 reductions): choose another, or leave a policy such as "
        "MixedPrecisionPolicy out",
    ),
}


def contradiction(expected: dict, actual: dict) -> str:
    """The first difference between options and live objects, with what to do; "" if there is none. Others may follow from the optimizer."""
    found = contract_differences(expected, actual)
    key = "optimizer" if "optimizer" in found else next(iter(found), "")
    return "; ".join(filter(None, (found.get(key), REMEDIES.get(key))))


def of_all_stages(contracts: list[dict[str, Any]], own: dict[str, Any]) -> dict[str, Any]:
    """A rank's own contract, with what the ranks of a pipeline know of their layers put together."""

    def together(values: list) -> Any:
        if isinstance(values[0], dict):
            keys = sorted(set().union(*values))
            return {key: together([value.get(key, []) for value in values]) for key in keys}
        return sorted(set().union(*values))

    return {
        key: together([contract[key] for contract in contracts]) if key in OF_LAYERS else value
        for key, value in own.items()
    }


def global_batch(config: dict) -> int:
    """The number of windows in one micro batch of all DP ranks together, of a recorded configuration.

    Runs with the same number are fed the same windows in the same order, whatever their dp_size.
    """
    return config["dp_size"] * config["batch_size"]


def on_any_mesh(contract: dict) -> dict:
    """The contract without what depends on the mesh: the loss is a mean over so many tokens, however they are divided."""
    means = contract.get("loss_is_mean_over")
    return {**contract, "loss_is_mean_over": math.prod(means)} if means else contract


def contract_differences(expected: dict, actual: dict, ignoring: tuple[str, ...] = ()) -> dict[str, str]:
    """Entry -> "key is a, not b" for every entry in which two contracts differ."""
    return {
        key: _difference(key, expected.get(key), actual.get(key))
        for key in sorted((expected.keys() | actual.keys()) - set(ignoring))
        if expected.get(key) != actual.get(key)
    }


def _difference(key: str, expected: object, actual: object) -> str:
    """The first difference inside of two objects, the values themselves otherwise."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        inner = next(
            name for name in [*expected, *actual] if name not in actual or expected.get(name) != actual[name]
        )
        return _difference(f"{key}.{inner}", expected.get(inner), actual.get(inner))
    return f"{key} is {_short(actual)}, not {_short(expected)}"


def contract_difference(expected: dict, actual: dict, ignoring: tuple[str, ...] = ()) -> str:
    """The first of the differences, or "" if there are none."""
    return next(iter(contract_differences(expected, actual, ignoring).values()), "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
