"""Damaged config.json files, made by the hundred: each is refused in one line, or it is a model that can be run.

benchmarks/damaged_files.py makes a thousand of them. "taken" means that everything that is checked before a run
starts was passed: the model was built, and its own code gave a float64 reference.
"""

import collections
import copy
import json
import os
import random
import signal
import tempfile
from pathlib import Path

from families import FAMILIES
from fuzz import Late, damage, limited, mutate
from test_config_json import TINY, taken

from lockstep.ground.errors import UserError
from lockstep.verdict import model_check

SECONDS = 60
BASES = [*TINY.values(), *(FAMILIES[name] for name in ("phi3", "gpt_neox", "mixtral"))]


def outcome(folder: Path) -> str:
    """What becomes of FOLDER/config.json: all that is checked before a run with it starts."""
    try:
        with limited(SECONDS):
            taken(folder)
        return "taken"
    except UserError as error:
        return "refused" if str(error).isprintable() and len(str(error)) < 2000 else f"many lines: {error}"
    except Late:
        return "hang"
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        return f"traceback: {type(error).__name__}: {error}"


def case(number: int, folder: Path) -> None:
    """Write the config.json of a case: one or two values changed, or bytes without regard to what they say."""
    chance = random.Random(number)
    content = copy.deepcopy(chance.choice(BASES))
    for _ in range(chance.choice([1, 1, 2])):
        mutate(content, chance)
    data = json.dumps(content).encode()
    (folder / "config.json").write_bytes(damage(data, chance) if number % 4 == 0 else data)


def table(numbers) -> tuple[collections.Counter, list[str]]:
    """(how many cases ended how, those that must not be)."""
    counts, bad = collections.Counter(), []
    with tempfile.TemporaryDirectory() as name:
        for number in numbers:
            case(number, Path(name))
            word = outcome(Path(name))
            counts[word.split(":")[0]] += 1
            if word not in ("refused", "taken"):
                bad.append(f"case {number}: {word[:300]}")
    return counts, bad


def test_whatever_it_says_it_is_refused_in_one_line_or_can_be_run():
    counts, bad = table(range(40))
    assert bad == [] and counts["refused"] > 12 and counts["taken"] > 5, counts


def test_a_fifo_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert outcome(tmp_path) == "refused"


def test_the_table_sees_what_is_wrong(monkeypatch, tmp_path):
    """Negative controls: a traceback and a hang; and a model without a reference is not taken."""
    (tmp_path / "config.json").write_text(json.dumps(TINY["qwen2"]))
    assert outcome(tmp_path) == "taken"
    monkeypatch.setattr(model_check, "problem_of", lambda *_: "its gradient is off")
    assert outcome(tmp_path) == "refused"
    monkeypatch.setattr(model_check, "problem_of", lambda *_: 1 / 0)
    assert outcome(tmp_path).startswith("traceback: ZeroDivisionError")
    monkeypatch.setattr(f"{__name__}.SECONDS", 1)
    monkeypatch.setattr(model_check, "problem_of", lambda *_: signal.pause())
    assert outcome(tmp_path) == "hang"
