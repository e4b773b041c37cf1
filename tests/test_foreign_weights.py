"""Weights files that other programs wrote: single, with an index, state dicts; half precision, tied heads, cut models."""

import json
import os
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from ranks import ROOT
from safetensors.torch import load_file, save_file

from lockstep.errors import UserError
from lockstep.inputs import weights
from lockstep.inputs.architectures import BUILT_IN, resolve
from lockstep.inputs.model import build_model
from lockstep.inputs.shapes import parameter_shapes
from lockstep.training import initial_weights

TINY, UNTIED = BUILT_IN["tiny-qwen2"], BUILT_IN["tiny-llama"]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def build(architecture=TINY, path=None, seed=3):
    return build_model(architecture, seed=seed, attn_impl="sdpa", init_weights_path=path)


def state(architecture=TINY, dtype=torch.float32):
    return {name: value.detach().to(dtype) for name, value in build(architecture)[0].named_parameters()}


def write(path, tensors):
    """As the other programs do: one file, or two and an index, or torch.save."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".pt":
        torch.save(tensors, path)
    elif path.suffix == ".json":
        names, place = sorted(tensors), {}
        for number, part in enumerate((names[:5], names[5:]), start=1):
            shard = f"model-{number:05}-of-00002.safetensors"
            save_file({name: tensors[name] for name in part}, path.with_name(shard), {"format": "pt"})
            place.update(dict.fromkeys(part, shard))
        path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": place}))
    else:
        save_file(tensors, path, {"format": "pt"})
    return path


FORMATS = ["model.safetensors", "model.safetensors.index.json", "state.pt"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("architecture", [TINY, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_read(tmp_path, name, architecture, dtype):
    tensors = state(architecture, dtype)
    path = write(tmp_path / name, tensors)
    weights.check(path, architecture)
    model, sums = build(architecture, path, seed=9)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, tensors[name].float()), name
    assert sums == weights.checksums((name, tensor.float()) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", FORMATS)
def test_the_head_of_a_tied_model(tmp_path, name):
    tensors = state()
    tensors[HEAD] = tensors[EMBEDDING].clone()
    weights.check(write(tmp_path / name, tensors), TINY)
    tensors[HEAD][0, 0] += 1
    with pytest.raises(UserError, match="lm_head.weight is not model.embed_tokens.weight"):
        weights.check(write(tmp_path / name, tensors), TINY)
    with pytest.raises(UserError, match="lm_head.weight is missing"):
        weights.check(write(tmp_path / name, state()), {**TINY, "tie_word_embeddings": False})


@pytest.mark.parametrize("name", FORMATS)
def test_layers_are_left_out_only_when_asked(tmp_path, name):
    path, cut = write(tmp_path / name, state()), {**TINY, "num_hidden_layers": 1}
    with pytest.raises(
        UserError, match="model.layers.1.input_layernorm.weight is not part of the model; add --num_layers"
    ):
        weights.check(path, cut)
    weights.check(path, cut, fewer_layers=True)
    model, sums = build(cut, path)
    assert all(torch.equal(value, state()[name]) for name, value in model.named_parameters()) and len(
        sums
    ) < len(state())
    with pytest.raises(UserError, match="other.weight is not part"):
        weights.check(
            write(tmp_path / name, {**state(), "other.weight": torch.ones(1)}), cut, fewer_layers=True
        )


def test_views_of_one_storage(tmp_path):
    """A transposed tensor, and two slices of one, as torch.save writes them."""
    tensors, name, two = state(), "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    both = torch.stack([tensors[two], tensors["model.layers.0.input_layernorm.weight"] + 0.5])
    changed = {**tensors, name: tensors[name].t().contiguous().t()}
    changed.update({two: both[0], "model.layers.0.input_layernorm.weight": both[1]})
    path = write(tmp_path / "state.pt", changed)
    weights.check(path, TINY)
    expected = torch.load(path, weights_only=True)
    assert all(torch.equal(value, expected[each]) for each, value in build(path=path)[0].named_parameters())


NORM = "model.norm.weight"
ODD = {
    "is an expanded view": lambda: torch.ones(1).expand(64),
    "_rebuild_sparse_tensor": lambda: torch.eye(64).to_sparse(),
    "_rebuild_meta_tensor": lambda: torch.empty(64, device="meta"),
    "ComplexFloatStorage": lambda: torch.zeros(64, dtype=torch.complex64),
    "is F64, initial weights are float32, bfloat16 or float16": lambda: torch.zeros(64).double(),
    "is I64": lambda: torch.zeros(64, dtype=torch.int64),
    "holds a NaN or an infinity": lambda: torch.full((64,), float("inf")),
    "tensor model.norm.weight holds a NaN": lambda: torch.tensor([float("nan")] * 64, dtype=torch.bfloat16),
    "is a list, not a tensor": lambda: [1.0] * 64,
    "is a dict, not a tensor": lambda: {"a": torch.ones(1)},
}


@pytest.mark.parametrize("message", ODD)
def test_what_is_no_plain_float_tensor(tmp_path, message):
    path = write(tmp_path / "state.pt", {**state(), NORM: ODD[message]()})
    with pytest.raises(UserError, match=message) as caught:
        weights.check(path, TINY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_nan_is_named(tmp_path, name):
    tensors = state()
    tensors[NORM][3] = float("nan")
    with pytest.raises(UserError, match="tensor model.norm.weight holds a NaN"):
        weights.check(write(tmp_path / name, tensors), TINY)


def test_compressed_archives_and_bombs(tmp_path):
    path, bomb = write(tmp_path / "state.pt", state()), tmp_path / "bomb.pt"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for info in archive.infolist():
            packed.writestr(info.filename, archive.read(info))
    assert torch.load(bomb, weights_only=True).keys() == state().keys(), "torch itself unpacks it"
    with pytest.raises(UserError, match="is compressed or encrypted, which torch.save never does"):
        weights.check(bomb, TINY)


def test_old_files_of_torch(tmp_path):
    torch.save(state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="no end of a zip archive"):
        weights.check(tmp_path / "old.pt", TINY)


@pytest.mark.parametrize("name", FORMATS)
def test_only_regular_files(tmp_path, name):
    """A FIFO would wait for ever, /dev/zero never ends."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="not a regular file"):
        weights.check(tmp_path / name, TINY)
    os.remove(tmp_path / name)
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        weights.check(tmp_path / name, TINY)
    os.remove(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="not a regular file"):
        weights.check(tmp_path / name, TINY)


