"""Capture: what a run computes in its first steps, written out as full tensors while it trains.

For every captured step, in one file (lockstep/dump.py):

    forward/MODULE           the output of every module (MODULE.1 for the second tensor of a tuple)
    backward/MODULE          the gradient of the loss with respect to that output
    gradient/PARAMETER       before clipping
    exp_avg/PARAMETER  exp_avg_sq/PARAMETER  parameter/PARAMETER      after the update
    batch/input_ids  batch/labels          what the model was really called with

Loss means the mean over the global batch, so what a DP rank computes for its own share is divided by dp_size. Rows
(dim 0) are the global batch: DP rank by DP rank, micro batch by micro batch. Hooks exist only during captured steps.
"""

import functools
import os
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lockstep import dump
from lockstep.collective import gather_objects, stop_together
from lockstep.errors import first_line
from lockstep.mesh import share

KINDS = ("gradient", "exp_avg", "exp_avg_sq", "parameter")  # of what a strategy holds per parameter
BATCH, SEQUENCE = "batch", "sequence"


def output_shapes(model: torch.nn.Module) -> dict[str, tuple]:
    """Name -> shape of every module output of the whole, unsharded model; "batch" and "sequence" stand for those dims.

    Found by two tiny forward passes that differ in both.
    """
    seen: list[dict[str, tuple]] = []
    for batch, sequence in ((2, 3), (4, 5)):
        shapes: dict[str, tuple] = {}
        handles = _watch(model, lambda name, tensor, shapes=shapes: shapes.update({name: tuple(tensor.shape)}))
        with torch.no_grad():
            model(input_ids=torch.zeros(batch, sequence, dtype=torch.int64), use_cache=False)
        for handle in handles:
            handle.remove()
        seen.append(shapes)
    symbols = {(2, 4): BATCH, (3, 5): SEQUENCE}
    return {
        name: tuple(a if a == b else symbols[(a, b)] for a, b in zip(shape, seen[1][name], strict=True))
        for name, shape in seen[0].items()
    }


def _watch(model: torch.nn.Module, see) -> list:
    """Call see(name, tensor) for every tensor that a module gives back; returns the hooks' handles.

    Not for the model and its base model: what they give back are outputs of modules inside them.
    """

    def hook(name, _module, _inputs, output):
        if isinstance(output, torch.Tensor):
            see(name, output)
        elif type(output) is tuple:
            for number, tensor in enumerate(item for item in output if isinstance(item, torch.Tensor)):
                see(f"{name}.{number}" if number else name, tensor)

    return [
        module.register_forward_hook(functools.partial(hook, name))
        for name, module in model.named_modules()
        if name not in ("", "model")
    ]


