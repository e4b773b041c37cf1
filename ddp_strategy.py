"""The baseline: PyTorch DistributedDataParallel. Every rank holds the whole model; gradients are averaged over dp."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.model import causal_lm_loss
from lockstep.observe import observed_max_grad_norm, torch_contract
from lockstep.optim import build_optimizer, held_whole, parameter_groups, total_norm


class DDPStrategy:
    """See `lockstep.training.Strategy` for the contract."""

    def __init__(self, model: torch.nn.Module, config, mesh, device: torch.device):
        self.config, self.device = config, device
        self.model = model.to(device=device, dtype=config.parameter_dtype)
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(
            parameter_groups(self.parameters, config.weight_decay),
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
        )

    def geometry(self) -> tuple[int, int, int, int]:
        return dist.get_rank(self.ddp.process_group), dist.get_world_size(self.ddp.process_group), 0, 1

    def forward_backward(self, micro_batches: list[tuple]) -> torch.Tensor:
        self.num_micro_batches, self.num_tokens = len(micro_batches), micro_batches[0][1].numel()
        self.optimizer.zero_grad()
        losses = []
        for index, (input_ids, labels) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                with self.config.autocast(self.device):
                    loss = causal_lm_loss(self.ddp, input_ids, labels)
                (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def update(self) -> float:
        grad_norm = total_norm([p.grad for p in self.parameters])
        if self.config.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, grad_norm)
        self.optimizer.step()
        self.grad_norm = float(grad_norm)
        return self.grad_norm

    def full_parameters(self):
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().cpu()

    def held(self, kind: str):
        return held_whole(self.model, self.optimizer, kind)

    def effective_contract(self) -> dict:
        return {
            **torch_contract(self.model, self.optimizer),
            "max_grad_norm": observed_max_grad_norm(
                self.config.max_grad_norm, self.grad_norm, float(total_norm([p.grad for p in self.parameters]))
            ),
            "gradient_accumulation_steps": self.num_micro_batches,
            "loss_is_mean_over": [self.num_tokens, self.num_micro_batches, self.geometry()[1]],
        }
