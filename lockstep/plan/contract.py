"""The effective contract: what a strategy really runs with.

This module says what a configuration demands of every strategy. `lockstep/training/observe.py` reads the live objects of every rank after
the first step, and the loop stops the run if the two differ. Two runs are compared only if their contracts agree.

What only gradients show, such as the norm that they have after clipping, is no configuration. The tensors are judged for that.
"""

import json
import math
from dataclasses import replace
from typing import Any

from lockstep.inputs.shapes import Description
from lockstep.plan import compiled, cuts, rates
from lockstep.plan.config import BETAS, EPS, PARAM_DTYPES, Config
from lockstep.plan.mesh import Mesh

ON_RANK = " on rank "  # in the name of an entry that differs on this rank
MODULE_SETTINGS = "module_settings"

# Entries in which strategies differ by design: recorded and shown, but no reason to refuse (docs/findings.md).
KNOWN_DIFFERENCES = (
    "biased_linear_dtype",
    "sharding",
    "cuts",
    "activation_checkpointing",  # it changes memory and time
    "compiled",
)
# Entries that say how something is computed, not what: recorded, and never compared.
IMPLEMENTATION = ("attention", "optimizer_implementation")
# Entries that matter only if the configuration asks for them: a strategy of a user's own may save memory without being asked.
IF_ASKED = ("activation_checkpointing",)
# Entries that are read from the outputs of modules. A module whose weight its parent uses by itself, as in Mamba, has none.
OF_OUTPUTS = ("compute_dtype", "biased_linear_dtype", "embedding_dtype")
# Entries of which a rank knows only what concerns its own layers.
OF_LAYERS = (
    "weight_decay",
    "optimizer_settings",
    MODULE_SETTINGS,
    "parameter_dtype",
    "reduction_dtype",
    "optimizer_dtype",
    "average_dtype",
    *OF_OUTPUTS,
    "compiled",
)


def expected_contract(
    config: Config,
    architecture: dict,
    model: Description,
    optimizer: dict[str, Any] | None = None,
    num_labels: int | None = None,
) -> dict[str, Any]:
    """The contract that this configuration demands of every strategy; one meaning for each option.

    `optimizer` are the entries of an optimizer of the user's own (`lockstep.training.observe.own_optimizer`). `num_labels` is the number of
    labels of the first global batch, in a run in which some positions have none.
    """
    compute = "torch.float32" if config.precision == "fp32" else "torch.bfloat16"
    is_promoted = (
        config.spec.float32_biases_under_autocast and config.precision == "autocast" and config.tp_size > 1
    )
    visible = {
        kind: [name for name in linears if not compiled.is_hidden(model.names, config.compile, name)]
        for kind, linears in (("plain", model.names.linears), ("biased", model.names.biased))
    }
    storage = "torch.bfloat16" if config.precision == "bf16" else "torch.float32"
    sharding = config.spec.sharding(config)
    divided = {axis: cut.expected(config, architecture) for axis, cut in cuts.of(config).items()}
    return {
        **(_built_in_optimizer(config, model, storage) if optimizer is None else optimizer),
        "max_grad_norm": config.max_grad_norm,
        MODULE_SETTINGS: model.settings,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "loss_is_mean_over": [
            config.batch_size * config.seq_length,
            config.gradient_accumulation_steps,
            config.dp_size,
        ]
        if num_labels is None
        else [num_labels],
        **({"also_called_with": list(config.samples.further)} if config.samples.further else {}),
        "parameter_dtype": [storage],
        "reduction_dtype": [storage],
        **({"average_dtype": ["torch.float32"]} if config.ema_decay < 1 else {}),
        "compute_dtype": [compute] if visible["plain"] else [],
        "biased_linear_dtype": ["torch.float32" if is_promoted else compute] if visible["biased"] else [],
        "embedding_dtype": [f"torch.{PARAM_DTYPES[config.precision]}"],
        "attention": config.attn_impl,
        "dropout": 0.0,
        "training_mode": True,
        "activation_checkpointing": config.activation_checkpointing,
        "compiled": [config.compile != "off"],
        "tied_embeddings": model.tied,
        **({"sharding": sharding} if sharding else {}),
        **({"cuts": divided} if divided else {}),
        **config.spec.contract(config),
    }


