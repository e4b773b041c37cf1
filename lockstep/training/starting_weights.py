"""The weights that a run starts from: made or read before the strategy, and held against the file once they are sharded."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lockstep.ground import hang
from lockstep.ground.collective import stop_together, stopping_together
from lockstep.inputs import weights
from lockstep.inputs.data import Inputs
from lockstep.inputs.model import build_model
from lockstep.inputs.shapes import parameter_shapes
from lockstep.plan import initial_weights
from lockstep.plan.config import Config
from lockstep.training.strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def initial_model(
    config: Config, inputs: Inputs, source: str
) -> tuple["PreTrainedModel", dict[str, str] | None]:
    """The model that the run starts from, and the checksums of its weights file; None if its weights are not a file's.

    `source` says where the weights come from.
    """

    def build(path: Path | None) -> tuple["PreTrainedModel", dict[str, str] | None]:
        return build_model(
            inputs.architecture,
            seed=config.weights_seed,
            attn_impl=config.attn_impl,
            init_weights_path=path,
        )

    path = initial_weights.file_of(config)
    written = config.written_weights
    if written is not None:
        with stopping_together():
            if dist.get_rank() == 0:
                model, _ = build(path)
                weights.save(written, model, inputs.architecture, source, overwrite=config.overwrite)
                _say(config, f"Saved initial weights to {written}")
        path = written
    with stopping_together():  # a file need not be there on every machine
        model, sums = build(path)
    if path and dist.get_rank() == 0:
        _say(config, f"Loaded initial weights from {path}")
    if config.noise_control:
        weights.perturb(model, "float32" if config.precision == "fp32" else "bfloat16", config.weights_seed)
        return model, None  # no longer the file's
    return model, sums


def _say(config: Config, line: str) -> None:
    if not config.quiet:
        print(line, flush=True)


def require_file_weights(
    strategy: Strategy, inputs: Inputs, config: Config, file_sums: dict[str, str] | None
) -> dict[str, str] | None:
    """The checksums of the live weights, on rank 0. Collective.

    The weights, sharded and gathered back, must be the file's, bit for bit (unless they were cast to bfloat16).
    """
    hang.at("gathering the weights before step 1")
    shapes: dict[str, tuple[int, ...]] = {}
    live, whole = live_checksums(strategy, shapes), parameter_shapes(inputs.architecture)
    problem = ""
    if live is not None:
        missing, extra = sorted(whole.keys() - live.keys()), sorted(live.keys() - whole.keys())
        cut = next((name for name in sorted(live) if shapes[name] != whole.get(name)), None)
        if missing or extra:
            found = " and ".join(
                f"{what} {names[0]} ({len(names)} in all)"
                for what, names in (("lacks", missing), ("also has", extra))
                if names
            )
            problem = f"the strategy's model {found}; parameters keep the names of the model; adapters such as LoRA are a part of --model path/to/file.py:FUNCTION"
        elif cut:
            problem = (
                f"{cut} is {shapes[cut]} when gathered, and {whole[cut]} in the model; weights must be whole, or DTensors that say how they are "
                "cut"
            )
        elif file_sums is not None and config.precision != "bf16":
            wrong = next((name for name in sorted(live) if live[name] != file_sums.get(name)), None)
            problem = f"{wrong} differs from {config.init_weights_path or config.model_name}" if wrong else ""
    stop_together(f"after sharding, {problem}" if problem else "")
    return live


def live_checksums(
    strategy: Strategy, shapes: dict[str, tuple[int, ...]] | None = None
) -> dict[str, str] | None:
    """Checksums of the live weights, gathered whole, whose shapes are added to `shapes`. On rank 0 only, but collective."""

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in strategy.full_parameters():
            if shapes is not None:
                shapes[name] = tuple(tensor.shape)
            yield name, tensor

    if dist.get_rank() == 0:
        return weights.checksums(gathered())
    for _ in strategy.full_parameters():
        pass
    return None
