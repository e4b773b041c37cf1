"""Real dumps of two steps of the smallest model, for the tests that read or damage them."""

from pathlib import Path

from ranks import CAPTURED, run_alone, run_ranks


def make(folder: Path) -> None:
    """Fill a folder: ddp, fsdp, reference, replay_ddp, replay_fsdp."""
    arguments = [
        *CAPTURED,
        "--debug_steps",
        "2",
        "--capture_steps",
        "2",
        "--gradient_accumulation_steps",
        "2",
    ]
    arguments += ["--capture_dir", str(folder)]
    for strategy, num_ranks in (("ddp", 2), ("fsdp", 4)):
        run = {"name": "losses", "strategy": strategy, "fault": "none", "arguments": arguments}
        run_ranks(num_ranks, "jobs:histories", folder / "work", {"runs": [run]})
    run_alone("jobs:reference", folder / "work", arguments)
