"""config.json: the keys of a supported model, and the keys that would make it another model.

A key is one of four things:

    known       transformers builds the family's model from these. They are checked here, and no others are passed on
    harmless    about files, labels, outputs or generation; training does not depend on them
    refused     would be another model, or something that no strategy supports (lockstep/inputs/refusals.py)
    unknown     any other. The strategies and the reference build the model without it. The banner of a run names it, and
                lockstep/tensors/model_check.py compares the reference with transformers' own model built with it

Nothing here imports torch or transformers.
"""

import functools
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, NoReturn, get_args

from pydantic import ConfigDict, Field

from lockstep.errors import UserError, printable
from lockstep.inputs import refusals
from lockstep.schemas import Strict, validate

REMEDY = "correct it, or fetch the model again"
# Elementwise, without parameters, in the dtype of their input: what a tensor-parallel shard and float64 can do as well.
# Not xielu and prelu, which have parameters, and not those of refusals.JUMPING.
Activation = Literal[
    "gelu", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "laplace", "linear", "mish", "quick_gelu", "relu2", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
]  # fmt: skip
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
LayerType = Literal["full_attention", "sliding_attention"]
FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"

Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**24)]
TokenIds = TokenId | Annotated[list[TokenId], Field(min_length=1, max_length=1024)] | None
Length = Annotated[int, Field(ge=1, le=2**31)]
Width = Annotated[int, Field(ge=1, le=2**18)]
Inner = Annotated[int, Field(ge=1, le=2**20)]
Depth = Annotated[int, Field(ge=1, le=1024)]
Heads = Annotated[int, Field(ge=1, le=2**12)]
HeadDim = Annotated[int, Field(ge=2, le=2**12)]
Epsilon = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Dropout = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
Factors = Annotated[list[Positive], Field(min_length=1, max_length=2**11)]


class Rope(Strict):
    """`rope_parameters`, or `rope_scaling`, its older name. ROPE_KEYS has the keys of each type."""

    rope_type: RopeType | None = None
    type: RopeType | None = None
    rope_theta: Annotated[Positive, Field(gt=1)] | None = None
    factor: Annotated[Positive, Field(ge=1)] | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=2, le=2**31)] | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool | None = None
    short_factor: Factors | None = None
    long_factor: Factors | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    partial_rotary_factor: Annotated[Positive, Field(le=1)] | None = None


# type -> (required keys, optional keys). transformers ignores a key of another type with a warning.
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "original_max_position_embeddings", "attention_factor"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "proportional": ((), ("factor", "partial_rotary_factor")),
}


class _Common(Strict):
    """The keys of all families."""

    model_config = ConfigDict(extra="ignore")  # the unknown keys: see above

    class_suffix: ClassVar[str] = "ForCausalLM"  # of the name of transformers' class
    required: ClassVar[tuple[str, ...]]
    defaults: ClassVar[dict[str, object]] = {}  # of transformers, which must be written down
    common_names: ClassVar[dict[str, str]] = {}  # its own name of a key -> that of the other families
    harmless: ClassVar[frozenset[str]] = frozenset()  # beside HARMLESS

    model_type: str  # one of FAMILIES: `checked` has looked
    vocab_size: Annotated[int, Field(ge=2, le=2**24)]
    initializer_range: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    tie_word_embeddings: bool = False
    pad_token_id: TokenId | None = None
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None


class GPT2(_Common):
    class_suffix = "LMHeadModel"
    required = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "initializer_range")
    defaults = {"tie_word_embeddings": True, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    common_names = {  # transformers takes either name
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    }
    harmless = frozenset((  # of the heads of other classes, or of older versions
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        "n_ctx", "task_specific_params",
    ))  # fmt: skip

    n_embd: Width
    n_layer: Depth
    n_head: Heads
    n_positions: Length
    n_inner: Inner | None = None  # 4 n_embd
    activation_function: Activation = "gelu_new"
    layer_norm_epsilon: Epsilon = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    attn_pdrop: Dropout
    embd_pdrop: Dropout
    resid_pdrop: Dropout


class _Rotary(_Common):
    """Rotary embedding, RMS norms, KV heads."""

    required = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "initializer_range",
    )  # fmt: skip
    # of `required`, where transformers' default follows from the other keys
    may_be_missing: ClassVar[tuple[str, ...]] = ()
    has_own_head_dim: ClassVar[bool] = False  # transformers' default is a number, and not hidden_size / heads

    hidden_size: Width
    intermediate_size: Inner
    num_hidden_layers: Depth
    num_attention_heads: Heads
    num_key_value_heads: Heads | None
    head_dim: HeadDim | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Length
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Annotated[Positive, Field(gt=1)] = 10000.0
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=2, le=2**31)] = 2
    attention_dropout: Dropout = 0.0


