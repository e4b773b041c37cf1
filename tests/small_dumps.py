"""Real dumps of two steps of the smallest model, for the tests that read or damage them."""

from pathlib import Path

from ranks import CAPTURED

from lockstep.running import jobs

FLAGS = [
    *CAPTURED,
    *(f"--{name}=2" for name in ("debug_steps", "capture_steps", "gradient_accumulation_steps")),
]


def make(folder: Path, *flags: str, more: tuple[str, ...] = ()) -> None:
    """Fill a folder: ddp, fsdp, reference, replay_ddp, replay_fsdp. `more` strategies run on four ranks, too."""
    arguments = [*FLAGS, *flags, "--capture_dir", str(folder), "--loss_output_dir", str(folder / "work")]
    groups = [(2, "ddp"), (4, "fsdp"), *((4, strategy) for strategy in more), (None, jobs.REFERENCE)]
    trained = [(ranks, [{"strategy": strategy, "arguments": arguments}]) for ranks, strategy in groups]
    try:
        jobs.start_all_groups(trained, folder / "work")
    except jobs.JobFailed as error:
        error.add_note((folder / "work" / "log.txt").read_text())
        raise
