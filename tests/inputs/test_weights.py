"""Weights files, our own and those of other programs: what is read, what is refused in one line, and that nothing is executed."""

import json
import os
import time
import warnings
import zipfile

import pytest
import torch
import weights_trials
from ranks import ROOT
from safetensors.torch import load_file, save_file
from small_inputs import build, write_weights

from lockstep.ground.errors import UserError
from lockstep.inputs import own_model, weight_files, weights
from lockstep.inputs.architectures import BUILT_IN, resolve
from lockstep.inputs.shapes import from_config, parameter_shapes

TINY, UNTIED = BUILT_IN["tiny-qwen2"], BUILT_IN["tiny-llama"]
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
OWN = ["init.safetensors", "init.pt"]
INDEX = "model.safetensors.index.json"
FORMATS = ["model.safetensors", INDEX, "state.pt"]


def state(architecture=TINY, dtype=torch.float32):
    model, _ = build(architecture=architecture)
    return {name: value.detach().to(dtype) for name, value in model.named_parameters()}


def write(path, tensors):
    """As the other programs do: one file, or two and an index, or torch.save."""
    if path.suffix == ".pt":
        torch.save(tensors, path)
    elif path.suffix == ".json":
        names, place = sorted(tensors), {}
        for number, part in enumerate((names[:5], names[5:])):
            shard = f"model-{number}.safetensors"
            save_file({name: tensors[name] for name in part}, path.with_name(shard), {"format": "pt"})
            place.update(dict.fromkeys(part, shard))
        path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": place}))
    else:
        save_file(tensors, path, {"format": "pt"})
    return path


