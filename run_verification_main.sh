#!/usr/bin/env bash
# DDP, DeepSpeed AutoTP and FSDP+DTensor from the same weights on the same batches, then a figure and a verdict. A fourth run,
# DDP from weights one rounding off, shows how far rounding alone takes the loss.
#
#   ./run_verification_main.sh                    on GPUs if there are TP_SIZE x DP_SIZE of them, else on the CPU
#   PRECISION=fp32 ./run_verification_main.sh     any setting below can be overridden from the environment
#
# Exit status: 0 they compute the same thing; 1 they do not, or a run failed; 2 a usage error; 3 an internal error.
set -euo pipefail
trap 'echo "$0: interrupted" >&2; exit 130' INT
source "$(dirname "$0")/environment.sh" requirements.txt
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 # the caller's folder is where paths start, not where modules are

# --- settings, once -------------------------------------------------------------------------------------------
TP_SIZE=${TP_SIZE:-2}
DP_SIZE=${DP_SIZE:-2}
OUTPUT_DIR=${OUTPUT_DIR:-runs/verification}
case $OUTPUT_DIR in /*) ;; *) OUTPUT_DIR=$PWD/$OUTPUT_DIR ;; esac
for name in TP_SIZE DP_SIZE; do
  if ! [[ ${!name} =~ ^[1-9][0-9]{0,5}$ ]]; then
    echo "$0: $name=${!name}; it is a whole number, at least 1" >&2
    exit 2
  fi
done
gpus=$(trap '' INT; "$PYTHON" -c 'from lockstep.config import local_gpus; print(local_gpus())')
DEVICE=${DEVICE:-$([ "$gpus" -ge $((TP_SIZE * DP_SIZE)) ] && echo cuda || echo cpu)}
if [ "$DEVICE" = cuda ]; then # the full configuration, of a model that nobody chose at two layers
  NUM_LAYERS=${NUM_LAYERS:-$([ -n "${MODEL_NAME:-}" ] && echo all || echo 2)}
  MODEL_NAME=${MODEL_NAME:-Qwen/Qwen2.5-0.5B}
  BATCH_SIZE=${BATCH_SIZE:-2}
  SEQ_LENGTH=${SEQ_LENGTH:-1024}
  LEARNING_RATE=${LEARNING_RATE:-1e-5}
else # a laptop
  MODEL_NAME=${MODEL_NAME:-tiny-qwen2}
  NUM_LAYERS=${NUM_LAYERS:-all}
  BATCH_SIZE=${BATCH_SIZE:-8}
  SEQ_LENGTH=${SEQ_LENGTH:-128}
  LEARNING_RATE=${LEARNING_RATE:-1e-3}
fi
PRECISION=${PRECISION:-autocast}
DEBUG_STEPS=${DEBUG_STEPS:-100}
LOG_INTERVAL=${LOG_INTERVAL:-10}
SEED=${SEED:-0}
DATASET_NAME=${DATASET_NAME:-builtin}
OPTIMIZER=${OPTIMIZER:-adamw}
WEIGHT_DECAY=${WEIGHT_DECAY:-0.01}
MAX_GRAD_NORM=${MAX_GRAD_NORM:-1.0}
GRADIENT_ACCUMULATION_STEPS=${GRADIENT_ACCUMULATION_STEPS:-1}
ATTN_IMPL=${ATTN_IMPL:-sdpa}
NOISE_FLOOR=${NOISE_FLOOR:-1} # 0: no control run; the tolerances are then those of docs/precision.md alone
PRETRAINED=${PRETRAINED:-0}   # 1: from the weights of MODEL_NAME, a folder or hub id; 0: from random ones
# Where the first run writes the weights for all. A file of your own that is there already is what they start from, instead.
INIT_WEIGHTS_PATH=${INIT_WEIGHTS_PATH:-}

if [ "$NOISE_FLOOR" != 0 ] && [ "$NOISE_FLOOR" != 1 ]; then
  echo "$0: NOISE_FLOOR=$NOISE_FLOOR; it is 1, with a control run, or 0, without" >&2
  exit 2
fi
if [ "$PRETRAINED" != 0 ] && [ "$PRETRAINED" != 1 ]; then
  echo "$0: PRETRAINED=$PRETRAINED; it is 1, from the weights of MODEL_NAME, or 0, from random ones" >&2
  exit 2
fi
if [ -z "$INIT_WEIGHTS_PATH" ]; then # the script's own file, which its next run replaces
  INIT_WEIGHTS_PATH=$OUTPUT_DIR/init_weights.safetensors
  save=(--save_init_weights --overwrite)
elif [ -e "$INIT_WEIGHTS_PATH" ]; then # somebody's file: read, never written
  save=()
else
  save=(--save_init_weights)
fi
[ "$PRETRAINED" = 0 ] || save+=(--pretrained)
settings="$MODEL_NAME, $NUM_LAYERS layers, batch $BATCH_SIZE, sequence $SEQ_LENGTH, learning rate $LEARNING_RATE, $PRECISION,"
settings+=" $DEBUG_STEPS steps, TP=$TP_SIZE, DP=$DP_SIZE -> $OUTPUT_DIR"
echo "Settings for ${DEVICE//[[:cntrl:]]/?} ($gpus GPUs found): ${settings//[[:cntrl:]]/?}"

common=(
  --model_name "$MODEL_NAME" --num_layers "$NUM_LAYERS" --batch_size "$BATCH_SIZE" --seq_length "$SEQ_LENGTH"
  --num_epochs 1 --debug_steps "$DEBUG_STEPS" --learning_rate "$LEARNING_RATE" --optimizer "$OPTIMIZER"
  --weight_decay "$WEIGHT_DECAY" --max_grad_norm "$MAX_GRAD_NORM"
  --gradient_accumulation_steps "$GRADIENT_ACCUMULATION_STEPS" --precision "$PRECISION" --attn_impl "$ATTN_IMPL"
  --seed "$SEED" --dataset_name "$DATASET_NAME" --log_interval "$LOG_INTERVAL"
  --loss_output_dir "$OUTPUT_DIR" --storage_path "$OUTPUT_DIR/ray" --device "$DEVICE"
)
alone=(--dp_size "$DP_SIZE" --num_workers "$DP_SIZE")
sharded=(--tp_size "$TP_SIZE" --dp_size "$DP_SIZE" --num_workers $((TP_SIZE * DP_SIZE)))
weights=(--init_weights_path "$INIT_WEIGHTS_PATH")

# --- one local Ray instance for all the runs; it and they end when this script does, however that comes about -------
if [ -z "${RAY_ADDRESS:-}" ]; then
  ray_folder=$(mktemp -d "${RAY_TMPDIR:-/tmp}/lockstep-XXXXXX") # short: the names of sockets must be
  export RAY_TMPDIR=$ray_folder
  export RAY_AUTH_MODE=token # what a local instance uses; whoever joins it has to say so
  coproc RAY { trap '' INT; exec "$PYTHON" -m lockstep.under_ray; }
  ray_pid=$RAY_PID ray_stdin=${RAY[1]} ray_stdout=${RAY[0]}
fi
ray_started="" current="" next="" checks="" # process ids of training scripts
last_word="" failed="a training script failed; its own line above says why"
end_ray() { # [WHAT IT IS TOLD]: it ends itself and all its processes
  [ -n "${ray_pid:-}" ] || return 0
  trap '' PIPE # it may be gone
  { echo "${1:-}" >&"$ray_stdin"; eval "exec $ray_stdin>&-"; } 2>/dev/null || true
  ray_pid=""
}
stop() { # Ray ends the workers of a script that is gone
  exec {terminal}>&2 2>/dev/null # bash would say of each what it was killed by
  [ -z "$current$next$checks" ] || kill -KILL $current $next $checks || true
  if [ -z "$ray_started" ]; then # it would not listen yet; the kernel ends its processes with it
    [ -z "${ray_pid:-}" ] || kill -KILL $ray_pid || true
  fi
  end_ray
  wait || true
  if [ "$last_word" != "$failed" ]; then # else Ray's logs may say more
    for _ in 1 2 3 4 5; do rm -rf "${ray_folder:-}" && break || sleep 0.2; done # its processes are ending
  fi
  [ -z "$last_word" ] || echo "$0: $last_word" >&"$terminal"
}
interrupted() { last_word="interrupted${current:+; the histories in $OUTPUT_DIR hold the steps so far}"; }
trap stop EXIT
trap 'interrupted; exit 130' INT
trap 'interrupted; exit 143' TERM
wait_for() { # PROCESS_ID: fails as it did
  local status=0
  wait "$1" || status=$?
  [ $status -lt 128 ] || { last_word="a script was killed by signal $((status - 128))" failed=$last_word; return 1; }
  return $status
}

# While it starts: a usage error in the settings is answered before anything is trained or removed; then nothing of an older run
# is left to compare. Scripts in the background are not interrupted by Ctrl-C; `stop` ends them.
"$PYTHON" "$ROOT/train_deepspeed.py" "${common[@]}" "${sharded[@]}" --dry_run >/dev/null &
checks=$!
wait_for $checks
"$PYTHON" "$ROOT/train_ddp.py" "${common[@]}" "${alone[@]}" "${weights[@]}" "${save[@]}" --dry_run >/dev/null &
checks=$!
wait_for $checks
checks=""
mkdir -p "$OUTPUT_DIR"
exec {lock}<>"$OUTPUT_DIR/.run_verification_main.lock"
(trap '' INT; exec "$PYTHON" -m lockstep.locks $lock "$OUTPUT_DIR")
rm -f "$OUTPUT_DIR"/{loss_ddp.json,loss_control.json,loss_deepspeed.json,loss_fsdp.json,loss_curves.png,verdict.json}

if [ -n "${ray_pid:-}" ]; then
  read -r RAY_ADDRESS <&"$ray_stdout" || { echo "$0: the local Ray instance did not start (see above)" >&2; exit 1; }
  export RAY_ADDRESS
  ray_started=1
fi

# --- the runs, one after the other. To start a script takes seconds: it is started when the run before it has begun, and waits
# for its turn (only a Ray instance of our own has turns; elsewhere it is started when the run before it has ended) -------------
train() { # NAME COMMAND...: comes back when the run has a history, so there are initial weights; fails if the one before it did
  if [ -z "${ray_pid:-}" ] && [ -n "$current" ]; then
    wait_for "$current"
    current=""
  fi
  LOCKSTEP_PARENT=$$ "$PYTHON" "$ROOT/$2" "${@:3}" "${common[@]}" "${weights[@]}" &
  next=$!
  [ -z "$current" ] || wait_for "$current"
  current=$next next=""
  while [ ! -e "$OUTPUT_DIR/loss_$1.json" ] && kill -0 "$current" 2>/dev/null; do sleep 0.2; done
}
last_word=$failed
train ddp train_ddp.py "${save[@]}" "${alone[@]}"
[ "$NOISE_FLOOR" = 0 ] || train control train_ddp.py --noise_control "${alone[@]}"
train deepspeed train_deepspeed.py "${sharded[@]}"
train fsdp train_fsdp.py "${sharded[@]}"
wait_for "$current"
current="" last_word=""
rmdir "$OUTPUT_DIR/ray" 2>/dev/null || true # Ray Train's records, of which there are none
end_ray "went well" # while the comparison runs
"$PYTHON" "$ROOT/plot_loss_curves.py" --input_dir "$OUTPUT_DIR" --output "$OUTPUT_DIR/loss_curves.png" --json "$OUTPUT_DIR/verdict.json" &
checks=$!
status=0
wait $checks || status=$?
checks=""
exit $status