class _Windowed(_Rotary):
    use_sliding_window: bool = False
    sliding_window: Length | None = 4096
    max_window_layers: Annotated[int, Field(ge=0, le=2**31)] = 28
    layer_types: Annotated[list[LayerType], Field(max_length=1024)] | None = None


class Qwen2(_Windowed):
    head_dim: HeadDim = 2  # not a field of Qwen2Config, and read by Qwen2Attention all the same


class Qwen3(_Windowed):
    has_own_head_dim = True

    head_dim: HeadDim = 128
    attention_bias: bool = False


class Llama(_Rotary):
    may_be_missing = ("num_key_value_heads",)

    attention_bias: bool = False
    mlp_bias: bool = False


class Mistral(_Rotary):
    sliding_window: Length | None = 4096  # of all layers; None: no window


# model_type -> its schema, which has the name of the family
SCHEMAS: dict[str, type[_Common]] = {
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "llama": Llama,
    "mistral": Mistral,
    "gpt2": GPT2,
}
FAMILIES = {family: f"{schema.__name__}{schema.class_suffix}" for family, schema in SCHEMAS.items()}
HARMLESS = frozenset((
    "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path", "use_cache",
    "return_dict", "output_attentions", "output_hidden_states", "problem_type", "id2label", "label2id", "num_labels",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "gradient_checkpointing", "pretraining_tp", "tokenizer_class", "_commit_hash",
))  # fmt: skip


def harmless(family: str) -> frozenset[str]:
    """The keys of a family's config.json that training does not depend on."""
    return HARMLESS | SCHEMAS[family].harmless


def in_common_names(content: dict) -> dict:
    """A config with the keys' names that all families share, as in an architecture everywhere outside of config.json."""
    names = SCHEMAS[content["model_type"]].common_names
    return {names.get(key, key): value for key, value in content.items()}


def in_own_names(content: dict, family: str) -> dict:
    """The inverse of `in_common_names`: as in the family's config.json."""
    names = {common: own for own, common in SCHEMAS[family].common_names.items()}
    return {names.get(key, key): value for key, value in content.items()}


def checked(content: dict, where: str) -> tuple[dict, list[str]]:
    """The known keys of a config.json with their values there, in common names, and the names of its unknown keys.

    Where transformers' default of a key is another than a missing key means here, it is filled in: `num_key_value_heads`, `head_dim`
    (if it is not hidden_size / heads), a schema's `defaults`. Raises UserError, beginning with `where`, for the first value that is
    wrong, unsupported or in contradiction to another one.
    """
    family = content.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f"{where}: model_type is {printable(repr(family), 60)}, and only {', '.join(FAMILIES)} can be trained here; "
            "choose a Qwen2, Qwen2.5, Qwen3, Llama, Mistral or GPT-2 model"
        )
    schema = SCHEMAS[family]
    may_be_missing = schema.may_be_missing if issubclass(schema, _Rotary) else ()
    missing = next((key for key in schema.required if key not in {*content, *may_be_missing}), None)
    if missing:
        raise UserError(f"{where} gives no {missing}; fetch the model again")
    content = {
        **schema.defaults,
        **{key: value for key, value in content.items() if key not in schema.harmless},
    }
    ruled = refusals.refuse(content, family, FAMILIES[family], where)
    model = validate(schema, {"num_key_value_heads": None, **content}, where, REMEDY)
    known = {key: content[key] for key in type(model).model_fields if key in content}

    def refuse(key: str, why: str) -> NoReturn:
        raise UserError(f"{where}: {key} is {printable(repr(known[key]), 60)}: {why}; {REMEDY}")

    _consistent_ids(model, refuse)
    if isinstance(model, _Rotary):
        if model.num_key_value_heads is None:
            known["num_key_value_heads"] = model.num_attention_heads
        if model.has_own_head_dim:
            known["head_dim"] = model.head_dim
        _consistent_rotary(model, known, refuse)
    elif isinstance(model, GPT2) and model.n_embd % model.n_head:
        refuse("n_embd", f"n_head, {model.n_head}, does not divide it")
    return in_common_names(known), sorted(set(content) - set(known) - HARMLESS - ruled)


