"""What the fuzzers of all readers share: one value of a JSON file changed, bytes damaged, a limit of time."""

import contextlib
import copy
import resource
import signal
from pathlib import Path

ODD = [
    None,
    True,
    False,
    "",
    "x",
    "\x1b[2J",
    "\ud800",
    "9" * 70000,
    [],
    {},
    [[]],
    {"a": {"b": {"c": None}}},
    # fmt: skip
    0,
    -1,
    1.5,
    1e308,
    -1e308,
    5e-324,
    2**70,
    10**400,
    -(10**400),
    float("nan"),
    float("inf"),
    float("-inf"),
]


def places(value, path=()):
    """Every (path, value) of a JSON value below the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key), item
        yield from places(item, (*path, key))


def mutate(content, chance, group=None):
    """Change one thing; returns the path of it. With `group` of a path, one of the groups is drawn first."""
    found = list(places(content))
    if group:
        drawn = chance.choice(sorted({group(path) for path, _ in found}))
        found = [(path, value) for path, value in found if group(path) == drawn]
    path, value = chance.choice(found)
    *above, key = path
    parent = content
    for part in above:
        parent = parent[part]
    kind = chance.choice(["odd", "odd", "number", "remove", "add", "swap", "copy"])
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "number" and number and -1e300 < value < 1e300:
        parent[key] = chance.choice(
            [-value, value * 10, value + 1, value * 1.01, int(value), float(value), str(value)]
        )
    elif kind == "remove":
        del parent[key]
    elif kind == "add" and isinstance(value, dict | list):
        value.update({"new": 1}) if isinstance(value, dict) else value.append(
            copy.deepcopy(chance.choice(value or ODD))
        )
    elif kind == "swap" and isinstance(parent, list):
        other = chance.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif kind == "copy":
        parent[key] = copy.deepcopy(chance.choice([item for _, item in places(content)]))
    else:
        parent[key] = copy.deepcopy(chance.choice(ODD))
    return path


def damage(data, chance):
    """The bytes of a file, changed without regard to what they say."""
    place = chance.randrange(len(data))
    return chance.choice(
        [
            lambda: data[:place],
            lambda: data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :],
            lambda: data[:place] + chance.randbytes(3) + data[place:],
            lambda: data[:place] + data[place + chance.randrange(1, 50) :],
            lambda: data + data,
            lambda: b"\xef\xbb\xbf" + data,
            lambda: b'{"format": 3, ' + data[1:],
            lambda: b"[" * 100_000,
            lambda: data.replace(b"0.1", b"1" * 5000, 1),
            lambda: b"",
        ]
    )()


class Late(BaseException):
    """No Exception: nothing that is tried here may take it for its own."""


def allow_memory(size):
    """So many bytes of address space more than the process has, which may be a pytest that has judged much before."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # The hard limit stays: a process that has lowered it may not raise it for its next case.
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, hard))


@contextlib.contextmanager
def limited(seconds):
    def too_long(*_):
        raise Late

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
