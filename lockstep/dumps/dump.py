"""A dump: what one run computed in its first steps, as full tensors on disk.

    FOLDER/manifest.json            what ran, and for every step and tensor: shape, dtype, how it was sharded, checksum
    FOLDER/step_1.safetensors       the tensors of a step, readable by any safetensors reader
    FOLDER/step_2.safetensors.part  a step that was not finished

The manifest (lockstep/dumps/manifest.py) names a step only when its file is whole. lockstep/dumps/capture.py takes the tensors of a rank.
Each rank writes its shards into the one file (step_file.py), at the places that placement.py computes. Nothing is gathered. This module
reads a dump and checks it against what the model must have computed (lockstep/dumps/layout.py).
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from lockstep.dumps import manifest as manifest_file
from lockstep.dumps.layout import Layout
from lockstep.dumps.manifest import MANIFEST, REMEDY
from lockstep.dumps.step_file import DTYPES, checksum, step_path
from lockstep.ground.errors import UserError, first_line, printable
from lockstep.ground.files import parse_json, require_regular
from lockstep.inputs.samples import Samples
from lockstep.plan import compiled
from lockstep.plan.config import OPTIMIZERS, sequences_per_step

TORCH = {text: dtype for dtype, text in DTYPES.items()}
ITEMSIZE = {text: dtype.itemsize for dtype, text in DTYPES.items()}


def number_of_elements(entry: dict) -> int:
    return math.prod(entry["shape"])


class Dump:
    """A dump on disk: its manifest, checked, and its tensors by name, read piece by piece.

    Raises UserError for a folder without a readable manifest; for a file that is missing, cut off, damaged or not the manifest's; for
    tensors that the model does not have, or has in another shape. A reference and a replay must have all tensors of their steps. What a
    run lacks is in `missing`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / MANIFEST
        unfinished = sorted(folder.glob("*.part")) if folder.is_dir() else []
        if not path.exists():
            found = f"only the unfinished {unfinished[0].name}" if unfinished else "no dump"
            raise UserError(f"{folder}: {found} (no {MANIFEST}); run with --capture_dir again")
        if unfinished:
            raise UserError(
                f"{folder}: {unfinished[0].name} was not finished; the run was stopped or is still going on; {REMEDY}"
            )
        self.manifest = manifest_file.read(path)
        self.run = self.manifest["run"]
        self.label = self.run["label"]
        self.steps: dict[int, dict[str, Any]] = {int(n): entry for n, entry in self.manifest["steps"].items()}
        self.exact: bool = bool(self.run.get("exact"))
        self.contract: dict = self.manifest.get("contract") or {}  # a reference has none
        if not self.contract and not self.exact:
            raise UserError(f"{folder}: the run was stopped before its contract was recorded; {REMEDY}")
        self.layout = Layout.model_validate(self.manifest["layout"])
        self.missing = [(step, name) for step in self.steps for name in self._check_tensors(step)]
        self._places = {step: self._read_header(step) for step in self.steps}
        if self.exact and self.missing:
            step, name = self.missing[0]
            raise UserError(
                f"{path}: step {step} lacks {name}; a reference must have every tensor of its model; {REMEDY}"
            )

    @property
    def name(self) -> str:
        """The run's name: its --run_name, else that of its strategy."""
        return self.run["config"]["run_name"] or self.run["config"]["strategy"]

    @property
    def initial_sha256(self) -> str:
        return self.manifest["initial_sha256"]

    @property
    def batch_hashes(self) -> dict[int, str]:
        """Step -> hash of its global batch."""
        return {step: entry["batch_hash"] for step, entry in self.steps.items() if step}

    @property
    def micro_batches_of_schedule(self) -> int:
        """The number of micro batches into which a pipeline's schedule divides each one; 1 without a pipeline."""
        return self.contract.get("cuts", {}).get("pp", {}).get("microbatches", 1)

    @property
    def is_reference(self) -> bool:
        return 0 in self.steps

    @property
    def is_replay(self) -> bool:
        return self.exact and not self.is_reference

    @property
    def has_own_optimizer(self) -> bool:
        """Whether its optimizer is not one of the built-in ones."""
        return self.run["config"]["optimizer"] not in OPTIMIZERS

    @property
    def samples(self) -> Samples:
        """How its samples are made."""
        return Samples.of_options(self.run["config"])

    @functools.cache  # noqa: B019 - a dump lives as long as its comparison
    def expected(self, step: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every tensor that the step must have, in order of execution."""
        config = self.run["config"]
        kinds = self.layout.kinds(config)
        if step == 0:
            kinds = ("parameter",)
        elif self.is_replay:  # it steps only an optimizer of the user's own
            kinds = ("gradient", *self.layout.state, "parameter") if self.has_own_optimizer else ("gradient",)
        rows, further = sequences_per_step(config), self.samples.further
        return self.layout.of_step(kinds, rows, config["seq_length"], further)

    def has(self, step: int, *names: str) -> bool:
        """Whether a step has all of these tensors."""
        return all(name in self.steps[step]["tensors"] for name in names)

    def _check_tensors(self, step: int) -> list[str]:
        """Return the tensors that the step lacks.

        Raises UserError for a tensor that the model does not have, or has in another shape or dtype.
        """
        path, expected, tensors = (
            self.folder / MANIFEST,
            self.expected(step),
            self.steps[step]["tensors"],
        )
        for name, entry in tensors.items():
            if name not in expected:
                raise UserError(
                    f"{path}: step {step}: the model has no tensor {printable(name, 200)}; {REMEDY}"
                )
            if tuple(entry["shape"]) != expected[name]:
                raise UserError(
                    f"{path}: step {step}: {name} is {entry['shape']}, with this model and batch it must be {list(expected[name])}; {REMEDY}"
                )
            choice = self.layout.choices.get(name.removeprefix("forward/"))
            is_int64 = name.startswith("batch/") or (choice is not None and not choice.number)
            if (entry["dtype"] == "I64") != is_int64 or (self.exact and entry["dtype"] not in ("F64", "I64")):
                raise UserError(f"{path}: step {step}: {name} cannot be {entry['dtype']}; {REMEDY}")
        # Which further outputs a module has depends on its kernel. What is computed from them is judged.
        return [name for name in expected if name not in tensors and not self._may_lack(name)]

    def _may_lack(self, name: str) -> bool:
        """Whether a run may lack a tensor: an output of a module beside its first, or one inside of a compiled layer."""
        kind, _, module = name.partition("/")
        backend = self.run["config"]["compile"]
        return (
            not self.exact
            and kind in ("forward", "backward")
            and (self.layout.is_further(module) or compiled.is_hidden(self.layout.names, backend, module))
        )

    def _read_header(self, step: int) -> dict:
        """Return name -> (offset in the file, dtype, shape) of every tensor of the step.

        Raises UserError unless file and manifest agree.
        """
        path = step_path(self.folder, step)
        tensors, expected = self.steps[step]["tensors"], self.expected(step)
        try:
            require_regular(path)
        except UserError as error:
            raise UserError(f"{error}; {REMEDY}") from error
        try:
            with safe_open(path, framework="numpy"):  # no holes, no overlaps, nothing cut off
                pass
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(length).decode())
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{path}: damaged or cut off ({first_line(error)}); {REMEDY}") from error
        unknown = next((name for name in header if name not in expected), None)
        if unknown is not None:
            raise UserError(f"{path}: the model has no tensor {printable(unknown, 200)}; {REMEDY}")
        places = {}
        for name, entry in tensors.items():
            slot = header.get(name)
            if slot is None or [slot["dtype"], slot["shape"]] != [entry["dtype"], entry["shape"]]:
                difference = (
                    "is missing"
                    if slot is None
                    else f"is {slot['dtype']} {slot['shape']}, {MANIFEST} says {entry['dtype']} {entry['shape']}"
                )
                raise UserError(f"{path}: {printable(name, 200)} {difference}; {REMEDY}")
            places[name] = (8 + length + slot["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        return places

    def blocks(self, step: int, name: str, num_elements: int) -> Iterator[torch.Tensor]:
        """Yield a tensor's elements in flat blocks of `num_elements`, each valid until the next, and verify its checksum.

        Raises UserError after the last block if the bytes are not those that were written.
        """
        path = step_path(self.folder, step)
        offset, dtype, shape = self._places[step][name]
        itemsize, total, first = ITEMSIZE[dtype], 0, 0
        bytes_left = math.prod(shape) * itemsize
        buffer = np.empty(min(bytes_left, num_elements * itemsize), dtype=np.uint8)
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(offset)
                while bytes_left:
                    piece = buffer[:bytes_left]
                    num_read = 0
                    while num_read < len(piece):
                        num_read += file.readinto(piece[num_read:].data) or self._cut_off(path, name)
                    total += checksum(piece, itemsize, first)
                    first += len(piece) // itemsize
                    bytes_left -= len(piece)
                    yield torch.from_numpy(piece).view(TORCH[dtype])
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error}); {REMEDY}") from error
        if total % 2**64 != self.steps[step]["tensors"][name]["checksum"]:
            raise UserError(f"{path}: {name} is damaged (its checksum does not match); {REMEDY}")

    @staticmethod
    def _cut_off(path: Path, name: str) -> NoReturn:
        raise UserError(f"{path}: cut off inside {name}; {REMEDY}")

    def parameter_digest(self, step: int) -> str:
        """Return a hash of the parameters after a step, made of their checksums."""
        tensors = self.steps[step]["tensors"]
        sums = {name: entry["checksum"] for name, entry in tensors.items() if name.startswith("parameter/")}
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    def tensor(self, step: int, name: str) -> torch.Tensor:
        """Return a full tensor in memory. Raises UserError if it is damaged or the run did not compute it."""
        if not self.has(step, name):
            raise UserError(f"{self.folder}: step {step} has no {name}; {REMEDY}")
        _, dtype, shape = self._places[step][name]
        whole = torch.empty(shape, dtype=TORCH[dtype])
        # The loop runs to the end, because the checksum is verified after the last block
        for block in self.blocks(step, name, max(whole.numel(), 1)):
            whole = block.reshape(shape)
        return whole


Dumps = dict[str, Dump]  # by the name of the run
