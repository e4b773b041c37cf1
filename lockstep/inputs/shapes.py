"""Names and shapes of a model's parameters, and settings of its modules, from transformers' own model on torch's meta device.

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


Shapes = dict[str, tuple[int, ...]]
# attribute -> its value, as JSON -> the modules that have it
Settings = dict[str, dict[str, list[str]]]


def parameter_shapes(architecture: dict) -> Shapes:
    """Name -> shape of every trained tensor, tied ones once. Raises UserError if transformers cannot build the model."""
    return dict(_described(json.dumps(architecture, sort_keys=True))[0])


def module_settings(architecture: dict) -> Settings:
    """What `settings_of` finds in the model. Raises UserError if transformers cannot build it."""
    return _described(json.dumps(architecture, sort_keys=True))[1]


def settings_of(model: "torch.nn.Module") -> Settings:
    """The numbers with a fraction that modules were built with: epsilons, scales, dropout.

    Whole numbers are left out, because parallel layers change them: a rank has some of the heads.
    """
    found: Settings = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, float) and not attribute.startswith("_"):
                found.setdefault(attribute, {}).setdefault(json.dumps(value), []).append(name)
    return found


@functools.lru_cache(maxsize=16)
def _described(architecture: str) -> tuple[Shapes, Settings]:
    path = _kept_at(architecture)
    kept = _read(path, architecture)
    if kept is not None:
        return kept
    model = build_empty(json.loads(architecture), attn_impl="sdpa")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = shapes, settings_of(model)
    with contextlib.suppress(UserError):  # the next run builds the model again
        write_text(path, json.dumps({"found": found, "sha256": _seal(architecture, found)}))
    return found


def _kept_at(architecture: str) -> Path:
    """Another version of torch, transformers or this file may find other shapes."""
    libraries = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    key = json.dumps([architecture, *libraries, Path(__file__).read_text(encoding="utf-8")])
    return token_cache.default_folder() / f"shapes-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(path: Path, architecture: str) -> tuple[Shapes, Settings] | None:
    """What was kept; None if it is not there or not what was written."""
    try:
        content = read_json(path)
        shapes, settings = content["found"]
        found = {name: tuple(shape) for name, shape in shapes.items()}, settings
        return found if content["sha256"] == _seal(architecture, found) else None
    except (UserError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _seal(architecture: str, found: tuple[Shapes, Settings]) -> str:
    return hashlib.sha256(json.dumps([architecture, found]).encode()).hexdigest()


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