class Capture:
    """One rank's capture. `begin`, `gradients` and `end` are collective, once per captured step.

    Raises TrainingFailure on every rank when a tensor cannot be placed in its full tensor, was only partly written, or
    the disk is full.
    """

    def __init__(self, config, model: torch.nn.Module, provenance: dict):
        self.config, self.mesh, self.rank = config, config.mesh, dist.get_rank()
        here = self.mesh.coordinates(self.rank)
        self.dp_rank, self.tp_rank = here.dp, here.tp
        self.folder = config.capture_folder
        self.full_shapes = output_shapes(model)
        self.num_tensors = 2 * len(self.full_shapes) + len(KINDS) * len(list(model.parameters())) + 2
        self.manifest = {"run": provenance, "steps": {}}
        self.writers: dict[str, bool] = {}

    def begin(self, strategy, step: int) -> None:
        """Before the step's first forward pass: open the file, start to watch."""
        self._open(strategy, step)
        self.handles = _watch(strategy.model, self._see)
        self.handles.append(strategy.model.register_forward_pre_hook(self._see_batch, with_kwargs=True))

    def _open(self, strategy, step: int) -> None:
        self.strategy, self.step, self.problem = strategy, step, ""
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.logits: list[float] = [0.0, 0.0, 0.0, 0.0]  # count, sum, sum of squares, largest
        self.path = dump.step_path(self.folder, step).with_suffix(".safetensors.part")
        if self.rank == 0:
            self._try(dump.StepWriter.create, self.path)
        stop_together(self.problem)
        self.writer = self._try(dump.StepWriter, self.path, self.num_tensors)
        stop_together(self.problem)
        if not self.writers:
            self.writers = self._parameter_writers()

    def gradients(self) -> None:
        """Between the backward pass and the update: write every parameter's gradient."""
        for handle in self.handles:
            handle.remove()
        self._write_held("gradient")

    def only_parameters(self, strategy) -> None:
        """Write the parameters alone, as step 0."""
        self._open(strategy, 0)
        self._write_held("parameter")
        self._close({})

    def end(self, record: dict, *, updated: bool = True) -> None:
        """After the update: write moments and parameters, make the file whole, name the step in the manifest."""
        for kind in KINDS[1:] if updated else ():
            self._write_held(kind)
        fields = ("loss", "rank_losses", "grad_norm", "learning_rate", "batch_hash", "started_from")
        self._close({key: record[key] for key in fields if key in record})

    def state_contract(self, contract: dict) -> None:
        """Write down what the run really runs with. Called once, by one rank, when a step has shown it."""
        self.manifest["contract"] = contract
        dump.write_manifest(self.folder, self.manifest)

    def _close(self, entry: dict) -> None:
        self._try(self.writer.close)
        parts = {name: slot.parts for name, slot in self.writer.slots.items()}
        layout = {name: (slot.shape, slot.dtype, slot.offset) for name, slot in self.writer.slots.items()}
        everyone = gather_objects((parts, layout, self.logits))
        stop_together(self.problem)
        if self.rank == 0:
            self._try(self._finish, everyone, entry)
        stop_together(self.problem)

    def _try(self, call, *arguments):
        """Call; an error is kept for `stop_together`, because the other ranks are waiting in a collective."""
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - it is raised on every rank, by stop_together
            what = getattr(error, "strerror", None) or first_line(error)
            self.problem = self.problem or f"capture of step {self.step}, rank {self.rank}: {what} ({self.path})"

    def _see_batch(self, _model, _inputs, options: dict) -> None:
        micro = self.calls["batch"]
        self.calls["batch"] += 1
        for name in ("input_ids", "labels"):
            self._write_output(f"batch/{name}", options[name], (BATCH, SEQUENCE), micro)

    def _see(self, module: str, output: torch.Tensor) -> None:
        """Write a module's output, and its gradient when that is known."""
        micro = self.calls[module]
        self.calls[module] += 1
        symbols = self.full_shapes[module]
        if micro > 0 and symbols[0] != BATCH:
            return  # the same for every micro batch
        local = _local(output)
        if module == "lm_head":
            self._summarise(local)
        self._write_output(f"forward/{module}", local, symbols, micro)
        if output.requires_grad:  # its place is fixed now, in the order of the forward pass, which all ranks share
            self._try(self._place, f"backward/{module}", local, symbols)
            output.register_hook(functools.partial(self._see_gradient, module, micro))

    def _see_gradient(self, module: str, micro: int, gradient: torch.Tensor) -> None:
        local = _local(gradient) / self.mesh.dp
        self._write_output(f"backward/{module}", local, self.full_shapes[module], micro)

    def _summarise(self, logits: torch.Tensor) -> None:
        wide = logits.double()
        count, total, square, largest = self.logits
        self.logits = [
            count + wide.numel(), total + float(wide.sum()), square + float(wide.square().sum()),
            max(largest, float(wide.abs().max())),
        ]  # fmt: skip

    def _write_output(self, name: str, local: torch.Tensor, symbols: tuple, micro: int) -> None:
        self.order.append(name)
        self._try(self._write_placed, name, local, symbols, micro)

    def _write_placed(self, name: str, local: torch.Tensor, symbols: tuple, micro: int) -> None:
        start, is_writer = self._place(name, local, symbols)
        if symbols[0] == BATCH:
            start[0] += micro * self.config.batch_size
        self.writer.write(name, tuple(start), local, is_writer=is_writer)

    def _place(self, name: str, local: torch.Tensor, symbols: tuple) -> tuple[list[int], bool]:
        """Where this rank's first micro batch of an output begins in the full tensor, and whether this rank writes it.

        Asks for the tensor's slot. Raises ValueError for a shape that is no share of the full tensor along one dim.
        """
        config = self.config
        per_rank = config.batch_size * config.gradient_accumulation_steps
        sizes = {BATCH: per_rank * config.dp_size, SEQUENCE: config.seq_length}
        full = tuple(sizes.get(symbol, symbol) for symbol in symbols)
        start, over_dp, over_tp = [0] * len(full), symbols[0] == BATCH, False
        expected = [config.batch_size if over_dp else full[0], *full[1:]]
        if over_dp:
            start[0] = self.dp_rank * per_rank
        for dim in range(1, len(full)):
            if local.shape[dim] != full[dim] and not over_tp:
                over_tp = True
                start[dim], expected[dim] = share(full[dim], self.tp_rank, self.mesh.tp)
        if list(local.shape) != expected:
            raise ValueError(f"{name} is {tuple(local.shape)}; the full tensor is {full}, and that is no share of it along one dim")
        self.writer.slot(name, full, local.dtype)
        return start, (over_dp or self.dp_rank == 0) and (over_tp or self.tp_rank == 0)

    def _write_held(self, kind: str) -> None:
        for name, local, full, start in self.strategy.held(kind):
            self._try(self._write_one_held, f"{kind}/{name}", name, local, full, start)

    def _write_one_held(self, key: str, name: str, local: torch.Tensor, full: tuple, start: tuple) -> None:
        self.writer.slot(key, full, local.dtype)
        self.writer.write(key, start, local, is_writer=self.writers[name])

    def _parameter_writers(self) -> dict[str, bool]:
        """Parameter -> whether this rank writes its part: ranks that hold the same part take turns."""
        mine = {name: (start, tuple(local.shape)) for name, local, _, start in self.strategy.held("parameter")}
        everyone = gather_objects(mine)
        writes = {}
        for number, name in enumerate(mine):
            twins = [rank for rank, theirs in enumerate(everyone) if theirs[name] == mine[name]]
            writes[name] = twins[number % len(twins)] == self.rank
        return writes

    def _finish(self, everyone: list, entry: dict) -> None:
        """On rank 0: check that the parts make whole tensors, write the header, name the step in the manifest."""
        tensors, replicas = {}, {}
        for rank, (_, layout, _) in enumerate(everyone):
            if layout != everyone[0][1]:
                raise ValueError(f"rank {rank} and rank 0 did not see the same tensors in the same order")
        for name in self._execution_order():
            slot = self.writer.slots[name]
            parts = [ranks[name] for ranks, _, _ in everyone]
            total, odd = dump.merge(name, parts, slot.shape, slot.dtype.itemsize)
            tensors[name] = {
                "dtype": dump.DTYPES[slot.dtype],
                "shape": list(slot.shape),
                "sharded": self._sharded(parts),
                "checksum": total,
            }
            if odd:
                replicas[name] = odd
        self.writer.write_header(self.path)
        os.replace(self.path, dump.step_path(self.folder, self.step))
        by_rank = [logits for _, _, logits in everyone]
        tp = self.mesh.tp
        logits = [_combine(by_rank[first : first + tp]) for first in range(0, len(by_rank), tp)]
        self.manifest["steps"][str(self.step)] = {
            **entry, "logits": logits, "tensors": tensors, "replicas_differ": replicas
        }  # fmt: skip
        dump.write_manifest(self.folder, self.manifest)

    def _execution_order(self) -> list[str]:
        """Forward; backward, each output gradient followed by the gradients of its module's own parameters; update."""
        slots, order = self.writer.slots, []
        for name in dict.fromkeys(self.order):
            order.append(name)
            if name.startswith("backward/"):
                module = name.removeprefix("backward/")
                own = f"gradient/{module}."
                order += [key for key in slots if key.startswith(own) and "." not in key.removeprefix(own)]
        parameters = [key.split("/", 1)[1] for key in slots if key.startswith(("gradient/", "parameter/"))]
        order += [f"{kind}/{name}" for name in parameters for kind in KINDS]
        return [name for name in dict.fromkeys(order) if name in slots]

    def _sharded(self, parts: list[list[dump.Part]]) -> dict[str, int]:
        """Mesh axis -> the dim that was cut along it, from where the ranks' parts really lie."""
        dims = {}
        for axis in self.mesh.axes:
            here, there = parts[0][0].start, parts[self.mesh.neighbour(0, axis)][0].start
            dims.update({axis: dim for dim, (a, b) in enumerate(zip(here, there, strict=True)) if a != b})
        return dims


def _combine(shards: list[list[float]]) -> dict[str, float]:
    """Summary of one DP rank's logits from those of its vocabulary shards (or of its copies)."""
    counts, totals, squares, largest = zip(*shards, strict=True)
    if not sum(counts):
        return {}  # no forward pass was captured
    return {"mean": sum(totals) / sum(counts), "rms": (sum(squares) / sum(counts)) ** 0.5, "max_abs": max(largest)}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
