"""Damaged config.json files, made by the hundred: each is refused in one line, or it is a model that is computed right.

python tests/test_config_json_fuzz.py 1000 prints how many cases ended how. "taken" means that transformers' own model of
the file, as it is, and the float64 reference of what was read from it gave the same outputs, loss and gradients.
"""

import collections
import copy
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import hub
from test_history_fuzz import damage, mutate

from lockstep.errors import UserError
from lockstep.inputs import architectures
from lockstep.inputs.model_config import FAMILIES
from lockstep.tensors import model_check

SECONDS, SEQUENCE = 60, 24
BASES = [
    *hub.ALL.values(),
    *(architectures.BUILT_IN[f"tiny-{family}"] for family in FAMILIES),
]


def outcome(folder: Path) -> str:
    """What becomes of FOLDER/config.json: all that is checked before a run with it starts."""
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        architecture, _ = architectures.resolve(str(folder))
        content, _ = architectures.find(str(folder))
        model_check.try_out(architecture, content, str(folder))
        problem = architectures.tensor_parallel_problem(architecture, 1)
        difference, _ = model_check.compare(architecture, content, SEQUENCE)
        return "refused" if problem or difference else "taken"
    except UserError as error:
        return "refused" if "\n" not in str(error) and len(str(error)) < 2000 else f"many lines: {error}"
    except TimeoutError:
        return "hang"
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        return f"traceback: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def _late(*_) -> None:
    raise TimeoutError


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


def test_whatever_it_says_it_is_refused_in_one_line_or_computed_right():
    counts, bad = table(range(120))
    assert bad == [] and counts["refused"] > 40 and counts["taken"] > 10, counts


def test_a_fifo_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert outcome(tmp_path) == "refused"


def test_the_table_sees_what_is_wrong(monkeypatch, tmp_path):
    """Negative controls: a traceback and a hang; and the reference without a window is not taken."""
    (tmp_path / "config.json").write_text(json.dumps(architectures.BUILT_IN["tiny-qwen2"]))
    assert outcome(tmp_path) == "taken"
    monkeypatch.setattr(model_check, "compare", lambda *_: ("other angles", 1.0))
    assert outcome(tmp_path) == "refused"
    monkeypatch.setattr(model_check, "compare", lambda *_: 1 / 0)
    assert outcome(tmp_path).startswith("traceback: ZeroDivisionError")


if __name__ == "__main__":
    counts, bad = table(range(int(sys.argv[1])))
    print(dict(counts))
    print("\n".join(bad))
