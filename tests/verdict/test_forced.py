"""Each module of a captured run by itself, in autocast: what the rounding errors of the whole computation hide is found, and only that."""

import json
import shutil

import pytest
import small_dumps
from edited import change_tensor, edit
from page_cases import payload

from lockstep import compare
from lockstep.dumps.dump import Dump
from lockstep.verdict import forced, module_results, tensor_report
from lockstep.verdict.float64 import make_exact
from lockstep.verdict.scalars import Chosen

PROJECTION = "model.layers.1.self_attn.q_proj"
NORM = "model.layers.1.post_attention_layernorm"


@pytest.fixture(scope="module")
def captured(new_folder):
    """Dumps of two steps in autocast: ddp, fsdp, reference, replays, and what was found of modules by themselves."""
    folder = new_folder("autocast")
    small_dumps.make(folder, "--precision=autocast")
    return folder


@pytest.fixture(scope="module")
def in_bf16(new_folder):
    folder = new_folder("bf16")
    small_dumps.make(folder, "--precision=bf16", more=("deepspeed",))
    return folder


@pytest.fixture
def copied(captured, tmp_path):
    """What may be changed: the dump of fsdp, and what is needed to judge it."""
    for name in ("ddp", "fsdp", "reference", "replay_ddp", "replay_fsdp"):
        shutil.copytree(captured / name, tmp_path / name)
    for name in ("ddp", "fsdp"):
        shutil.copy(captured / f"alone_{name}.json", tmp_path)
    return tmp_path


def judged(folder):
    """The result of a comparison after the modules of fsdp were computed by themselves again."""
    dump, reference = Dump(folder / "fsdp"), Dump(folder / "reference")
    reference_model, yardstick_model = forced.model_of(dump), forced.model_of(dump)
    make_exact(reference_model, dump.layout.tables)
    module_results.write(forced.judge(dump, reference, reference_model, yardstick_model), folder / "fsdp")
    return compare.judge([folder / name for name in ("ddp", "fsdp", "reference")])


def test_all_that_has_a_gradient_is_judged(captured):
    for name in ("ddp", "fsdp"):
        dump = Dump(captured / name)
        found = module_results.read(dump, captured)
        names = {(row.step, row.name) for row in found.rows}
        tables = {f"forward/{module}" for module in dump.layout.outputs if module not in dump.layout.backward}
        for step in (1, 2):
            expected = {
                name
                for name in dump.expected(step)
                if name.split("/")[0] in ("forward", "backward", "gradient")
            }
            assert {name for at, name in names if at == step} == expected - tables
        assert not [row for row in found.rows if row.too_far]


