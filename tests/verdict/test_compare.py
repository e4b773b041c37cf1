"""Comparing dumps: verdicts on edited copies, and how a damaged, half-written or foreign dump is recognised."""

import itertools
import os
import re
import shutil

import numpy as np
import pytest
import torch
from edited import change_tensor, edit, flip_byte, overwrite, take_out

from lockstep import compare
from lockstep.dumps.dump import Dump
from lockstep.dumps.header import configuration
from lockstep.dumps.layout import Layout
from lockstep.dumps.manifest import FORMAT
from lockstep.dumps.step_file import checksum
from lockstep.ground.errors import UserError
from lockstep.plan.contract import expected_contract


@pytest.fixture
def copy(dumps, tmp_path):
    shutil.copytree(dumps / "fsdp", tmp_path / "fsdp")
    return tmp_path / "fsdp"


def copy_all(dumps, to):
    for manifest in dumps.glob("*/manifest.json"):
        shutil.copytree(manifest.parent, to / manifest.parent.name)
    return to


@pytest.fixture
def all_copied(dumps, tmp_path):
    return copy_all(dumps, tmp_path)


@pytest.fixture(scope="module")
def copied_once(dumps, new_folder):
    return copy_all(dumps, new_folder("copies"))


@pytest.fixture
def manifests(copied_once):
    """Copies of all dumps, of which nothing but the manifests may be changed."""
    before = {path: path.read_bytes() for path in copied_once.glob("*/manifest.json")}
    yield copied_once
    for path, content in before.items():
        path.write_bytes(content)


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


def unfinished(folder, step):
    (folder / f"step_{step}.safetensors").rename(folder / f"step_{step}.safetensors.part")


