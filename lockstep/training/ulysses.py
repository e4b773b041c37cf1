"""Sequence parallelism as DeepSpeed has it (Ulysses, arXiv 2309.14509): `--sp_size` ranks share the positions of each sequence.

Around attention, an all-to-all gives every rank all positions of some of the heads. `UlyssesSPAttentionHF` is DeepSpeed's; what is here
hands it to the model and to the engine.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from lockstep.inputs import modules
from lockstep.plan.config import Config
from lockstep.plan.cuts import CONTIGUOUS
from lockstep.plan.mesh import Coordinates, Geometry, Mesh
from lockstep.training.context_parallel import OwnPositions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The attention function's name in transformers' registry
NAME = "ulysses"


def forget() -> None:
    """Release the groups of an earlier run in this process: the engine of a run without Ulysses would take them for its own."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    if groups.mpu is parallel_state_sp:
        parallel_state_sp._release_sequence_parallel_groups()
        groups.mpu = None


class Ulysses(OwnPositions):
    """Makes a model, in place, attend to the positions of all ranks along cp. `mpu` is for the engine."""

    def __init__(self, model: "PreTrainedModel", config: Config):
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # The engine asks this module for its groups.
        self.mpu = parallel_state_sp
        # Those of an earlier run in this process
        self.mpu._release_sequence_parallel_groups()
        self.mpu.initialize_sequence_parallel(sequence_parallel_size=config.cp_size)
        super().__init__(self.mpu.get_sequence_parallel_group(), CONTIGUOUS, config.seq_length)
        sizes = model.config
        # `register_with_transformers` would do the same for all later models of this process, too.
        self.attention = UlyssesSPAttentionHF(
            attn=sdpa_attention_forward,
            batch_size=config.batch_size,
            attn_head_count=sizes.num_attention_heads,
            attn_head_size=getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads,
            kv_head_count=sizes.num_key_value_heads,
            num_hidden_layers=sizes.num_hidden_layers,
            process_group=self.group,
            seq_length_is_variable=False,
            local_seq_length=config.seq_length // self.size,
            global_seq_length=config.seq_length,
        )
        self.attention.core_attn_implementation = "sdpa"
        AttentionInterface.register(NAME, attend)
        model.set_attn_implementation(NAME)
        names = modules.names_in(model)
        for layer in model.get_submodule(names.layers).children():
            # Not as a submodule: it has no weights and the model's own modules keep their names.
            object.__setattr__(layer.get_submodule(names.attention), NAME, self.attention)

    def geometry(self) -> Geometry:
        """The mesh and this rank's coordinates, from the groups that the engine reduces over: dp and cp together, and cp."""
        both, cp = self.mpu.get_sequence_data_parallel_group(), self.group
        mesh = Mesh(dp=dist.get_world_size(both) // dist.get_world_size(cp), cp=dist.get_world_size(cp))
        return Geometry(mesh, Coordinates(dp=dist.get_rank(both) // mesh.cp, cp=dist.get_rank(cp)))

    def observed(self) -> dict[str, Any]:
        """Entries of the contract: the kernel that attention computes with, and each rank's positions."""
        return {"attention": self.attention.core_attn_implementation, "cuts": {"cp": self.contract()}}


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: query (B, H, S / cp, D), key and value (B, H_kv, S / cp, D) -> (B, S / cp, H D)."""
    return cast(Any, module).ulysses(module, query, key, value, None, **options)
