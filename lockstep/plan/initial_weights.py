"""The source of a run's initial weights (a seed, a pretrained model, or a file), and its checks before the run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.ground import files
from lockstep.ground.errors import UserError
from lockstep.inputs import weight_files, weights
from lockstep.inputs.architectures import BUILT_IN, HUB_IDS
from lockstep.inputs.hub import hub_file
from lockstep.inputs.weight_files import FLOATS, INDEX

if TYPE_CHECKING:
    from lockstep.plan.config import Config

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
        found = next((path for name in (_SINGLE, f"model{INDEX}") if (path := folder / name).exists()), None)
        if found is None:
            raise UserError(
                f"{where} has no {_SINGLE} and no model{INDEX}; save the model with save_pretrained"
            )
        return found.absolute()
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


def file_of(config: "Config") -> Path | None:
    """The file from which a run reads its weights, before it may save them. None: they are drawn from the seed."""
    if config.pretrained:
        return pretrained_file(config.model_name)
    return None if config.save_init_weights else config.init_weights_path


def origin(config: "Config") -> str:
    """The source of a run's initial weights in words, without paths of this machine (except a model folder)."""
    if config.pretrained:
        return f"pretrained weights of {config.model_name}"
    path = file_of(config)
    if path is None:
        return f"{DRAWN}, seed {config.weights_seed}"
    about = weight_files.read(path, f"--init_weights_path {path}").about
    return (about and about.source) or "weights of a file"


def describe(config: "Config") -> str:
    """The source for the first line of a run, with the file and the dtypes that are cast."""
    path, shown = file_of(config), origin(config)
    if path is None:
        return shown
    if not config.pretrained:
        shown = f"weights of {path}" + ("" if shown == "weights of a file" else f" ({shown})")
    tensors = weight_files.read(path, str(path)).tensors.values()
    dtypes = sorted({str(tensor.dtype) for tensor in tensors} & set(FLOATS[1:]))
    return shown + (f", {' and '.join(dtypes)} cast to float32" if dtypes else "").replace("torch.", "")


def check(config: "Config", architecture: dict) -> None:
    """Raise UserError unless this run can read the weights that it starts from, and write those that it saves."""
    if config.save_init_weights and not config.spec.is_baseline:
        raise UserError(
            "--save_init_weights: only train_ddp.py writes initial weights; run it first, then load them here"
        )
    path = config.written_weights
    if path is not None:
        weights.check_new(path, architecture, origin(config), overwrite=config.overwrite)
        files.require_writable_file(path, "--init_weights_path")
    start = file_of(config)
    if start is not None:
        option = "--pretrained" if config.pretrained else "--init_weights_path"
        weights.check(start, architecture, option=option, fewer_layers=config.num_layers is not None)
