#!/usr/bin/env bash
# Train with DDP, its control run and the other strategies, from the same weights on the same batches. Then judge the loss curves, and every
# tensor of the first two steps of the same runs. Writes a table, a figure and reports.
#
#   ./run_verification_main.sh                     on GPUs if there are TP_SIZE x DP_SIZE of them, else on the CPU
#   LEARNING_RATE=1e-5 ./run_verification_main.sh  any setting below can be overridden from the environment
#
# Exit status: 0 they compute the same thing; 1 they do not, a run failed, or the verdict is NOT JUDGED; 2 a usage error, or runs that cannot
# be compared; 3 an internal error; 130 interrupted by Ctrl-C; 143 terminated by SIGTERM.
set -euo pipefail
trap 'echo "$0: interrupted" >&2; exit 130' INT
source "$(dirname "$0")/environment.sh" requirements.txt
running= # the id of the program that is waited for
stop() { # WORD SIGNAL STATUS
  trap '' INT TERM
  if [ -n "$running" ]; then
    sleep 1 # Ctrl-C has reached it, too, and so has a signal to the whole group
    kill -s "$2" "$running" 2>/dev/null || true
    wait "$running" || true
  fi
  echo "$0: $1" >&2
  exit "$3"
}
trap 'stop interrupted INT 130' INT
trap 'stop terminated TERM 143' TERM
waited_for() { # COMMAND...: in the background, so that a signal is answered at once
  (trap - INT && exec "$@") &
  running=$!
  local status=0
  wait "$running" || status=$?
  running=
  return $status
}
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 # the caller's folder is where paths start, not where modules are
export LOCKSTEP_PARENT=$$                                           # the scripts end with this one, even if it is killed

