import signal

import pytest

# A suite that was started in the background has inherited an ignored Ctrl-C, and the programs that it starts would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="all the bugs of test_foreign_bugs.py, not a sample")


@pytest.fixture(scope="session")
def dumps(tmp_path_factory):
    """A folder of dumps of two steps: ddp, fsdp, reference, replay_ddp, replay_fsdp. Not to be changed."""
    import small_dumps

    folder = tmp_path_factory.mktemp("dumps")
    small_dumps.make(folder)
    return folder


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """With several processes (pytest -n), the tests of a file stay together, because they share fixtures; in these files they do not."""
    for item in items:
        if item.path.stem != "test_launch":
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
