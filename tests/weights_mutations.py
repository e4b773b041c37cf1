"""How weights files are damaged, or made hostile: bytes of any file, headers of .safetensors, archives and pickles of .pt."""

import copy
import io
import json
import random
import struct
import zipfile

import torch

WORDS = [
    None,
    True,
    -1,
    0,
    1,
    1.5,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**30,
    "",
    "x",
    "F32",
    [],
    [0],
    {},
    [[]],
    float("nan"),
    "\x1b[2J",
    "\u2028",
]
DTYPES = ["F64", "F16", "BF16", "I32", "I64", "U8", "BOOL", "F8_E4M3", "C64", "F4", "f32", "", None, 5]


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
        header[one]["shape"] = draw.choice(
            [
                shape[::-1],
                [*shape, 1],
                shape[1:],
                [-1],
                [2**32, 2**32],
                [2**64],
                [0],
                "64",
                None,
                [1.0],
                [True],
                [[16]],
            ]
        )
    elif kind == 2:
        begin, end = header[one]["data_offsets"]
        header[one]["data_offsets"] = draw.choice(
            [
                [end, begin],
                [-4, end],
                [begin, 2**63],
                [begin + 4, end + 4],
                [begin, end - 4],
                [begin],
                [0, 0],
                [begin, end, end],
                [float(begin), end],
                None,
                header[two]["data_offsets"],
            ]
        )
    elif kind == 3:
        header[one]["data_offsets"], header[two]["data_offsets"] = (
            header[two]["data_offsets"],
            header[one]["data_offsets"],
        )
    elif kind == 4:
        header[draw.choice(["", "x\x1b[31m", "a" * 5000, "__metadata__", two, "\u2028", one + "\0"])] = (
            header.pop(one)
        )
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
        header["__metadata__"]["lockstep"] = draw.choice(
            [json.dumps(about)] * 5 + ["", "null", "[" * 100_000, '{"a":1,"a":1}', "\ufeff{}", "1" * 5000]
        )
    elif kind == 11:
        return join(
            json.dumps(header).encode(),
            data,
            draw.choice([0, 1, 8, 2**22 + 1, 2**40, 2**63, 2**64 - 1, len(json.dumps(header)) + 8]),
        )
    elif kind == 12:
        text = json.dumps(header).encode()
        empty = b'"a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        odd = [
            b"[]",
            b"null",
            b"",
            b"5",
            b"{}",
            b"[" * 100_000,
            b'{"a":' * 50_000,
            b"\xef\xbb\xbf" + text,
            text + b" " * 7,
        ]
        odd += [b" " + text, text[:-1], text + text, text.replace(b'"F32"', b"NaN", 1)]
        odd += [text[:-1] + b", " + empty + b", " + empty + b"}"]
        return join(draw.choice(odd), data)
    elif kind == 13:
        (a, b), (c, d) = header[one]["data_offsets"], header[two]["data_offsets"]
        data = bytearray(data)
        data[a:b], data[c:d] = (
            (data[c : c + b - a], data[a : a + d - c])
            if b - a == d - c
            else (data[a:b][::-1], data[c:d][::-1])
        )
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
        torch.zeros(1).expand(size),
        torch.zeros(1).expand(2**40),
        torch.empty(size, device="meta"),
        torch.eye(size).to_sparse(),
        torch.zeros(size, dtype=torch.complex64),
        torch.zeros(size).double(),
        torch.zeros(size, dtype=torch.int8),
        torch.full((size,), torch.nan),
        torch.full((size,), torch.inf).bfloat16(),
        torch.quantize_per_tensor(torch.zeros(size), 0.1, 0, torch.qint8),
        "text",
        None,
        5,
        [1.0] * size,
        {},
        loop,
        laughs,
        torch.zeros(size).as_strided((size, 1), (0, 1)),
        torch.zeros(4, 4).as_strided((size,), (0,)),
        _Call(bytearray, 10**12),
        _Call(torch.empty, 2**40),
        _Call(set, [1]),
        _Call(torch.Size, [1]),
        torch.nn.Linear(2, 2),
        torch.zeros(size, dtype=torch.float8_e4m3fn),
        torch.zeros(size, dtype=torch.uint16),
    ]
    return [{**tensors, name: value} for value in odd] + [
        [tensors],
        tensors[name],
        loop,
        laughs,
        {},
        {5: tensors[name]},
        {"model": tensors},
    ]


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
        entries[at] = (
            draw.choice(
                [
                    name + "x",
                    "../" + name,
                    "x/" + name,
                    "x",
                    "archive/constants.pkl",
                    name.upper(),
                    name.rsplit("/", 1)[0] + "/data/99",
                ]
            ),
            data,
        )
    elif kind == 6:
        entries.append((name, data[::-1]))
    elif kind == 7:
        entries.append(
            (
                name.split("/")[0] + draw.choice(["/constants.pkl", "/code/x.py", "/data/77", "/version"]),
                b"x" * draw.choice([0, 1, 100]),
            )
        )
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
        heads = [
            i
            for i in range(len(whole) - 46)
            if whole[i : i + 4] in (b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04")
        ]
        spot = draw.choice(heads) + draw.choice([6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 30, 42])
        whole[spot : spot + 4] = struct.pack(
            "<I", draw.choice([0, 1, 8, 255, 2**16 - 1, 2**31, 2**32 - 1, draw.randrange(2**32)])
        )
        return bytes(whole)
    return archive(entries)
