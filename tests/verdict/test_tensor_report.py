"""What a report says: enough to be filed, and nothing that a terminal or a page would execute."""

import json
import re
from dataclasses import replace

import pytest
from edited import edit
from page_cases import HIDDEN, WRONG, row
from synthetic import require_origin

from lockstep import compare
from lockstep.ground.words import and_more
from lockstep.verdict import module_results, tensor_report
from lockstep.verdict.factors import Factor


@pytest.fixture(scope="module")
def written(dumps, new_folder):
    folder = new_folder("report")
    assert compare.main([str(dumps / "fsdp"), str(dumps / "reference"), "--output_dir", str(folder)]) == 0
    return (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    "what, value",
    [
        ("model", r"tiny-qwen2, 2 layers"),
        ("precision", "fp32"),
        ("mesh", r"DDP .*: TP=1, DP=2, batch_size \d+ on cpu, FSDP.*: TP=2, DP=2, batch_size \d+ on cpu"),
        ("seed", "0"),
        ("steps", "1, 2 captured of 2"),
        ("dataset", r"builtin .* tokenizer word-crc32"),
        ("versions", r"torch \S+, transformers \S+.*numpy.*safetensors"),
        ("Lockstep", r"captured at \S+; compared at \S+"),
        ("processor", r"\w+"),
        ("captured", r"\d{4}-\d\d-\d\dT\S+Z"),
        ("compared", r"\d{4}-\d\d-\d\dT\S+Z by python "),
        ("options", "optimizer adamw, learning_rate 0.001"),
    ],
)
def test_it_says_what_was_compared(written, what, value):
    page, data = written
    assert re.search(value, data["about"][what]), data["about"][what]
    assert f"- {what}: " in page


def test_the_json_has_the_origin_of_every_run(written):
    runs = written[1]["runs"]
    assert set(runs) == {"ddp", "fsdp"} and all(
        run["origin"]["commit"] and run["missing"] == [] and 0 < run["nearest"] < 1 for run in runs.values()
    )
    for run in runs.values():
        require_origin(run["versions"], run["origin"])


def test_text_from_files_is_no_markup(dumps, tmp_path, capsys):
    import shutil

    for name in ("ddp", "fsdp"):
        shutil.copytree(dumps / name, tmp_path / name)
        edit(
            tmp_path / name,
            lambda manifest: manifest["run"]["config"].update(dataset_name="a|b<script>`x`[y](z)"),
        )
    assert compare.main([str(tmp_path / "ddp"), str(tmp_path / "fsdp"), "--output_dir", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert r"a\|b\<script\>\`x\`\[y\](z)" in page and "<script>" not in page
    assert json.loads((tmp_path / "report.json").read_text())["about"]["dataset"].startswith("a|b<script>")


def test_control_characters_do_not_reach_the_terminal():
    assert tensor_report.escaped("a\x1b[2J\nb") == r"a\\x1b\[2J\\nb"


def test_one_wrong_tensor_is_said_in_the_singular():
    right, wrong = (row(1, name, wrong=name == WRONG) for name in (HIDDEN, WRONG))
    said = module_results.sentence([right, wrong])
    assert said.startswith(
        f"1 of 2 tensors is not what its module computes from its recorded inputs: {WRONG}: relative error"
    )
    said = module_results.sentence([right, wrong, row(2, WRONG, wrong=True)])
    assert (
        f"are not what their modules compute from their recorded inputs: {WRONG} in steps 1, 2; the first: "
        in said
    )


@pytest.mark.parametrize(
    "wrong, tolerated, said",
    [
        (False, 1e-5, "rows 4 to 7 of 8 are 1.003 times what they should be (300 times what a factor may be off by); its distance is within what is tolerated"),
        (True, 1e-9, "rows 4 to 7 of 8 are 1.003 times what they should be (3e+06 times what a factor may be off by)"),
        # A part of another error, which is farther beyond by far
        (True, 1e-3, "relative error "),
    ],
)  # fmt: skip
def test_a_factor_is_told_where_it_is_what_is_wrong(wrong, tolerated, said):
    one = replace(row(1, HIDDEN, wrong=wrong), factor=Factor(HIDDEN, (8, 6), (0, 4, 8), 0.003, tolerated))
    assert one.too_far and one.describe().startswith(said)
    assert ("relative error" in one.describe()) is (said == "relative error ")


def test_a_projection_alone_is_no_factor_of_a_tensor_that_is_far():
    """Half of another tensor may lie along the right one, and be no multiple of it."""
    one = replace(row(1, HIDDEN, wrong=True), factor=Factor(HIDDEN, (8, 6), None, -0.5, 1e-9))
    along = replace(one.distance, error=0.5 * one.distance.change, scale=0.5)
    assert replace(one, distance=along).describe().startswith("all of it is 0.5 times what it should be")
    across = replace(along, error=0.9 * one.distance.change)
    assert replace(one, distance=across).describe().startswith("relative error ")


@pytest.mark.parametrize(
    "names, said", [("a", "a"), ("ab", "a and b"), ("abc", "a, b and c"), ("abcd", "a and 3 more")]
)
def test_up_to_three_names_are_said(names, said):
    assert and_more([*names]) == said