# --- settings, once -------------------------------------------------------------------------------------------
TP_SIZE=${TP_SIZE:-2}
DP_SIZE=${DP_SIZE:-2}
OUTPUT_DIR=${OUTPUT_DIR:-runs/verification}
case $OUTPUT_DIR in /*) ;; *) OUTPUT_DIR=$PWD/$OUTPUT_DIR ;; esac
for name in TP_SIZE DP_SIZE; do
  if ! [[ ${!name} =~ ^[1-9][0-9]{0,5}$ ]]; then
    echo "$0: $name=${!name}: must be a whole number, at least 1" >&2
    exit 2
  fi
done
read -r gpus registered <<<"$("$PYTHON" -c 'from lockstep.plan import resources, strategies; print(resources.local_gpus(), ",".join(strategies.SPECS))')"
STRATEGIES=${STRATEGIES:-$registered} # comma-separated NAME@MESH:OPTIONS, as in fsdp@tp1xdp4:prefetch=1; your own as path/to/file.py:Class
DEVICE=${DEVICE:-$([ "$gpus" -ge $((TP_SIZE * DP_SIZE)) ] && echo cuda || echo cpu)}
if [ "$DEVICE" = cuda ]; then # the full configuration; the default model has two layers
  NUM_LAYERS=${NUM_LAYERS:-$([ -n "${MODEL_NAME:-}" ] && echo all || echo 2)}
  MODEL_NAME=${MODEL_NAME:-Qwen/Qwen2.5-0.5B}
  BATCH_SIZE=${BATCH_SIZE:-2}
  SEQ_LENGTH=${SEQ_LENGTH:-1024}
  LEARNING_RATE=${LEARNING_RATE:-1e-5}
  PRECISION=${PRECISION:-autocast}
else # a laptop
  MODEL_NAME=${MODEL_NAME:-tiny-qwen2}
  NUM_LAYERS=${NUM_LAYERS:-all}
  BATCH_SIZE=${BATCH_SIZE:-8}
  SEQ_LENGTH=${SEQ_LENGTH:-128}
  LEARNING_RATE=${LEARNING_RATE:-1e-3}
  PRECISION=${PRECISION:-fp32}
fi
DEBUG_STEPS=${DEBUG_STEPS:-100}
LOG_INTERVAL=${LOG_INTERVAL:-10}
REPORT_TO=${REPORT_TO:-none} # comma-separated trackers: tensorboard, wandb, mlflow
PROFILE=${PROFILE:-0} # steps that torch's profiler records
SEED=${SEED:-0}
DATASET_NAME=${DATASET_NAME:-builtin}
OPTIMIZER=${OPTIMIZER:-adamw}
WEIGHT_DECAY=${WEIGHT_DECAY:-0.01}
MAX_GRAD_NORM=${MAX_GRAD_NORM:-1.0}
GRADIENT_ACCUMULATION_STEPS=${GRADIENT_ACCUMULATION_STEPS:-1}
ATTN_IMPL=${ATTN_IMPL:-sdpa}
NOISE_FLOOR=${NOISE_FLOOR:-1} # 0: no control run; only the fixed tolerances of docs/precision.md
TENSORS=${TENSORS:-$([ "$PRECISION" = mixed ] && echo 0 || echo 1)} # 0: judge the losses only, as for mixed
PRETRAINED=${PRETRAINED:-0} # 1: start from the weights of MODEL_NAME, a folder or hub id; 0: from random ones
# The first run writes the weights of all runs there. If the file already exists, they start from it instead.
INIT_WEIGHTS_PATH=${INIT_WEIGHTS_PATH:-}

for name in NOISE_FLOOR TENSORS PRETRAINED; do
  if [[ ${!name} != [01] ]]; then
    echo "$0: $name=${!name}: must be 0 or 1" >&2
    exit 2
  fi
done
common=(
  --model_name "$MODEL_NAME" --num_layers "$NUM_LAYERS" --batch_size "$BATCH_SIZE" --seq_length "$SEQ_LENGTH"
  --num_epochs 1 --debug_steps "$DEBUG_STEPS" --learning_rate "$LEARNING_RATE" --optimizer "$OPTIMIZER"
  --weight_decay "$WEIGHT_DECAY" --max_grad_norm "$MAX_GRAD_NORM"
  --gradient_accumulation_steps "$GRADIENT_ACCUMULATION_STEPS" --precision "$PRECISION" --attn_impl "$ATTN_IMPL"
  --seed "$SEED" --dataset_name "$DATASET_NAME" --log_interval "$LOG_INTERVAL" --report_to "$REPORT_TO" --profile "$PROFILE" --dp_size "$DP_SIZE"
  --loss_output_dir "$OUTPUT_DIR" --storage_path "$OUTPUT_DIR/ray" --device "$DEVICE" --overwrite
)
[ "$TENSORS" = 0 ] || common+=(--capture_dir "$OUTPUT_DIR/tensors" --capture_steps 2)
weights=(--init_weights_path "${INIT_WEIGHTS_PATH:-$OUTPUT_DIR/init_weights.safetensors}")
first=() # further flags of the first run
if [ -z "$INIT_WEIGHTS_PATH" ] || [ ! -e "$INIT_WEIGHTS_PATH" ]; then # somebody's file is read, never written
  first+=(--save_init_weights)
fi
[ "$PRETRAINED" = 0 ] || first+=(--pretrained)
[ "$NOISE_FLOOR" = 0 ] || first+=(--control)
verification=("$PYTHON" "$ROOT/run_verification.py" --strategies "$STRATEGIES" --tp_size "$TP_SIZE" "${common[@]}" "${weights[@]}" "${first[@]}")

# --- one local Ray instance for all the runs; it starts meanwhile, and ends with this script -----------------------------------------
if [ -z "${RAY_ADDRESS:-}" ]; then
  export RAY_AUTH_MODE=token # a local instance uses a token, and whoever joins it must say so
  exec {ray}< <(exec "$PYTHON" -m lockstep.running.ray_instance)
  ray_pid=$!
fi

# --- a usage error is answered before anything is trained ------------------------------------------------------------------------------
plan=$("${verification[@]}" --part plan)
mkdir -p "$OUTPUT_DIR"
exec {lock}<>"$OUTPUT_DIR/.run_verification_main.lock"
"$PYTHON" -m lockstep.ground.locks $lock "$OUTPUT_DIR"
settings="$MODEL_NAME, $NUM_LAYERS layers, $PRECISION, $DEBUG_STEPS steps, TP=$TP_SIZE, DP=$DP_SIZE on $DEVICE ($gpus GPUs here) -> $OUTPUT_DIR"
echo "${settings//[[:cntrl:]]/?}"

# --- the runs, one after the other; then the verdict -------------------------------------------------------------------------------
# Each run replaces the older one's history and tensors once its first step is done, and a run that fails ends the script: the verdict sees
# none that is older. No older verdict stands beside histories that it does not judge.
if [ -n "${ray:-}" ]; then
  read -r RAY_ADDRESS <&"$ray" || { echo "$0: the local Ray instance did not start (see above)" >&2; exit 1; }
  export RAY_ADDRESS
fi
rm -f "$OUTPUT_DIR"/{loss_curves.png,verdict.json} "$OUTPUT_DIR"/tensors/report.{md,json}
while IFS=$'\t' read -r name flags program strategy <&3; do # the first run's flags have --save_init_weights, --pretrained and --control
  script=("$ROOT/$program") # one of the three train_*.py
  [ -f "${script[0]}" ] || script=(-m lockstep.train --strategy "$strategy") # a strategy of your own
  waited_for "$PYTHON" "${script[@]}" "${common[@]}" $flags "${weights[@]}" || {
    status=$?
    [ $status -lt 128 ] || echo "$0: the training script of $name was killed by signal $((status - 128))" >&2
    exit $((status < 128 ? status : 1))
  }
done 3<<<"$plan"
rmdir "$OUTPUT_DIR/ray" 2>/dev/null || true # for Ray Train's records; it is empty
[ -z "${ray_pid:-}" ] || kill -USR1 "$ray_pid" 2>/dev/null || true
[ "$NOISE_FLOOR" != 0 ] || rm -f "$OUTPUT_DIR/loss_control.json" # of an older run
waited_for "${verification[@]}" --part verdict