def refused(path, message, architecture=TINY, **how):
    with pytest.raises(UserError, match=message) as caught:
        weights.check(path, architecture, **how)
    assert str(caught.value).startswith(f"--init_weights_path {path}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OWN)
def test_round_trip_is_bit_identical(tmp_path, name):
    path = write_weights(tmp_path / name, seed=7)
    weights.check(path, TINY)
    model, sums = build(path, seed=0)
    original = dict(build(seed=7)[0].named_parameters())
    assert all(torch.equal(p, original[n]) for n, p in model.named_parameters())
    assert sums == weights.checksums(original.items())
    assert list(tmp_path.iterdir()) == [path], "a temporary file was left behind"
    refused(
        path, "written for rope_theta = 1000000.0, the model has 10000.0", {**TINY, "rope_theta": 10000.0}
    )


CHANGES = {
    "model.norm.weight is missing": lambda t: t.pop(NORM),
    "model.norm.weight has shape": lambda t: t.update({NORM: torch.zeros(3)}),
    "extra.weight is not part": lambda t: t.update({"extra.weight": torch.zeros(3)}),
    "model.norm.weight is damaged": lambda t: t[NORM].add_(1e-3),
    "model.norm.weight is torch.float16": lambda t: t.update({NORM: t[NORM].half()}),
}


@pytest.mark.parametrize("message", CHANGES)
def test_the_first_wrong_tensor_is_named(tmp_path, message):
    """Other tensors under our old description, as damage or a foreign file would have it."""
    path = write_weights(tmp_path / "init.pt")
    content = torch.load(path, weights_only=True)
    CHANGES[message](content["tensors"])
    torch.save(content, path)
    refused(path, message)


def test_names_of_files(tmp_path):
    refused(tmp_path / "none.pt", "no such file")
    refused(tmp_path / "init.bin", "must end in")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("architecture", [TINY, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_of_other_programs(tmp_path, name, architecture, dtype):
    tensors = state(architecture, dtype)
    path = write(tmp_path / name, tensors)
    weights.check(path, architecture)
    model, sums = build(path, 9, architecture)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, tensors[name].float()), name
    assert sums == weights.checksums((name, tensor.float()) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", FORMATS)
def test_the_head_of_a_tied_model(tmp_path, name):
    tensors = state()
    tensors[HEAD] = tensors[EMBEDDING].clone()
    weights.check(write(tmp_path / name, tensors), TINY)
    tensors[HEAD][0, 0] += 1
    refused(write(tmp_path / name, tensors), "lm_head.weight is not model.embed_tokens.weight")
    path = write(tmp_path / name, state())
    refused(path, "lm_head.weight is missing", {**TINY, "tie_word_embeddings": False})


@pytest.mark.parametrize("name", FORMATS)
def test_layers_are_left_out_only_when_asked(tmp_path, name):
    path, cut = write(tmp_path / name, state()), {**TINY, "num_hidden_layers": 1}
    refused(path, "model.layers.1.input_layernorm.weight is not part of the model; add --num_layers", cut)
    weights.check(path, cut, fewer_layers=True)
    model, sums = build(path, architecture=cut)
    assert all(torch.equal(value, state()[name]) for name, value in model.named_parameters())
    assert len(sums) < len(state())
    write(path, {**state(), "other.weight": torch.ones(1)})
    refused(path, "other.weight is not part", cut, fewer_layers=True)


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


ODD = {
    "_rebuild_sparse_tensor": torch.eye(64).to_sparse(),
    "bytearray; give a plain dict": Call(bytearray, 10**10),
    "has shape": torch.ones(1).expand(2**40),
    "is torch.float64, initial weights are torch.float32": torch.zeros(64).double(),
    "holds a NaN or an infinity": torch.full((64,), float("inf")),
    "is a list, not a tensor": [1.0] * 64,
}


@pytest.mark.parametrize("message", ODD)
def test_what_is_no_plain_float_tensor(tmp_path, message):
    refused(write(tmp_path / "state.pt", {**state(), NORM: ODD[message]}), message)


@pytest.mark.parametrize("inside", ["architecture", "sha256", "tensors"])
def test_nothing_is_executed(tmp_path, inside):
    """A pickle that would make a folder is refused, and makes none; the negative control is pickle's own way to read it."""
    made, path = tmp_path / "made", tmp_path / "evil.pt"
    content = {"architecture": {}, "sha256": {}, "tensors": {}, inside: Call(os.mkdir, str(made))}
    refused(write(path, content), "holds posix.mkdir; give a plain dict of dense tensors")
    assert not made.exists()
    torch.load(path, weights_only=False)
    assert made.exists()


def test_what_else_a_pt_file_may_be(tmp_path):
    path = tmp_path / "x.pt"
    refused(write(path, [state()]), "holds a list, not a dict")
    refused(write(path, {5: torch.ones(1)}), "its entry 5 is a Tensor, not a tensor with a name")
    inside = {"architecture": {"a": torch.ones(2)}, "sha256": {}, "tensors": {}}
    refused(write(path, inside), "Tensor is not JSON serializable")
    torch.save(state(), path, _use_new_zipfile_serialization=False)
    refused(path, "no .pt file .*not a zip file")


def test_archives(tmp_path, monkeypatch):
    """torch would unpack what is compressed, maps it wrongly, and does not look at the CRC-32."""
    path, other = write(tmp_path / "state.pt", state()), tmp_path / "other.pt"
    for more, method, message in (
        ({}, zipfile.ZIP_DEFLATED, "is compressed, which torch.save never does"),
        ({"state/data/0": b"x"}, zipfile.ZIP_STORED, "two members of one name"),
        ({"state/x": bytes(5_000_000)}, zipfile.ZIP_STORED, "state/x has 5000000 bytes, at most"),
    ):
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(other, "w", method) as copy:
            for name, data in [*((name, archive.read(name)) for name in archive.namelist()), *more.items()]:
                with warnings.catch_warnings(action="ignore"):
                    copy.writestr(name, data)
        refused(other, message)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    other.write_bytes(content)
    assert torch.load(other, weights_only=True, mmap=True).keys() == state().keys(), "torch does not see it"
    refused(other, "does not match its CRC-32")
    monkeypatch.setattr(weight_files, "LARGEST_HEADER", 1000)
    refused(path, "its directory has .* bytes, at most 1000 are read")


@pytest.mark.parametrize("name", FORMATS)
def test_only_regular_files(tmp_path, name):
    """A FIFO would wait for ever, /dev/zero never ends."""
    for number, make in enumerate((os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"))):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        make(path)
        refused(path, "not a regular file")


def test_a_large_header(tmp_path):
    """One so large that its library would take half a minute for it."""
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 26).to_bytes(8, "little"))
    os.truncate(path, 1 << 27)
    refused(path, "its header has 67108864 bytes, at most 4194304 are read")


BROKEN = {
    "names ../x.safetensors, which is no .safetensors file beside": {NORM: "../x.safetensors"},
    "gone.safetensors: cannot be read": {NORM: "gone.safetensors"},
    "lacks tensor extra": {"extra": "model-0.safetensors"},
    "holds, against the index, tensor model.norm.weight": {NORM: None},
}


@pytest.mark.parametrize("message", BROKEN)
def test_an_index_that_does_not_fit(tmp_path, message):
    path = write(tmp_path / INDEX, state())
    places = json.loads(path.read_text())["weight_map"] | BROKEN[message]
    path.write_text(json.dumps({"weight_map": {name: at for name, at in places.items() if at is not None}}))
    refused(path, message)
    path.write_text('{"weight_map": []}')
    refused(path, "weight_map is")


# 2^60 lists and 2^60 tuples, in 600 bytes
LISTS = b"](]q\x00" + b"".join(b"]q%c(h%ch%ce" % (i + 1, i, i) for i in range(60)) + b"e"
TUPLES = b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60))
PICKLES = {
    "tuples are not those of tensors": b")" + b"\x85" * 1_000_000,
    # deeper than a hash can follow
    "its tuples are": b"}" + TUPLES + b"K\x01s",
    "its description of the model has 4194": b"}(X\x0c\x00\x00\x00architecture" + LISTS
    + b"X\x06\x00\x00\x00sha256}X\x07\x00\x00\x00tensors}u",
    }  # fmt: skip


@pytest.mark.parametrize("message", PICKLES)
def test_hostile_pickles_are_answered_at_once(tmp_path, message):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + PICKLES[message] + b".")
        archive.writestr("x/version", "3\n")
    start = time.monotonic()
    refused(tmp_path / "x.pt", message)
    assert time.monotonic() - start < 30