DAMAGE = {
    "step_1.safetensors: .* is damaged .its checksum does not match": lambda folder: flip_byte(
        folder / "step_1.safetensors", -100
    ),
    "step_2.safetensors: damaged or cut off": lambda folder: os.truncate(
        folder / "step_2.safetensors", (folder / "step_2.safetensors").stat().st_size - 1000
    ),
    "step_2.safetensors: cannot be read": lambda folder: (folder / "step_2.safetensors").unlink(),
    "step_1.safetensors.* damaged": lambda folder: shutil.copy(
        folder / "step_2.safetensors", folder / "step_1.safetensors"
    ),
    "only the unfinished step_1.safetensors.part": lambda folder: (
        unfinished(folder, 1),
        (folder / "manifest.json").unlink(),
    ),
    "no dump": lambda folder: [path.unlink() for path in folder.iterdir()],
    "not one step was finished": lambda folder: edit(folder, lambda manifest: manifest["steps"].clear()),
    "stopped before its contract was recorded": lambda folder: edit(
        folder, lambda manifest: manifest.pop("contract")
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_what_is_damaged_or_not_whole_is_recognised(dumps, copy, capsys, message):
    DAMAGE[message](copy)
    assert re.search(message, refused(capsys, copy, dumps / "reference"))


def test_words_that_changed_places_are_found():
    data = np.random.default_rng(0).integers(0, 256, 64_000, dtype=np.uint8)
    for itemsize in (2, 4, 8):
        swapped = data.copy().reshape(-1, itemsize)
        swapped[[3, 7000]] = swapped[[7000, 3]]
        assert checksum(swapped.reshape(-1), itemsize) != checksum(data, itemsize)
        parts = [
            checksum(data[begin : begin + 16_000], itemsize, begin // itemsize)
            for begin in range(0, 64_000, 16_000)
        ]
        assert sum(parts) % 2**64 == checksum(data, itemsize)  # negative control, and parts add up


def test_one_tensor_alone_is_verified_too(dumps, copy):
    name = list(Dump(copy).steps[1]["tensors"])[0]
    offset, _, _ = Dump(copy)._places[1][name]
    Dump(copy).tensor(1, name)
    flip_byte(copy / "step_1.safetensors", offset)
    with pytest.raises(UserError, match="is damaged"):
        Dump(copy).tensor(1, name)


@pytest.mark.parametrize("name", ["step_2.safetensors", "manifest.json"])
def test_what_is_no_regular_file_is_not_opened(dumps, copy, capsys, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    error = refused(capsys, copy, dumps / "reference")
    assert f"{name}: not a regular file" in error and error.count("capture again") == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "not valid JSON"),
        ("{}", "not a dump's manifest"),
        ('{"format": 99}', f"format 99, this version reads {FORMAT}"),
        (f'{{"format": {FORMAT}, "run": {{}}}}', "not what its sha256 says"),
    ],
)
def test_a_broken_manifest_is_found(dumps, copy, capsys, text, message):
    (copy / "manifest.json").write_text(text)
    error = refused(capsys, copy, dumps / "reference")
    assert message in error and error.count("manifest.json") == 1 and error.count("capture again") == 1


def test_any_edit_that_is_not_sealed_is_found(dumps, copy, capsys):
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    assert "not what its sha256 says" in refused(capsys, copy, dumps / "reference")
    (copy / "manifest.json").write_text(text)
    assert compare.main([str(copy), str(dumps / "fsdp")]) == 0  # negative control


def _first(manifest, kind="forward/lm_head"):
    return manifest["steps"]["1"]["tensors"][kind]


CONTRADICTIONS = {
    "step 1: forward/lm_head is [8, 32, 2047], with this model": lambda m: _first(m).update(
        shape=[8, 32, 2047]
    ),
    "the model has no tensor forward/model.extra": lambda m: m["steps"]["1"]["tensors"].update(
        {"forward/model.extra": _first(m)}
    ),
    "cut along tp in dim 5": lambda m: _first(m).update(sharded={"tp": 5}),
    "4 workers, and TP=2, DP=2 of the configuration do not go together": lambda m: m["run"]["mesh"].update(
        dp=4, tp=1
    ),
    "run.config.batch_size is '2'": lambda m: m["run"]["config"].update(batch_size="2"),
    "run.label is 'other'": lambda m: m["run"].update(label="other"),
    "it has the steps 1, 3": lambda m: m["steps"].update({"3": m["steps"].pop("2")}),
    "step 2: loss is missing": lambda m: m["steps"]["2"].pop("loss"),
    "step 2: loss is 7.0, the mean of its rank_losses": lambda m: m["steps"]["2"].update(loss=7.0),
    "3 rank_losses of 2 DP ranks": lambda m: m["steps"]["2"].update(
        rank_losses=[m["steps"]["2"]["loss"]] * 3
    ),
    "replicas_differ has ranks [9]": lambda m: m["steps"]["2"]["replicas_differ"].update(
        {"forward/lm_head": [9]}
    ),
    "replicas_differ names x": lambda m: m["steps"]["2"]["replicas_differ"].update(x=[1]),
    "num_hidden_layers is 1000000000": lambda m: m["run"]["architecture"].update(num_hidden_layers=10**9),
    "forward/lm_head is [8, 32, 2048], with this model and batch it must be [8, 32, 7]": lambda m: m[
        "layout"
    ]["outputs"].update({"lm_head": ["batch", "sequence", 7]}),
    "contract: betas is missing": lambda m: m["contract"].pop("betas"),
    "contract.compiled is [1], its configuration says [false]": lambda m: m["contract"].update(compiled=[1]),
    "run.config.own.dp_replicate is 0": lambda m: m["run"]["config"]["own"].update(dp_replicate=0),
    "run.config.own.unknown is 1": lambda m: m["run"]["config"]["own"].update(unknown=1),
    "run.config.own.wrap is missing": lambda m: m["run"]["config"]["own"].pop("wrap"),
    "versions does not name torch": lambda m: m["run"]["versions"].pop("torch"),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_manifest_that_does_not_agree_with_itself_or_its_model(manifests, capsys, message):
    """Sealed again: what no damage makes, but another program may. On every path: with and without a reference."""
    edit(manifests / "fsdp", CONTRADICTIONS[message])
    for other in ("reference", "ddp"):
        error = refused(capsys, manifests / "fsdp", manifests / other)
        assert message in error and error.count("capture again") == 1, error


def _names(layout):
    return layout["model"]["names"]


# What contradicts itself is refused even where all dumps say the same.
ODD_LAYOUTS = {
    "a gradient of nothing": lambda layout: layout["backward"].append("model.nothing"),
    "a gradient twice": lambda layout: layout["backward"].append("lm_head"),
    "an output that is gone": lambda layout: layout["outputs"].pop("model.layers.1.mlp.down_proj.input"),
    "no head": lambda layout: layout["outputs"].pop("lm_head"),
    "an input of nothing": lambda layout: layout["inputs"].update(lm_head={"0": "lm_head.input"}),
    "sources that are none": lambda layout: layout["sources"].update(lm_head=["model.nothing"]),
    "flat tokens of nothing": lambda layout: layout["flat"].append("model.nothing"),
    "a choice of nothing": lambda layout: layout["choices"].update(x={"call": 0, "scores": "y"}),
    "both captured and not": lambda layout: layout["unknown"].append("lm_head"),
    "parameters that are gone": lambda layout: layout["model"]["parameters"].clear(),
    "another head": lambda layout: _names(layout).update(head="model.nothing"),
    }  # fmt: skip
# What is not held against anything else, or has another meaning that is possible.
OTHER_LAYOUTS = {
    "no layers": lambda layout: _names(layout).update(layers="", attention="", mlp=""),
    "settings that are no numbers": lambda layout: layout["model"]["settings"].update(eps={"x": ["model"]}),
    "a far call": lambda layout: layout["choices"].update(lm_head={"call": 2**62, "scores": "lm_head"}),
    "untied": lambda layout: layout["model"].update(tied=not layout["model"]["tied"]),
}


@pytest.mark.parametrize("what", [*ODD_LAYOUTS, *OTHER_LAYOUTS])
def test_a_layout_that_is_wrong_is_one_line(manifests, capsys, what):
    """In one of the dumps, and in all of them alike, sealed again."""
    change = {**ODD_LAYOUTS, **OTHER_LAYOUTS}[what]
    edit(manifests / "fsdp", lambda manifest: change(manifest["layout"]))
    for other in ("reference", "ddp"):
        refused(capsys, manifests / "fsdp", manifests / other)
    for name in ("ddp", "reference", "replay_ddp", "replay_fsdp"):
        edit(manifests / name, lambda manifest: change(manifest["layout"]))
    status, output = verdict(capsys, manifests / "fsdp", manifests / "reference")
    assert status == 2 or (what in OTHER_LAYOUTS and status in (0, 1)), (status, output.err[-500:])
    assert len(output.err.splitlines()) == (status == 2)


CHANGES = {
    "their models differ": lambda manifest: manifest["run"]["architecture"].update(rope_theta=5.0),
    "different weights": lambda manifest: manifest.update(initial_sha256=64 * "0"),
    "step 2 was trained on different batches": lambda manifest: manifest["steps"]["2"].update(
        batch_hash=16 * "0"
    ),
    "learning_rate is 0.5 against ": lambda manifest: manifest["run"]["config"].update(learning_rate=0.5),
    "it has 1 of 2 steps: the run was stopped": lambda manifest: manifest["steps"].pop("2"),
    "their libraries differ, torch ": lambda manifest: manifest["run"]["versions"].update(torch="1"),
    "their tokenizers differ": lambda manifest: manifest["run"].update(tokenizer="another"),
}


@pytest.mark.parametrize("message", CHANGES)
def test_what_cannot_be_compared_is_refused(dumps, copy, capsys, message):
    edit(copy, CHANGES[message])
    assert message in refused(capsys, copy, dumps / "ddp") and message in refused(capsys, dumps / "ddp", copy)


def test_two_dumps_without_a_reference(dumps, copy, capsys):
    assert compare.main([str(dumps / "fsdp"), str(dumps / "ddp")]) == 0
    assert "| reference |" not in capsys.readouterr().out
    assert compare.main([str(copy), str(dumps / "fsdp")]) == 0
    assert "37 of 37 tensors bit-identical" in capsys.readouterr().out
    assert compare.main([str(dumps / "fsdp"), str(dumps / "reference")]) == 0
    assert "| reference |" in capsys.readouterr().out  # negative control


def test_one_folder_named_twice_is_refused(dumps, tmp_path, capsys):
    (tmp_path / "link").symlink_to(dumps / "fsdp")
    for other in (dumps / "fsdp", tmp_path / "link", dumps / "ddp" / ".." / "fsdp"):
        assert "are the same folder" in refused(capsys, dumps / "fsdp", other)
        assert "are the same folder" in refused(capsys, dumps / "fsdp", dumps / "reference", other)


LACKING = {
    "one tensor": lambda name: name == "backward/model.layers.0",
    "a gradient": lambda name: name == "gradient/model.norm.weight",
    "parameters": lambda name: name.startswith("parameter/"),
}


@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize("whose", ["ddp", "fsdp"])
def test_what_one_dump_lacks_is_a_failure_in_every_order(manifests, capsys, whose, lacking):
    assert take_out(manifests / whose, LACKING[lacking]) > 0
    outcomes = {
        verdict(capsys, *(manifests / name for name in order))[0]
        for order in itertools.permutations(("ddp", "fsdp"))
    }
    assert outcomes == {1}


@pytest.mark.parametrize("lacking", LACKING)
def test_what_a_run_lacks_and_what_its_yardstick_lacks(dumps, all_copied, capsys, lacking):
    """Whatever the order of the arguments. A later step has no reference if the parameters before it are not there."""
    folders = {name: all_copied / name for name in ("ddp", "fsdp", "reference")}
    orders = list(itertools.permutations(folders.values()))
    # What is lacking is looked for after the dumps have been put in order
    if lacking != "one tensor":
        orders = orders[:: len(orders) - 1]
    assert {verdict(capsys, *order)[0] for order in orders} == {0}  # negative control
    take_out(folders["fsdp"], LACKING[lacking])
    found = [verdict(capsys, *order) for order in orders]
    assert {status for status, _ in found} == {{"parameters": 2, "a gradient": 1}.get(lacking, 0)}
    if lacking == "one tensor":
        assert "no output of model.layers.0 was captured, as where one kernel computes" in found[0][1].out
    take_out(folders["fsdp"], LACKING[lacking], steps=())
    for name in ("ddp", "reference", "replay_fsdp"):
        shutil.rmtree(all_copied / "fsdp")
        shutil.copytree(dumps / "fsdp", all_copied / "fsdp")
        if take_out(all_copied / name, LACKING[lacking]):
            assert {verdict(capsys, *order)[0] for order in orders} == {2}, name
        shutil.rmtree(all_copied / name)
        shutil.copytree(dumps / name, all_copied / name)


def test_a_layer_that_is_not_computed(all_copied, capsys):
    """Where a kernel skips an output, gradients arrive at the weights all the same. Negative control."""
    own, layer = all_copied / "fsdp", "model.layers.0"
    take_out(own, lambda name: name == f"forward/{layer}")
    for name in (f"forward/{layer}.mlp", "gradient/model.norm.weight"):
        change_tensor(own, 2, name, lambda tensor: tensor.mul_(1.5))
    status, said = verdict(capsys, own, all_copied / "ddp", all_copied / "reference")
    assert status == 1 and f"step 2, forward/{layer}.mlp: " in said.out and "not computed" not in said.out
    for name in Dump(own).expected(2):
        if name.startswith(f"gradient/{layer}."):
            change_tensor(own, 2, name, torch.Tensor.zero_)
    status, said = verdict(capsys, own, all_copied / "ddp", all_copied / "reference")
    assert status == 1 and f"- not computed: forward/{layer}: the run has another model" in said.out
    take_out(own, lambda name: name.startswith("backward/"))
    status, said = verdict(capsys, own, all_copied / "ddp", all_copied / "reference")
    assert status == 1 and "step 1, backward/lm_head: was not computed" in said.out


def test_the_same_tensors_taken_out_of_all_dumps(manifests, capsys):
    """What must be there is the model's, not what the files list."""
    for folder in manifests.iterdir():
        take_out(folder, lambda name: name.startswith(("forward/", "backward/", "batch/")))
    assert "lacks batch/input_ids" in refused(capsys, manifests / "fsdp", manifests / "reference")


def test_a_later_step_needs_its_replay(dumps, tmp_path, capsys):
    for name in ("ddp", "fsdp", "reference"):
        shutil.copytree(dumps / name, tmp_path / name)
    assert "/ddp has no replay to compare it with" in refused(
        capsys, tmp_path / "fsdp", tmp_path / "reference"
    )


def test_without_the_yardstick_there_is_no_verdict(dumps, tmp_path, capsys):
    for name in ("fsdp", "reference"):
        shutil.copytree(dumps / name, tmp_path / name)
    assert "ddp: no dump" in refused(capsys, tmp_path / "fsdp", tmp_path / "reference")


@pytest.mark.parametrize(
    "option, value, first",
    [
        ("learning_rate", 1.001e-3, "parameter/"),
        ("weight_decay", 0.5, "parameter/"),
        ("max_grad_norm", 0.9, "exp_avg/"),
    ],
)
def test_an_update_that_is_not_what_was_asked_for(manifests, capsys, option, value, first):
    """All runs alike, DDP too: what they did is not what their configuration says."""

    def change(manifest):
        manifest["run"]["config"][option] = value
        if "contract" in manifest:
            run, model = manifest["run"], Layout.model_validate(manifest["layout"]).model
            demanded = expected_contract(configuration(run), run["architecture"], model)
            manifest["contract"].update(
                {key: demanded[key] for key in ("learning_rates", "weight_decay", "max_grad_norm")}
            )
        for entry in manifest["steps"].values() if option == "learning_rate" else ():
            entry.update({option: value} if option in entry else {})

    for name in ("ddp", "fsdp", "reference", "replay_ddp", "replay_fsdp"):
        edit(manifests / name, change)
    status, output = verdict(capsys, *(manifests / name for name in ("ddp", "fsdp", "reference")))
    assert status == 1 and output.out.endswith("FAIL\n")
    assert output.out.count(f"step 1, {first}") == 2, output.out[:2000]


def test_a_nan_in_every_run_is_found(all_copied, capsys):
    """The last parameters of a run are read by nobody else."""
    for name in ("ddp", "fsdp"):
        overwrite(all_copied / name, 2, "parameter/model.norm.weight", 0, 0x7FC00000)
    status, output = verdict(capsys, *(all_copied / name for name in ("ddp", "fsdp", "reference")))
    assert status == 1 and output.out.count("step 2, parameter/model.norm.weight") == 2


def test_a_run_that_stopped_in_its_second_step_is_recognised(all_copied, capsys):
    for name in ("ddp", "fsdp"):
        unfinished(all_copied / name, 2)
        edit(all_copied / name, lambda manifest: manifest["steps"].pop("2"))
    assert "step_2.safetensors.part was not finished" in refused(
        capsys, all_copied / "fsdp", all_copied / "reference"
    )


def test_two_dumps_of_one_strategy(dumps, copy, capsys):
    assert "are both dumps of fsdp" in refused(capsys, copy, dumps / "fsdp", dumps / "reference")


def test_the_other_dumps_replicas_count_too(dumps, copy, capsys):
    edit(
        copy,
        lambda manifest: manifest["steps"]["1"]["replicas_differ"].update(
            {"parameter/model.norm.weight": [3]}
        ),
    )
    for pair in ((copy, dumps / "fsdp"), (dumps / "fsdp", copy)):
        status, output = verdict(capsys, *pair)
        assert status == 1 and "parameter/model.norm.weight: is not the same on all ranks" in output.out
        assert "looked for only with a reference" in output.out


def test_the_replay_of_another_run_is_refused(all_copied, capsys):
    shutil.rmtree(all_copied / "replay_fsdp")
    shutil.copytree(all_copied / "replay_ddp", all_copied / "replay_fsdp")
    assert "did not start from the parameters of" in refused(
        capsys, all_copied / "fsdp", all_copied / "reference"
    )


def test_a_replay_is_no_reference(dumps, capsys):
    assert "a replay, which is found beside the reference" in refused(
        capsys, dumps / "fsdp", dumps / "replay_fsdp"
    )


def test_a_baseline_that_ran_with_something_else_than_its_options(manifests, capsys):
    edit(manifests / "ddp", lambda m: m["contract"].update(max_grad_norm=0.5))
    edit(manifests / "fsdp", lambda m: m["contract"].update(max_grad_norm=0.5))
    status, output = verdict(capsys, manifests / "fsdp", manifests / "reference")
    assert status == 1 and "DDP (TP=1, DP=2): max_grad_norm is 0.5, not 1.0" in output.out


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda m: m["contract"].update(max_grad_norm=0.0), "max_grad_norm is 0.0, not 1.0"),
        (lambda m: m["steps"]["2"].update(learning_rate=2e-3), "learning rate of step 2 is 0.002, not 0.001"),
    ],
)
def test_another_contract_is_a_difference_in_configuration(manifests, capsys, change, sentence):
    """Before any tensor: what the runs really ran with. Two dumps without a reference, too."""
    edit(manifests / "fsdp", change)
    for other in ("reference", "ddp"):
        status, output = verdict(capsys, manifests / "fsdp", manifests / other)
        assert status == 1 and output.out.endswith("CONFIGURED DIFFERENTLY\n") and sentence in output.out
    assert verdict(capsys, manifests / "ddp", manifests / "reference")[0] == 0