BUGS = {
    # the tensor that is changed, how; the tensors that are called wrong
    "gradient of a projection": (
        f"gradient/{PROJECTION}.weight",
        lambda tensor: tensor.mul_(1.003),
        [f"gradient/{PROJECTION}.weight"],
    ),
    "gradient of a norm": (
        f"gradient/{NORM}.weight",
        lambda tensor: tensor.mul_(1.003),
        [f"gradient/{NORM}.weight"],
    ),
    "output of one sample": (
        "forward/model.layers.1.mlp.down_proj",
        lambda tensor: tensor[1].mul_(1.01),
        ["forward/model.layers.1.mlp.down_proj", "forward/model.layers.1.mlp"],
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_what_rounding_errors_hide(bug, copied):
    name, by, wrong = BUGS[bug]
    change_tensor(copied / "fsdp", 1, name, by)
    result = judged(copied)
    run = result.runs["fsdp"]
    hidden = [row for row in run.rows_of(1).values() if row.name in wrong and not row.too_far]
    assert len(hidden) == len(wrong), "its distance from the reference does not show it"
    assert [row.name for row in run.by_themselves if row.too_far and row.step == 1] == wrong
    assert result.verdict("fsdp") == "FAIL" and result.verdict("ddp") == "PASS"
    assert run.failures[0][:1] + run.failures[0][2:3] == (1, wrong[0])
    said = run.failures[0][3]
    assert "times what a factor may be off by)" in said
    # Autocast does not round the gradient of a norm, so its distance from what the module should compute shows it, too.
    assert ("its distance is within what is tolerated" in said) == (bug != "gradient of a norm")


@pytest.mark.parametrize(("times", "wrong"), [(1.00002, {"cpu"}), (1.003, {"cpu", "cuda"})])
def test_a_gpu_is_allowed_what_it_cuts_from_sums(copied, times, wrong):
    name = f"gradient/{PROJECTION}.weight"
    change_tensor(copied / "fsdp", 1, name, lambda tensor: tensor.mul_(times))
    for device in ("cpu", "cuda"):
        dump, reference = Dump(copied / "fsdp"), Dump(copied / "reference")
        dump.run["config"]["device"] = device
        reference_model, yardstick_model = forced.model_of(dump), forced.model_of(dump)
        make_exact(reference_model, dump.layout.tables)
        rows = forced.judge(dump, reference, reference_model, yardstick_model).rows
        assert {row.name for row in rows if row.too_far} == ({name} if device in wrong else set()), device


def test_what_only_a_module_by_itself_shows_is_not_explained(copied):
    name, by, wrong = BUGS["output of one sample"]
    change_tensor(copied / "fsdp", 1, name, by)
    result = judged(copied)
    diagnosis = result.runs["fsdp"].diagnosis
    assert (
        not diagnosis.causes
        and "only the module by itself shows it" in diagnosis.odd[0]
        and not diagnosis.excluded
    )
    assert (
        f"2 of 192 tensors are not what their modules compute from their recorded inputs: {', '.join(wrong)}"
        in tensor_report.by_themselves(result)[1]
    )


def test_what_is_wrong_by_itself_is_not_ruled_out(copied):
    """Where another tensor is diagnosed, that is far from the reference, too."""
    name, by, _ = BUGS["output of one sample"]
    change_tensor(copied / "fsdp", 1, f"gradient/{NORM}.weight", lambda tensor: tensor.mul_(2))
    ruled_out = judged(copied).runs["fsdp"].diagnosis.excluded
    assert any(sentence.startswith("forward: right") for sentence in ruled_out), "negative control"
    change_tensor(copied / "fsdp", 1, name, by)
    ruled_out = judged(copied).runs["fsdp"].diagnosis.excluded
    assert ruled_out and not any(sentence.startswith("forward: right") for sentence in ruled_out)


def test_the_page_has_it(copied):
    """The tensor that no distance shows is wrong in the table of modules by themselves alone, with the rank's shard that the factor is in."""
    name = f"gradient/{PROJECTION}.weight"
    change_tensor(copied / "fsdp", 1, name, lambda tensor: tensor[32:].mul_(1.01))
    judged(copied)
    compare.main(
        [*map(str, (copied / one for one in ("ddp", "fsdp", "reference"))), "--output_dir", str(copied)]
    )
    content = payload((copied / "report.html").read_text())
    assert content["views"][1]["first"][:2] == [1, name]
    free, alone = (one for one in content["tables"] if (one["view"], one["step"]) == (1, 1))
    # The moments do not follow from the changed gradient. What is observed is said of the first of them.
    assert {free["names"][place] for place in free["far"]}.isdisjoint([content["names"][name]])
    assert content["views"][1]["observed"][0].startswith(f"exp_avg/{PROJECTION}.weight: ")
    assert alone["alone"]
    (place,) = alone["far"]
    assert alone["names"][place] == content["names"][name]
    said, part = alone["said"][str(place)]
    assert part == [0, 32, 64] and said.startswith("rows 32 to 63 of 64 are 1.0")
    assert alone["pictures"][str(place)]["shape"] == [64, 64]


def test_two_broken_modules_are_both_named(copied):
    for name in (f"gradient/{PROJECTION}.weight", "gradient/model.layers.0.mlp.up_proj.weight"):
        change_tensor(copied / "fsdp", 1, name, lambda tensor: tensor.mul_(1.003))
    wrong = {row.name for row in judged(copied).runs["fsdp"].by_themselves if row.too_far}
    assert wrong == {f"gradient/{PROJECTION}.weight", "gradient/model.layers.0.mlp.up_proj.weight"}


def test_a_choice_that_only_its_module_shows(copied):
    """Such as a router's of experts, whose score from its own input is far below one that was left out."""
    found = module_results.read(Dump(copied / "fsdp"), copied)
    name = "forward/model.layers.0.mlp"
    wrong = found.model_copy(update={"choices": [Chosen(1, name, 0.5, 1e-3)]})
    module_results.write(wrong, copied / "fsdp")
    result = compare.judge([copied / name for name in ("ddp", "fsdp", "reference")])
    run = result.runs["fsdp"]
    assert result.verdict("fsdp") == "FAIL" and run.failures[0][2] == name
    said = f"{name} is another choice than the reference's"
    assert said in tensor_report.by_themselves(result)[1]


def test_a_dump_that_was_changed_since_is_not_judged(copied, capsys):
    """What was found of another dump says nothing."""
    folders = [str(copied / name) for name in ("ddp", "fsdp", "reference")]
    edit(copied / "fsdp", lambda manifest: manifest["steps"]["1"].update(learning_rate=1.0))
    compare.main(folders)
    assert f"FSDP+DTensor (TP=2, DP=2): not judged; {module_results.REMEDY}" in capsys.readouterr().out


def test_a_damaged_file(copied, refusal):
    path = copied / "alone_fsdp.json"
    content = json.loads(path.read_text())
    content["rows"][0]["tolerated"] = "much"
    path.write_text(json.dumps(content))
    said = refusal(compare.main, [copied / name for name in ("ddp", "fsdp", "reference")])
    assert "alone_fsdp.json: rows.0.tolerated is 'much'" in said


def test_a_step_in_another_convention_is_not_judged(copied):
    """Gradients under a loss scale that is taken off again: what follows from them by themselves is not what the run has."""
    dump = Dump(copied / "fsdp")
    for name in [name for name in dump.expected(1) if name.startswith("backward/")]:
        change_tensor(copied / "fsdp", 1, name, lambda tensor: tensor.mul_(4))
    result = judged(copied)
    run = result.runs["fsdp"]
    assert run.conventions and result.verdict("fsdp") == "PASS"
    assert any(row.too_far for row in run.alone.rows) and {row.step for row in run.by_themselves} == {2}


def test_bfloat16_throughout(in_bf16, tmp_path):
    """Correct runs pass. A factor that their rounding errors hide is found by its module alone, a large one by its distance, too."""
    names = ("ddp", "deepspeed", "fsdp", "reference")
    result = compare.judge([in_bf16 / name for name in names])
    for name in names[:3]:
        assert result.verdict(name) == "PASS" and len(result.runs[name].by_themselves) == 192
    for factor, is_hidden in ((1.01, True), (1.3, False)):
        folder = tmp_path / str(factor)
        shutil.copytree(in_bf16, folder)
        gradient = f"gradient/{PROJECTION}.weight"
        change_tensor(folder / "fsdp", 1, gradient, lambda tensor, factor=factor: tensor.mul_(factor))
        run = judged(folder).runs["fsdp"]
        assert [row.name for row in run.by_themselves if row.too_far and row.step == 1] == [gradient]
        assert run.rows_of(1)[gradient].too_far is not is_hidden
