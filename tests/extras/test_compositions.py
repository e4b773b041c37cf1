"""What goes together: every pair and triple has a run, what is refused is refused for a reason, and the page says what came out."""

import itertools
import json

import pytest
from programs import script

import run_study
from extras.studies import compositions, variations
from extras.studies import study as study_file
from extras.studies.study import DEFAULT

PAGES = script("compositions")


@pytest.fixture(params=PAGES.STUDIES)
def study(request):
    return study_file.read(run_study.STUDIES / f"{request.param}.toml")


def test_every_pair_and_triple_has_a_run(study):
    vary = study.vary
    (group,) = compositions.groups(vary)
    found = {json.dumps(case.choice, sort_keys=True) for case in group.cases}
    chosen = compositions.values(vary)
    for number in (1, 2, 3):
        for some in itertools.combinations(chosen, number):
            if len(dict(some)) < number:
                continue  # two values of one option
            whole = compositions.with_needs(vary, {}, dict(some))
            assert whole is None or json.dumps(whole, sort_keys=True) in found
    assert len(found) == len(group.cases) > 90


def test_what_an_option_needs_comes_with_it():
    vary = study_file.read(run_study.STUDIES / "compositions_fsdp.toml").vary
    assert compositions.with_needs(vary, {}, {"sequence_parallel": True}) == {
        "sequence_parallel": True,
        "tp_size": 2,
    }
    assert compositions.with_needs(vary, {"tp_size": 1}, {"sequence_parallel": True}) is None
    needs = {"a": {"b": [DEFAULT, 2]}, "c": {"b": [2, 3]}, "b": {"d": [4]}}
    vary = vary.model_copy(update={"needs": needs})
    assert compositions.with_needs(vary, {}, {"a": 1}) == {"a": 1}
    assert compositions.with_needs(vary, {}, {"a": 1, "c": 1}) == {"a": 1, "c": 1, "b": 2, "d": 4}
    assert compositions.with_needs(vary, {}, {"c": 1, "b": 1}) is None


def test_the_page_is_generated():
    contents = PAGES.read()
    assert PAGES.PAGE.read_text() == PAGES.page(contents)
    contents["compositions_fsdp"]["runs"][0]["outcome"] = "FAIL"  # negative control
    assert PAGES.PAGE.read_text() != PAGES.page(contents)


def test_what_the_page_says_is_refused_is_refused_now(tmp_path):
    """Of each reason the smallest choice. What passed is trained again only with --all."""
    for name, content in PAGES.read().items():
        study = study_file.read(run_study.STUDIES / f"{name}.toml")
        rows = compositions.unexplained(content["runs"])
        assert rows and all(row["outcome"] == "refused by Lockstep" for row in rows)
        cases = [variations.Case(row["case"], row["options"]) for row in rows]
        _, refused = variations.plan(study, study.vary, variations.Group("all", {}, cases), tmp_path)
        assert refused == {row["case"]: row["why"] for row in rows}


def test_only_the_smallest_choice_with_a_reason_is_listed():
    def row(outcome, why="", **options):
        return {"outcome": outcome, "why": why, "options": options}

    rows = [
        row("FAIL", a=1, b=1, c=1),
        row("FAIL", a=1, b=1),
        row("PASS", a=1),
        row("DID NOT RUN", a=1, b=1, d=1),
    ]
    assert compositions.unexplained(rows) == [rows[1], rows[3]]
    assert compositions.unexplained([*rows, row("FAIL", "another tensor", a=1, b=1, c=2)])[-1]["why"]


@pytest.mark.timeout(3600)
def test_every_choice_is_trained_and_judged(study, tmp_path, request):
    if not request.config.getoption("--all"):
        pytest.skip("only with --all: 300 runs take ten minutes")
    name = next(
        name for name in PAGES.STUDIES if study_file.read(run_study.STUDIES / f"{name}.toml") == study
    )
    arguments = [str(run_study.STUDIES / f"{name}.toml"), "--output_dir", str(tmp_path / "out")]
    assert run_study.main(arguments) == 0
    now = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    before = PAGES.read()[name]["runs"]
    assert [(row["case"], row["outcome"]) for row in now] == [(row["case"], row["outcome"]) for row in before]
