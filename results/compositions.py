"""Write docs/compositions.md, what goes together, from the studies stored here: python results/compositions.py"""

import json
from pathlib import Path

from extras.studies import compositions
from extras.studies import study as study_file
from extras.studies.options_report import REFUSALS
from extras.studies.report import DID_NOT_RUN
from lockstep.ground.files import write_text
from lockstep.ground.words import in_markdown
from lockstep.verdict.loss_curves import PASS

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "compositions.md"
NO = {PASS: "yes", **dict.fromkeys((*REFUSALS, DID_NOT_RUN), "no")}
STUDIES = ("compositions_fsdp", "compositions_deepspeed")


def read() -> dict[str, dict]:
    return {name: json.loads((HERE / f"{name}.json").read_text()) for name in STUDIES}


def page(contents: dict[str, dict]) -> str:
    lines = [
        "# What goes together",
        "",
        "Every dimension and technique alone (on the diagonal), with each other one, and in threes. *yes*: every tensor of the first step agrees with",
        "the float64 reference, and every loss of two steps with DDP's. *no*: the reason is below the table. An empty cell was not",
        "run, because its two settings exclude each other, such as two values of one option. Made by `python results/compositions.py` from the reports of the two studies; tests/extras/test_compositions.py holds the page",
        "against them, and `./run_tests.sh --all` runs them again.",
    ]
    for name, content in contents.items():
        study = study_file.read(HERE.parent / "studies" / f"{name}.toml")
        assert study.vary is not None
        reasons = {
            compositions.label_of(row): row["why"] for row in compositions.unexplained(content["runs"])
        }
        head, *rows = compositions.table(study.vary, content["runs"])
        lines += [
            "",
            f"## {study.title}",
            "",
            f"`run_study.py studies/{name}.toml`, {len(content['runs'])} runs.",
            "",
        ]
        lines += in_markdown([head, *([row[0], *(NO.get(cell, cell) for cell in row[1:])] for row in rows)])
        lines += [
            "",
            "The others, with the reason (a larger choice with one of these inside has the same):",
            "",
        ]
        lines += [f"- {what}: {why}" for what, why in reasons.items()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    write_text(PAGE, page(read()))
