#!/usr/bin/env bash
#SBATCH --job-name=lockstep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --output=lockstep-%j.log
#
# One training script on all GPUs of a SLURM job: torchrun on each node starts a rank for each GPU.
#
#   sbatch studies/slurm.sh train_deepspeed.py --tp_size 1 --zero_stage 2
#   sbatch --nodes=2 studies/slurm.sh train_fsdp.py --tp_size 2 --loss_output_dir SHARED/FOLDER
#
# Submit it from the repository's folder, whose .venv it uses. Options of sbatch replace the lines above.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
source .venv/bin/activate
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" \
  --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$first_node:29500" \
  "$@"
