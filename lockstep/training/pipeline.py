"""Pipeline parallelism: every rank along pp has some of the layers, and micro batches pass through the ranks.

Stages are torch's (`torch.distributed.pipelining`), made by hand. lockstep/plan/cuts.py says which rank has which layers. A rank keeps the
model of transformers without the layers of other ranks, so that parameters and modules keep their names.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from lockstep.ground.blocks import CalledModules
from lockstep.ground.collective import gather_objects
from lockstep.inputs import modules
from lockstep.plan import cuts
from lockstep.training.optim import gradient_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Stage(torch.nn.Module):
    """Consecutive units of a model (lockstep/plan/cuts.py). The first stage takes token ids; the last returns loss / `share`.

    With `apart`, a sequence holds several documents that do not see each other.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        units: list[str | int],
        autocast: bool,
        apart: bool,
    ):
        super().__init__()
        self.apart = apart
        names = modules.names_in(model)
        base = model.get_submodule(names.base)
        self.units, self.autocast = units, autocast
        self.sums = False  # whether the loss is the sum over labels, not their mean
        self.config, self.loss_function = model.config, model.loss_function
        self.numbers = [unit for unit in units if isinstance(unit, int)]
        layers = model.get_submodule(names.layers)
        self.embedding = model.get_submodule(names.embedding) if modules.EMBEDDING in units else None
        self.layers = torch.nn.ModuleList(layers.get_submodule(str(number)) for number in self.numbers)
        self.rotary_emb = base.get_submodule("rotary_emb")
        self.norm = base.get_submodule("norm") if modules.HEAD in units else None
        self.head = model.get_submodule(names.head) if modules.HEAD in units else None

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids (b, S), or hidden states (b, S, hidden) of the stage before -> hidden states, or the loss ().

        `labels` are already shifted, `position_ids` (b, S) the positions in the sequence or, if documents are `apart`, in its documents.
        """
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            if self.embedding is not None:
                x = self.embedding(x)
            if self.numbers:
                x = self._through_layers(x, position_ids if self.apart else position_ids[:1], attention_mask)
            if self.norm is None or self.head is None:
                return x
            logits = self.head(self.norm(x))
            divisor = {"num_items_in_batch": 1} if self.sums else {}
            return self.loss_function(logits, labels, self.config.vocab_size, shift_labels=labels, **divisor)

    def _through_layers(
        self, x: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Apply the layers, as the forward pass of transformers' base model does."""
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        mask_functions = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        config = self.config.to_dict()
        # All layers of a family without types have this one.
        default = "sliding_attention" if config.get("sliding_window") else "full_attention"
        layer_types = config.get("layer_types") or [default] * self.config.num_hidden_layers
        own_types = [layer_types[number] for number in self.numbers]
        masks = {
            layer_type: mask_functions[layer_type](
                self.config,
                x,
                attention_mask=attention_mask,
                past_key_values=None,
                position_ids=position_ids if self.apart else None,
            )
            for layer_type in sorted(set(own_types))
        }
        angles = self.rotary_emb(x, position_ids)
        for layer, layer_type in zip(self.layers, own_types, strict=True):
            x = layer(
                x,
                attention_mask=masks[layer_type],
                position_ids=position_ids,
                position_embeddings=angles,
                use_cache=False,
            )
        return x