@pytest.mark.parametrize("off", [2e-6, 1e-3])
def test_a_recorded_gradient_norm_that_is_not_the_gradients(manifests, capsys, off):
    """What a sum in float32 may be off by is a note."""
    edit(
        manifests / "fsdp",
        lambda m: m["steps"]["2"].update(grad_norm=m["steps"]["2"]["grad_norm"] * (1 + off)),
    )
    status, output = verdict(capsys, manifests / "fsdp", manifests / "reference")
    if off < 1e-5:
        assert status == 0 and "A sum in float32 may be off by" in output.out
        return
    assert status == 1
    assert "step 2, gradient norm: was recorded as" in output.out
    assert (
        "- not explained" in output.out
    )  # the gradients and the update are right: nothing says that it clipped by it


@pytest.mark.parametrize("kinds", [("exp_avg", "exp_avg_sq", "parameter"), ("exp_avg", "exp_avg_sq")])
def test_a_step_that_was_left_out_is_named(all_copied, kinds):
    """Moments that are unchanged under weights that are not have no such cause."""
    folder = all_copied / "fsdp"
    before = Dump(folder)
    for name in before.steps[2]["tensors"]:
        if name.startswith(tuple(f"{kind}/" for kind in kinds)):
            old = before.tensor(1, name)
            change_tensor(folder, 2, name, lambda new, old=old: new.copy_(old))
    result = compare.judge([all_copied / name for name in ("ddp", "fsdp", "reference")])
    run = result.runs["fsdp"]
    assert result.verdict("fsdp") == "FAIL" and run.failures[0][0] == 2
    assert run.failures[0][2].startswith("exp_avg/")
    causes = [cause.name for cause in run.diagnosis.causes]
    assert causes == (["update left out"] if "parameter" in kinds else [])
