"""What a model is: names and shapes of its parameters, settings of its modules, from the model itself on torch's meta device.

Importing this imports neither torch nor transformers. Building a model does, which takes four seconds, so `describe` keeps what it found
in the cache folder.
"""

import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import json
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.ground import files, schemas, user_file
from lockstep.ground.errors import UserError, printable
from lockstep.ground.files import read_json, seal, write_text
from lockstep.ground.schemas import Name, Shape
from lockstep.inputs import modules
from lockstep.inputs.modules import Names

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


Shapes = dict[str, tuple[int, ...]]
# attribute -> its value, as JSON -> the modules that have it
Settings = dict[str, dict[str, list[str]]]


# Keys of a config.json that are about files, outputs or generation. The model does not depend on them.
OF_FILES = (
    "_name_or_path", "architectures", "attn_implementation", "_attn_implementation", "dtype", "torch_dtype", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "transformers_version", "use_cache",
)  # fmt: skip


# Key of a config.json -> why a model that has it is refused
REFUSED = {
    "quantization_config": "quantized weights cannot be trained; give a model without it",
    "auto_map": "code of its own, which is not run; give a model of transformers, or a function with --model path/to/file.py:FUNCTION",
}
DEEPEST = 1024  # layers


class Description(schemas.Strict):
    """What a model is, without its numbers."""

    parameters: dict[Name, Shape]  # every parameter, tied ones once
    frozen: schemas.Names  # those that are not trained
    settings: dict[Name, dict[str, list[str]]]  # see `settings_of`
    names: Names
    tied: bool  # whether embedding and head share their weight
    other_dtypes: dict[Name, Name]  # parameters that are not float32

    @functools.cached_property
    def trained(self) -> Shapes:
        frozen = set(self.frozen)
        return {name: shape for name, shape in self.parameters.items() if name not in frozen}


def settings_of(model: "torch.nn.Module", without: Collection[str] = ()) -> Settings:
    """The float attributes that modules were built with: epsilons, scales, dropout. Modules named in `without` are left out.

    Whole numbers are left out, because parallel layers change them: a rank has some of the heads.
    """
    settings: Settings = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items() if name not in without else ():
            if isinstance(value, float) and not attribute.startswith("_"):
                settings.setdefault(attribute, {}).setdefault(json.dumps(value), []).append(name)
    return settings


def active_dropout(settings: Settings) -> tuple[float, str] | None:
    """(probability, name) of the first module that drops elements in training; None if there is none."""
    for attribute, values in settings.items():
        if attribute == "p" or "drop" in attribute:
            for value, names in values.items():
                # A larger value is not a fraction; it is, for instance, the p of a norm
                if 0 < float(value) <= 1 and names:
                    return float(value), names[0]
    return None


def as_transformers_says(content: dict, where: str) -> dict:
    """A config.json as the config object of transformers has it, with the names of keys that all architectures share.

    Raises UserError, beginning with `where`, if transformers has no such causal language model.
    """
    return json.loads(_configured(json.dumps(content, sort_keys=True), where))


@functools.lru_cache(maxsize=16)
def _configured(content: str, where: str) -> str:
    """`as_transformers_says` from JSON to JSON, which can be cached."""
    for key, reason in REFUSED.items():
        if json.loads(content).get(key):
            raise UserError(f"{where} has {key}: {reason}")
    try:
        with quiet():
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

            config = transformers_config(json.loads(content))
            if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
                raise ValueError(f"model_type {config.model_type} has no causal language model")
            depth = getattr(config, "num_hidden_layers", 1)
            if not 1 <= depth <= DEEPEST:
                raise ValueError(f"num_hidden_layers is {depth}, and 1 to {DEEPEST} layers can be trained")
            common = {own_name: name for name, own_name in config.attribute_map.items()}
            entries = {
                common.get(key, key): value for key, value in config.to_dict().items() if key not in OF_FILES
            }
            return json.dumps(entries)
    except Exception as error:  # noqa: BLE001 - transformers raises anything for a config that is none
        raise UserError(
            f"{where}: transformers cannot read it ({_reason(error)}); correct it, or fetch the model again"
        ) from error


def _reason(error: Exception) -> str:
    """What a library says, in one line; its first line alone may only name the field."""
    return printable(" ".join(str(error).split()) or type(error).__name__, 300)


def describe(architecture: dict) -> Description:
    """The description of the model. Raises UserError if it cannot be built."""
    return _described(json.dumps(architecture, sort_keys=True))


