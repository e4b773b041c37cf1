"""After the first step: what the live objects of all ranks run with, held against what the options demand."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from lockstep.dumps.capture import Capture
from lockstep.dumps.history import History
from lockstep.ground.collective import gather_objects, stop_together
from lockstep.inputs import modules
from lockstep.plan import compiled
from lockstep.plan.contract import contradiction, left_to_the_verdict, of_all_ranks
from lockstep.plan.mesh import Mesh
from lockstep.training.listeners import Listener
from lockstep.training.observe import clipping_problem
from lockstep.training.strategy import MicroBatch, Strategy


class Agreement(Listener):
    """Sees the dtypes that linear layers and the embedding return in the first step; then `require` reads back the rest."""

    steps = (1,)

    def __init__(self, record: History, mesh: Mesh, capture: Capture | None):
        self.record, self.mesh, self.capture = record, mesh, capture
        self._seen: dict[str, set[str]] = {
            "compute_dtype": set(),
            "biased_linear_dtype": set(),
            "embedding_dtype": set(),
        }

    def begin(self, strategy: Strategy, step: int, fed: Sequence[MicroBatch]) -> None:
        self.strategy = strategy
        self._handles: list[RemovableHandle] = []
        names, backend = modules.names_in(strategy.model), self.record.run["config"]["compile"]
        for name, module in strategy.model.named_modules():
            if compiled.is_hidden(names, backend, name):
                continue
            if isinstance(module, torch.nn.Embedding) or name == names.embedding:
                self._watch(module, "embedding_dtype")
            elif name in names.linears or name in names.biased:
                self._watch(module, "biased_linear_dtype" if name in names.biased else "compute_dtype")

    def _watch(self, module: torch.nn.Module, key: str) -> None:
        seen = self._seen[key]

        def see(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, torch.Tensor):  # not of a router, which returns several
                seen.add(str(output.dtype))

        self._handles.append(module.register_forward_hook(see))

    def end(self, record: dict[str, Any]) -> None:
        for handle in self._handles:
            handle.remove()

    def require(self, wanted: dict[str, Any], grad_norm: float) -> None:
        """Record the contract of the run. Stop all ranks unless it is the `wanted` one; what a captured tensor shows better is left to the verdict."""
        seen = {key: sorted(dtypes) for key, dtypes in self._seen.items()}
        everyone = gather_objects({**self.strategy.effective_contract(), **seen})
        found = self.record.contract = of_all_ranks(everyone, self.mesh)
        if dist.get_rank() == 0 and self.capture:
            self.capture.state_contract(found)
        later = left_to_the_verdict(wanted, found) if self.capture else ()
        difference, label = contradiction(wanted, found, later), self.record.run["label"]
        stop_together(f"{label}: the live objects contradict the options: {difference}" if difference else "")
        if self.capture is None:
            options = self.record.run["config"]
            clipped = self.strategy.clipped_norm()
            odd = clipping_problem(options["max_grad_norm"], grad_norm, clipped, options["precision"])
            stop_together(f"{label}: step 1, rank {dist.get_rank()}: {odd}" if odd else "")
