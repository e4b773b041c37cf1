"""torchrun starts this with a file of rows: the script of every row is recorded by processes that its ranks fork after the imports, at most two each.

A row is {"ranks", "folder", "port", "script", "arguments", "steps"}. The folder gets the recording, `run`, and of each rank its output, `log_R`, and exit status, `status_R`.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from lockstep.ground import startup

LIMIT = 60  # seconds of a row
# What the rows' scripts import, at the latest when they train.
IMPORTED = (
    "accelerate",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "lightning.fabric",
    "lightning.pytorch",
    "lockstep.recorder.recorder",
    "peft",
    "torch.distributed.tensor.parallel",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.sft_trainer",
)


def main(path: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    with startup.importing():
        for name in IMPORTED:
            importlib.import_module(name)
    sys.modules["deepspeed"].ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # or it is compiled, for a minute
    )
    for row in json.loads(Path(path).read_text()):
        began = time.monotonic()
        # Of this process: two of four ranks, or the only one
        ranks = range(int(os.environ["RANK"]), row["ranks"], int(os.environ["WORLD_SIZE"]))
        children = {rank: os.fork() or os._exit(record_row(row, rank)) for rank in ranks}
        for rank, child in children.items():
            status = wait(child, began + LIMIT)
            (Path(row["folder"]) / f"status_{rank}").write_text(str(status))


def wait(child: int, ended: float) -> int:
    """The exit status of a forked process, which is killed at a time."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > ended:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def record_row(row: dict, rank: int) -> int:
    from lockstep import record

    log = os.open(Path(row["folder"]) / f"log_{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    size = str(row["ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_PORT=str(row["port"]), TORCHELASTIC_USE_AGENT_STORE="False")
    status = 1
    try:
        steps = ["--steps", str(row["steps"])]
        status = record.main(["--output", f"{row['folder']}/run", *steps, row["script"], *row["arguments"]])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main(sys.argv[1])
