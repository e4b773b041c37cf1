"""FSDP2 + DTensor: a tensor-parallel plan over the tp axis, then `fully_shard` over the dp axis."""

import collections
import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lockstep.ground.collective import gather_objects
from lockstep.ground.errors import UserError
from lockstep.inputs import modules
from lockstep.plan import compiled, fsdp
from lockstep.plan.config import PARAM_DTYPES
from lockstep.plan.mesh import share
from lockstep.recorder.wrapped import fsdp_groups
from lockstep.training.optim import gradient_of
from lockstep.training.pipeline import Pipeline
from lockstep.training.torch_strategy import TorchStrategy
from lockstep.training.vocab_parallel_loss import vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# full_tensor() gathers over tp, then over dp, and torch warns each time that one collective would be faster.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

# How each style of a model's own plan is implemented here. The plan is transformers' (`base_model_tp_plan` of a configuration's class).
# For Llama, Mistral and Qwen2, q_proj, k_proj, v_proj, gate_proj and up_proj are colwise, o_proj and down_proj rowwise. Qwen3's plan has
# the norms on heads, too. x is replicated over tp between blocks. Each rank holds some output rows of a colwise weight and the matching
# input columns of the rowwise weight after it, whose partial products are summed.
#   y = sum_r f(x A_r) B_r        (Megatron-LM, arXiv 1909.08053, section 3)
STYLES: dict[str, ParallelStyle] = {
    # Whole heads, whole KV heads, columns of the MLP; with their bias
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    # One norm for all heads. Its weight is whole on every rank. A rank has only the part of the gradient that its own heads give, so
    # the gradients are summed over tp. Dim 2 of (batch, sequence, heads, head_dim) is the one that is cut.
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
}


# The names that transformers gives them in the models that are cut here
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def own_rows(between: Placement) -> dict[str, ParallelStyle]:
    """The rows that no model's own plan has. `between`: how x lies between blocks, whole on every rank or cut by position."""
    return {
        # No family's plan cuts it. Ids 0..V/tp-1 are on tp rank 0, and so on. An id of another rank gives zero, so the sum over tp has
        # the row.
        EMBEDDING: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        # Not in the base model's plan. The head is cut like the embedding, so that they stay tied. Logits stay sharded and the loss is
        # computed on the shards; transformers' plan of the head ("colwise_gather_output") would gather them.
        HEAD: ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        # The input of a block is redistributed once, so the gradients of q, k and v (of gate and up) are summed locally, then reduced
        # over tp together. Without these rows each linear layer would reduce its own.
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
    }


OWN_ROWS = own_rows(Replicate())
# With sequence parallelism x is cut along its positions, dim 1, between blocks: norms and residuals work on a rank's own positions.
# A block gathers them at its input, and its partial products are summed and cut again (arXiv 2205.05198, section 4.2.2).
SEQUENCE_ROWS = own_rows(Shard(1))
SEQUENCE_STYLES: dict[str, ParallelStyle] = {**STYLES, "rowwise": RowwiseParallel(output_layouts=Shard(1))}