def require_trainable(architecture: dict, where: str) -> None:
    """Raise UserError, beginning with `where`, for a model that no two strategies could train alike."""
    try:
        model = describe(architecture)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    dropout = active_dropout(model.settings)
    if dropout:
        p, module = dropout
        keys = ", ".join(key for key, setting in architecture.items() if "drop" in key and setting == p)
        raise UserError(
            f"{where}: dropout of {p} in {module}: every strategy would drop different elements; set it to 0 in config.json ({keys})"
        )
    if model.other_dtypes:
        name, dtype = next(iter(model.other_dtypes.items()))
        raise UserError(
            f"{where}: {name} is {dtype}, and all parameters must be float32 at the start; choose another model"
        )


def width(architecture: dict) -> int:
    """The size of the vector that stands for a token (hidden_size)."""
    model = describe(architecture)
    return model.parameters[model.names.embedding_weight][-1]


def parameter_shapes(architecture: dict) -> Shapes:
    return dict(describe(architecture).parameters)


@functools.lru_cache(maxsize=16)
def _described(architecture: str) -> Description:
    path = _kept_at(architecture)
    cached = _read(path)
    if cached is not None:
        return cached
    model = build_empty(json.loads(architecture), attn_impl="eager")  # which every model has
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    other_dtypes = {
        name: str(parameter.dtype)
        for name, parameter in model.named_parameters()
        if str(parameter.dtype) != "torch.float32"
    }
    frozen = tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    description = Description(
        parameters=shapes,
        frozen=frozen,
        settings=settings_of(model),
        names=modules.find(model),
        tied=modules.is_tied(model),
        other_dtypes=other_dtypes,
    )
    with contextlib.suppress(UserError):  # the next run builds the model again
        content = description.model_dump()
        write_text(path, json.dumps(content | {"sha256": seal(content)}))
    return description


def _kept_at(architecture: str) -> Path:
    """The file that keeps the description of an architecture.

    Its name depends on the versions of torch and transformers and on the code here, as others may find another model.
    """
    libraries = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    sources = [Path(file).read_text(encoding="utf-8") for file in (__file__, modules.__file__)]
    key = json.dumps([architecture, *libraries, *sources])
    return files.cache_folder() / f"model-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> Description | None:
    """The description that a file keeps; None if it is not there, or is not what was written."""
    try:
        content = read_json(path)
        return Description.model_validate(content) if content.pop("sha256") == seal(content) else None
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def build_empty(architecture: dict, *, attn_impl: str) -> "torch.nn.Module":
    """The model on the meta device: names and shapes without numbers. Does not change the random state.

    Raises UserError if it cannot be built.
    """
    import torch

    try:
        with quiet(), torch.device("meta"), torch.random.fork_rng(devices=[]):
            return from_config(architecture, attn_impl=attn_impl)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - transformers and torch raise anything for an architecture that is none
        raise UserError(
            f"no model can be built from this architecture ({_reason(error)}{user_file.place_of(error)})"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, transformers' own and Python's. A run gives them again, and an error is one line."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def from_config(
    architecture: dict, *, attn_impl: str, dtype: "torch.dtype | None" = None
) -> "PreTrainedModel":
    """The model in training mode, with random weights, in float32 unless told. Raises whatever transformers raises."""
    import torch

    if user_file.is_named(architecture["model_type"]):
        from lockstep.inputs import own_model

        model = own_model.build(architecture["model_type"])
        if dtype is not None:
            modules.to_dtype(model, dtype)
        return cast("PreTrainedModel", model)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        transformers_config(architecture), dtype=dtype or torch.float32, attn_implementation=attn_impl
    )
    model.tie_weights()
    return model.train()


def use_eager_experts(model: "torch.nn.Module") -> None:
    """Let a mixture of experts loop over its experts. Other models stay as they are.

    The grouped product of transformers takes neither float64 nor strides of zero.
    """
    set_implementation = getattr(model, "set_experts_implementation", None)
    if set_implementation is not None:
        set_implementation("eager")


def transformers_config(architecture: dict) -> "PreTrainedConfig":
    """The model's config as an object of transformers. Raises whatever transformers raises for a config that it refuses."""
    from transformers import AutoConfig

    fields = {
        key: value for key, value in architecture.items() if key not in ("model_type", "dtype", "torch_dtype")
    }
    # A copy, because transformers writes into the dict of the rope
    return AutoConfig.for_model(architecture["model_type"], **copy.deepcopy(fields))
