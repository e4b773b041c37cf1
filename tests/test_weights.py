import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import UserError
from lockstep.inputs import weights
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.model import build_model

TINY = BUILT_IN["tiny-qwen2"]
FORMATS = ["init.safetensors", "init.pt"]


def build(path=None, seed=0):
    return build_model(TINY, seed=seed, attn_impl="sdpa", init_weights_path=path)


def write_weights(path, seed=0):
    weights.save(path, build(seed=seed)[0], TINY, f"random weights, seed {seed}")
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip_is_bit_identical(tmp_path, name):
    path = write_weights(tmp_path / name, seed=7)
    weights.check(path, TINY)
    model, sums = build(path, seed=0)
    original = dict(build(seed=7)[0].named_parameters())
    assert all(torch.equal(p, original[n]) for n, p in model.named_parameters())
    assert sums == weights.checksums(original.items())
    assert list(tmp_path.iterdir()) == [path], "a temporary file was left behind"


def rewrite(path, change):
    """Write the file again with other tensors but the old header, as damage or a foreign file would."""
    if path.suffix == ".pt":
        content = torch.load(path, weights_only=True)
        change(content["tensors"])
        torch.save(content, path)
    else:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata)


def _flip(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-3


CHANGES = {
    "model.norm.weight is missing": lambda t: t.pop("model.norm.weight"),
    "model.layers.0.self_attn.q_proj.bias has shape": lambda t: t.update(
        {"model.layers.0.self_attn.q_proj.bias": torch.zeros(3)}
    ),
    "extra.weight is not part": lambda t: t.update({"extra.weight": torch.zeros(3)}),
    "model.layers.1.mlp.up_proj.weight is damaged": _flip,
    "model.norm.weight is": lambda t: t.update({"model.norm.weight": t["model.norm.weight"].double()}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("message", CHANGES)
def test_the_first_wrong_tensor_is_named(tmp_path, name, message):
    path = write_weights(tmp_path / name)
    rewrite(path, CHANGES[message])
    with pytest.raises(UserError, match=message):
        weights.check(path, TINY)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("keep", [0, 5, 3000, -4000])
def test_truncated_files(tmp_path, name, keep):
    path = write_weights(tmp_path / name)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="truncated|damaged"):
        weights.check(path, TINY)


def test_a_flipped_byte_is_found(tmp_path):
    path = write_weights(tmp_path / "init.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        weights.check(path, TINY)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        weights.check(tmp_path / "none.pt", TINY)
    with pytest.raises(UserError, match="must end in"):
        weights.check(tmp_path / "init.bin", TINY)
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(UserError, match="model.embed_tokens.weight is missing"):
        weights.check(tmp_path / "foreign.safetensors", TINY)


def test_nothing_is_unpickled(tmp_path):
    """Negative control for weights_only: a pickle that would create a file is refused and creates none."""
    import os
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save(
        {"architecture": {}, "sha256": {}, "tensors": Evil()}, tmp_path / "evil.pt", pickle_module=pickle
    )
    with pytest.raises(UserError, match="holds posix.mkdir; only plain dense tensors"):
        weights.check(tmp_path / "evil.pt", TINY)
    assert not (tmp_path / "pwned").exists()


def test_combined_hash_sees_every_tensor():
    sums = {"a": "1", "b": "2"}
    assert weights.combined_sha256(sums) == weights.combined_sha256(dict(reversed(sums.items())))
    assert weights.combined_sha256(sums) != weights.combined_sha256({"a": "2", "b": "1"})
    assert json.dumps(sums)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_another_architecture_with_the_same_shapes(tmp_path, name):
    path = write_weights(tmp_path / name)
    with pytest.raises(UserError, match="written for rope_theta = 1000000.0, the model has 10000.0"):
        weights.check(path, {**TINY, "rope_theta": 10000.0})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_control_run_starts_from_weights_perturbed_by_one_ulp(dtype):
    model, original = build(seed=7)[0], dict(build(seed=7)[0].named_parameters())
    weights.perturb(model, dtype, seed=1)
    for name, parameter in model.named_parameters():
        before = original[name].detach()
        # as numbers of that dtype nearly all are others than before, by one ulp up or down
        mine, theirs = (tensor.detach().to(getattr(torch, dtype)).double() for tensor in (parameter, before))
        moved = (parameter != before) | (before == 0) | (before == 1)
        assert moved.all(), name
        step = torch.finfo(getattr(torch, dtype)).eps
        assert ((mine - theirs).abs() <= 1.01 * step * before.double().abs()).all()
