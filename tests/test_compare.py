"""Comparing dumps: verdicts on edited copies, and how a damaged, half-written or foreign dump is recognised."""

import json
import shutil

import pytest

from lockstep import compare
from lockstep.dump import Dump


@pytest.fixture
def copy(dumps, tmp_path):
    shutil.copytree(dumps / "fsdp", tmp_path / "fsdp")
    return tmp_path / "fsdp"


@pytest.fixture
def all_copied(dumps, tmp_path):
    for folder in dumps.iterdir():
        if (folder / "manifest.json").is_file():
            shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path


def edit(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def verdict(capsys, *folders):
    status = compare.main([str(folder) for folder in folders])
    return status, capsys.readouterr()


def refused(capsys, *folders):
    status = compare.main([str(folder) for folder in folders])
    error = capsys.readouterr().err
    assert status == 2 and len(error.splitlines()) == 1, (status, error)
    return error


def test_accumulated_steps_pass(dumps, capsys):
    assert compare.main([str(dumps / name) for name in ("fsdp", "reference")]) == 0
    assert capsys.readouterr().out.endswith("PASS\n")


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
    assert "/ddp has no replay to be judged by" in refused(capsys, tmp_path / "fsdp", tmp_path / "reference")


def test_without_the_yardstick_there_is_no_verdict(dumps, tmp_path, capsys):
    for name in ("fsdp", "reference"):
        shutil.copytree(dumps / name, tmp_path / name)
    assert "ddp: no dump" in refused(capsys, tmp_path / "fsdp", tmp_path / "reference")


@pytest.mark.parametrize("option, value, first", [("learning_rate", 1.001e-3, "parameter of"), ("weight_decay", 0.5, "parameter of"),
                                                  ("max_grad_norm", 0.9, "exp_avg of")])  # fmt: skip
def test_an_update_that_is_not_what_was_asked_for(all_copied, capsys, option, value, first):
    """All runs alike, DDP too: what they did is not what their configuration says."""
    for name in ("ddp", "fsdp", "reference", "replay_ddp", "replay_fsdp"):
        edit(all_copied / name, lambda manifest: manifest["run"]["config"].update({option: value}))
    status, output = verdict(capsys, *(all_copied / name for name in ("ddp", "fsdp", "reference")))
    assert status == 1 and output.out.endswith("FAIL\n")
    assert output.out.count(f"step 1, update pass, {first}") == 2, output.out[:2000]


def test_a_nan_in_every_run_is_found(all_copied, capsys):
    """The last parameters of a run are read by nobody else."""
    for name in ("ddp", "fsdp"):
        folder = all_copied / name
        mine = Dump(folder)
        offset, _, _ = mine._places[2]["parameter/model.norm.weight"]
        with open(folder / "step_2.safetensors", "r+b") as file:
            file.seek(offset)
            old = int.from_bytes(file.read(4), "little")
            file.seek(offset)
            file.write((0x7FC00000).to_bytes(4, "little"))
        change = (0x7FC00000 - old) % 2**64
        entry = "parameter/model.norm.weight"
        edit(folder, lambda m, c=change: m["steps"]["2"]["tensors"][entry].update(checksum=(m["steps"]["2"]["tensors"][entry]["checksum"] + c) % 2**64))
    status, output = verdict(capsys, *(all_copied / name for name in ("ddp", "fsdp", "reference")))
    assert status == 1 and output.out.count("step 2, update pass, parameter of model.norm.weight") == 2


def test_a_run_that_stopped_in_its_second_step_is_recognised(all_copied, capsys):
    for name in ("ddp", "fsdp"):
        (all_copied / name / "step_2.safetensors").rename(all_copied / name / "step_2.safetensors.part")
        edit(all_copied / name, lambda manifest: manifest["steps"].pop("2"))
    assert "step_2.safetensors.part was not finished" in refused(capsys, all_copied / "fsdp", all_copied / "reference")


def test_a_dump_without_steps(all_copied, capsys):
    edit(all_copied / "fsdp", lambda manifest: manifest["steps"].clear())
    assert "not one step was finished" in refused(capsys, all_copied / "fsdp", all_copied / "reference")


def test_two_dumps_of_one_strategy(dumps, copy, capsys):
    assert "are both dumps of fsdp" in refused(capsys, copy, dumps / "fsdp", dumps / "reference")


def test_the_other_dumps_replicas_count_too(dumps, copy, capsys):
    edit(copy, lambda manifest: manifest["steps"]["1"]["replicas_differ"].update({"parameter/model.norm.weight": [3]}))
    for pair in ((copy, dumps / "fsdp"), (dumps / "fsdp", copy)):
        status, output = verdict(capsys, *pair)
        assert status == 1 and "parameter of model.norm.weight: is not the same on all ranks" in output.out
        assert "looked for only with a reference" in output.out


def test_the_replay_of_another_run_is_refused(all_copied, capsys):
    shutil.rmtree(all_copied / "replay_fsdp")
    shutil.copytree(all_copied / "replay_ddp", all_copied / "replay_fsdp")
    assert "did not start from the parameters of" in refused(capsys, all_copied / "fsdp", all_copied / "reference")


def test_a_reference_with_fewer_steps_is_refused(all_copied, capsys):
    edit(all_copied / "reference", lambda manifest: manifest["steps"].pop("2"))
    assert "capture the same steps" in refused(capsys, all_copied / "fsdp", all_copied / "reference")


def test_a_replay_is_no_reference(dumps, capsys):
    assert "cannot be compared" in refused(capsys, dumps / "fsdp", dumps / "replay_fsdp")


def test_a_tensor_that_was_not_computed_is_a_failure(all_copied, capsys):
    name = "backward/model.layers.0"
    edit(all_copied / "fsdp", lambda manifest: manifest["steps"]["1"]["tensors"].pop(name))
    status, output = verdict(capsys, all_copied / "fsdp", all_copied / "reference")
    assert status == 1 and "backward of model.layers.0: was not computed" in output.out and "1. not computed" in output.out


@pytest.mark.parametrize("change, sentence", [
    (lambda m: m["contract"].update(max_grad_norm=0.0), "max_grad_norm is 0.0, not 1.0"),
    (lambda m: m["steps"]["2"].update(learning_rate=2e-3), "learning rate of step 2 is 0.002, not 0.001"),
])  # fmt: skip
def test_another_contract_is_a_difference_in_configuration(all_copied, capsys, change, sentence):
    """Before any tensor: what the runs really ran with. Two dumps without a reference, too."""
    edit(all_copied / "fsdp", change)
    for other in ("reference", "ddp"):
        status, output = verdict(capsys, all_copied / "fsdp", all_copied / other)
        assert status == 1 and output.out.endswith("CONFIGURED DIFFERENTLY\n") and sentence in output.out
    assert verdict(capsys, all_copied / "ddp", all_copied / "reference")[0] == 0


def test_a_run_that_never_said_what_it_ran_with(all_copied, capsys):
    edit(all_copied / "fsdp", lambda manifest: manifest.pop("contract"))
    assert "stopped before it said what it runs with" in refused(capsys, all_copied / "fsdp", all_copied / "reference")


def test_a_recorded_gradient_norm_that_is_not_the_gradients(all_copied, capsys):
    edit(all_copied / "fsdp", lambda m: m["steps"]["2"].update(grad_norm=m["steps"]["2"]["grad_norm"] * (1 + 2e-6)))
    status, output = verdict(capsys, all_copied / "fsdp", all_copied / "reference")
    assert status == 1 and "step 2, gradient norm: was recorded as" in output.out and "1. clipping" in output.out
