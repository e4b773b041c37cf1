import signal

import pytest

# A suite that was started in the background has inherited an ignored Ctrl-C, and the programs that it starts would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def dumps(tmp_path_factory):
    """A folder of dumps of two steps: ddp, fsdp, reference, replay_ddp, replay_fsdp. Not to be changed."""
    from ranks import CAPTURED, run_alone, run_ranks

    folder = tmp_path_factory.mktemp("dumps")
    arguments = [
        *CAPTURED,
        "--debug_steps",
        "2",
        "--capture_steps",
        "2",
        "--gradient_accumulation_steps",
        "2",
        "--capture_dir",
        str(folder),
    ]
    for strategy, num_ranks in (("ddp", 2), ("fsdp", 4)):
        run = {"name": "losses", "strategy": strategy, "fault": "none", "arguments": arguments}
        run_ranks(num_ranks, "jobs:histories", folder / "work", {"runs": [run]})
    run_alone("jobs:reference", folder / "work", arguments)
    return folder
