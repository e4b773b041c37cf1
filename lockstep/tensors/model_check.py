"""Checks of a user's model before a run: does transformers accept it, and does the reference compute the same model?

`try_out` builds the model without memory from all keys of its file and compares its parameters with `parameter_shapes`, which are those of
a model of the known keys alone. `check` runs a small model of the same kind twice, by transformers and by the float64 reference, and
compares every module's output, the loss and every gradient. This shows any key that transformers acts on and the reference does not.

Both run in float64: transformers' casts to float32 become casts to float64, so two equal models differ only by float64's rounding errors.
The unit roundoff is 1.1e-16, and TOLERANCE is 9e4 of those. Correct models show at most 2.6e-13 (results/model_families.md; 1e-14 if no
gradient is zero up to rounding errors). An epsilon of 1e-5 in place of 1e-6 in the norms shows about 5e-6.
"""

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from lockstep.config import Config
from lockstep.errors import UserError, first_line, printable
from lockstep.inputs import architectures, model_config
from lockstep.inputs.data import Inputs
from lockstep.inputs.model import causal_lm_loss
from lockstep.inputs.shapes import parameter_shapes, quiet, transformers_config
from lockstep.tensors.exact import make_exact
from lockstep.tensors.layout import watched
from lockstep.training.optim import gradient_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = 1e-11  # relative; see above
SMALL_VOCABULARY, SMALL_HIDDEN, SMALL_INNER = 96, 64, 96
LARGEST_RATIO = 32  # query heads for one KV head
LARGEST_SCORES = 1 << 22  # numbers in the attention scores of one layer; beyond that, heads are left out
# Of the largest gradient. A gradient that is zero up to rounding errors, such as q_proj's under a window of one, is compared with this.
SMALLEST_GRADIENT = 1e-3


def try_out(architecture: dict, content: dict, model_name: str) -> None:
    """Raise UserError if transformers refuses to build the model, or builds other parameters from all keys than from the known ones.

    `content` is that of a config.json, and `architecture` what `resolve` made of it.
    """
    family = architecture["model_type"]
    theirs = _without(content, model_config.harmless(family))
    where = f"--model_name {model_name}: "
    try:
        with quiet(), torch.device("meta"):
            method = next(
                (
                    key
                    for key in theirs
                    if callable(getattr(type(transformers_config(architecture)), key, None))
                ),
                None,
            )
            if not method:
                transformers_config(theirs)
                model = _build({**theirs, **model_config.in_own_names(_depth(architecture), family)}, "sdpa")
    except Exception as error:  # noqa: BLE001 - whatever it is, transformers does not take this model
        reason = printable(" ".join(str(error).split()) or type(error).__name__, 300)
        raise UserError(
            f"{where}transformers cannot build a model from its config.json ({reason}); correct it"
        ) from error
    if method:
        raise UserError(
            f"{where}its config.json: {method} would replace a method of transformers' config; remove it"
        )
    cut = parameter_shapes({**architecture, **_depth(architecture)})
    _require_names(model, cut, f"{where}transformers' own model")


def check(config: Config, inputs: Inputs) -> None:
    """Raise UserError, naming the first module that differs, unless the reference is transformers' own model.

    Does nothing for built-in models. Takes about two seconds at 1000 tokens.
    """
    if architectures.is_built_in(inputs.architecture_source):
        return
    content, _ = architectures.find(config.model_name)
    difference = compare(inputs.architecture, content, config.seq_length, config.attn_impl)[0]
    if difference:
        raise UserError(
            f"--model_name {config.model_name}: the reference and transformers compute different models from its config.json: {difference}; "
            "remove the key that the reference does not support, or choose another model"
        )


def compare(architecture: dict, content: dict, seq_length: int, attn_impl: str = "sdpa") -> tuple[str, float]:
    """(the first difference between the reference and transformers' own model in a sentence, or ""; the largest difference).

    The reference is built from `architecture`, transformers' model from `content`, the whole config.json. A difference is the norm of
    the difference over the norm of transformers' tensor.
    """
    with quiet():
        return _compare(architecture, content, seq_length, attn_impl)


def _compare(architecture: dict, content: dict, seq_length: int, attn_impl: str) -> tuple[str, float]:
    small, family = _small(architecture, seq_length), architecture["model_type"]
    left_out = {
        *model_config.harmless(family),
        "bos_token_id",
        "eos_token_id",
    }  # the small vocabulary may not have them
    architecture, theirs = _without(architecture, left_out), _without(content, left_out)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SMALL_VOCABULARY, (1, seq_length + 1), generator=generator)
    ids[0, 0] = small.get("pad_token_id", 0)
    try:
        problem = _layers_differ(transformers_config(theirs), transformers_config(architecture))
        if problem:
            return problem, float("inf")
        reference = _build({**architecture, **small}, "sdpa")
        own = _build({**theirs, **model_config.in_own_names(small, family)}, attn_impl)
        _fill(own, generator)
        problem = _names_differ(own, reference)
        if problem:
            return problem, float("inf")
        reference.load_state_dict(own.state_dict())
        make_exact(reference, attn_impl="sdpa")
        own.double()
        with _Float64Casts():
            computed, expected = _run(reference, ids), _run(own, ids)
    except Exception as error:  # noqa: BLE001 - of transformers, on a model it does not want, or of the reference's attention
        return f"it cannot be run ({first_line(error)})", float("inf")
    return _first_difference(computed, expected)


