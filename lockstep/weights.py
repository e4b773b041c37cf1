"""The initial weights: one file that every strategy starts from, with a SHA-256 of each tensor.

`.safetensors` files carry the architecture and the checksums in their header; `.pt` files hold the same three
things in a dict and are only ever read with `weights_only=True`. A file that does not fit is an error naming
the first wrong tensor; there is no random start in its place.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from lockstep.architectures import parameter_shapes
from lockstep.errors import UserError, first_line
from lockstep.files import write_atomically

_HEADER = "lockstep"
_REWRITE = "write it again with train_ddp.py --save_init_weights"


def tensor_sha256(tensor) -> str:
    """SHA-256 of a CPU tensor's bytes, whatever its dtype."""
    import torch

    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def checksums(tensors: Iterable[tuple[str, "torch.Tensor"]]) -> dict[str, str]:
    """Name -> SHA-256, one tensor in memory at a time."""
    return {name: tensor_sha256(tensor) for name, tensor in tensors}


def perturb(model: "torch.nn.Module", dtype: str, seed: int) -> None:
    """Move every weight by one spacing of a dtype, up or down as a seeded coin falls: half an epsilon, rounded.

    A power of two (the 1 of a fresh norm) is half-way then, and stays where it is when it should go up.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    half = torch.finfo(getattr(torch, dtype)).eps / 2
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).double().mul_(2).sub_(1)
            parameter.copy_(parameter.double() * (1 + half * signs))


def combined_sha256(sums: dict[str, str]) -> str:
    """One SHA-256 for a whole set of named tensors; independent of their order."""
    return hashlib.sha256("\n".join(f"{name} {sums[name]}" for name in sorted(sums)).encode()).hexdigest()


def save(path: Path, model, architecture: dict) -> None:
    """Write every trained tensor of `model` (tied ones once), the architecture and the checksums, atomically."""
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    about = {"architecture": architecture, "sha256": checksums(tensors.items())}

    def write(temporary: Path) -> None:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(tensors, temporary, metadata={_HEADER: json.dumps(about)})
        else:
            import torch

            torch.save({**about, "tensors": tensors}, temporary)

    write_atomically(path, write)


def check_suffix(path: Path) -> None:
    """Raise UserError unless the name says which of the two formats it is."""
    if path.suffix not in (".safetensors", ".pt"):
        raise UserError(f"--init_weights_path {path}: the name must end in .safetensors or .pt")


def check(path: Path, architecture: dict) -> None:
    """Raise UserError unless the file is whole and holds exactly this architecture's tensors."""
    check_suffix(path)
    if not path.is_file():
        raise UserError(f"--init_weights_path {path}: no such file; run train_ddp.py with --save_init_weights first")
    written_for, found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pt(path)
    _compare(path, found, architecture)
    other = next((key for key in sorted(architecture) if written_for.get(key) != architecture[key]), None)
    if other:
        raise UserError(
            f"--init_weights_path {path}: written for {other} = {written_for.get(other)}, the model has "
            f"{architecture[other]}; use the model it was written with, or {_REWRITE}"
        )


def load(path: Path, model) -> dict[str, str]:
    """Copy the file's tensors into an unsharded `model` and return their checksums.

    Call `check` first (it verifies shapes and checksums). Works tensor by tensor from a memory map.
    """
    import torch

    parameters = dict(model.named_parameters())
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(file.get_tensor(name))
            return json.loads(file.metadata()[_HEADER])["sha256"]
    content = _load_pt(path)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(content["tensors"][name])
    return content["sha256"]


def _read_safetensors(path: Path) -> tuple[dict, dict[str, tuple[str, tuple[int, ...], str, str]]]:
    """The architecture, and name -> (dtype, shape, recorded SHA-256, actual SHA-256), read without torch.

    Layout: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
    (https://github.com/huggingface/safetensors#format).
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise ValueError("the header is cut off")
            header = json.loads(file.read(length))
            about = json.loads(header.pop("__metadata__", {}).get(_HEADER, "null"))
            if about is None:
                raise UserError(f"--init_weights_path {path}: not written by this project (no checksums); {_REWRITE}")
            found = {}
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
                begin, end = entry["data_offsets"]
                if 8 + length + end > size:
                    raise UserError(f"--init_weights_path {path}: truncated inside tensor {name}; {_REWRITE}")
                file.seek(8 + length + begin)
                actual = hashlib.sha256(file.read(end - begin)).hexdigest()
                found[name] = (entry["dtype"], tuple(entry["shape"]), about["sha256"].get(name, "none"), actual)
            return dict(about["architecture"]), found
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--init_weights_path {path}: damaged or no safetensors file ({error}); {_REWRITE}") from error


def _load_pt(path: Path) -> dict:
    import torch

    try:
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        content["architecture"], content["sha256"], content["tensors"].items  # noqa: B018 - the three parts are there
    except Exception as error:  # torch raises half a dozen kinds, from zip, pickle and its own code
        raise UserError(
            f"--init_weights_path {path}: damaged, truncated or not a weights file ({first_line(error)}); {_REWRITE}"
        ) from error
    return content


def _read_pt(path: Path) -> tuple[dict, dict[str, tuple[str, tuple[int, ...], str, str]]]:
    content = _load_pt(path)
    names = {"torch.float32": "F32"}
    return content["architecture"], {
        name: (
            names.get(str(tensor.dtype), str(tensor.dtype)),
            tuple(tensor.shape),
            content["sha256"].get(name, "none"),
            tensor_sha256(tensor),
        )
        for name, tensor in content["tensors"].items()
    }


def _compare(path: Path, found: dict, architecture: dict) -> None:
    expected = parameter_shapes(architecture)
    where = f"--init_weights_path {path}"
    other = "use the --model_name and --num_layers it was written with, or " + _REWRITE
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{where}: tensor {name} is missing; {other}")
        dtype, actual_shape, recorded, actual = found[name]
        if actual_shape != shape:
            raise UserError(f"{where}: tensor {name} has shape {actual_shape}, the model needs {shape}; {other}")
        if dtype != "F32":
            raise UserError(f"{where}: tensor {name} is {dtype}, initial weights are float32; {_REWRITE}")
        if recorded != actual:
            raise UserError(f"{where}: tensor {name} is damaged (its checksum does not match); {_REWRITE}")
    extra = next((name for name in found if name not in expected), None)
    if extra is not None:
        raise UserError(f"{where}: tensor {extra} is not part of the model; {other}")