def tp_plan(model: "PreTrainedModel", *, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """Module (with * for the number of its layer) -> how it is cut over tp, from the model's `base_model_tp_plan` and our own rows.

    Raises ValueError naming the first row with an unknown style, or the first module that needs a row and has none.
    """
    styles, rows = (SEQUENCE_STYLES, SEQUENCE_ROWS) if sequence_parallel else (STYLES, OWN_ROWS)
    if model.config.base_model_tp_plan is None:
        raise ValueError(f"{type(model).__name__} comes with no tensor-parallel plan")
    plan = dict(rows)
    if sequence_parallel:
        # A rank has the gradient that its own positions give a norm; these are summed over tp.
        plan |= {
            _pattern(name): SequenceParallel(use_local_output=True) for name in norms_between_blocks(model)
        }
    for pattern, style in model.config.base_model_tp_plan.items():
        name = f"model.{pattern}"
        if style not in styles:
            raise ValueError(
                f"the model's own plan has {style!r} for {name}, which is not known here; known: {', '.join(STYLES)} "
                "(fsdp_strategy.STYLES)"
            )
        if name in rows:
            raise ValueError(
                f"the model's own plan has a row for {name} ({style!r}), and so has fsdp_strategy.OWN_ROWS; keep one of them"
            )
        plan[name] = styles[style]
    _require_fits(model, plan)
    return plan


def norms_between_blocks(model: "PreTrainedModel") -> list[str]:
    """The norms outside of attention and MLP, by name: those of the layers, and the last one."""
    names = modules.names_in(model)
    inside = (f".{names.attention}.", f".{names.mlp}.")
    return [
        name
        for name, module in model.named_modules()
        if {parameter.ndim for parameter in module.parameters(recurse=False)} == {1}
        and not any(block in name for block in inside)
    ]


def _require_fits(model: torch.nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Raise ValueError unless rows and modules match.

    Every row needs a module. Every linear layer and embedding, and every module with weights inside a block, needs a row. Norms on heads
    need the size of a head.
    """
    by_pattern = {_pattern(name): module for name, module in model.named_modules()}
    stray = next((pattern for pattern in plan if pattern not in by_pattern), None)
    if stray:
        raise ValueError(f"the tensor-parallel plan has a row for {stray}, and the model has no such module")
    for pattern, module in by_pattern.items():
        cut = isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) or pattern.rpartition(".")[0] in plan
        if cut and pattern not in plan and any(True for _ in module.parameters(recurse=False)):
            raise ValueError(
                f"the tensor-parallel plan says nothing about {pattern}: every linear layer and embedding, and whatever has "
                "weights inside attention and MLP, needs a row"
            )
        if plan.get(pattern) is STYLES["replicated_with_grad_allreduce"]:
            head_dim = by_pattern[pattern.rpartition(".")[0]].head_dim
            if tuple(module.weight.shape) != (head_dim,):
                raise ValueError(
                    f"{pattern} has weights of shape {tuple(module.weight.shape)}, and only a norm on heads of {head_dim} may "
                    "have its gradient summed over tp"
                )


def _pattern(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class FSDPStrategy(TorchStrategy):
    """Weights cut over tp, then over dp; `lockstep.training.torch_strategy` has what it shares with other strategies in torch."""

    def parallelize(self, model: "PreTrainedModel", device_mesh: DeviceMesh) -> torch.nn.Module:
        options = fsdp.of(self.config)
        if device_mesh["tp"].size() > 1:
            shard_over_tp(model, device_mesh["tp"], sequence_parallel=options.sequence_parallel)
            if self.config.compile != "off":
                embedding = model.get_submodule(modules.names_in(model).embedding)
                embedding.register_forward_hook(lambda _module, _inputs, output: Waited.apply(output))
        self.positions_in_norms: set[int] = set()
        names = modules.names_in(model)
        for norm in norms_between_blocks(model) if options.sequence_parallel else ():
            if compiled.is_hidden(names, self.config.compile, norm):
                continue
            model.get_submodule(norm).register_forward_hook(self._see_norm)
        self.roots: list[torch.nn.Module] = [model]
        if self.config.pp_size > 1:
            self.pipeline = self._pipeline(model, device_mesh)
            self.roots = [*self.pipeline.stages]
        self.synced = collections.deque[str](maxlen=self.config.gradient_accumulation_steps)
        pinned = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        # By default shards are gathered once per step: kept between forward and backward, as ZeRO-1 keeps whole parameters.
        # At dp 1 this gathers nothing and still makes every strategy run the same code.
        mixed = self.config.precision == "mixed"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        shard = functools.partial(
            fully_shard,
            mesh=shard_mesh(device_mesh, options.dp_replicate),
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=policy,
            offload_policy=pinned if options.cpu_offload else OffloadPolicy(),
        )
        layers = self._layers(model) if options.wrap == "layer" else []
        _require_tensors(model)
        if layers:
            _require_layers(model, modules.names_in(model).layers)
        for layer in layers:
            shard(layer)
        for root in self.roots:
            shard(root)
        if options.prefetch:
            gather_ahead(model, layers, options.prefetch)
        return model

    def _layers(self, model: "PreTrainedModel") -> list[torch.nn.Module]:
        """The layers that this rank has."""
        layers = modules.names_in(model).layers
        return list(model.get_submodule(layers).children()) if layers else []

    def _pipeline(self, model: "PreTrainedModel", device_mesh: DeviceMesh) -> Pipeline:
        config, options = self.config, fsdp.of(self.config)
        micro = options.pp_microbatches or config.batch_size
        pipeline = Pipeline(
            model,
            device_mesh,
            schedule=options.pp_schedule,
            micro=micro,
            share=micro * config.gradient_accumulation_steps,
            autocast=config.precision == "autocast",
            apart=config.documents == "apart",
        )
        positions = config.seq_length // config.cp_size
        pipeline.prepare(
            config.batch_size // micro,
            positions,
            positions // (config.tp_size if options.sequence_parallel else 1),
            getattr(torch, PARAM_DTYPES[config.precision]),
        )
        return pipeline

    def _see_norm(self, _module: torch.nn.Module, _arguments: object, output: torch.Tensor) -> None:
        self.positions_in_norms.add(output.shape[1])

    def cut(
        self, input_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        input_ids, labels, positions = super().cut(input_ids, labels)
        if positions is None and fsdp.of(self.config).sequence_parallel:
            # transformers would count the positions of the embedding's output, and this rank has only some of them.
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return input_ids, labels, positions

    @contextlib.contextmanager
    def _reducing(self, last: bool) -> Iterator[None]:
        sync = fsdp.of(self.config).gradient_sync
        with super()._reducing(last or sync != "last"):
            if sync == "scatter":
                cast(FSDPModule, self.wrapped).set_requires_all_reduce(last)
            yield
            # After the backward pass, because a pipeline's schedule sets the flags itself.
            self.synced.append(", ".join(sorted({_synced(group) for group in self.param_groups()})))

    def param_groups(self) -> list[Any]:
        """FSDP's groups of parameters, which are gathered and reduced together."""
        return [group for root in self.roots for group in fsdp_groups(root)]

    def _reduction_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        policies = {cast(FSDPModule, root)._get_fsdp_state()._mp_policy.reduce_dtype for root in self.roots}
        return policies.pop() or gradient_of(parameter).dtype

    def sharding(self) -> dict[str, Any]:
        groups, layers = self.param_groups(), list(self._layers(self.model))
        states = [group.modules[0]._get_fsdp_state() for group in groups]
        prefetched = [(s._states_to_forward_prefetch, s._states_to_backward_prefetch) for s in states]
        wrap = "layer" if all(isinstance(layer, FSDPModule) for layer in layers) else "model"
        return {
            "replicas": sorted({getattr(group.mesh_info, "replicate_mesh_size", 1) for group in groups}),
            "shards": sorted({group.mesh_info.shard_mesh_size for group in groups}),
            "reshard_after_forward": sorted({_left_after_forward(group) for group in groups}),
            "offloaded": sorted({p.offload_to_cpu for group in groups for p in group.fsdp_params}),
            "prefetch": max(len(states_ahead) for directions in prefetched for states_ahead in directions),
            "positions_in_norms": sorted(set().union(*gather_objects(self.positions_in_norms))),
            "gradients_of_micro_batches": list(self.synced),
            # Without a list of layers, both options wrap the model.
            "wrap": wrap if layers else fsdp.of(self.config).wrap,
        }


def _require_tensors(model: torch.nn.Module) -> None:
    """Raise UserError if a parameter is a scalar, which FSDP2 cannot shard."""
    scalar = next((name for name, parameter in model.named_parameters() if parameter.ndim == 0), None)
    if scalar is not None:
        raise UserError(f"{scalar} is a scalar, which FSDP2 cannot shard; make it a tensor of one element")


def _require_layers(model: torch.nn.Module, layers: str) -> None:
    """Raise UserError if FSDP2 cannot shard the layers, which are those of the list `layers`.

    A layer must have a forward method. FSDP2 cannot shard a parameter with a layer and elsewhere, or unties it.
    """
    for name, child in model.get_submodule(layers).named_children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            raise UserError(
                f"--wrap layer: {layers}.{name} is a {type(child).__name__}, which is never called, and FSDP2 cannot shard it; say --wrap model"
            )
    # Of each parameter, the layers that have it; None stands for the rest of the model
    owners: dict[torch.Tensor, set[torch.nn.Module | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer, _, rest = name.removeprefix(f"{layers}.").partition(".")
        is_in_layer = name.startswith(f"{layers}.") and rest
        owner = model.get_submodule(f"{layers}.{layer}") if is_in_layer else None
        owners.setdefault(parameter, set()).add(owner)
    shared = next((name for name, parameter in model.named_parameters() if len(owners[parameter]) > 1), None)
    if shared is not None:
        raise UserError(
            f"--wrap layer: {shared} is in a layer and elsewhere, and FSDP2 cannot shard it with both; say --wrap model"
        )


class Waited(torch.autograd.Function):
    """Waits for the output of a collective. A compiled layer sends no gradient to one that is still on its way (docs/findings.md)."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.wait() if isinstance(output, AsyncCollectiveTensor) else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def shard_mesh(device_mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    """What `fully_shard` cuts over: dp, or dp as replicas of shards. Neighbours along dp are shards of one replica.

    Ranks along cp hold the same weights and see other tokens, as those along dp do, so they hold shards of them, too.
    """
    name = "dp"
    if device_mesh["cp"].size() > 1:
        name = "dp_cp"
        device_mesh = device_mesh["dp", "cp"]._flatten(name)
    if replicas == 1:
        return device_mesh[name]
    names = ("dp_replicate", "dp_shard")
    return device_mesh._unflatten(name, (replicas, device_mesh[name].size() // replicas), names)[names]


def gather_ahead(model: Any, layers: list[Any], number: int) -> None:
    """Let the model and each of its layers gather the weights of the next `number` layers, in forward and in backward."""
    for order, direction in (([model, *layers], "forward"), ([model, *reversed(layers)], "backward")):
        for index, module in enumerate(order):
            getattr(module, f"set_modules_to_{direction}_prefetch")(order[index + 1 : index + 1 + number])


def _synced(group: Any) -> str:
    """What the next backward pass does with a group's gradients."""
    return "none" if not group.reduce_grads else "all" if group.all_reduce_grads else "shards"


def _left_after_forward(group: Any) -> bool | int:
    """What a group keeps of the gathered weights between forward and backward, as `--reshard_after_forward` says it."""
    mesh = group.post_forward_mesh_info
    return False if mesh is None else mesh is group.mesh_info or mesh.shard_mesh_size


def shard_over_tp(model: "PreTrainedModel", tp_mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Cut the model by its `tp_plan`, in place. Its loss is then computed on vocabulary shards."""
    tied = modules.is_tied(model)
    plan = tp_plan(model, sequence_parallel=sequence_parallel)
    # Without a broadcast: all ranks hold equal weights already.
    parallelize_module(model, tp_mesh, plan, src_data_rank=None)
    # parallelize_module has made a new Parameter of each; make them one again.
    if tied:
        model.get_submodule(HEAD).weight = model.get_submodule(EMBEDDING).weight
    first_id, _ = share(
        model.get_parameter(f"{HEAD}.weight").shape[0], tp_mesh.get_local_rank(), tp_mesh.size()
    )
    group = tp_mesh.get_group()

    def loss_on_shards(
        logits: DTensor,
        labels: torch.Tensor,
        vocab_size: int,
        shift_labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        local_logits = logits.to_local(grad_placements=logits.placements)
        return vocab_parallel_cross_entropy(local_logits, shift_labels, first_id, group, num_items_in_batch)

    model.loss_function = loss_on_shards