def _first_difference(
    computed: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[str, float]:
    largest = max(float(value.norm()) for name, value in expected.items() if name.startswith("gradient"))
    first, worst = "", 0.0
    for name, value in expected.items():
        if name not in computed or computed[name].shape != value.shape:
            return first or f"{name} is missing or has another shape", float("inf")
        scale = max(float(value.norm()), largest * SMALLEST_GRADIENT if name.startswith("gradient") else 0.0)
        distance = float((computed[name] - value).norm())
        relative = distance / scale if scale else float(distance > 0)
        worst = max(worst, relative)
        if not relative <= TOLERANCE:  # NaN is a difference
            first = (
                first
                or f"{name} differs by {relative:.1e} of its norm; rounding errors make less than {TOLERANCE:.0e}"
            )
    return first, worst


def _run(model: "PreTrainedModel", ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name -> output of every module in the order of the forward pass, the loss, then every parameter's gradient."""
    seen: dict[str, torch.Tensor] = {}

    def see(name: str, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor):
            seen[f"the output of {name}"] = first.detach()

    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: see(name, output))
        for name, module in watched(model)
    ]
    model.train()
    loss = causal_lm_loss(model, ids[:, :-1], ids[:, 1:]).mean()
    for handle in handles:
        handle.remove()
    loss.backward()
    gradients = {
        f"gradient of {name}": gradient_of(parameter) for name, parameter in model.named_parameters()
    }
    return {**seen, "the loss": loss.detach(), **gradients}


def _without(content: dict, keys: Collection[str]) -> dict:
    return {key: value for key, value in content.items() if key not in keys}


class _Float64Casts(TorchFunctionMode):
    """Inside, torch.float32 means torch.float64."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {
            key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


def _build(architecture: dict, attn_impl: str) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        transformers_config(architecture), dtype=torch.float32, attn_implementation=attn_impl
    )
    model.tie_weights()
    return model


def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Random weights that give outputs of about 1 everywhere, so that a wrong angle, window, epsilon or scale shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith(".weight"):  # of a norm
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.5, generator=generator)


def _small(architecture: dict, seq_length: int) -> dict:
    """The changes to a config that make its model small: sizes, depth and number of heads. All else stays."""
    heads = architecture["num_attention_heads"]
    head_dim = architecture.get("head_dim") or architecture["hidden_size"] // heads
    small = {"vocab_size": SMALL_VOCABULARY, **_depth(architecture)}
    if "num_key_value_heads" in architecture:
        kv_heads = architecture["num_key_value_heads"]
        ratio, kv_heads = heads // kv_heads, min(kv_heads, 2)
        heads = kv_heads * min(ratio, LARGEST_RATIO, max(2, LARGEST_SCORES // (kv_heads * seq_length**2)))
        small["hidden_size"] = max(1, SMALL_HIDDEN // heads) * heads  # transformers wants a multiple
        small |= {"intermediate_size": SMALL_INNER, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    else:  # GPT-2: hidden_size is heads x head_dim, and LayerNorm of a few elements is nearly a step: it needs many narrow heads
        heads = max(2, min(SMALL_HIDDEN // head_dim, LARGEST_SCORES // seq_length**2))
        small |= {"hidden_size": heads * head_dim, "n_inner": SMALL_INNER}
    small["num_attention_heads"] = heads
    if architecture.get("pad_token_id") is not None:
        small["pad_token_id"] = architecture["pad_token_id"] % SMALL_VOCABULARY
    return small


def _depth(architecture: dict) -> dict:
    """A depth of at most two, with one layer of each type that the model has."""
    depth = architecture["num_hidden_layers"]
    types = getattr(transformers_config(architecture), "layer_types", None)
    if types is None:  # all layers are of one type
        return {"num_hidden_layers": min(2, depth)}
    chosen = sorted({types.index(each) for each in types})
    chosen = chosen if len(chosen) > 1 else list(range(min(2, depth)))
    return {"num_hidden_layers": len(chosen), "layer_types": [types[each] for each in chosen]}


def _require_names(model: torch.nn.Module, shapes: dict[str, tuple], whose: str) -> None:
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    name = next((name for name in [*built, *shapes] if built.get(name) != shapes.get(name)), None)
    if name:
        raise UserError(
            f"{whose} has {printable(name, 80)} of shape {built.get(name)}, and the reference has "
            f"{shapes.get(name)}; choose another model"
        )


def _layers_differ(own: "PreTrainedConfig", reference: "PreTrainedConfig") -> str:
    """The difference of the layers' types before the depth is cut, in a sentence, or ""."""
    mine, expected = (getattr(config, "layer_types", None) or [] for config in (reference, own))
    if mine != expected[: len(mine)]:
        return (
            f"the reference's layers are {printable(mine, 200)}, transformers has {printable(expected, 200)}"
        )
    return ""


def _names_differ(own: torch.nn.Module, reference: torch.nn.Module) -> str:
    try:
        _require_names(
            own, {name: tuple(parameter.shape) for name, parameter in reference.named_parameters()}, "it"
        )
    except UserError as error:
        return str(error)
    return ""
