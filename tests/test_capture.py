"""Dumps: what is in them, who can read them, and how a damaged, half-written or foreign one is recognised."""

import json
import shutil
import signal

import pytest
import torch
from safetensors import safe_open

from lockstep import compare
from lockstep.dump import Dump
from lockstep.errors import UserError
from ranks import run_alone, run_ranks

COMMON = ["--batch_size", "2", "--seq_length", "32", "--precision", "fp32", "--dp_size", "2"]
STEPS = ["--debug_steps", "2", "--capture_steps", "2", "--gradient_accumulation_steps", "2"]


def captured(folder, strategy, *arguments):
    arguments = [*COMMON, *arguments, "--capture_dir", str(folder)]
    run = {"name": "losses", "strategy": strategy, "fault": "none", "arguments": arguments}
    run_ranks(2 if strategy == "ddp" else 4, "jobs:histories", folder / "work", {"runs": [run]})
    return folder / strategy


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    for strategy in ("ddp", "fsdp"):
        captured(folder, strategy, *STEPS)
    run_alone("jobs:reference", folder / "work", [*COMMON, *STEPS, "--capture_dir", str(folder)])
    return folder


def test_accumulated_steps_pass(dumps, capsys):
    assert compare.main([str(dumps / name) for name in ("fsdp", "reference")]) == 0
    assert capsys.readouterr().out.endswith("PASS\n")


def test_every_tensor_of_a_step_is_there(dumps):
    entry = Dump(dumps / "fsdp").steps["1"]["tensors"]
    kinds = {name.split("/")[0] for name in entry}
    assert kinds == {"batch", "forward", "backward", "gradient", "exp_avg", "exp_avg_sq", "parameter"}
    modules = {name.removeprefix("forward/") for name in entry if name.startswith("forward/")}
    assert {"model.embed_tokens", "model.layers.1.mlp.act_fn", "model.layers.0.self_attn", "model.layers.1", "lm_head"} <= modules
    assert entry["forward/lm_head"]["shape"] == [8, 32, 2048]  # dp x accumulation x batch rows, the whole vocabulary
    assert entry["forward/lm_head"]["sharded"] == {"dp": 0, "tp": 2}
    assert entry["parameter/model.layers.0.self_attn.o_proj.weight"]["sharded"] == {"dp": 0, "tp": 1}
    names = list(entry)
    assert names.index("forward/lm_head") < names.index("backward/lm_head") < names.index("gradient/model.norm.weight")


