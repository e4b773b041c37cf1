"""Attention in plain torch, of runs that computed it with kernels of GPUs. Those compute neither on CPUs nor in float64.

The functions are those of the package flash_attn. They have the names, arguments and shapes of
https://github.com/Dao-AILab/flash-attention, and stand in the package's place while a recorded model is computed. As in the
kernels, scores and probabilities are in float32 where the inputs have 16 bits, and the probabilities are rounded to the inputs'
dtype before they are multiplied with the values.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from lockstep.ground.errors import UserError

PACKAGES = ("flash_attn", "flash_attn_interface")  # of version 2, and of version 3
LOADED = "flash_attention_3"  # the version that transformers imports without looking for it first
AUTOCAST = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
OLDER = {"get_autocast_gpu_dtype": "get_autocast_dtype", "set_autocast_gpu_dtype": "set_autocast_dtype"}
ANYWHERE = (-1, -1)  # a window that ends on neither side

flash_attn_with_kvcache = None  # transformers imports it, for generation


@contextlib.contextmanager
def in_place(device: str) -> Iterator[None]:
    """While a run on a `device` other than "cpu" is judged, what imports flash_attn gets this module.

    torch's flex_attention, which CPUs compute without compiling it, can be differentiated, and sdpa_kernel chooses no kernel. Where
    the model's code turns autocast on or off for "cuda", or asks for its state, that of the CPU is meant.
    """
    if device == "cpu":
        yield
        return
    modules_before = {name: sys.modules.get(name) for name in PACKAGES}
    sys.modules.update(dict.fromkeys(PACKAGES, sys.modules[__name__]))
    # Other versions of torch may not have them
    private = ("flex_attention._validate_device", "_sdpa_kernel")
    try:
        with contextlib.ExitStack() as stack:
            for name in private:
                patch = mock.patch(f"torch.nn.attention.{name}", lambda *_, **__: None, create=True)
                stack.enter_context(patch)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            init = torch.autocast.__init__
            stack.enter_context(mock.patch.object(torch.autocast, "__init__", _made_for_cpu(init)))
            for name in AUTOCAST:
                stack.enter_context(mock.patch.object(torch, name, _of_cpu(getattr(torch, name))))
            for name, newer in OLDER.items():
                stack.enter_context(
                    mock.patch.object(torch, name, functools.partial(getattr(torch, newer), "cuda"))
                )
            # A GPU's autocast computes in float16 where no dtype is given
            stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
            torch.set_autocast_dtype("cpu", torch.float16)
            yield
    finally:
        for name, module in modules_before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _made_for_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """Return the `__init__` of autocast with the CPU, on which the judge computes, in the place of "cuda"."""

    def made(self: torch.autocast, device_type: str, *arguments: Any, **options: Any) -> None:
        init(self, "cpu" if device_type == "cuda" else device_type, *arguments, **options)

    return made


def _of_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of autocast's state, likewise. Without a device, torch means a GPU's."""

    def asked(device_type: Any = "cuda", *arguments: Any, **named: Any) -> Any:
        if not isinstance(device_type, str):  # set_autocast_enabled(True)
            device_type, arguments = "cpu", (device_type, *arguments)
        return function("cpu" if device_type == "cuda" else device_type, *arguments, *named.values())

    return asked


def choose(model: torch.nn.Module) -> list[str]:
    """Let models of transformers compute attention with what a CPU has.

    Returns the names of the kernels that the run had, which compute the same.
    """
    kernels = set()
    for module in model.modules():
        config: Any = vars(module).get("config")
        name = getattr(config, "_attn_implementation", None)
        if not isinstance(name, str) or not ("flash" in name or "flex" in name):
            continue
        # sdpa has no soft cap of its scores
        has_soft_cap = getattr(config, "attn_logit_softcapping", None) is not None
        has_sdpa = getattr(module, "_supports_sdpa", False) and not has_soft_cap
        replacement = LOADED if "flash" in name else "sdpa" if has_sdpa else "eager"
        config._attn_implementation = replacement
        kernels.add(name)
    # Modules of a model share its config, so the later ones find LOADED there
    return sorted(kernels - {LOADED} or kernels)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = ANYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of sequences that lie one after the other, (positions, heads, head dim).

    `q` is (positions, heads, head dim). `k` and `v` are likewise, and the number of their heads divides that of `q`. Sequence i ends
    at entry i + 1 of `cu_seqlens`. If queries and keys have unequal numbers of positions, their last ones are aligned.
    `window_size`: how many positions before and after its own a query sees. `s_aux` (heads): a further score of each head, without
    a value. Raises UserError for dropout, whose random numbers the kernels draw themselves, and for what is not known here.
    """
    if dropout_p or alibi_slopes is not None or return_attn_probs:
        name = "dropout" if dropout_p else "alibi_slopes" if alibi_slopes is not None else "return_attn_probs"
        raise UserError(
            f"flash_attn was called with {name}, which the reference cannot compute; record a run without it"
        )
    before, after = window_size[0], 0 if causal else window_size[1]
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), cu_seqlens_k.tolist()
    sequences = (tensor.tensor_split(ends[1:-1]) for tensor, ends in zip((q, k, v), offsets, strict=True))
    outputs = [
        _attention(queries, keys, values, scale, before, after, softcap, s_aux)
        for queries, keys, values in zip(*sequences, strict=True)
    ]
    return torch.cat(outputs)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    before: int,
    after: int,
    softcap: float,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of one sequence; `q`, `k` and `v` are (positions, heads, head dim)."""
    query_positions, key_positions = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    is_seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if before >= 0:
        is_seen &= key_positions >= query_positions - before
    if after >= 0:
        is_seen &= key_positions <= query_positions + after
    with torch.autocast(q.device.type, enabled=False):
        heads, dtype = q.shape[1], torch.promote_types(q.dtype, torch.float32)
        k, v = (tensor.repeat_interleave(heads // tensor.shape[1], 1).transpose(0, 1) for tensor in (k, v))
        scores = q.transpose(0, 1).to(dtype) @ k.to(dtype).mT * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~is_seen, torch.finfo(scores.dtype).min)
        if s_aux is not None:
            sink = s_aux.to(dtype).view(heads, 1, 1).expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], -1)
        probabilities = scores.softmax(-1)[..., : k.shape[1]] * is_seen.any(1, keepdim=True)
        return (probabilities.to(v.dtype) @ v).transpose(0, 1)


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **options: Any
) -> torch.Tensor:
    """`q`, `k`, `v` (batch, positions, heads, head dim); further arguments as above, after `max_seqlen_k`."""
    q_ends, k_ends = (torch.arange(len(tensor) + 1) * tensor.shape[1] for tensor in (q, k))
    queries, keys, values = (tensor.flatten(0, 1) for tensor in (q, k, v))
    output = flash_attn_varlen_func(queries, keys, values, q_ends, k_ends, None, None, *more, **options)
    return output.unflatten(0, q.shape[:2])


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    """`qkv` (batch, positions, 3, heads, head dim)."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_func(q, k, v, *more, **options)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    """`kv` (batch, positions, 2, heads, head dim)."""
    k, v = kv.unbind(-3)
    return flash_attn_func(q, k, v, *more, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *more: Any, **options: Any
) -> torch.Tensor:
    """`qkv` (positions, 3, heads, head dim)."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *more, **options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *more: Any, **options: Any
) -> torch.Tensor:
    """`kv` (positions, 2, heads, head dim)."""
    k, v = kv.unbind(-3)
    return flash_attn_varlen_func(q, k, v, *more, **options)
