"""The initial weights: what every strategy starts from, with a SHA-256 of each tensor.

A file that Lockstep wrote holds the architecture and the checksums beside the tensors (in the header of a `.safetensors`, in the dict of
a `.pt`), and must match them. Of a foreign file, names, shapes and numbers are checked, and the checksums are computed. `load` loads what
`check` accepts. A file that does not fit is never replaced by random weights.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.ground.errors import UserError, printable
from lockstep.ground.files import write_atomically
from lockstep.inputs import modules
from lockstep.inputs.shapes import describe, parameter_shapes
from lockstep.inputs.weight_files import DAMAGED, FLOATS, HEADER, INDEX, About, Contents, read

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_ANOTHER = "write a file for this model under another name with train_ddp.py --save_init_weights"
# Ends of the names of tables that files hold beside the parameters.
_TABLES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def tensor_sha256(tensor: "torch.Tensor") -> str:
    """SHA-256 of a CPU tensor's bytes, whatever its dtype."""
    import torch

    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def checksums(tensors: Iterable[tuple[str, "torch.Tensor"]]) -> dict[str, str]:
    """Name -> SHA-256 of its tensor. Only one tensor is in memory at a time."""
    return {name: tensor_sha256(tensor) for name, tensor in tensors}


def perturb(model: "torch.nn.Module", dtype: str, seed: int) -> None:
    """Perturb every weight by one ulp of `dtype`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(perturbed(parameter, generator, torch.finfo(getattr(torch, dtype)).eps / 2))


def perturbed(tensor: "torch.Tensor", generator: "torch.Generator", size: float) -> "torch.Tensor":
    """Every element moved up or down at random by a relative `size`, and rounded. Half of a dtype's epsilon moves by one ulp of it.

    Upwards, a power of two (the 1 of a fresh norm) lands half-way between two numbers and is rounded back to itself.
    """
    import torch

    signs = torch.randint(0, 2, tensor.shape, generator=generator).double().mul_(2).sub_(1)
    return (tensor.double() * (1 + size * signs)).to(tensor.dtype)


def combined_sha256(sums: dict[str, str]) -> str:
    """One SHA-256 for a set of named tensors, in any order."""
    return hashlib.sha256("\n".join(f"{name} {sums[name]}" for name in sorted(sums)).encode()).hexdigest()


def save(
    path: Path, model: "torch.nn.Module", architecture: dict, source: str, *, overwrite: bool = False
) -> None:
    """Write every parameter of `model` (tied ones once), the architecture, the checksums and the source, atomically.

    A file with the same content stays as it is. Raises UserError for a file that `check_new` refuses.
    """
    existing = check_new(path, architecture, source, overwrite=overwrite)
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    sums = checksums(tensors.items())
    about = {"architecture": architecture, "sha256": sums, "source": source}
    if existing is not None and not overwrite:
        if existing.sha256 == sums:
            return
        raise UserError(_occupied(path, f"holds other {source} than this run would write"))

    def write(temporary: Path) -> None:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(tensors, temporary, metadata={HEADER: json.dumps(about)})
        else:
            import torch

            torch.save({**about, "tensors": tensors}, temporary)

    write_atomically(path, write)


def check_new(path: Path, architecture: dict, source: str, *, overwrite: bool) -> About | None:
    """What an existing file says of itself; None if there is no file.

    Raises UserError unless `save` may write there: nothing is lost, or `overwrite` allows it.

    A file that claims to hold these weights may stay; the run compares it with what it would write. A file that this project did not
    write is never replaced.
    """
    where = f"--init_weights_path {path}"
    if path.suffix not in (".safetensors", ".pt"):
        raise UserError(f"{where}: the name must end in .safetensors or .pt")
    if not os.path.lexists(path):
        return None
    try:
        about = read(path, where).about
    except UserError:
        about = None
    if about is None:
        raise UserError(
            f"{where}: already exists, was not written by --save_init_weights and is never replaced; choose another name, "
            "or leave out --save_init_weights to start from it"
        )
    if not overwrite and (about.source != source or _other_key(about.architecture, architecture) is not None):
        raise UserError(_occupied(path, f"holds other weights ({about.source or 'of an unknown source'})"))
    return about


def _occupied(path: Path, what: str) -> str:
    return (
        f"--init_weights_path {path}: already exists and {what}, and nothing is overwritten; choose another name, leave out "
        "--save_init_weights to start from it, or add --overwrite"
    )


def check(
    path: Path, architecture: dict, *, option: str = "--init_weights_path", fewer_layers: bool = False
) -> None:
    """Raise UserError unless the file is whole and holds exactly this architecture's tensors, with finite numbers.

    With `fewer_layers` the model was cut, and a foreign file may hold the layers that were left out.
    """
    where = f"{option} {path}"
    if path.suffix not in (".safetensors", ".pt") and not path.name.endswith(INDEX):
        raise UserError(f"{where}: the name must end in .safetensors, {INDEX} or .pt")
    if not os.path.exists(path):
        raise UserError(f"{where}: no such file; run train_ddp.py with --save_init_weights first")
    contents = _whole_names(read(path, where, checksums=True), describe(architecture).names)
    _check_names_and_shapes(contents, where, architecture, fewer_layers)
    about = contents.about
    if about is not None:
        key = _other_key(about.architecture, architecture)
        if key is not None:
            raise UserError(
                f"{where}: written for {printable(key, 80)} = {printable(about.architecture.get(key), 80)}, the model has "
                f"{architecture.get(key)}; use the model it was written with, or {_ANOTHER}"
            )
        name = _other_key(about.sha256, checksums(contents.tensors.items()))
        if name is not None:
            raise UserError(
                f"{where}: tensor {printable(name, 200)} is damaged (its checksum does not match); {DAMAGED}"
            )
    for name in parameter_shapes(architecture):
        tensor = contents.tensors[name].float()
        # aminmax() returns NaN for a tensor with a NaN; isfinite() would take as much memory as the tensor again.
        if tensor.numel() and not all(extreme.isfinite() for extreme in tensor.aminmax()):
            raise UserError(
                f"{where}: tensor {name} holds a NaN or an infinity; training cannot start from it, give other weights"
            )
    _check_tied_head(contents, where, architecture)


def load(path: Path, model: "PreTrainedModel") -> dict[str, str]:
    """Copy the file's tensors into an unsharded `model`, in float32, and return their checksums.

    Call `check` first. Reads tensor by tensor from a memory map.
    """
    import torch

    contents = _whole_names(read(path, str(path)), modules.names_in(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(contents.tensors[name])
    return checksums(model.named_parameters()) if contents.about is None else contents.about.sha256


def _whole_names(contents: Contents, names: modules.Names) -> Contents:
    """The contents with the names that the whole model has.

    In a file of the base model alone, as that of openai-community/gpt2, names lack that of the base.
    """
    if (
        contents.about is not None
        or not names.base
        or names.embedding_weight.removeprefix(f"{names.base}.") not in contents.tensors
    ):
        return contents
    tensors = {
        name if name == names.head_weight else f"{names.base}.{name}": tensor
        for name, tensor in contents.tensors.items()
    }
    return dataclasses.replace(contents, tensors=tensors)


def _check_names_and_shapes(contents: Contents, where: str, architecture: dict, fewer_layers: bool) -> None:
    expected, tensors = parameter_shapes(architecture), contents.tensors
    remedy = f"use the --model_name and --num_layers it was written with, or {_ANOTHER}"
    floats = FLOATS if contents.about is None else FLOATS[:1]
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"{where}: tensor {name} is missing; {remedy}")
        actual, dtype = tuple(tensors[name].shape), str(tensors[name].dtype)
        if actual != shape:
            raise UserError(f"{where}: tensor {name} has shape {actual}, the model needs {shape}; {remedy}")
        if dtype not in floats:
            raise UserError(
                f"{where}: tensor {name} is {dtype}, initial weights are {' or '.join(floats)}; {_ANOTHER}"
            )
    model, is_foreign = describe(architecture), contents.about is None
    for name in sorted(tensors.keys() - expected.keys()):
        is_tied_head = name == model.names.head_weight and model.tied
        # The architecture of a module of the user's own has no number of layers.
        num_layers = architecture.get("num_hidden_layers", math.inf)
        is_left_out = is_foreign and model.names.layer_of(name) >= num_layers
        if (is_foreign and (is_tied_head or name.endswith(_TABLES))) or (is_left_out and fewer_layers):
            continue
        hint = "; add --num_layers to leave layers out" if is_left_out else ""
        raise UserError(f"{where}: tensor {printable(name, 200)} is not part of the model{hint}; {remedy}")


def _check_tied_head(contents: Contents, where: str, architecture: dict) -> None:
    """If the file holds a head and the model ties it, the head must be equal to the embedding."""
    import torch

    model = describe(architecture)
    embedding_weight, head_weight = model.names.embedding_weight, model.names.head_weight
    if head_weight not in contents.tensors or not model.tied:
        return
    head, embedding = contents.tensors[head_weight], contents.tensors[embedding_weight]
    # The shape first: an expanded view of another shape could take any amount of memory as float32.
    if (
        head.shape != embedding.shape
        or str(head.dtype) not in FLOATS
        or not torch.equal(head.float(), embedding.float())
    ):
        raise UserError(
            f"{where}: {head_weight} is not {embedding_weight}, and the model has one for both (tie_word_embeddings); set "
            "tie_word_embeddings to false in config.json, or use the model it was written with"
        )


def _other_key(one: dict, other: dict) -> str | None:
    """The first key in which two JSON objects differ; None if they are equal. As in JSON, true is not 1, but 1.0 is."""
    return next(
        (key for key in sorted(one.keys() | other.keys()) if _text(one.get(key)) != _text(other.get(key))),
        None,
    )


def _text(value: object) -> str:
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)
