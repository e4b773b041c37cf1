"""What a forward and backward pass holds beyond weights, gradients and optimizer state: measured on fake tensors.

A fake tensor has a shape, a dtype and a device, and no numbers. transformers' own model runs on them with two and with three
layers, and every storage that comes and goes is counted: what is saved for backward, the logits, the temporary tensors of
each operation. The difference between the two is a layer, so a model of any depth takes seconds. A gradient is dropped as
soon as it is whole: gradients that are kept are in the plan of the strategy.

The kernels are those of a CPU. A GPU's attention kernels save the same tensors.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.ground import files
from lockstep.ground.errors import UserError
from lockstep.ground.files import read_json, write_text
from lockstep.inputs import modules
from lockstep.inputs.shapes import from_config, quiet

if TYPE_CHECKING:
    import torch

    from lockstep.plan.config import Config


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro batch on one rank, without weights and kept gradients.

    `saved` is alive when the forward pass ends: all that backward needs, and the loss. The others, but for `layer`, are the
    most that is alive at any time of a phase, `saved` or what is left of it included.
    """

    saved: int
    layers: int  # forward, until the head
    forward: int  # head and loss
    head: int  # backward of loss and head, until the last layer's first gradient
    top: int  # from there on
    bottom: int  # from the first layer's first gradient on
    tail: int  # backward of the embedding
    layer: int = 0  # of `saved`, what one layer adds


def of(config: "Config", architecture: dict, *, whole_layers: bool = False) -> Activations:
    """The activations of a rank: those of the model that is left when tp has cut it.

    With `whole_layers` the gradients of a layer are among them until its last one is there.
    """
    local = local_architecture(architecture, config.tp_size)
    layers = local["num_hidden_layers"]
    two, three = (
        _cached(
            json.dumps(_with_layers(local, count), sort_keys=True),
            config.attn_impl,
            config.precision,
            config.batch_size,
            config.seq_length,
            config.tp_size,
            whole_layers,
        )
        for count in (2, 3)
    )
    values = {key: value + (layers - 2) * (getattr(three, key) - value) for key, value in asdict(two).items()}
    return Activations(**{**values, "layer": three.saved - two.saved})


