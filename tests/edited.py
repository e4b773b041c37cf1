"""Dumps that a test has changed: the one way to edit a manifest, which is sealed, and a step's file."""

import json
from pathlib import Path

import numpy as np
import torch

from lockstep.dumps import manifest as manifest_file
from lockstep.dumps.dump import ITEMSIZE, TORCH, Dump
from lockstep.dumps.step_file import checksum


def edit(folder: Path, change) -> None:
    """change(manifest), which is then sealed again: what an honest writer of other content would have written."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    manifest_file.write(folder, manifest)


def take_out(folder: Path, chosen, *, steps=("1", "2")) -> int:
    """Take the tensors with chosen(name) out of the manifest; returns how many."""
    taken = []

    def change(manifest):
        for step in steps:
            tensors = manifest["steps"].get(step, {"tensors": {}})["tensors"]
            taken.extend(tensors.pop(name) for name in list(tensors) if chosen(name))

    edit(folder, change)
    return len(taken)


def overwrite(folder: Path, step: int, name: str, word: int, bits: int) -> None:
    """Write other bits into one word of a tensor: an honest dump of other numbers."""
    itemsize = ITEMSIZE[Dump(folder)._places[step][name][1]]

    def change(data: np.ndarray) -> None:
        data[word * itemsize : (word + 1) * itemsize] = list(bits.to_bytes(itemsize, "little"))

    change_bytes(folder, step, name, change)


def change_tensor(folder: Path, step: int, name: str, change) -> None:
    """change(tensor), in place: an honest dump of other numbers."""
    _, dtype, shape = Dump(folder)._places[step][name]
    change_bytes(
        folder,
        step,
        name,
        lambda data: change(torch.from_numpy(data).view(TORCH[dtype]).view(shape)),
    )


def change_bytes(folder: Path, step: int, name: str, change) -> None:
    """change(bytes of a tensor), in place, and write them with their checksum."""
    offset, dtype, shape = Dump(folder)._places[step][name]
    itemsize = ITEMSIZE[dtype]
    with open(folder / f"step_{step}.safetensors", "r+b") as file:
        file.seek(offset)
        data = np.frombuffer(file.read(int(np.prod(shape)) * itemsize), dtype=np.uint8).copy()
        change(data)
        file.seek(offset)
        file.write(data.tobytes())
    edit(
        folder,
        lambda manifest: manifest["steps"][str(step)]["tensors"][name].update(
            checksum=checksum(data, itemsize)
        ),
    )


def flip_byte(path: Path, place: int) -> None:
    """Change one byte of a file; a negative place counts from its end."""
    with open(path, "r+b") as file:
        file.seek(place, 2 if place < 0 else 0)
        byte = file.read(1)
        file.seek(place, 2 if place < 0 else 0)
        file.write(bytes([byte[0] ^ 1]))
