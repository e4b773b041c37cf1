"""The source of a run's initial weights (a seed, a pretrained model, or a file), and its checks before the run."""

import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.ground import files
from lockstep.ground.errors import UserError
from lockstep.inputs import weight_files, weights
from lockstep.inputs.architectures import BUILT_IN, HUB_IDS
from lockstep.inputs.hub import hub_file
from lockstep.inputs.weight_files import FLOATS, INDEX

DRAWN = "random weights"  # so begins the source of weights that were drawn from a seed
_SINGLE = "model.safetensors"


def pretrained_file(model_name: str) -> Path:
    """The weights of a model folder or hub id: model.safetensors, or the index of several files, which are all fetched.

    Raises UserError if there are none.
    """
    model_name = HUB_IDS.get(model_name, model_name)
    where = f"--pretrained: {model_name}"
    if model_name in BUILT_IN:
        raise UserError(
            f"{where} is a built-in architecture without weights; give a model folder or a hub id"
        )
    folder = Path(os.path.expanduser(model_name))
    if os.path.isdir(folder):
        local = next((path for name in (_SINGLE, f"model{INDEX}") if (path := folder / name).exists()), None)
        if local is None:
            raise UserError(
                f"{where} has no {_SINGLE} and no model{INDEX}; save the model with save_pretrained"
            )
        return local.absolute()
    single, problem = hub_file(model_name, _SINGLE)
    if single is not None:
        return single
    index, _ = hub_file(model_name, f"model{INDEX}")
    if index is None:
        raise UserError(f"{where} has no weights on the hub ({problem}); give a model folder with {_SINGLE}")
    for shard in weight_files.shards(index):
        fetched, problem = hub_file(model_name, shard)
        if fetched is None:
            raise UserError(
                f"{where}: {shard} is not available from the hub ({problem}); fetch the model and give its folder"
            )
    return index


@dataclass(frozen=True)
class Start:
    """Where a run's initial weights come from: a seed, a pretrained model or a file. They may be written to a file first."""

    model_name: str
    pretrained: bool
    path: Path | None  # --init_weights_path
    save: bool  # write them to `path` first
    overwrite: bool
    seed: int
    perturbed_in: str | None = None  # a dtype: every weight is then perturbed by one ulp of it

    @property
    def written(self) -> Path | None:
        """The file that the weights are written to; None if they are not written. Raises UserError if no file is named."""
        if self.save and self.path is None:
            raise UserError("--save_init_weights needs --init_weights_path, the file to write")
        return self.path if self.save else None

    def file(self) -> Path | None:
        """The file that the weights are read from, before they are saved; None if they are drawn from the seed."""
        if self.pretrained:
            return pretrained_file(self.model_name)
        return None if self.save else self.path

    def origin(self) -> str:
        """Where the weights come from in words, without paths of this machine (except a model folder)."""
        if self.pretrained:
            return f"pretrained weights of {self.model_name}"
        path = self.file()
        if path is None:
            return f"{DRAWN}, seed {self.seed}"
        about = weight_files.read(path, f"--init_weights_path {path}").about
        return (about and about.source) or "weights of a file"

    def describe(self) -> str:
        """The source for the first line of a run, with the file and the dtypes that are cast."""
        path, source = self.file(), self.origin()
        if path is None:
            return source
        if not self.pretrained:
            source = f"weights of {path}" + ("" if source == "weights of a file" else f" ({source})")
        tensors = weight_files.read(path, str(path)).tensors.values()
        dtypes = sorted({str(tensor.dtype) for tensor in tensors} & set(FLOATS[1:]))
        return source + (f", {' and '.join(dtypes)} cast to float32" if dtypes else "").replace("torch.", "")

    def check(self, architecture: dict, *, fewer_layers: bool) -> None:
        """Raise UserError unless a run can read these weights, and write those that it saves; see `weights.check`."""
        if self.written is not None:
            weights.check_new(self.written, architecture, self.origin(), overwrite=self.overwrite)
            files.require_writable_file(self.written, "--init_weights_path")
        path = self.file()
        if path is not None:
            option = "--pretrained" if self.pretrained else "--init_weights_path"
            weights.check(path, architecture, option=option, fewer_layers=fewer_layers)
