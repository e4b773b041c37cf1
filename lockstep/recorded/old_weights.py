"""Explain the output of a module by weights from before an update: those of a copy, or of a cache that outlives the step."""

import itertools

import torch

from lockstep.recorded.model_pass import ModelPass
from lockstep.recorded.pieces import explains
from lockstep.recorder.micro_batch import JoinedMicroBatch
from lockstep.recorder.module_hooks import module_of
from lockstep.verdict.lazy import Lazy


def explain(yardstick: ModelPass, micro_batch: JoinedMicroBatch, name: str) -> list[str]:
    """Return a sentence if weights that an earlier step began with explain an output, forward/MICRO_BATCH/MODULE; [] if none do.

    The module is computed from the inputs that it had in the run: with all of its weights from then, and with one of them.
    """
    recording, weights, module = yardstick.recording, yardstick.weights, module_of(name)
    recorded = recording.of_modules(yardstick.step, micro_batch)
    own = [parameter for parameter in weights if parameter.rpartition(".")[0] == module]
    if name not in recorded or not own:
        return []
    yardstick.written = {key: tensors[0][1] for key, tensors in recorded.items()}
    observed = [yardstick.written[name]]

    def computed() -> list[torch.Tensor]:
        # The model may not be computed to its end.
        return [yardstick.outputs(micro_batch).get(name, torch.empty(0))]

    def earlier(step: int, old: list[str]) -> Lazy:
        return Lazy(
            weights,
            lambda name: recording.whole(step, f"weight/{name}")[0] if name in old else weights[name],
        )

    now = computed()
    alone = [[parameter] for parameter in own] if len(own) > 1 else []
    try:
        for step, old in itertools.product(range(yardstick.step - 1, 0, -1), [own, *alone]):
            yardstick.give(earlier(step, old))
            if explains(observed, computed(), now):
                which = " and ".join(old)
                return [
                    f"{module} computes with {which} from before the update of step {step}, as where a copy or a cache is kept"
                ]
    finally:
        yardstick.written = {}
        yardstick.give(weights)
    return []
