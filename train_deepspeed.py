"""Train with DeepSpeed AutoTP + ZeRO: tensor parallelism by configuration, and by stage what is sharded over dp.

    python train_deepspeed.py --tp_size 2 --dp_size 2 --init_weights_path runs/init.safetensors
    torchrun --nproc_per_node 4 train_deepspeed.py      the same loop in place, without ray
    deepspeed --num_gpus 4 train_deepspeed.py           the same under DeepSpeed's launcher
    python train_deepspeed.py --dry_run                 configuration, mesh and contract; trains nothing

Writes loss_deepspeed.json under --loss_output_dir. All flags: --help. Exit status: 0; 1 a run that failed; 2 a usage error;
3 an internal error.
"""

if __name__ == "__main__":
    from lockstep import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

    from lockstep.launch import launch

    startup.end(launch("deepspeed"))
