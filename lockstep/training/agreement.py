"""After the first step, compare what the live objects of all ranks run with to what the options demand."""

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
    """Records the output dtypes of linear layers and the embedding in the first step; `require` reads back the rest."""

    steps = (1,)

    def __init__(self, record: History, mesh: Mesh, capture: Capture | None):
        self.record, self.mesh, self.capture = record, mesh, capture
        self._dtypes: dict[str, set[str]] = {
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
        dtypes = self._dtypes[key]

        def see(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            # A router returns several tensors.
            if isinstance(output, torch.Tensor):
                dtypes.add(str(output.dtype))

        self._handles.append(module.register_forward_hook(see))

    def end(self, record: dict[str, Any]) -> None:
        for handle in self._handles:
            handle.remove()

    def require(self, wanted: dict[str, Any], grad_norm: float) -> None:
        """Record the contract of the run, and stop all ranks unless it is the `wanted` one. Collective.

        If tensors are captured, what they show better is left to the verdict. Otherwise the clipped norm of step 1 is checked here.
        """
        observed = {key: sorted(names) for key, names in self._dtypes.items()}
        contracts = gather_objects({**self.strategy.effective_contract(), **observed})
        contract = self.record.contract = of_all_ranks(contracts, self.mesh)
        if dist.get_rank() == 0 and self.capture:
            self.capture.state_contract(contract)
        ignored = left_to_the_verdict(wanted, contract) if self.capture else ()
        difference, label = contradiction(wanted, contract, ignored), self.record.run["label"]
        stop_together(f"{label}: the live objects contradict the options: {difference}" if difference else "")
        if self.capture is None:
            options = self.record.run["config"]
            clipped = self.strategy.clipped_norm()
            problem = clipping_problem(options["max_grad_norm"], grad_norm, clipped, options["precision"])
            stop_together(f"{label}: step 1, rank {dist.get_rank()}: {problem}" if problem else "")