def _consistent_ids(model: _Common, refuse: Callable[[str, str], NoReturn]) -> None:
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = getattr(model, key)
        if any(
            each >= model.vocab_size for each in (ids if isinstance(ids, list) else [ids]) if each is not None
        ):
            refuse(key, f"token ids run from 0 to {model.vocab_size - 1}")


def _consistent_rotary(model: _Rotary, known: dict, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse values that are each valid but contradict each other."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    if heads % known["num_key_value_heads"]:
        refuse("num_key_value_heads", f"it does not divide num_attention_heads, {heads}")
    if "head_dim" not in known and hidden % heads:
        refuse("hidden_size", f"num_attention_heads, {heads}, does not divide it, and there is no head_dim")
    head_dim = known.get("head_dim") or hidden // heads
    if head_dim % 2:
        refuse(
            "head_dim" if known.get("head_dim") else "hidden_size",
            f"rotary embedding needs an even head_dim, it is {head_dim}",
        )
    if isinstance(model, _Windowed):
        _consistent_windows(model, refuse)
    if model.rope_parameters and model.rope_scaling and known["rope_parameters"] != known["rope_scaling"]:
        refuse("rope_scaling", "rope_parameters says something else; keep one of them")
    for key in ("rope_parameters", "rope_scaling"):
        if known.get(key):
            _consistent_rope(getattr(model, key), head_dim, functools.partial(refuse, key))


def _consistent_windows(model: _Windowed, refuse: Callable[[str, str], NoReturn]) -> None:
    if model.use_sliding_window and model.sliding_window is None:
        refuse(
            "use_sliding_window", "there is no sliding_window; set use_sliding_window to false, or give one"
        )
    if model.layer_types is not None:
        if len(model.layer_types) != model.num_hidden_layers:
            refuse(
                "layer_types",
                f"{len(model.layer_types)} layers, and num_hidden_layers is {model.num_hidden_layers}",
            )
        if SLIDING in model.layer_types and not model.use_sliding_window:
            refuse(
                "layer_types", f"{SLIDING} without use_sliding_window; set it to true, or have {FULL} only"
            )


def _consistent_rope(rope: Rope, head_dim: int, refuse: Callable[[str], NoReturn]) -> None:
    kind = rope.rope_type or rope.type or "default"
    if rope.type not in (None, kind):
        refuse(f"its type is {rope.type}, its rope_type {kind}")
    must, may = ROPE_KEYS[kind]
    given = {key for key in rope.model_fields_set if key not in ("rope_type", "type", "rope_theta")}
    missing = next((key for key in must if getattr(rope, key) is None), None)
    foreign = next((key for key in sorted(given - {*must, *may}) if getattr(rope, key) is not None), None)
    if missing:
        refuse(f"rope type {kind} needs {missing}")
    if foreign:
        refuse(f"{foreign} is not a key of rope type {kind}")
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if kind == "llama3" and low is not None and high is not None and high <= low:
        refuse("high_freq_factor must be above low_freq_factor")
    if kind == "yarn" and (rope.beta_fast or 32) <= (rope.beta_slow or 1):
        refuse("beta_fast (32 where it is missing) must be above beta_slow (1)")
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        if len(getattr(rope, key)) != head_dim // 2:
            refuse(
                f"{key} has {len(getattr(rope, key))} numbers, and heads of {head_dim} need {head_dim // 2}"
            )
