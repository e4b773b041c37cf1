"""Train with PyTorch DistributedDataParallel, the baseline; it also writes the initial weights for the others.

    python train_ddp.py --init_weights_path runs/init.safetensors --save_init_weights
    torchrun --nproc_per_node 2 train_ddp.py        the same loop in place, without ray
    python train_ddp.py --dry_run                   configuration, mesh and contract; trains nothing

Writes loss_ddp.json under --loss_output_dir. All flags: --help. Exit status: 0; 1 a run that failed; 2 a usage error;
3 an internal error.
"""

if __name__ == "__main__":
    from lockstep import startup

    startup.begin()  # first: from now on Ctrl-C and a missing package are one line each

    from lockstep.launch import launch

    startup.end(launch("ddp"))