def test_overlapping_entries_at_once(tmp_path):
    header = {f"t{i}": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]} for i in range(20_000)}
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4000))
    with pytest.raises(UserError, match="no safetensors file .*invalid offset"):
        weights.check(tmp_path / "x.safetensors", TINY)


INDEX = FORMATS[1]
BROKEN = {
    "names ../model.safetensors, which is no .safetensors file beside it": lambda m: {
        **m,
        NORM: "../model.safetensors",
    },
    "names /etc/passwd, which is no": lambda m: {**m, NORM: "/etc/passwd"},
    "gone.safetensors: cannot be read": lambda m: {**m, NORM: "gone.safetensors"},
    "lacks tensor extra": lambda m: {**m, "extra": m[NORM]},
    "holds, against the index, tensor model.norm.weight": lambda m: {
        name: place for name, place in m.items() if name != NORM
    },
    "weight_map is": lambda m: [],
    "weight_map.model.norm.weight is": lambda m: {**m, NORM: 5},
}


@pytest.mark.parametrize("message", BROKEN)
def test_an_index_that_does_not_fit(tmp_path, message):
    path = write(tmp_path / INDEX, state())
    path.write_text(json.dumps({"weight_map": BROKEN[message](json.loads(path.read_text())["weight_map"])}))
    with pytest.raises(UserError, match=message):
        weights.check(path, TINY)


LIST_OF_LISTS = b"]q\x00" + b"".join(
    b"]q%c(h%ch%ce" % (i + 1, i, i) for i in range(60)
)  # 2^60 lists, in 600 bytes
PICKLES = {
    "deep": b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
    "deep key": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
    "a memo of 4 billion places": b"\x80\x02Nr\xff\xff\xff\xff.",
    "a billion laughs": b"\x80\x02}(X\x0c\x00\x00\x00architecture}X\x01\x00\x00\x00a" + LIST_OF_LISTS + b"s.",
    "in itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "no key": b"\x80\x02}X\x03\x00\x00\x00\xed\xa0\x80Ns.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_hostile_pickles_are_answered_at_once(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", PICKLES[name])
    start = time.monotonic()
    with pytest.raises(UserError):
        weights.check(tmp_path / "x.pt", TINY)
    assert time.monotonic() - start < 10


def test_no_format_needs_torch(tmp_path):
    paths = [write(tmp_path / str(number) / name, state()) for number, name in enumerate(FORMATS)]
    code = (
        "import sys; from pathlib import Path; from lockstep.inputs import weight_files\n"
        "for path in sys.argv[1:]: weight_files.read(Path(path), 'x', checksums=True)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, *paths], cwd=ROOT).returncode == 0


@pytest.fixture
def as_on_the_hub(tmp_path):
    """A file like that of openai-community/gpt2: of the base model, whose names lack the prefix, with tables of the causal mask."""
    architecture = resolve("tiny-gpt2")[0]
    model, _ = build(architecture, None, seed=3)
    model.transformer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(256, 256).tril()[None, None]
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path)
    return architecture, path, tensors


def test_the_file_of_gpt2s_base_model(as_on_the_hub):
    architecture, path, tensors = as_on_the_hub
    assert "wte.weight" in tensors and "lm_head.weight" not in tensors
    weights.check(path, architecture)
    model, sums = build(architecture, path, seed=9)
    assert sums.keys() == parameter_shapes(architecture).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name.removeprefix("transformer.")]), name


def test_a_table_is_all_that_may_be_beside(as_on_the_hub):
    architecture, path, tensors = as_on_the_hub
    save_file({**tensors, "h.0.attn.scale": torch.ones(1)}, path)
    with pytest.raises(UserError, match="tensor transformer.h.0.attn.scale is not part of the model"):
        weights.check(path, architecture)
    save_file({name: tensor for name, tensor in tensors.items() if name != "wpe.weight"}, path)
    with pytest.raises(UserError, match="tensor transformer.wpe.weight is missing"):
        weights.check(path, architecture)


def test_pretrained_weights_of_a_built_in_name_come_from_the_hub(as_on_the_hub, monkeypatch):
    _, path, _ = as_on_the_hub
    asked = []

    def hub_file(repo, name):
        asked.append((repo, name))
        return (path, "") if name == path.name else (None, "it has none")

    monkeypatch.setattr(initial_weights, "hub_file", hub_file)
    assert initial_weights.pretrained_file("gpt2") == path
    assert asked == [("openai-community/gpt2", "model.safetensors")]
    with pytest.raises(UserError, match="tiny-gpt2 is a built-in architecture without weights"):
        initial_weights.pretrained_file("tiny-gpt2")


def test_pretrained_weights_of_a_built_in_name_without_a_hub(monkeypatch):
    monkeypatch.setattr(initial_weights, "hub_file", lambda repo, name: (None, "no network"))
    with pytest.raises(
        UserError, match=r"openai-community/gpt2-large has no weights on the hub \(no network\)"
    ):
        initial_weights.pretrained_file("gpt2-large")
