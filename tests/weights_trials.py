"""Trials of damaged and hostile weights files, and what becomes of each.

`outcome` tells: "refused" (one line), "same" (accepted, and loads what the writer meant), or what must never be:
"traceback", "accepted wrong", "fails later", "hang".
"""

import collections
import io
import json
import random
import tempfile
import warnings
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from fuzz import Late, allow_memory, damage, limited, mutate
from safetensors.torch import save_file

from lockstep.ground.errors import UserError
from lockstep.inputs import weights
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import parameter_shapes, transformers_config

SMALL = {**BUILT_IN["tiny-qwen2"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
# Of a case; the memory is address space, most of it torch's libraries.
SECONDS, MEMORY = 5, 6 << 30


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
    """What is damaged: own and foreign files of both formats."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), Model(7)
        for suffix in (".safetensors", ".pt"):
            weights.save(folder / f"own{suffix}", model, SMALL, "random weights, seed 7")
        plain = {name: value.detach() for name, value in model.values.items()}
        save_file(plain, folder / "foreign.safetensors", {"format": "pt"})
        torch.save(plain, folder / "foreign.pt")
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def safetensors_case(content: bytes, draw: random.Random, own: bool) -> bytes:
    """Another header. Of a foreign file the bytes stay with their names: nothing could tell."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    one, two = draw.sample([name for name in header if name != "__metadata__"], 2)
    kind = draw.randrange(4)
    if kind == 0 and own:
        header[one], header[two] = header[two], header[one]
    elif kind == 1 and own:
        about = json.loads(header["__metadata__"]["lockstep"])
        mutate(about, draw)
        odd = ["", "null", "[" * 100_000, '{"a":1,"a":1}', "1" * 5000]
        header["__metadata__"]["lockstep"] = draw.choice([json.dumps(about)] * 5 + odd)
    elif kind > 1:
        mutate(header, draw)
    text = json.dumps(header).encode()
    if kind == 0:
        text = draw.choice([text, text + b" " * 7, text[:-1], text + text, b"[" * 100_000, b"{}", b""])
    return len(text).to_bytes(8, "little") + text + data


def pt_case(content: bytes, draw: random.Random, own: bool) -> bytes:
    """Another archive. Only an own file is damaged under a right CRC-32: nothing else could tell."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = draw.choice([0, draw.randrange(len(entries))])
    name, data = entries[at]
    kind, method = draw.randrange(6 if own else 4), zipfile.ZIP_STORED
    if kind == 0:
        method = draw.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    elif kind == 1:
        del entries[at]
    elif kind == 2:
        entries[at] = (draw.choice([name + "x", "../" + name, "x/" + name, name.upper()]), data)
    elif kind == 3:
        entries.append((draw.choice([name, "own/constants.pkl", "own/data/77"]), data[::-1]))
    else:
        entries[at] = (name, draw.choice([damage(data or b"x", draw), draw.choice(entries)[1]]))
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return target.getvalue()


def cases(suffix: str, count: int, seed: int):
    """(label, bytes) of `count` cases."""
    # Of zipfile and torch, about what is done here on purpose.
    warnings.simplefilter("ignore")
    draw, originals = random.Random(seed), bases()
    for number in range(count):
        own = number % 4 != 3
        name = "own" if own else "foreign"
        base = originals[name + suffix]
        # A foreign .pt has a CRC-32, a foreign .safetensors nothing.
        if number % 3 == 0 and (own or suffix == ".pt"):
            content = damage(base, draw)
        else:
            content = (pt_case if suffix == ".pt" else safetensors_case)(base, draw, own)
        yield f"{name} {number}", content


def outcome(path: Path) -> str:
    """Check the file as a run does, then load it, and hold what was loaded against what was written."""
    step = "traceback"
    try:
        weights.check(path, SMALL)
        step = "fails later"
        loaded, written = Model(None), Model(7).values
        sums = weights.load(path, loaded)
    # A panic of a library is no Exception.
    except BaseException as error:  # noqa: BLE001
        if isinstance(error, UserError) and step == "traceback":
            one_line = "\n" not in str(error) and len(str(error)) < 2000 and str(path) in str(error)
            return "refused" if one_line else f"traceback: message {str(error)[:200]!r}"
        return "hang" if isinstance(error, Late) else f"{step}: {type(error).__name__}: {error}"
    same = all(torch.equal(value, written[name]) for name, value in loaded.values.items())
    return "same" if same and sums == weights.checksums(written.items()) else "accepted wrong"


def in_little_room(path: Path) -> str:
    """`outcome` under a limit of time and memory."""
    allow_memory(MEMORY)
    torch.set_num_threads(1)
    with limited(SECONDS):
        return outcome(path)


def run(suffix: str, count: int, seed: int, folder: Path, workers: int = 2) -> dict[str, list[str]]:
    """Outcome -> the cases that had it."""
    found = collections.defaultdict(list)
    with ProcessPoolExecutor(workers) as pool:
        pending = {}
        for label, content in cases(suffix, count, seed):
            path = folder / f"{label.replace(' ', '_')}{suffix}"
            path.write_bytes(content)
            pending[label] = pool.submit(in_little_room, path)
        for label, future in pending.items():
            word, _, rest = future.result(timeout=60).partition(":")
            found[word].append(f"{label}:{rest}")
    return found