def test_any_safetensors_reader_can_read_it(dumps):
    mine = Dump(dumps / "fsdp")
    with safe_open(dumps / "fsdp" / "step_1.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(mine.steps["1"]["tensors"])
        for name in ("forward/lm_head", "gradient/model.layers.0.mlp.down_proj.weight", "batch/labels"):
            assert torch.equal(file.get_tensor(name), mine.tensor(1, name))


def test_the_reference_keeps_the_initial_weights(dumps):
    tensors = Dump(dumps / "reference").steps["0"]["tensors"]
    assert tensors and all(name.startswith("parameter/") for name in tensors)


def test_the_parameters_after_a_step_are_the_input_of_its_replay(dumps):
    assert list(Dump(dumps / "replay_fsdp").steps) == ["2"]
    first = Dump(dumps / "fsdp").tensor(1, "parameter/model.embed_tokens.weight")
    ids = Dump(dumps / "replay_fsdp").tensor(2, "batch/input_ids")
    assert torch.equal(Dump(dumps / "replay_fsdp").tensor(2, "forward/model.embed_tokens"), first.double()[ids])


@pytest.fixture
def copy(dumps, tmp_path):
    shutil.copytree(dumps / "fsdp", tmp_path / "fsdp")
    return tmp_path / "fsdp"


def refused(capsys, *folders):
    status = compare.main([str(folder) for folder in folders])
    error = capsys.readouterr().err
    assert status == 2 and len(error.splitlines()) == 1, (status, error)
    return error


def test_a_damaged_byte_is_found(dumps, copy, capsys):
    with open(copy / "step_1.safetensors", "r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-100, 2)
        file.write(bytes([byte[0] ^ 1]))
    error = refused(capsys, copy, dumps / "reference")
    assert "is damaged (its checksum does not match)" in error and "step_1" in error


def test_a_cut_file_is_found(dumps, copy, capsys):
    with open(copy / "step_2.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) - 1000)
    assert "cut off inside" in refused(capsys, copy, dumps / "reference")


def test_a_missing_file_is_found(dumps, copy, capsys):
    (copy / "step_2.safetensors").unlink()
    assert "damaged or missing" in refused(capsys, copy, dumps / "reference")


def test_a_swapped_file_is_found(dumps, copy, capsys):
    shutil.copy(copy / "step_2.safetensors", copy / "step_1.safetensors")
    assert "damaged" in refused(capsys, copy, dumps / "reference")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1, "run": {}}'])
def test_a_broken_manifest_is_found(dumps, copy, capsys, text):
    (copy / "manifest.json").write_text(text)
    assert "not a dump's manifest" in refused(capsys, copy, dumps / "reference")


def test_a_half_written_dump_is_recognised(dumps, copy, capsys):
    (copy / "step_1.safetensors").rename(copy / "step_1.safetensors.part")
    (copy / "manifest.json").unlink()
    assert "only the unfinished step_1.safetensors.part" in refused(capsys, copy, dumps / "reference")


def test_a_folder_without_a_dump(dumps, tmp_path, capsys):
    assert "no dump" in refused(capsys, tmp_path, dumps / "reference")


CHANGES = {
    "their models differ": lambda manifest: manifest["run"]["architecture"].update(num_hidden_layers=3),
    "different weights": lambda manifest: manifest.update(initial_sha256="0"),
    "step 2 was trained on different batches": lambda manifest: manifest["steps"]["2"].update(batch_hash="0"),
    "learning_rate is 0.5 in one": lambda manifest: manifest["run"]["config"].update(learning_rate=0.5),
    "steps 1 against 1, 2": lambda manifest: manifest["steps"].pop("2"),
    "versions": lambda manifest: manifest["run"]["versions"].update(torch="1"),
}


@pytest.mark.parametrize("message", CHANGES)
def test_what_cannot_be_compared_is_refused(dumps, copy, capsys, message):
    manifest = json.loads((copy / "manifest.json").read_text())
    CHANGES[message](manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert message in refused(capsys, copy, dumps / "ddp")


def test_two_dumps_without_a_reference(dumps, copy, capsys):
    assert compare.main([str(dumps / "fsdp"), str(dumps / "ddp")]) == 0
    assert compare.main([str(copy), str(dumps / "fsdp")]) == 0
    assert "29 of 29 tensors bit-identical" in capsys.readouterr().out


def test_a_later_step_needs_its_replay(dumps, tmp_path, capsys):
    for name in ("ddp", "fsdp", "reference"):
        shutil.copytree(dumps / name, tmp_path / name)
    assert "step 2 of ddp has no replay" in refused(capsys, tmp_path / "fsdp", tmp_path / "reference")


def test_without_the_yardstick_there_is_no_verdict(dumps, tmp_path, capsys):
    for name in ("fsdp", "reference"):
        shutil.copytree(dumps / name, tmp_path / name)
    assert "ddp: no dump" in refused(capsys, tmp_path / "fsdp", tmp_path / "reference")


def test_nothing_is_overwritten(dumps):
    from lockstep import config as config_module

    config = config_module.parse_config("fsdp", [*COMMON, "--capture_dir", str(dumps)])
    with pytest.raises(UserError, match="is not empty, and nothing is overwritten"):
        config_module.check_environment(config, config_module.load_inputs(config).architecture)


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a limit on file sizes")
def test_a_full_disk_stops_every_rank(tmp_path):
    """One rank cannot write: all say so, and no manifest names the step."""
    run = {"strategy": "fsdp", "fault": "no room for files on rank 1", "arguments": [*COMMON, "--capture_dir", str(tmp_path)]}
    run_ranks(4, "jobs:refused", tmp_path / "work", run)
    for rank in range(4):
        assert "capture of step 1, rank 1: File too large" in (tmp_path / "work" / f"error{rank}.txt").read_text()
    with pytest.raises(UserError, match="only the unfinished"):
        Dump(tmp_path / "fsdp")
