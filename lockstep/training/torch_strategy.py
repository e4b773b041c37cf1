"""The base of strategies in plain torch: for any model whose parameters are plain tensors or DTensors, on any mesh.

A subclass says how to parallelize. The rest follows from the parameters themselves:

    class MyStrategy(TorchStrategy):
        def parallelize(self, model, device_mesh):
            return DistributedDataParallel(model, process_group=device_mesh["dp"].get_group())
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.ground.blocks import CalledModules, Held, pieces
from lockstep.ground.errors import UserError
from lockstep.inputs import modules
from lockstep.inputs.model import causal_lm_loss
from lockstep.plan.config import Config
from lockstep.plan.mesh import AXES, Geometry, Mesh, build_device_mesh
from lockstep.training import context_parallel
from lockstep.training.observe import torch_contract
from lockstep.training.optim import (
    WeightAverage,
    build_optimizer,
    gradient_of,
    held_tensors,
    named_trained,
    parameter_groups,
    state_kinds,
    total_norm,
)
from lockstep.training.pipeline import Pipeline
from lockstep.training.strategy import MicroBatch, count_labels

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TorchStrategy:
    """See `lockstep.training.strategy.Strategy` for what each method has to do.

    The module that `parallelize` returns averages the gradients over dp. DDP and FSDP2 modules are told which micro batch is the last;
    any other module reduces by its own hooks, at every micro batch.
    """

    def __init__(self, model: "PreTrainedModel", config: Config, mesh: Mesh, device: torch.device):
        self.config, self.device = config, device
        # What the loop feeds. Each forward pass counts again.
        self.num_micro_batches = config.gradient_accumulation_steps
        self.num_tokens = config.batch_size * config.seq_length // config.cp_size
        self._fed = (
            0  # the tokens that `loss` has been given in this step, perhaps a part of a micro batch at a time
        )
        self._num_labels: torch.Tensor | None = None
        self._divided_by: torch.Tensor | None = None
        self._further: dict[str, torch.Tensor] = {}
        self._handed_on: tuple[str, ...] = ()
        self.device_mesh = build_device_mesh(mesh, device.type)
        modules.to_dtype(model, config.parameter_dtype)
        model.to(device)  # type: ignore[arg-type] # a decorator of transformers loses self
        self.context = (
            context_parallel.ContextParallel(model, self.device_mesh.get_group("cp"), config.seq_length)
            if mesh.cp > 1
            else None
        )
        self.pipeline: Pipeline | None = None  # a strategy that has pp makes it in `parallelize`
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self.wrapped = self.parallelize(model, self.device_mesh)
        _require_module(self.wrapped, model, type(self).__name__, frozen)
        # Sharded, it is still of transformers' class.
        self.model = cast("PreTrainedModel", unwrapped(self.wrapped, model))
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.sharded = [parameter for parameter in self.parameters if isinstance(parameter, DTensor)]
        self.layouts = by_layout(self.parameters)
        self.in_norm = by_layout(self._counted())
        self.optimizer = build_optimizer(
            [
                group
                # A fused step cannot mix device meshes.
                for parameters in self.layouts
                for group in parameter_groups(parameters, config.weight_decay)
            ],
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
            named=named_trained(self.model),
        )
        self.average = WeightAverage(self.model, config.ema_decay) if config.ema_decay < 1 else None

    def parallelize(self, model: "PreTrainedModel", device_mesh: DeviceMesh) -> torch.nn.Module:
        """Turn `model`, which every rank holds whole, into a module that runs on `device_mesh`; returns what forward calls.

        `device_mesh` has the axes of lockstep/plan/mesh.py by name. Parameters keep their Hugging Face names.
        """
        raise UserError(
            f"{type(self).__name__} has no method parallelize; write it (docs/your-own-strategy.md)"
        )

    @property
    def loss_shares(self) -> int:
        """Gradients of weights are averaged over all ranks that see other tokens."""
        return self.geometry().mesh.num_loss_shares

    def geometry(self) -> Geometry:
        return Geometry.of_groups({axis: self.device_mesh.get_group(axis) for axis in AXES})

    def forward_backward(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        self.num_micro_batches, self._fed = len(micro_batches), 0
        self._num_labels = count_labels(self.config.samples, micro_batches, self.geometry().mesh)
        self.optimizer.zero_grad()
        through = self._through_model if self.pipeline is None else self._through_pipeline
        mean = through(micro_batches)
        for parameter in self.sharded:
            parameter.grad = laid_out_like(parameter, parameter.grad)
        if self.pipeline is not None:
            self.pipeline.sum_tied()
            dist.broadcast(mean, group=self.pipeline.group, group_src=self.pipeline.last_rank)
        if self.context is not None:
            mean = self.context.mean(mean)
        return mean

    @property
    def num_labels(self) -> torch.Tensor | None:
        """The number of labels of the global batch, while its losses are computed; None if every position has one.

        To read it counts as dividing the loss by it: the contract then says so.
        """
        self._divided_by = self._num_labels
        return self._num_labels

    @property
    def further(self) -> dict[str, torch.Tensor]:
        """Further inputs of the model for the whole micro batch: `attention_mask` or `position_ids`, (B, S), or none.

        To read them counts as calling the model with them: the contract then says so.
        """
        self._handed_on = tuple(self._further)
        return self._further

    @property
    def num_shares(self) -> int:
        """The number of losses whose mean is that of the global batch: one per micro batch of each rank that sees other tokens."""
        return self.num_micro_batches * self.geometry().mesh.num_loss_shares

    def _through_model(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """Run forward and backward of all micro batches; returns this rank's mean loss."""
        losses = []
        for index, (input_ids, labels, *further) in enumerate(micro_batches):
            self._further = self.config.samples.named(further)
            with self._reducing(index == len(micro_batches) - 1):
                with self.config.autocast(self.device):
                    loss = self.loss(input_ids, labels)
                (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _through_pipeline(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """The same on this rank's stages. The mean loss is known on the rank of the last stage."""
        assert self.pipeline is not None
        mean = torch.zeros((), device=self.device)
        if self.num_labels is not None:
            self.pipeline.divide_by(self.num_labels, 1 / self.geometry().mesh.num_loss_shares)
        for index, (input_ids, labels, *further) in enumerate(micro_batches):
            self._further = self.config.samples.named(further)
            input_ids, labels, positions = self.cut(input_ids, labels)
            inputs = self._given(positions)
            if inputs["position_ids"] is None:
                inputs["position_ids"] = torch.arange(labels.shape[1], device=labels.device)[None]
            self.num_tokens = labels.numel()
            with self._reducing(index == len(micro_batches) - 1):
                mean += self.pipeline.step(input_ids, labels, **inputs)
        return mean

    def called(self) -> CalledModules:
        """See `lockstep.dumps.capture.Captured`."""
        samples = self.config.samples
        if self.pipeline is None:
            return [(self.model, {name: name for name in samples.inputs})]
        return self.pipeline.called({name: name for name in samples.further})

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """This rank's mean loss over its positions of one micro batch, each (B, S); shape ().

        With `num_labels`, the sum, divided by it and multiplied with `num_shares`.
        """
        input_ids, labels, positions = self.cut(input_ids, labels)
        self._fed += labels.numel() * torch.is_grad_enabled()  # to look at a loss trains on nothing
        loss = causal_lm_loss(
            self.wrapped, input_ids, labels, num_labels=self.num_labels, **self._given(positions)
        )
        return loss if self._num_labels is None else loss * self.num_shares

    def _given(self, positions: torch.Tensor | None) -> dict[str, Any]:
        """The model's inputs beside ids and labels, for these positions (1, S / cp) of a micro batch; None means all positions."""
        further = self.further
        if positions is None or not further:
            return {"position_ids": positions, **further}
        selected = further["position_ids"][:, positions[0]] if "position_ids" in further else positions
        return {"position_ids": selected, "attention_mask": context_parallel.allowed(further, positions[0])}

    def cut(
        self, input_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Cut ids and labels, each (B, S), to this rank's positions; returns these (1, S), too, or None for all."""
        return (input_ids, labels, None) if self.context is None else self.context.cut(input_ids, labels)

    @contextlib.contextmanager
    def _reducing(self, last: bool) -> Iterator[None]:
        """Reduce gradients over dp in this micro batch's backward only if it is the last one."""
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(last)
        if isinstance(self.wrapped, DistributedDataParallel) and not last:
            with self.wrapped.no_sync():
                yield
        else:
            yield

    def _counted(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients count in the norm. Of tied weights, those of the first stage count."""
        if self.pipeline is None or self.pipeline.replica is None:
            return self.parameters
        return [parameter for parameter in self.parameters if parameter is not self.pipeline.replica.weight]

    def grad_norm(self) -> torch.Tensor:
        """The norm of the whole gradient: squares of the local shards, summed over every axis that shards them. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameters in self.in_norm:
            gradients = [local(gradient_of(parameter)) for parameter in parameters]
            # Offloaded gradients are on the CPU.
            square = total_norm(gradients).to(self.device) ** 2
            first = parameters[0]
            if isinstance(first, DTensor):
                for axis in sharded_axes(first):
                    dist.all_reduce(square, group=first.device_mesh.get_group(axis))
            total += square
        if self.pipeline is not None:
            dist.all_reduce(total, group=self.pipeline.group)
        return total.sqrt()

    def update(self) -> float:
        norm = self.grad_norm()
        if self.config.max_grad_norm > 0:
            for parameters in self.layouts:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        return float(norm)

    def clipped_norm(self) -> float | None:
        gone = any(parameter.grad is None for parameter in self.parameters)
        return None if gone else float(self.grad_norm())

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = dict(self.model.named_parameters())
        if self.pipeline is None:
            for name in parameters:
                yield name, self._whole(parameters[name]).cpu()
            return
        for name, (shape, owner) in self.pipeline.whole.items():
            is_owner = owner == self.pipeline.rank
            whole = (
                self._whole(parameters[name]).contiguous()
                if is_owner
                else torch.empty(shape, dtype=self.config.parameter_dtype, device=self.device)
            )
            dist.broadcast(whole, group=self.pipeline.group, group_src=owner)
            yield name, whole.cpu()

    def _whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole parameter, gathered over its device mesh. Offloaded shards are moved from the CPU first. Collective."""
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = cast(DTensor, whole.to(self.device)).full_tensor()
        return whole

    def held(self, kind: str) -> Held:
        for name, tensor in held_tensors(self.model, self.optimizer, kind, self.average):
            name = self.pipeline.renamed.get(name, name) if self.pipeline else name
            for start, piece in pieces(tensor.detach()):
                yield name, piece, tuple(tensor.shape), start

    def state_kinds(self) -> list[str]:
        return state_kinds(self.optimizer)

    def effective_contract(self) -> dict[str, Any]:
        mesh, average, cuts = self.geometry().mesh, self.average, self.divided()
        num_tokens = self._fed // self.num_micro_batches if self._fed else self.num_tokens
        contract = {
            **torch_contract(self.model, self.optimizer, self.config.optimizer),
            **(
                {"average_dtype": sorted({str(tensor.dtype) for tensor in average.averages.values()})}
                if average
                else {}
            ),
            "max_grad_norm": self.config.max_grad_norm,
            "gradient_accumulation_steps": self.num_micro_batches,
            "loss_is_mean_over": [num_tokens * mesh.cp, self.num_micro_batches, mesh.dp]
            if self._divided_by is None
            else [int(self._divided_by)],
            **({"also_called_with": list(self._handed_on)} if self.config.samples.further else {}),
            "reduction_dtype": sorted(
                {str(self._reduction_dtype(parameter)) for parameter in self.parameters}
            ),
            **({"sharding": self.sharding()} if self.config.spec.sharding(self.config) else {}),
            **({"cuts": cuts} if cuts else {}),
        }
        if self.context is not None:
            contract["attention"] = context_parallel.KERNEL
        if self.pipeline is not None:
            contract["tied_embeddings"] = self.pipeline.tied
            renamed = self.pipeline.renamed
            for of_values in (contract["weight_decay"], *contract.get("optimizer_settings", {}).values()):
                for value, names in of_values.items():
                    of_values[value] = sorted(renamed.get(name, name) for name in names)
        return contract

    def divided(self) -> dict[str, Any]:
        """Axis -> how it divides samples or the model, read back from live objects. The `cuts` of the spec say what is expected."""
        live = {"cp": self.context, "pp": self.pipeline}
        return {axis: cut.contract() for axis, cut in live.items() if cut is not None}

    def sharding(self) -> dict[str, Any]:
        """What is sharded and how gradients are reduced, read back from the live module: for a spec that has `sharding`."""
        raise NotImplementedError

    def _reduction_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The dtype in which a gradient is reduced over dp: what `fully_shard` was told, else the gradient's own."""
        configured = (
            self.wrapped._get_fsdp_state()._mp_policy.reduce_dtype
            if isinstance(self.wrapped, FSDPModule)
            else None
        )
        # An update may have freed the gradient. Torch gives it the dtype of its parameter.
        return configured or (parameter if parameter.grad is None else gradient_of(parameter)).dtype


def _require_module(wrapped: Any, model: torch.nn.Module, name: str, frozen: set[str]) -> None:
    """Raise UserError unless `parallelize` returned a module with no more `frozen` parameters than `model` had."""
    if not isinstance(wrapped, torch.nn.Module):
        raise UserError(
            f"{name}.parallelize returned {type(wrapped).__name__}; return the module that forward calls"
        )
    still_frozen = {key for key, p in unwrapped(wrapped, model).named_parameters() if not p.requires_grad}
    if still_frozen - frozen:
        raise UserError(
            f"{name}.parallelize left {min(still_frozen - frozen)} frozen (requires_grad is False), which the model trains; freeze it in the function "
            "of --model, or leave it trained"
        )


def unwrapped(module: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """The model inside wrappers that keep it as their `module`, as DistributedDataParallel does.

    `model` is what was wrapped. It may have a `module` of its own.
    """
    while module is not model and isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    return module


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient with its parameter's placements. Backward may leave it as partial sums, or whole on every rank."""
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    same = gradient.placements == parameter.placements
    return gradient if same else gradient.redistribute(placements=parameter.placements)


def by_layout(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters grouped by device mesh and by the axes that cut them; plain tensors are a group of their own."""
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        layout = (parameter.device_mesh, sharded_axes(parameter)) if isinstance(parameter, DTensor) else None
        groups.setdefault(layout, []).append(parameter)
    return list(groups.values())


def sharded_axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of a tensor's device mesh over which it is sharded, not replicated; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())