def _built_in_optimizer(config: Config, model: Description, storage: str) -> dict[str, Any]:
    """The entries of AdamW or SGD, whose state is in the dtype `storage`."""
    is_adamw = config.optimizer == "adamw"
    decay: dict[str, list[str]] = {}
    for name, shape in model.trained.items():
        decay.setdefault(str(config.weight_decay if len(shape) >= 2 else 0.0), []).append(name)
    return {
        "optimizer": "AdamW" if is_adamw else "SGD",
        "optimizer_implementation": "fused" if is_adamw else "for-loop",
        "optimizer_options": [],
        # that of the first step
        "learning_rates": [rates.rate_of(vars(config), 1, 1 + config.warmup_steps)],
        "betas": list(BETAS) if is_adamw else [],
        "eps": EPS if is_adamw else None,
        "momentum": None if is_adamw else 0,
        "weight_decay": {value: sorted(names) for value, names in decay.items()},
        "optimizer_dtype": [storage] if is_adamw else [],
    }


def of_optimizer(contract: dict[str, Any]) -> dict[str, Any] | None:
    """The entries of an optimizer of the user's own, as a contract records them; None for adamw and sgd."""
    keys = ("optimizer", "optimizer_settings", "optimizer_implementation", "learning_rates", "weight_decay")
    return (
        {key: contract[key] for key in keys if key in contract} if "optimizer_settings" in contract else None
    )


# Entry -> what to do if the live objects contradict it
REMEDIES = {
    "optimizer": "give --optimizer what the strategy uses, adamw or sgd",
    "loss_is_mean_over": "a loss of your own divides its sum by self.num_labels where that is not None (docs/your-own-strategy.md)",
    "also_called_with": "a loss of your own calls the model with self.further, too (docs/your-own-strategy.md)",
    **dict.fromkeys(
        (*OF_OUTPUTS, "reduction_dtype"),
        "--precision gives all strategies their dtypes (mixed: bfloat16 weights, float32 reductions): choose another, or leave a policy such as "
        "MixedPrecisionPolicy out",
    ),
}


def contradiction(expected: dict, actual: dict, ignoring: tuple[str, ...] = ()) -> str:
    """The first difference between options and live objects, with what to do; "" if there is none.

    A difference of the optimizer comes first: others may follow from it.
    """
    differences = contract_differences(expected, actual, ignoring)
    key = "optimizer" if "optimizer" in differences else next(iter(differences), "")
    return "; ".join(filter(None, (differences.get(key), REMEDIES.get(key))))


def of_all_ranks(contracts: list[dict[str, Any]], mesh: Mesh) -> dict[str, Any]:
    """The contract of a run from those of its ranks, in rank order: rank 0's, and what differs on others as "ENTRY on rank R".

    The ranks of a pipeline know of their own layers alone. What they know is put together.
    """
    whole: dict[int, dict[str, Any]] = {}
    for rank, contract in enumerate(contracts):
        if mesh.coordinates(rank).pp == 0:
            places = [replace(mesh.coordinates(rank), pp=stage) for stage in range(mesh.pp)]
            whole[rank] = _of_all_stages([contracts[mesh.rank(place)] for place in places], contract)
    first = whole[0]
    differing = {
        f"{entry}{ON_RANK}{rank}": contract[entry]
        for rank, contract in whole.items()
        for entry in contract_differences(first, contract, ("sharding", "cuts"))
        if entry in contract
    }
    return {**first, **differing}


def _of_all_stages(contracts: list[dict[str, Any]], own: dict[str, Any]) -> dict[str, Any]:
    """A rank's own contract, with what the ranks of its pipeline know of their layers put together."""
    if len(contracts) == 1:
        return own

    def together(values: list) -> Any:
        if any(isinstance(value, dict) for value in values):
            keys = sorted(set().union(*values))
            return {key: together([value[key] for value in values if key in value]) for key in keys}
        return sorted(set().union(*values))

    return {
        key: together([contract[key] for contract in contracts]) if key in OF_LAYERS else value
        for key, value in own.items()
    }


