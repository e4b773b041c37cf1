"""Real dumps of two steps of the smallest model, for the tests that read or damage them."""

from pathlib import Path

from ranks import CAPTURED, run_groups


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
    groups = []
    for strategy, num_ranks in (("ddp", 2), ("fsdp", 4)):
        run = {"name": "losses", "strategy": strategy, "fault": "none", "arguments": arguments}
        groups.append((num_ranks, "jobs:histories", folder / "work" / strategy, {"runs": [run]}))
    groups.append((0, "jobs:reference", folder / "work" / "reference", {"arguments": arguments}))
    run_groups(groups)
