"""The weights that a run starts from: made or read before the strategy, and compared with the file once they are sharded."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lockstep.ground import hang
from lockstep.ground.collective import stop_together, stopping_together
from lockstep.inputs import weights
from lockstep.inputs.data import Inputs
from lockstep.inputs.initial_weights import Start
from lockstep.inputs.model import build_model
from lockstep.inputs.shapes import Shapes, parameter_shapes
from lockstep.training.strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def initial_model(
    inputs: Inputs, source: str, *, attn_impl: str, quiet: bool
) -> tuple["PreTrainedModel", dict[str, str] | None]:
    """The model that the run starts from, and the checksums of its weights file; None if its weights are not a file's.

    `source` says where the weights come from.
    """
    start, lead = inputs.start, dist.get_rank() == 0

    def build(path: Path | None) -> tuple["PreTrainedModel", dict[str, str] | None]:
        seed = start.seed
        return build_model(inputs.architecture, seed=seed, attn_impl=attn_impl, init_weights_path=path)

    def say(line: str) -> None:
        if lead and not quiet:
            print(line, flush=True)

    path = start.file()
    if start.written is not None:
        with stopping_together():
            if lead:
                model, _ = build(path)
                weights.save(start.written, model, inputs.architecture, source, overwrite=start.overwrite)
                say(f"Saved initial weights to {start.written}")
        path = start.written
    with stopping_together():  # a file need not be there on every machine
        model, file_sums = build(path)
    if path:
        say(f"Loaded initial weights from {path}")
    if start.perturbed_in:
        weights.perturb(model, start.perturbed_in, start.seed)
        return model, None  # no longer the file's
    return model, file_sums


def require_file_weights(
    strategy: Strategy, inputs: Inputs, file_sums: dict[str, str] | None
) -> dict[str, str] | None:
    """Return the checksums of the live weights on rank 0, None elsewhere. Collective.

    Raises TrainingFailure unless the weights, sharded and gathered back, are the file's, bit for bit. `file_sums` is None if they do not
    come from a file, or are cast; then only names and shapes are compared with the model's.
    """
    hang.at("gathering the weights before step 1")
    shapes: dict[str, tuple[int, ...]] = {}
    live, model_shapes = live_checksums(strategy, shapes), parameter_shapes(inputs.architecture)
    stop_together(_problem(live, shapes, model_shapes, file_sums, inputs.start) if live is not None else "")
    return live


def _problem(
    live: dict[str, str], shapes: Shapes, whole: Shapes, file_sums: dict[str, str] | None, start: Start
) -> str:
    """Return how the live weights differ from the model's or the file's, as a sentence; "" if they do not."""
    missing, extra = sorted(whole.keys() - live.keys()), sorted(live.keys() - whole.keys())
    if missing or extra:
        difference = " and ".join(
            f"{verb} {names[0]} ({len(names)} in all)"
            for verb, names in (("lacks", missing), ("also has", extra))
            if names
        )
        return f"after sharding, the strategy's model {difference}; parameters keep the names of the model; adapters such as LoRA are a part of --model path/to/file.py:FUNCTION"
    misshapen = next((name for name in sorted(live) if shapes[name] != whole[name]), None)
    if misshapen:
        return (
            f"after sharding, {misshapen} is {shapes[misshapen]} when gathered, and {whole[misshapen]} in the model; weights must be whole, or DTensors that say how "
            "they are cut"
        )
    differing = next((name for name in sorted(live) if file_sums and live[name] != file_sums.get(name)), None)
    return f"after sharding, {differing} differs from {start.path or start.model_name}" if differing else ""


def live_checksums(
    strategy: Strategy, shapes: dict[str, tuple[int, ...]] | None = None
) -> dict[str, str] | None:
    """Return checksums of the live weights, gathered whole, on rank 0; None elsewhere. Adds their shapes to `shapes`. Collective."""

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