def on_any_mesh(contract: dict) -> dict:
    """The contract without what depends on the mesh: the loss is a mean over so many tokens, however they are divided."""
    sizes = contract.get("loss_is_mean_over")
    return {**contract, "loss_is_mean_over": math.prod(sizes)} if sizes else contract


def left_to_the_verdict(expected: dict[str, Any], actual: dict[str, Any]) -> tuple[str, ...]:
    """The entries that need not stop a run whose tensors are captured: the comparison looks at them, and says what they have done.

    An optimizer of another kind stops it: it has other state, so there is nothing to compare.
    """
    has_same_state = ("Adam" in expected["optimizer"]) == ("Adam" in actual["optimizer"])
    stopping = KNOWN_DIFFERENCES if has_same_state else (*KNOWN_DIFFERENCES, "optimizer")
    return tuple(entry for entry in actual if entry.partition(ON_RANK)[0] not in stopping)


def contract_differences(expected: dict, actual: dict, ignoring: tuple[str, ...] = ()) -> dict[str, str]:
    """Entry -> "entry is a, not b" for every entry in which two contracts differ. An entry of one rank names the rank."""
    differences = {}
    for key in sorted(expected.keys() | actual.keys()):
        entry, on_rank, rank = key.partition(ON_RANK)
        is_not_asked = entry in IF_ASKED and expected.get(entry) is False
        is_unknown = entry in OF_OUTPUTS and [] in (expected.get(entry), actual.get(key))
        if entry in (*ignoring, *IMPLEMENTATION) or key in ignoring or is_not_asked or is_unknown:
            continue
        difference = _difference(entry, expected.get(entry), actual.get(key))
        if difference:
            differences[key] = f"on rank {rank}, {difference}" if on_rank else difference
    return differences


def _difference(key: str, expected: object, actual: object) -> str:
    """How two values of an entry differ, of two objects the first difference inside of them; "" if they are equal."""
    if expected == actual:
        return ""
    if key.startswith(f"{MODULE_SETTINGS}."):
        # A library may replace a module by one of its own, which has other settings.
        return _of_names(key.partition(".")[2], expected, actual, everywhere=False)
    if _is_by_name(expected) or _is_by_name(actual):
        return _of_names(key, expected, actual, everywhere=True)
    if isinstance(expected, dict) and isinstance(actual, dict):
        differences = (
            _difference(f"{key}.{name}", expected.get(name), actual.get(name))
            for name in {**expected, **actual}
        )
        return next((difference for difference in differences if difference), "")
    return f"{key} is {_short(actual)}, not {_short(expected)}"


def _is_by_name(value: object) -> bool:
    """Whether a value is an object that maps values (as JSON) to the names that have them."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(
            isinstance(names, list) and all(isinstance(name, str) for name in names)
            for names in value.values()
        )
    )


def _of_names(key: str, expected: object, actual: object, *, everywhere: bool) -> str:
    """For which names the value differs, as a sentence; "" if for none. A plain value is that of all names.

    With `everywhere`, names that only one side has differ, too.
    """
    # Name -> value of either side; None for a plain value
    wanted, found = (
        {name: value for value, names in side.items() for name in names}
        if isinstance(side, dict) and (not side or _is_by_name(side))
        else None
        for side in (expected, actual)
    )
    names = list({**(wanted or {}), **(found or {})})
    if not everywhere:
        names = [name for name in names if name in (wanted or {}) and name in (found or {})]
    pairs = {
        name: tuple(
            json.dumps(side) if by_name is None else by_name.get(name, "nothing")
            for by_name, side in ((wanted, expected), (found, actual))
        )
        for name in names
    }
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not differing:  # but a side may have a name twice
        return f"{key} is {_short(actual)}, not {_short(expected)}" if everywhere else ""
    first = next(iter(differing.values()))
    affected = [name for name, pair in differing.items() if pair == first]
    more = f" and {len(affected) - 1} more" if len(affected) > 1 else ""
    return f"{key} of {affected[0]}{more} is {first[1]}, not {first[0]}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
