"""Ray Train with transformers' Trainer, or with DeepSpeed's engine, after the examples of its documentation. The recording is made inside each worker.

python examples/record/ray_train.py --output runs/ray --library deepspeed
python -m lockstep.judge runs/ray
"""

import argparse
import os
import tempfile
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchTrainer


def train_transformers(options):
    import transformers
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from trainer import Samples, model

    import lockstep

    arguments = transformers.TrainingArguments(
        options["folder"],
        use_cpu=True,
        max_steps=3,
        report_to="none",
        save_strategy="no",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    net = model()
    trainer = transformers.Trainer(model=net, args=arguments, train_dataset=Samples())
    trainer.add_callback(RayTrainReportCallback())
    trainer = prepare_trainer(trainer)
    with lockstep.record(net, options["output"] / "transformers"):
        trainer.train()


def train_deepspeed(options):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from torch.utils.data import DataLoader, DistributedSampler
    from trainer import Samples, model

    import lockstep

    # Without this, DeepSpeed compiles it, which takes a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
    }
    net = model().train()
    with lockstep.record(net, options["output"] / "deepspeed"):
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        sampler = DistributedSampler(Samples())
        for number, batch in enumerate(DataLoader(Samples(), batch_size=2, sampler=sampler), start=1):
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            ray.train.report({"loss": loss.item()})
            if number == 3:
                break


LIBRARIES = {"transformers": train_transformers, "deepspeed": train_deepspeed}


def train(options):
    for library in options["libraries"]:
        LIBRARIES[library](options)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--library", choices=LIBRARIES, nargs="+", default=["transformers"])
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            train_loop_config={
                "libraries": options.library,
                "output": options.output.absolute(),
                "folder": folder,
            },
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()


if __name__ == "__main__":
    main()