def local_architecture(architecture: dict, tp_size: int) -> dict:
    """The model that a tp rank holds: whole heads, columns of the MLP, rows of the vocabulary.

    Where these do not divide, it is the first rank's.
    """
    # These ids may belong to another rank's part of the vocabulary
    no_ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if tp_size == 1:
        return {**architecture, **no_ids}
    heads = architecture["num_attention_heads"]
    return {
        **architecture,
        "num_attention_heads": heads // tp_size,
        "num_key_value_heads": architecture["num_key_value_heads"] // tp_size,
        "intermediate_size": architecture["intermediate_size"] // tp_size,
        "vocab_size": -(-architecture["vocab_size"] // tp_size),
        "head_dim": architecture.get("head_dim") or architecture["hidden_size"] // heads,
        **no_ids,
    }


def _with_layers(architecture: dict, count: int) -> dict:
    """The same model with so many layers.

    If layers have two kinds of attention, that of the first layers is measured: only their masks differ.
    """
    kinds = architecture.get("layer_types")
    return {
        **architecture,
        "num_hidden_layers": count,
        **({"layer_types": [kinds[min(at, len(kinds) - 1)] for at in range(count)]} if kinds else {}),
    }


@functools.lru_cache(maxsize=64)
def _cached(
    architecture: str,
    attn_impl: str,
    precision: str,
    batch_size: int,
    seq_length: int,
    tp_size: int,
    whole_layers: bool,
) -> Activations:
    """Return what `measure` gives, or what an earlier process has measured.

    Measuring imports torch and transformers, which takes seconds.
    """
    asked = [architecture, attn_impl, precision, batch_size, seq_length, tp_size, whole_layers]
    libraries = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    key = json.dumps([asked, libraries, Path(__file__).read_text(encoding="utf-8")])
    name = hashlib.sha256(key.encode()).hexdigest()
    path = files.cache_folder() / f"activations-{name[:32]}.json"
    try:
        content = read_json(path)
        if content["of"] == name and all(type(content[field.name]) is int for field in fields(Activations)):
            return Activations(**{field.name: content[field.name] for field in fields(Activations)})
    except (UserError, LookupError, TypeError):  # not there, or not what was written
        pass
    measured = measure(
        json.loads(architecture), attn_impl, precision, batch_size, seq_length, tp_size, whole_layers
    )
    with contextlib.suppress(UserError):  # the next process measures again
        write_text(path, json.dumps({"of": name, **asdict(measured)}))
    return measured


def measure(
    architecture: dict,
    attn_impl: str,
    precision: str,
    batch_size: int,
    seq_length: int,
    tp_size: int,
    whole_layers: bool = False,
) -> Activations:
    """Run forward and backward of a model that tp has already cut, on fake tensors. Does not change the random state.

    In `mixed` the copies of the weights in bfloat16 are activations, as `CastWeights` of ddp_strategy.py makes them.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lockstep.inputs.model import causal_lm_loss

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with quiet(), FakeTensorMode(), torch.random.fork_rng(devices=[]), _tp_group(tp_size) as group:
        model = from_config(architecture, attn_impl=attn_impl, dtype=dtype)
        if group is not None:
            _compute_loss_on_shards(model, group)
        ids = torch.zeros(batch_size, seq_length, dtype=torch.long)
        live = _live([*model.parameters(), *model.buffers(), ids])
        with _one_sequence(), _phases(model, live, whole_layers), live:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
                loss = causal_lm_loss(_cast(model) if precision == "mixed" else model, ids, ids)
            saved = live.bytes
            live.enter("head")
            loss.backward()
    return Activations(saved=saved, **live.peaks)


def _cast(model: Any) -> Any:
    """The model, to be called with its weights cast to bfloat16."""
    import torch

    def forward(**inputs: Any) -> Any:
        cast = {name: weight.to(torch.bfloat16) for name, weight in model.named_parameters()}
        return torch.func.functional_call(model, cast, (), inputs)

    return forward


@contextlib.contextmanager
def _one_sequence() -> Iterator[None]:
    """Let transformers take a batch for one that is not packed.

    It would look at the positions. Fake ones have no values, and it would make a mask.
    """
    from transformers import masking_utils

    real = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = real


@contextlib.contextmanager
def _tp_group(tp_size: int) -> Iterator[Any]:
    """A process group of so many ranks of which only this one exists, for the collectives of the loss; None for one rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if tp_size == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=tp_size, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _compute_loss_on_shards(model: Any, group: Any) -> None:
    from lockstep.training.vocab_parallel_loss import vocab_parallel_cross_entropy

    def loss(
        logits: "torch.Tensor",
        labels: "torch.Tensor",
        vocab_size: int,
        shift_labels: "torch.Tensor",
        **_: Any,
    ) -> "torch.Tensor":
        return vocab_parallel_cross_entropy(logits, shift_labels, 0, group)

    model.loss_function = loss


def _live(uncounted: "list[torch.Tensor]") -> Any:
    """A mode that counts the bytes of all storages that operations make, while they are alive.

    `bytes` are those of now, `peaks` the most of each phase. Storages of the tensors `uncounted` do not count.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Live(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in uncounted}
            self.bytes, self.phase = 0, "layers"
            self.peaks = {"layers": 0}

        def enter(self, phase: str) -> None:
            if phase != self.phase:
                self.phase = phase
                self.peaks[phase] = self.bytes

        def _see(self, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.bytes += self.sizes[key]
                self.peaks[self.phase] = max(self.peaks[self.phase], self.bytes)
                weakref.finalize(storage, self._gone, key)

        def _gone(self, key: int) -> None:
            self.bytes -= self.sizes.pop(key)

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: dict | None = None
        ) -> Any:
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self._see(tensor)
            return out

    return Live()


@contextlib.contextmanager
def _phases(model: Any, live: Any, whole_layers: bool) -> Iterator[None]:
    """Drop every gradient once it is whole, or with `whole_layers` once all of its layer are. Tell `live` the phase from it."""
    last = model.config.num_hidden_layers - 1
    layer_of = modules.names_in(model).layer_of
    left = {
        number: 0 for number in range(last + 1)
    }  # layer -> number of its gradients that are still to come
    done: dict[int, list[torch.Tensor]] = {}  # layer -> parameters whose gradients are kept

    def watch(name: str) -> Any:
        number = layer_of(name)

        def whole(parameter: "torch.Tensor") -> None:
            done.setdefault(number, []).append(parameter)
            if number < 0 or not whole_layers or left[number] == 1:
                for kept in done.pop(number):
                    kept.grad = None
            if number == last:
                live.enter("top")
            elif number == 0:
                live.enter("bottom")
            if number >= 0:
                left[number] -= 1
            if number == 0 and not left[0]:
                live.enter("tail")

        return whole

    handles = [
        model.get_submodule(modules.names_in(model).head).register_forward_pre_hook(
            lambda *_: live.enter("forward")
        )
    ]
    for name, parameter in model.named_parameters():
        if layer_of(name) >= 0:
            left[layer_of(name)] += 1
        handles.append(parameter.register_post_accumulate_grad_hook(watch(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
