"""Damaged and hostile weights files, drawn by a seed, and what becomes of each.

    python tests/weights_mutations.py 540 360     .safetensors and .pt cases, in processes with limits; prints a table

`outcome` tells: "refused" (one line), "same" (accepted, and loads what the writer meant), or what must never be:
"traceback", "accepted wrong", "fails later", "hang".
"""

import collections
import copy
import io
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import warnings
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from lockstep.errors import UserError
from lockstep.inputs import weights
from lockstep.inputs.architectures import BUILT_IN, parameter_shapes

SMALL = {**BUILT_IN["tiny-qwen2"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
SECONDS, MEMORY = 5, 6 << 30  # of a case; address space, most of it torch's libraries
WORDS = [None, True, -1, 0, 1, 1.5, 2**31, 2**63, 2**64, -(2**63), 10**30, "", "x", "F32", [], [0], {}, [[]], float("nan"), "\x1b[2J", "\u2028"]
DTYPES = ["F64", "F16", "BF16", "I32", "I64", "U8", "BOOL", "F8_E4M3", "C64", "F4", "f32", "", None, 5]


class Model(torch.nn.Module):
    """Parameters of the names and shapes of SMALL, from a seed."""

    def __init__(self, seed: int | None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed or 0)
        self.values = {n: torch.nn.Parameter(torch.randn(s, generator=generator)) for n, s in parameter_shapes(SMALL).items()}

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
        return "refused" if "\n" not in str(error) and len(str(error)) < 2000 else f"traceback: message {str(error)[:200]!r}"
    except BaseException as error:  # noqa: BLE001 - a panic of a library is no Exception
        return "hang" if isinstance(error, TimeoutError) else f"traceback: {type(error).__name__}: {error}"
    try:
        loaded, written = Model(None), dict(Model(7).values)
        sums = weights.load(path, loaded)
    except BaseException as error:  # noqa: BLE001
        return "hang" if isinstance(error, TimeoutError) else f"fails later: {type(error).__name__}: {error}"
    same = all(torch.equal(value, written[name]) for name, value in loaded.values.items())
    return "same" if same and sums == weights.checksums(written.items()) else "accepted wrong"


# --- bytes, of any format ---------------------------------------------------------------------------------------


def damage(content: bytes, draw: random.Random) -> bytes:
    data, at = bytearray(content), draw.randrange(len(content))
    end = min(len(data), at + draw.choice([1, 4, 64, 4096]))
    kind = draw.randrange(8)
    if kind == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        data[at:end] = draw.randbytes(end - at)
    elif kind == 2:
        del data[at:end]
    elif kind == 3:
        data[at:at] = draw.randbytes(end - at)
    elif kind == 4:
        del data[at:]
    elif kind == 5:
        data += draw.randbytes(draw.choice([1, 8, 5000]))
    elif kind == 6:
        data[at:end] = bytes(end - at)
    else:
        data[at:end] = b"\xff" * (end - at)
    return bytes(data)


# --- safetensors --------------------------------------------------------------------------------------------------


def split(content: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _vary(value, draw: random.Random):
    """The same JSON with one thing in it changed."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.8:
        value = copy.copy(value)
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        kind = draw.randrange(5)
        if kind == 0:
            del value[key]
        elif kind == 1 and isinstance(value, dict):
            value[draw.choice(["", "x", "\x1b", "a" * 5000, key + "x"])] = value.pop(key)
        else:
            value[key] = _vary(value[key], draw)
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and draw.random() < 0.5:
        return draw.choice([-value, value + 1, value - 1, value * 2, float(value), value + 0.5, str(value)])
    return draw.choice(WORDS)


def safetensors_case(content: bytes, draw: random.Random) -> bytes:
    header, data = split(content)
    names = [name for name in header if name != "__metadata__"]
    one, two = draw.sample(names, 2)
    kind = draw.randrange(16)
    if kind == 0:
        header[one]["dtype"] = draw.choice(DTYPES)
    elif kind == 1:
        shape = header[one]["shape"]
        header[one]["shape"] = draw.choice([shape[::-1], [*shape, 1], shape[1:], [-1], [2**32, 2**32], [2**64], [0], "64", None, [1.0], [True], [[16]]])
    elif kind == 2:
        begin, end = header[one]["data_offsets"]
        header[one]["data_offsets"] = draw.choice([[end, begin], [-4, end], [begin, 2**63], [begin + 4, end + 4], [begin, end - 4], [begin], [0, 0], [begin, end, end], [float(begin), end], None, header[two]["data_offsets"]])
    elif kind == 3:
        header[one]["data_offsets"], header[two]["data_offsets"] = header[two]["data_offsets"], header[one]["data_offsets"]
    elif kind == 4:
        header[draw.choice(["", "x\x1b[31m", "a" * 5000, "__metadata__", two, "\u2028", one + "\0"])] = header.pop(one)
    elif kind == 5:
        header.update({f"t{i}": dict(header[one]) for i in range(draw.choice([1, 20_000]))})
    elif kind == 6:
        header["empty"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    elif kind == 7:
        same = [n for n in names if header[n]["shape"] == header[one]["shape"]]
        other = draw.choice(same)
        header[one], header[other] = header[other], header[one]
    elif kind in (8, 9, 10) and "__metadata__" in header and "lockstep" in header["__metadata__"]:
        about = _vary(json.loads(header["__metadata__"]["lockstep"]), draw)
        header["__metadata__"]["lockstep"] = draw.choice([json.dumps(about)] * 5 + ["", "null", "[" * 100_000, '{"a":1,"a":1}', "\ufeff{}", "1" * 5000])
    elif kind == 11:
        return join(json.dumps(header).encode(), data, draw.choice([0, 1, 8, 2**22 + 1, 2**40, 2**63, 2**64 - 1, len(json.dumps(header)) + 8]))
    elif kind == 12:
        text = json.dumps(header).encode()
        odd = [b"[]", b"null", b"", b"5", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"\xef\xbb\xbf" + text, text + b" " * 7, b" " + text, text[:-1], text + text,
               text.replace(b'"F32"', b"NaN", 1), text[:-1] + b', "a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}, "a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}}']  # fmt: skip
        return join(draw.choice(odd), data)
    elif kind == 13:
        (a, b), (c, d) = header[one]["data_offsets"], header[two]["data_offsets"]
        data = bytearray(data)
        data[a:b], data[c:d] = (data[c : c + b - a], data[a : a + d - c]) if b - a == d - c else (data[a:b][::-1], data[c:d][::-1])
        data = bytes(data)
    else:
        header = _vary(header, draw)
    return join(header, data)


# --- pt -----------------------------------------------------------------------------------------------------------


def members(content: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def archive(entries: list[tuple[str, bytes]], compression=zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as opened:
        for name, data in entries:
            opened.writestr(name, data)
    return target.getvalue()


def saved(value) -> bytes:
    target = io.BytesIO()
    torch.save(value, target)
    return target.getvalue()


class _Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def odd_values(tensors: dict) -> list:
    """What torch.save takes and no initial weights are."""
    name = "model.norm.weight"
    size = tensors[name].numel()
    loop: dict = {}
    loop["model.norm.weight"] = loop
    laughs: object = ()
    for _ in range(60):
        laughs = (laughs, laughs)
    odd = [
        torch.zeros(1).expand(size), torch.zeros(1).expand(2**40), torch.empty(size, device="meta"), torch.eye(size).to_sparse(),
        torch.zeros(size, dtype=torch.complex64), torch.zeros(size).double(), torch.zeros(size, dtype=torch.int8), torch.full((size,), torch.nan),
        torch.full((size,), torch.inf).bfloat16(), torch.quantize_per_tensor(torch.zeros(size), 0.1, 0, torch.qint8), "text", None, 5, [1.0] * size, {}, loop, laughs,
        torch.zeros(size).as_strided((size, 1), (0, 1)), torch.zeros(4, 4).as_strided((size,), (0,)), _Call(bytearray, 10**12), _Call(torch.empty, 2**40), _Call(set, [1]),
        _Call(torch.Size, [1]), torch.nn.Linear(2, 2), torch.zeros(size, dtype=torch.float8_e4m3fn), torch.zeros(size, dtype=torch.uint16),
    ]  # fmt: skip
    return [{**tensors, name: value} for value in odd] + [[tensors], tensors[name], loop, laughs, {}, {5: tensors[name]}, {"model": tensors}]


def pt_case(content: bytes, draw: random.Random, odd: list[bytes], own: bool) -> bytes:
    """With right CRC-32 again where the file holds SHA-256 of its own; elsewhere nothing could tell."""
    entries = members(content)
    at = draw.randrange(len(entries))
    name, data = entries[at]
    pickle_at = next(i for i, (n, _) in enumerate(entries) if n.endswith("data.pkl"))
    kind = draw.choice(range(14) if own else [0, 1, 2, 3, 4, 5, 6, 7, 13])
    if kind in (0, 1):
        return draw.choice(odd)
    if kind == 2:
        return archive(entries, draw.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))
    if kind == 3:  # a bomb: a gigabyte of zeros in a megabyte
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as opened:
            with opened.open(zipfile.ZipInfo(name), "w", force_zip64=True) as member:
                for _ in range(16):
                    member.write(bytes(1 << 20))
            for other, rest in entries:
                if other != name:
                    opened.writestr(other, rest)
        return target.getvalue()
    if kind == 4:
        del entries[at]
    elif kind == 5:
        entries[at] = (draw.choice([name + "x", "../" + name, "x/" + name, "x", "archive/constants.pkl", name.upper(), name.rsplit("/", 1)[0] + "/data/99"]), data)
    elif kind == 6:
        entries.append((name, data[::-1]))
    elif kind == 7:
        entries.append((name.split("/")[0] + draw.choice(["/constants.pkl", "/code/x.py", "/data/77", "/version"]), b"x" * draw.choice([0, 1, 100])))
    elif kind == 8:
        other = draw.randrange(len(entries))
        entries[at], entries[other] = (name, entries[other][1]), (entries[other][0], data)
    elif kind in (9, 10):  # the CRC-32 is right again
        entries[at] = (name, damage(data, draw) if data else b"x")
    elif kind == 11:
        name, data = entries[pickle_at]
        entries[pickle_at] = (name, damage(data, draw))
    elif kind == 12:  # numbers of elements, sizes, offsets, strides
        name, data = entries[pickle_at]
        data = bytearray(data)
        spots = [i for i in range(len(data) - 1) if data[i] in b"KM"]
        for spot in draw.sample(spots, min(3, len(spots))):
            data[spot + 1] = draw.randrange(256)
        entries[pickle_at] = (name, bytes(data))
    else:  # fields of the archive's directory: sizes, offsets, counts, methods
        whole = bytearray(archive(entries))
        heads = [i for i in range(len(whole) - 46) if whole[i : i + 4] in (b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04")]
        spot = draw.choice(heads) + draw.choice([6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 30, 42])
        whole[spot : spot + 4] = struct.pack("<I", draw.choice([0, 1, 8, 255, 2**16 - 1, 2**31, 2**32 - 1, draw.randrange(2**32)]))
        return bytes(whole)
    return archive(entries)


def cases(suffix: str, count: int, seed: int):
    """(label, bytes) of `count` cases. Bytes of a foreign .safetensors' tensors are left alone: nothing could tell."""
    warnings.simplefilter("ignore")  # of zipfile and torch, about what is done here on purpose
    draw, originals = random.Random(seed), bases()
    odd = []
    for value in odd_values({n: p.detach() for n, p in Model(7).values.items()}) if suffix == ".pt" else []:
        odd.append(saved(value))
        if isinstance(value, dict) and len(value) > 5:
            odd.append(saved({"architecture": SMALL, "sha256": weights.checksums(Model(7).values.items()), "tensors": value}))
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
