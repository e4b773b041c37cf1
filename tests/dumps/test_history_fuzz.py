"""Damaged histories, made by the hundred: each is read, or refused in one line; none hangs, none that is wrong passes.

benchmarks/damaged_files.py makes a thousand of each kind.
"""

import collections
import contextlib
import io
import json
import random
import sys
import tempfile
from pathlib import Path

import pytest
from fuzz import Late, damage, limited, mutate
from synthetic import control, history, rewrite

import plot_loss_curves
from lockstep.dumps.history import read
from lockstep.ground.errors import UserError
from lockstep.plan.config import history_file
from lockstep.plan.contract import KNOWN_DIFFERENCES

SECONDS = 20  # a case may take
NAMES = ("ddp", "deepspeed", "fsdp", "control")
# what a verdict rests on: a change of more than a thousandth here, sealed again, must not be a PASS
JUDGED = {"loss", "rank_losses", "grad_norm", "learning_rate", "tokens", "batch_hash", "step"}
JUDGED |= {"contract", "weights", "ended", "num_steps"}


def case(folder, seed):
    """Four histories that pass, and one of them changed: (its path, whether it must be refused, whether it must not pass)."""
    chance = random.Random(seed)
    precision = chance.choice(["fp32", "autocast"])
    for name in NAMES:
        run = (
            control(precision=precision, steps=6) if name == "control" else history(name, precision, steps=6)
        )
        run.save(history_file(folder, name))
    path = history_file(folder, chance.choice(NAMES))
    before = path.read_bytes()
    if chance.random() < 0.3:
        path.write_bytes(damage(before, chance))
        try:
            same = json.dumps(json.loads(path.read_text())) == json.dumps(json.loads(before))
        except (ValueError, RecursionError):
            same = False
        return path, not same, not same
    changed, sealed = [], chance.random() < 0.5
    rewrite(path, lambda content: changed.append(mutate(content, chance)), sealed=sealed)
    then, now = json.loads(before), json.loads(path.read_text())
    then["sha256"] = now.get("sha256")
    same = json.dumps(then) == json.dumps(now)
    judged = set(changed[0]) & JUDGED and not set(changed[0]) & set(KNOWN_DIFFERENCES)
    matters = bool(judged) and large(then, now, changed[0])
    return path, not same and not sealed, not same and (matters or not sealed)


def large(then, now, path):
    """Whether a number changed by more than a thousandth of it; anything else that changes is large."""
    try:
        for part in path:
            then, now = then[part], now[part]
        return not abs(now - then) <= 1e-3 * abs(then)
    except (KeyError, IndexError, TypeError, OverflowError):
        return True


def reader(folder, seed):
    """How reading one damaged history ends, in a word."""
    path, refused, _ = case(folder, seed)
    try:
        with limited(SECONDS):
            read(path)
    except UserError as error:
        return "refused" if "\n" not in str(error) else "more than a line"
    except Late:
        return "hang"
    except Exception as error:  # noqa: BLE001 - what is counted here
        return f"traceback {type(error).__name__}: {error}"[:200]
    return "accepted wrong" if refused else "read"


def plotter(folder, seed):
    """How comparing a folder with one damaged history ends, in a word."""
    _, refused, unequal = case(folder, seed)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with limited(SECONDS):
                status = plot_loss_curves.main(["--input_dir", str(folder), "--json", str(folder / "v.json")])
        except Late:
            return "hang"
    if status not in (0, 1, 2):
        return f"traceback {err.getvalue()[-300:]}"
    if (status == 2) != (err.getvalue().count("\n") == 1) or "\x1b" in out.getvalue() + err.getvalue():
        return "not one line"
    if status == 0 and unequal or status != 2 and refused:
        return "accepted wrong"
    return {0: "PASS", 1: out.getvalue().rstrip("\n").split("\n")[-1], 2: "refused"}[status]


def table(check, seeds):
    """(how many cases ended how, those that must not be)."""
    counts, bad = collections.Counter(), []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            word = check(Path(folder), seed)
        counts[word] += 1
        if word.split(" ")[0] not in FINE:
            bad.append(f"{check.__name__} {seed}: {word}")
    return counts, bad


FINE = {"refused", "read", "PASS", "FAIL", "NOT"}


@pytest.mark.parametrize("check, count", [(reader, 300), (plotter, 120)])
def test_damaged_histories(check, count):
    counts, bad = table(check, range(count))
    assert bad == [], counts
    assert counts["refused"] > count / 2


def test_the_untouched_case_passes(tmp_path, monkeypatch):
    """The negative control: without the damage nothing is refused."""
    monkeypatch.setattr(sys.modules[__name__], "damage", lambda data, _: data)
    monkeypatch.setattr(sys.modules[__name__], "mutate", lambda content, _: ("run",))
    assert {reader(tmp_path, seed) for seed in range(4)} == {"read"} and plotter(tmp_path, 5) == "PASS"
