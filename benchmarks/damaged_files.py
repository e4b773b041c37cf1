"""A thousand damaged or hostile files for every reader: how does each end?

    PYTHONPATH=.:tests:tests/inputs:tests/dumps python benchmarks/damaged_files.py --output results/damaged_files.json      all readers, about half an hour
    PYTHONPATH=.:tests:tests/inputs:tests/dumps python benchmarks/damaged_files.py config.json text                         some of them

The cases and what is demanded of them are those of the tests. A row of the table is replaced when its reader is run again.
Exit status: 0 every case ended as it may; 1 one did not; 2 a usage error.
"""

import collections
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import small_dumps
import test_config_json_fuzz
import test_data_fuzz
import test_dump_fuzz
import test_history_fuzz
import weights_trials

from lockstep.ground import origin
from lockstep.ground.errors import UserError, run_program
from lockstep.ground.files import read_json, require_ours, require_writable_file, write_result
from lockstep.ground.flags import Parser
from lockstep.training.observe import versions

MEMORY = 8 << 30  # bytes of address space, of which the libraries take one
TITLE = "# Damaged and hostile files"
BEGINS = b'{\n "of": "damaged files"'
GOOD = ("refused in one line", "read, means the same", "FAIL", "NOT JUDGED")
BAD = ("accepted wrong", "traceback", "hang", "memory", "fails later", "more than a line")
# What the tests call them. The first that a word begins with counts.
WORDS = {
    "accepted wrong": "accepted wrong",
    "taken wrongly": "accepted wrong",
    "refused": "refused in one line",
    "one line": "refused in one line",
    "read": "read, means the same",
    "same": "read, means the same",
    "taken": "read, means the same",
    "accepted": "read, means the same",
    "PASS": "read, means the same",
    "FAIL": "FAIL",
    "NOT JUDGED": "NOT JUDGED",
    "crash": "traceback",
    "traceback": "traceback",
    "hang": "hang",
    "killed": "memory",
    "fails later": "fails later",
    "many lines": "more than a line",
    "more than a line": "more than a line",
    "not one line": "more than a line",
    "untidy": "more than a line",
}
Table = tuple[
    collections.Counter, list[str]
]  # how many cases ended in which word, the cases that must not be


def dumps(number: int, seed: int) -> Table:
    with tempfile.TemporaryDirectory(prefix="lockstep-dumps-") as name:
        small_dumps.make(Path(name))
        found, bad = test_dump_fuzz.campaign(Path(name), number, seed=seed)
    return _by_last(found), bad


def histories(check: Callable) -> Callable[[int, int], Table]:
    return lambda number, seed: test_history_fuzz.table(check, _numbers(number, seed))


def data(kind: str) -> Callable[[int, int], Table]:
    def read(number: int, seed: int) -> Table:
        found, bad = test_data_fuzz.table(number, seed, (kind,))
        return _by_last(found), bad

    return read


def configs(number: int, seed: int) -> Table:
    return test_config_json_fuzz.table(_numbers(number, seed))


def weights(suffix: str) -> Callable[[int, int], Table]:
    def read(number: int, seed: int) -> Table:
        with tempfile.TemporaryDirectory() as folder:
            found = weights_trials.run(suffix, number, seed, Path(folder))
        bad = [
            f"{label}: {word}"
            for word, labels in found.items()
            if word not in ("refused", "same")
            for label in labels
        ]
        return collections.Counter({word: len(labels) for word, labels in found.items()}), bad

    return read


READERS: dict[str, tuple[str, Callable[[int, int], Table]]] = {
    "dump": ("a dump, by `python -m lockstep.compare`", dumps),
    "history": ("a loss history", histories(test_history_fuzz.reader)),
    "histories": (
        "a folder of loss histories, by `plot_loss_curves.py`",
        histories(test_history_fuzz.plotter),
    ),
    "safetensors": ("initial weights, `.safetensors`", weights(".safetensors")),
    "pt": ("initial weights, `.pt`", weights(".pt")),
    "config.json": ("a model's `config.json`", configs),
    "tokenizer.json": ("a `tokenizer.json`", data("tokenizer.json")),
    "text": ("a text", data("text")),
}


def _numbers(number: int, seed: int) -> range:
    return range(seed * number, (seed + 1) * number)


