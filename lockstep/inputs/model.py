"""Build the model: a Hugging Face causal LM in float32 on the CPU, unsharded, from a seed or from a weights file."""

import contextlib
import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.errors import UserError, first_line
from lockstep.inputs import weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def build_model(
    architecture: dict, *, seed: int, attn_impl: str, init_weights_path: Path | None
) -> tuple["PreTrainedModel", dict[str, str] | None]:
    """The model, and the checksums of its weights file (None if the weights come from the seed).

    Every rank that calls this with the same arguments has the same weights. Sharding comes later.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = transformers_config(architecture)
    torch.manual_seed(seed)
    with no_init_weights() if init_weights_path else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_impl)
    model.tie_weights()
    model.train()
    sums = weights.load(init_weights_path, model) if init_weights_path else None
    return model, sums


def build_empty(architecture: dict, *, attn_impl: str) -> "PreTrainedModel":
    """The model on torch's meta device: names and shapes without numbers. Does not change the random state.

    Raises UserError if transformers cannot build the model.
    """
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return build_model(architecture, seed=0, attn_impl=attn_impl, init_weights_path=None)[0]
    except Exception as error:  # noqa: BLE001 - transformers and torch raise anything for an architecture that is none
        raise UserError(f"no model can be built of this architecture ({first_line(error)})") from error


def transformers_config(architecture: dict) -> "PreTrainedConfig":
    """The model's config as an object of transformers. Raises whatever transformers raises for a config that it refuses."""
    from transformers import AutoConfig

    fields = {
        key: value for key, value in architecture.items() if key not in ("model_type", "dtype", "torch_dtype")
    }
    return AutoConfig.for_model(
        architecture["model_type"], **copy.deepcopy(fields)
    )  # it writes into the rope's dict


def causal_lm_loss(model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all B x S positions, in float32; `labels` (B, S) are already shifted by one.

    Calls the model's own `loss_function`, which a strategy with sharded logits replaces.
    """
    return model(input_ids=input_ids, labels=labels, shift_labels=labels, use_cache=False).loss
