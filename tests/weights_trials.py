"""Trials of damaged and hostile weights files, and what becomes of each.

    python tests/weights_trials.py 540 360     .safetensors and .pt cases, in processes with limits; prints a table

`outcome` tells: "refused" (one line), "same" (accepted, and loads what the writer meant), or what must never be:
"traceback", "accepted wrong", "fails later", "hang".
"""

import collections
import random
import resource
import signal
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from weights_mutations import (
    damage,
    odd_values,
    pt_case,
    safetensors_case,
    saved,
    split,
)

from lockstep.errors import UserError
from lockstep.inputs import weights
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import parameter_shapes, transformers_config

SMALL = {**BUILT_IN["tiny-qwen2"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
SECONDS, MEMORY = 5, 6 << 30  # of a case; address space, most of it torch's libraries


class Model(torch.nn.Module):
    """Parameters of the names and shapes of SMALL, from a seed."""

    def __init__(self, seed: int | None):
        super().__init__()
        self.config = transformers_config(SMALL)
        generator = torch.Generator().manual_seed(seed or 0)
        self.values = {
            n: torch.nn.Parameter(torch.randn(s, generator=generator))
            for n, s in parameter_shapes(SMALL).items()
        }

    def named_parameters(self, *_, **__):
        return iter(self.values.items())


def bases() -> dict[str, bytes]:
    """What is mutated: own and foreign files of both formats."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), Model(7)
        for suffix in (".safetensors", ".pt"):
            weights.save(folder / f"own{suffix}", model, SMALL, "random weights, seed 7")
        plain = {name: value.detach() for name, value in model.values.items()}
        save_file(plain, folder / "foreign.safetensors", {"format": "pt"})
        torch.save(plain, folder / "foreign.pt")
        for path in folder.iterdir():
            found[path.name] = path.read_bytes()
    return found


def outcome(path: Path) -> str:
    """Check the file as a run does, then load it, and hold what was loaded against what was written."""
    try:
        weights.check(path, SMALL)
    except UserError as error:
        return (
            "refused"
            if "\n" not in str(error) and len(str(error)) < 2000
            else f"traceback: message {str(error)[:200]!r}"
        )
    except BaseException as error:  # noqa: BLE001 - a panic of a library is no Exception
        return "hang" if isinstance(error, TimeoutError) else f"traceback: {type(error).__name__}: {error}"
    try:
        loaded, written = Model(None), dict(Model(7).values)
        sums = weights.load(path, loaded)
    except BaseException as error:  # noqa: BLE001
        return "hang" if isinstance(error, TimeoutError) else f"fails later: {type(error).__name__}: {error}"
    same = all(torch.equal(value, written[name]) for name, value in loaded.values.items())
    return "same" if same and sums == weights.checksums(written.items()) else "accepted wrong"


def cases(suffix: str, count: int, seed: int):
    """(label, bytes) of `count` cases. Bytes of a foreign .safetensors' tensors are left alone: nothing could tell."""
    warnings.simplefilter("ignore")  # of zipfile and torch, about what is done here on purpose
    draw, originals = random.Random(seed), bases()
    odd = []
    for value in odd_values({n: p.detach() for n, p in Model(7).values.items()}) if suffix == ".pt" else []:
        odd.append(saved(value))
        if isinstance(value, dict) and len(value) > 5:
            odd.append(
                saved(
                    {
                        "architecture": SMALL,
                        "sha256": weights.checksums(Model(7).values.items()),
                        "tensors": value,
                    }
                )
            )
    for number in range(count):
        own = number % 4 != 3
        base = originals[f"{'own' if own else 'foreign'}{suffix}"]
        if suffix == ".pt":
            content = damage(base, draw) if number % 3 == 0 else pt_case(base, draw, odd, own)
        elif own:
            content = damage(base, draw) if number % 3 == 0 else safetensors_case(base, draw)
        else:
            content = _foreign_structure(base, draw)
        yield f"{'own' if own else 'foreign'} {number}", content


def _foreign_structure(base: bytes, draw: random.Random) -> bytes:
    """A header that says something else in a way that can be seen: names and bytes of tensors of one shape stay in place."""
    header, data = split(base)
    for _ in range(1000):
        content = safetensors_case(base, draw)
        try:
            changed, rest = split(content)
            places = {n: e["data_offsets"] for n, e in header.items() if n != "__metadata__"}
            moved = any(changed[n]["data_offsets"] != place for n, place in places.items())
            if rest == data and not moved:
                return content
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
            return content
    return content


def limited(path: str) -> str:
    """`outcome` under a limit of time and memory."""

    def late(*_):
        raise TimeoutError

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return outcome(Path(path))
    finally:
        signal.alarm(0)


def run(suffix: str, count: int, seed: int, folder: Path, workers: int = 2) -> dict[str, list[str]]:
    """Outcome -> the cases that had it."""
    found = collections.defaultdict(list)
    with ProcessPoolExecutor(workers) as pool:
        pending = {}
        for label, content in cases(suffix, count, seed):
            path = folder / f"{label.replace(' ', '_')}{suffix}"
            path.write_bytes(content)
            pending[label] = pool.submit(limited, str(path))
        for label, future in pending.items():
            result = future.result(timeout=60)
            found[result.split(":")[0]].append(f"{label}{result[len(result.split(':')[0]) :]}")
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for suffix, count in zip((".safetensors", ".pt"), map(int, sys.argv[1:3]), strict=True):
            found = run(suffix, count, int(sys.argv[3]) if len(sys.argv) > 3 else 0, Path(name))
            print(suffix, count, {kind: len(labels) for kind, labels in sorted(found.items())})
            for kind in found.keys() - {"refused", "same"}:
                print(*(f"  {kind}: {label[:300]}" for label in found[kind][:20]), sep="\n")
