"""Names and shapes of a model's parameters, from transformers' own model on torch's meta device.

Importing this imports neither torch nor transformers. Building a model does, which takes four seconds, so `parameter_shapes` keeps what it
found in the cache folder.
"""

import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import UserError, first_line
from lockstep.files import read_json, write_text
from lockstep.inputs import token_cache

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def parameter_shapes(architecture: dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every trained tensor, tied ones once. Raises UserError if transformers cannot build the model."""
    return dict(_shapes(json.dumps(architecture, sort_keys=True)))


@functools.lru_cache(maxsize=16)
def _shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    path = _kept_at(architecture)
    kept = _read(path, architecture)
    if kept is not None:
        return kept
    model = build_empty(json.loads(architecture), attn_impl="sdpa")
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with contextlib.suppress(UserError):  # the next run builds the model again
        write_text(path, json.dumps({"shapes": found, "sha256": _seal(architecture, found)}))
    return found


def _kept_at(architecture: str) -> Path:
    """Another version of torch, transformers or this file may find other shapes."""
    libraries = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    key = json.dumps([architecture, *libraries, Path(__file__).read_text(encoding="utf-8")])
    return token_cache.default_folder() / f"shapes-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(path: Path, architecture: str) -> dict[str, tuple[int, ...]] | None:
    """What was kept; None if it is not there or not what was written."""
    try:
        content = read_json(path)
        shapes = {name: tuple(shape) for name, shape in content["shapes"].items()}
        return shapes if content["sha256"] == _seal(architecture, shapes) else None
    except (UserError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _seal(architecture: str, shapes: dict[str, tuple[int, ...]]) -> str:
    return hashlib.sha256(json.dumps([architecture, shapes]).encode()).hexdigest()


def has_biases(architecture: dict) -> bool:
    """Whether any layer of the model has a bias."""
    return any(name.endswith(".bias") for name in parameter_shapes(architecture))


def build_empty(architecture: dict, *, attn_impl: str) -> "PreTrainedModel":
    """The model on the meta device: names and shapes without numbers. Does not change the random state.

    Raises UserError if transformers cannot build the model.
    """
    import torch

    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return from_config(architecture, attn_impl=attn_impl)
    except Exception as error:  # noqa: BLE001 - transformers and torch raise anything for an architecture that is none
        raise UserError(f"no model can be built from this architecture ({first_line(error)})") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' warnings. A run gives them again, and an error is one line."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def from_config(
    architecture: dict, *, attn_impl: str, dtype: "torch.dtype | None" = None
) -> "PreTrainedModel":
    """transformers' model in training mode, with random weights, in float32 unless told. Raises whatever transformers raises."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        transformers_config(architecture), dtype=dtype or torch.float32, attn_implementation=attn_impl
    )
    model.tie_weights()
    return model.train()


def transformers_config(architecture: dict) -> "PreTrainedConfig":
    """The model's config as an object of transformers. Raises whatever transformers raises for a config that it refuses."""
    from transformers import AutoConfig

    fields = {
        key: value for key, value in architecture.items() if key not in ("model_type", "dtype", "torch_dtype")
    }
    return AutoConfig.for_model(
        architecture["model_type"], **copy.deepcopy(fields)
    )  # it writes into the rope's dict
