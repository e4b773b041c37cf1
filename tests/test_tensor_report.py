"""What a report says: enough to be filed, and nothing that a terminal or a page would execute."""

import json
import re

import pytest
from edited import edit
from test_history import require_origin

from lockstep import compare
from lockstep.verdict import tensor_report


@pytest.fixture(scope="module")
def written(dumps, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
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
    assert tensor_report._escaped("a\x1b[2J\nb") == r"a\\x1b\[2J\\nb"