def _by_last(found: collections.Counter) -> collections.Counter:
    """Of outcomes by (kind of case, word) those by word."""
    words: collections.Counter = collections.Counter()
    for (_, word), count in found.items():
        words[word] += count
    return words


def outcomes(words: collections.Counter) -> dict[str, int]:
    """The counts under the names of GOOD and BAD."""
    found = dict.fromkeys((*GOOD, *BAD), 0)
    for word, count in words.items():
        if "MemoryError" in word:
            found["memory"] += count
        else:
            found[next(name for begin, name in WORDS.items() if word.startswith(begin))] += count
    return found


def measure(name: str, number: int, seed: int) -> dict:
    """One row: what became of the cases of a reader, and where and by what it was found."""
    start = time.monotonic()
    words, bad = READERS[name][1](number, seed)
    return {
        "outcomes": outcomes(words),
        "bad": sorted(bad),
        "seconds": round(time.monotonic() - start),
        "command": origin.command(),
        "origin": origin.about(),
        "versions": versions(),
    }


def page(content: dict) -> str:
    """The table as Markdown."""
    rows = {name: content["readers"][name] for name in READERS if name in content["readers"]}
    shown = [*GOOD, *BAD[:-1]] + [BAD[-1]] * any(row["outcomes"][BAD[-1]] for row in rows.values())
    of = lambda get: "; ".join(dict.fromkeys(get(row) for row in rows.values()))  # noqa: E731
    libraries = of(lambda row: ", ".join(f"{name} {version}" for name, version in row["versions"].items()))
    machine = of(
        lambda row: f"{row['origin']['cores']} cores of {row['origin']['cpu']}, Python {row['origin']['python']}"
    )
    return "\n".join([
        TITLE,
        "",
        f"`python benchmarks/damaged_files.py --number {content['number']} --seed {content['seed']}`: "
        f"{content['number']} files for every reader, each changed in one way or two: bytes flipped, cut or added, values",
        "of another type or size, entries removed, renamed or exchanged, headers that point elsewhere, other kinds of file in its",
        "place. What a file means after the change is known, so that one that is read can be judged, too.",
        "",
        f"| reader | {' | '.join(shown)} |",
        f"|---|{'---|' * len(shown)}",
        *(f"| {READERS[name][0]} | {' | '.join(str(row['outcomes'][outcome]) for outcome in shown)} |" for name, row in rows.items()),
        "",
        "The first four columns are right: a verdict other than PASS where a file was changed and sealed again. Nothing may be in the",
        "others.",
        "",
        f"Machine: {machine}. Libraries: {libraries}. Commit: {of(lambda row: row['origin']['commit'])}.",
        *(f"\n{READERS[name][0]}: {line}" for name, row in rows.items() for line in row["bad"]),
    ]) + "\n"  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="damaged_files.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("readers", nargs="*", metavar="reader", help=f"{', '.join(READERS)} (default: all)")
    parser.add_argument(
        "--number", type=int, default=1000, help="cases for each reader (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=26, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/damaged_files.json"), help=".md beside it")
    return run_program("damaged_files.py", lambda: run(parser.parse_args(argv)))


def run(options) -> int:
    unknown = next((name for name in options.readers if name not in READERS), None)
    if unknown:
        raise UserError(f"there is no reader {unknown}; there are {', '.join(READERS)}")
    markdown = options.output.with_suffix(".md")
    for path, begins in ((options.output, BEGINS), (markdown, TITLE.encode())):
        require_writable_file(path, "--output")
        require_ours(path, "--output", begins)
    content = {"of": "damaged files", "number": options.number, "seed": options.seed, "readers": {}}
    if options.output.exists():
        older = read_json(options.output)
        if any(older[key] != content[key] for key in ("number", "seed")):
            raise UserError(
                f"--output {options.output}: is of --number {older['number']} --seed {older['seed']}; give another name"
            )
        content["readers"] = older["readers"]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for name in options.readers or READERS:
        row = content["readers"][name] = measure(name, options.number, options.seed)
        print(
            f"{name}: { {key: count for key, count in row['outcomes'].items() if count} }, {row['seconds']} s",
            *row["bad"],
            sep="\n",
            flush=True,
        )
        write_result(options.output, json.dumps(content, indent=1) + "\n")
        write_result(markdown, page(content))
    return int(any(content["readers"][name]["bad"] for name in options.readers or READERS))


if __name__ == "__main__":
    raise SystemExit(main())