class Pipeline:
    """The stages of one rank, and the schedule. Takes the layers of other ranks out of the model, in place.

    `micro` is the number of micro batches that a batch is cut into. Their losses are divided by `share`, so that they sum to the mean.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        device_mesh: DeviceMesh,
        *,
        schedule: str,
        micro: int,
        share: float,
        autocast: bool,
        apart: bool = False,
    ):
        self.name, self.micro = schedule, micro
        self.divisor: float | torch.Tensor = share
        self.group = device_mesh.get_group("pp")
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.device = torch.device(device_mesh.device_type)
        self.count = cuts.num_stages(schedule, self.size)
        self.numbers = cuts.stages_of(schedule, self.rank, self.size)
        self.last_rank = cuts.rank_of(schedule, self.count - 1, self.size)
        num_layers = model.config.num_hidden_layers
        names = modules.names_in(model)
        self.tied = modules.is_tied(model)
        # name -> shape of every parameter of the model, and the rank along pp that has it
        self.whole = {
            name: (tuple(parameter.shape), self._rank_of(name, names, num_layers))
            for name, parameter in model.named_parameters()
        }
        units_by_stage = [cuts.units_of(number, self.count, num_layers) for number in self.numbers]
        self.stages = [Stage(model, units, autocast, apart) for units in units_by_stage]
        self.hidden_size = model.config.hidden_size
        _keep(model, names, [unit for units in units_by_stage for unit in units])
        # The head of a tied model has the embedding's weights. On another rank it has a replica of them.
        self.replica = (
            model.get_submodule(names.head)
            if self.tied and self.rank == self.last_rank and self.last_rank
            else None
        )
        self.renamed = {names.head_weight: names.embedding_weight} if self.replica is not None else {}
        ends = device_mesh.mesh[[0, self.last_rank]].flatten(1).T.tolist()
        # The group of the ranks with the first and the last stage; None on the ranks between
        self.ends = dist.new_subgroups_by_enumeration(ends)[0] if self.tied and self.last_rank else None

    def _rank_of(self, name: str, names: modules.Names, layers: int) -> int:
        """The rank along pp that has a parameter. Tied weights belong to the embedding."""
        unit = names.unit_of(name)
        stage = next(n for n in range(self.count) if unit in cuts.units_of(n, self.count, layers))
        return cuts.rank_of(self.name, stage, self.size)

    def called(self, further: dict[str, str | int]) -> CalledModules:
        """The stages, and where among the arguments of each the parts of a batch are that it is called with."""
        called: CalledModules = []
        for stage in self.stages:
            places: dict[str, str | int] = {}
            if stage.embedding is not None:
                places |= {"input_ids": 0, **further}
            if stage.head is not None:
                places["labels"] = "labels"
            called.append((stage, places))
        return called

    def prepare(self, rows: int, positions: int, hidden_positions: int, dtype: torch.dtype) -> None:
        """Make the schedule, for micro batches of this shape. `hidden_positions` are those that a rank has between stages."""
        ids = torch.zeros(rows, positions, dtype=torch.int64, device="meta")
        hidden = torch.zeros(
            rows, hidden_positions, self.hidden_size, dtype=dtype, device="meta", requires_grad=True
        )
        loss = torch.zeros((), device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                stage,
                number,
                self.count,
                self.device,
                input_args=ids if number == 0 else hidden,
                output_args=loss if number == self.count - 1 else hidden,
                group=self.group,
            )
            for number, stage in zip(self.numbers, self.stages, strict=True)
        ]
        schedule_class = get_schedule_class(cuts.SCHEDULES[self.name][0])
        self.schedule = schedule_class(
            stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0],
            self.micro,
            loss_fn=lambda loss, _labels: loss / self.divisor,
            # True would scale the gradients of earlier batches again
            scale_grads=False,
        )

    def divide_by(self, num_labels: torch.Tensor, share: float) -> None:
        """From now on the loss is the sum over labels, divided by `num_labels` and `share`."""
        self.divisor = num_labels * share
        for stage in self.stages:
            stage.sums = True

    def step(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of a batch, each (B, S). Returns its part of the mean loss, 0 on ranks without the last stage."""
        losses: list[torch.Tensor] = []
        first_input = (input_ids,) if 0 in self.numbers else ()
        try:
            self.schedule.step(
                *first_input,
                target=labels,
                losses=losses,
                return_outputs=False,
                labels=labels,
                position_ids=position_ids.expand(len(labels), -1),
                **({} if attention_mask is None else {"attention_mask": attention_mask}),
            )
        except RuntimeError as error:
            # The schedule's own error says in which stage, not what went wrong.
            raise error.__cause__ or error from None
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self.device)

    def sum_tied(self) -> None:
        """Sum the gradients of tied weights over the two ends of the pipeline, in place. Other ranks have nothing to do."""
        if self.ends is None:
            return
        module = self.replica if self.replica is not None else self.stages[0].embedding
        gradient = gradient_of(cast(torch.nn.Module, module).weight)  # type: ignore[arg-type]
        dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self.ends)

    def contract(self) -> dict[str, Any]:
        """The schedule, its number of micro batches and the units of all stages, read back from live objects. Collective."""
        names = {torch_name: name for name, (torch_name, _, _) in cuts.SCHEDULES.items()}
        live = type(self.schedule)
        return {
            "schedule": next(name for key, name in names.items() if get_schedule_class(key) is live),
            "microbatches": self.schedule._n_microbatches,
            "units": gather_objects([stage.units for stage in self.stages], self.group),
        }


def _keep(model: "PreTrainedModel", names: modules.Names, units: list[str | int]) -> None:
    """Remove all units but these from the model, in place."""
    base = cast(Any, model.get_submodule(names.base))
    layers = base.layers
    base.layers = torch.nn.ModuleDict(
        {str(number): layers[number] for number in sorted(unit for unit in units if isinstance(unit, int))}
    )
    if modules.EMBEDDING not in units:
        base.embed_tokens = None
    if modules.HEAD not in units:
        base.norm = None
        cast(Any, model).lm_head = None
