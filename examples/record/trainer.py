"""A tiny model trained by transformers' Trainer on random tokens with labels of unequal lengths.

    torchrun --nproc_per_node 2 -m lockstep.record --output runs/trainer examples/record/trainer.py
    python -m lockstep.judge runs/trainer

Further arguments are those of TrainingArguments, such as --max_grad_norm 0.5 --gradient_accumulation_steps 2, and those of Options.
"""

import sys
import tempfile
from dataclasses import dataclass

import torch
from transformers import (
    HfArgumentParser,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Trainer,
    TrainingArguments,
)

VOCABULARY, LENGTH = 512, 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


@dataclass
class Options:
    kind: str = "text"  # text, classes: a sequence classifier, experts: a mixture
    own_loss: bool = False
    own_compute_loss: bool = False
    tp: int = 1  # tensor parallelism of transformers
    ep: int = 1  # expert parallelism of transformers
    lora: bool = False  # of peft


def model(kind: str = "text") -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "classes":
        return Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=5))
    if kind == "experts":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def parallel(whole: PreTrainedModel, options: Options, folder: str) -> PreTrainedModel:
    """Loaded again by each rank, which keeps its shard."""
    from accelerate import ParallelismConfig
    from transformers.distributed import DistributedConfig

    ParallelismConfig._validate_accelerator = lambda *_: None  # which refuses CPUs

    ranks, shared = torch.distributed.get_world_size(), [folder]
    torch.distributed.broadcast_object_list(shared)
    whole.save_pretrained(shared[0])
    torch.distributed.barrier()
    sizes = DistributedConfig(tp_size=options.tp, fsdp_size=ranks // options.tp, ep_size=options.ep)
    return type(whole).from_pretrained(shared[0], distributed_config=sizes)


class Samples(torch.utils.data.Dataset):
    """Random token ids; the first ones of each sample, the prompt, have no label."""

    def __init__(self, classes: bool = False):
        self.classes = classes

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: 4 + index % 13] = -100
        return {"input_ids": ids, "labels": ids[0] % 5 if self.classes else labels}


def mean_over_tokens(outputs, labels, num_items_in_batch=None):
    """A loss of one's own: the sum over this micro batch's tokens, divided by the number of tokens of the whole batch."""
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch


class MeanOverTokens(Trainer):
    """A trainer of one's own, whose compute_loss is another one."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        # Gradients are averaged over the ranks, and the number of tokens is that of all.
        loss = mean_over_tokens(outputs, inputs["labels"], num_items_in_batch) * self.args.world_size
        return (loss, outputs) if return_outputs else loss


def use_fsdp_on_cpus(trainer: Trainer) -> None:
    """Accelerate leaves FSDP out on CPUs without a word, and trains with DDP."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = [
            "--output_dir",
            folder,
            "--use_cpu",
            "True",
            "--max_steps",
            "3",
            "--report_to",
            "none",
            "--save_strategy",
            "no",
        ]
        given += ["--per_device_train_batch_size", "2", *sys.argv[1:]]
        arguments, options = HfArgumentParser((TrainingArguments, Options)).parse_args_into_dataclasses(given)
        net = model(options.kind)
        if options.tp > 1 or options.ep > 1:
            net = parallel(net, options, f"{folder}/whole")
        if options.lora:
            from peft import LoraConfig, get_peft_model

            net = get_peft_model(net, LoraConfig(target_modules=["q_proj", "v_proj"]))
        trainer = (MeanOverTokens if options.own_compute_loss else Trainer)(
            model=net,
            args=arguments,
            train_dataset=Samples(options.kind == "classes"),
            compute_loss_func=mean_over_tokens if options.own_loss else None,
        )
        if arguments.fsdp:
            use_fsdp_on_cpus(trainer)
        trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)


if __name__ == "__main__":
    main()
