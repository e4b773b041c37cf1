import gc
import os
import shutil
import signal

import preloaded
import pytest

from lockstep.ground import processes
from lockstep.running import jobs

SLOW = [
    "test_record_stacks",
    "test_record_bugs",
    "test_one_command",
    "test_run_faults",
    "test_record_strangers",
    "test_combinations",
    "test_launch",
    "test_record",
    "test_samples",
    "test_strangers",
    "test_study",
    "test_terminal",
    "test_record_deepspeed",
    "test_converging",
    "test_record_optimizers",
    "test_foreign_bugs",
    "test_strategies",
    "test_variations",
    "test_record_ray",
    "test_processes",
    "test_own_strategy",
    "test_run_verification",
    "test_options",
    "test_faults",
    "test_clean",
    "test_capture",
    "test_memory_plan",
]
# A suite that was started in the background has inherited an ignored Ctrl-C, and the programs that it starts would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Ray prints a line every ten seconds where the disk is almost full, which is no matter of these tests.
os.environ["RAY_local_fs_capacity_threshold"] = "1"  # noqa: SIM112 - Ray's own name


_start = processes.start


def _start_preloaded(command, **options):
    if command[1:3] == ["-m", jobs.NAME]:
        return preloaded.server().start_command(command, **options)
    return _start(command, **options)


processes.start = _start_preloaded  # see preloaded.py


@pytest.fixture(scope="module")
def from_nothing():
    """The ranks of this file's tests are started as a user's are: by a program that has imported nothing."""
    processes.start = _start
    yield
    processes.start = _start_preloaded


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also what takes long: see run_tests.sh")


@pytest.fixture(scope="session")
def dumps(tmp_path_factory, worker_id):
    """A folder of dumps of two steps: ddp, fsdp, reference, replay_ddp, replay_fsdp. Not to be changed. One for all processes of pytest -n."""
    import small_dumps
    from filelock import FileLock

    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "dumps"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            small_dumps.make(folder.with_name("dumps_being_made"))
            folder.with_name("dumps_being_made").rename(folder)
    return folder


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory):
    """new_folder(name) makes a folder for a file's tests, which goes when they have ended: the disk need not hold all files' runs."""
    made = []

    def new(name):
        made.append(tmp_path_factory.mktemp(name))
        return made[-1]

    yield new
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run(tmp_path):
    """Starts a run of its own in a folder: see real_runs.py."""
    from real_runs import starting

    with starting(tmp_path) as start:
        yield start


@pytest.fixture
def refusal(capsys):
    """The one line that main(arguments) of a program says to a usage error: nothing else is printed, and the status is 2."""

    def line(main, arguments):
        assert main([str(word) for word in arguments]) == 2
        said = capsys.readouterr()
        # A machine that is busy may take so long that the progress is shown, too.
        lines = [text for text in said.err.splitlines(keepends=True) if not text.startswith("tokenizing ")]
        assert said.out == "" and len(lines) == 1, said
        return lines[0]

    return line


def pytest_collection_modifyitems(items):
    """The slowest files begin, or one of several processes (pytest -n) would be left with one of them."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


def pytest_collection_finish():
    """The garbage collector need not look at what stays, again and again: a third of a second for each step that is judged."""
    gc.collect()
    gc.freeze()