@pytest.fixture
def as_on_the_hub(tmp_path):
    """A file like that of openai-community/gpt2: of the base model, whose names lack the prefix, with tables of the causal mask."""
    architecture = resolve("tiny-gpt2")[0]
    build(architecture=architecture)[0].transformer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(256, 256).tril()[None, None]
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return architecture, write(path, tensors), tensors


def test_the_file_of_gpt2s_base_model(as_on_the_hub):
    architecture, path, tensors = as_on_the_hub
    assert "wte.weight" in tensors and HEAD not in tensors
    weights.check(path, architecture)
    model, sums = build(path, 9, architecture)
    assert sums.keys() == parameter_shapes(architecture).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name.removeprefix("transformer.")]), name
    write(path, {**tensors, "h.0.attn.scale": torch.ones(1)})
    refused(path, "tensor transformer.h.0.attn.scale is not part of the model", architecture)
    tensors.pop("wpe.weight")
    refused(write(path, tensors), "tensor transformer.wpe.weight is missing", architecture)


def test_the_file_of_a_module_of_ones_own(tmp_path):
    """Its names have no base. A tensor that the model lacks is refused, as everywhere."""
    architecture = own_model.architecture_of(f"{ROOT}/examples/own_model.py:make_model")
    model = from_config(architecture, attn_impl="sdpa")
    path = write(tmp_path / "state.pt", model.state_dict())
    weights.check(path, architecture)
    loaded = from_config(architecture, attn_impl="sdpa")
    weights.load(path, loaded)
    assert all(x.equal(y) for x, y in zip(loaded.parameters(), model.parameters(), strict=True))
    write(path, {**model.state_dict(), "blocks.0.scale": torch.ones(1)})
    refused(path, "tensor blocks.0.scale is not part of the model", architecture)


def test_combined_hash_sees_every_tensor():
    sums = {"a": "1", "b": "2"}
    assert weights.combined_sha256(sums) == weights.combined_sha256(dict(reversed(sums.items())))
    assert weights.combined_sha256(sums) != weights.combined_sha256({"a": "2", "b": "1"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_control_run_starts_from_weights_perturbed_by_one_ulp(dtype):
    model, original = build(seed=7)[0], dict(build(seed=7)[0].named_parameters())
    weights.perturb(model, dtype, seed=1)
    step = torch.finfo(getattr(torch, dtype)).eps
    for name, parameter in model.named_parameters():
        before = original[name].detach()
        # as numbers of that dtype nearly all are others than before, by one ulp up or down
        mine, theirs = (tensor.detach().to(getattr(torch, dtype)).double() for tensor in (parameter, before))
        assert ((parameter != before) | (before == 0) | (before == 1)).all(), name
        assert ((mine - theirs).abs() <= 1.01 * step * before.double().abs()).all()


@pytest.mark.parametrize("suffix, count", [(".safetensors", 240), (".pt", 160)])
def test_no_damage_gets_through(tmp_path, suffix, count):
    """Refused in one line, or accepted and loaded as it was meant; nothing else."""
    found = weights_trials.run(suffix, count, 1, tmp_path)
    assert found.keys() == {"refused", "same"}, found
    assert len(found["refused"]) > count / 2, "the cases are not what they are meant to be"


def test_without_the_check_damage_is_seen(tmp_path, monkeypatch):
    """Negative control: what is loaded is really held against what was written."""
    monkeypatch.setattr(weights, "check", lambda *_, **__: None)
    found = weights_trials.run(".safetensors", 60, 1, tmp_path)
    assert found["accepted wrong"] and found["fails later"]
