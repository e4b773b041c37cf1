"""Studies that vary options: every pair that can be meets, what an option needs is there, and a refusal is a result."""

import itertools
import json

import listed
import pytest

import run_study
from extras.studies import options_report, variations
from extras.studies import study as study_file
from extras.studies.study import DEFAULT
from lockstep.ground.errors import UserError

VARIED = """title = "varied"
tensors = 1

[shared]
batch_size = 2
seq_length = 32
debug_steps = 2
dp_size = 2

[control]

[vary]
strategy = "deepspeed"

[vary.flags]
tp_size = 1

[vary.shared]
gradient_accumulation_steps = [2]

[vary.options]
zero_stage = [3]
fp16 = [true]
"zero_optimization.stage3_max_live_parameters" = [0]
"zero_optimization.reduce_bucket_size" = [-1]

[vary.alone]
gradient_allreduce_op = ["sum"]

[vary.needs]
"zero_optimization.stage3_max_live_parameters" = { zero_stage = [3] }
"""


def written(tmp_path, text=VARIED):
    (tmp_path / "s.toml").write_text(text)
    return tmp_path / "s.toml"


def allowed(vary, pair):
    """Whether two values can meet: each has what it needs, as far as the two say."""
    return all(
        pair.get(other, allowed[0]) in allowed
        for option, value in pair.items()
        if value != DEFAULT
        for other, allowed in variations.needs_of(vary, option, value).items()
    )


@pytest.mark.parametrize("name", ["ddp", "deepspeed", "fsdp"])
def test_every_pair_that_can_be_meets_and_no_other(name, request):
    if name == "deepspeed" and not request.config.getoption("--all"):
        pytest.skip("only with --all: to find its pairs takes a quarter of a minute")
    vary = study_file.read(run_study.STUDIES / f"{name}_options.toml").vary
    factors = {**vary.shared, **{option: [DEFAULT, *values] for option, values in vary.options.items()}}
    rows = variations._in_pairs(vary)
    met = {
        repr(((one, row[one]), (two, row[two])))  # a value may be a table
        for row in rows
        for one, two in itertools.combinations(factors, 2)
    }
    assert all(allowed(vary, row) for row in rows)
    missing = [
        (a, b)
        for one, two in itertools.combinations(factors, 2)
        for a in ((one, value) for value in factors[one])
        for b in ((two, value) for value in factors[two])
        if allowed(vary, dict((a, b))) and repr((a, b)) not in met
    ]
    # two options may need different values of a third: no run can have both
    assert all(needs_conflict(vary, dict(pair)) for pair in missing), missing


def needs_conflict(vary, pair):
    """Whether what two values need, and what that needs in turn, contradicts each other."""
    possible = {option: {repr(value)} for option, value in pair.items()}
    waiting = list(pair.items())
    while waiting:
        option, value = waiting.pop()
        if value == DEFAULT or option in vary.shared:
            continue
        for other, values in variations.needs_of(vary, option, value).items():
            narrowed = possible.get(other, {repr(each) for each in values}) & {repr(each) for each in values}
            if len(values) == 1 and narrowed != possible.get(other):
                waiting.append((other, values[0]))
            possible[other] = narrowed
    return not all(possible.values())


@pytest.mark.parametrize("name", [None, "ddp", "deepspeed", "fsdp"])
def test_one_by_one_every_value_has_a_neighbour_without_it(tmp_path, name):
    path = run_study.STUDIES / f"{name}_options.toml" if name else written(tmp_path)
    vary = study_file.read(path).vary
    met = set()
    for shared in variations.alone(vary):
        found = variations.one_by_one(vary, shared)
        cases = {case.name: case for case in found}
        assert len(cases) == len(found)
        for case in found:
            if case.varied is not None:
                without = dict(case.choice)
                met.add(study_file.place_of(case.varied, without.pop(case.varied)))
                assert cases[case.neighbour].choice == without
    varied = [*vary.options.items(), *vary.alone.items()]
    assert met == {study_file.place_of(option, value) for option, values in varied for value in values}


SHARED = """gradient_accumulation_steps = [2]
optimizer = ["sgd", "adamw"]"""


def test_alone_with_each_value_of_a_shared_flag(tmp_path):
    """Each has a group and a column; an option that needs one of the values is tried with that one alone."""
    text = VARIED.replace("gradient_accumulation_steps = [2]", SHARED)
    text = text.replace("[vary.flags]", 'alone_with = "optimizer"\n[vary.flags]')
    study = study_file.read(written(tmp_path, f'{text}fp16 = {{ optimizer = ["adamw"] }}\n'))
    groups = {group.shared["optimizer"]: group for group in variations.groups(study.vary)}
    varied = {name: [case.varied for case in group.cases] for name, group in groups.items()}
    assert "fp16" in varied["adamw"] and "fp16" not in varied["sgd"]
    assert all("zero_stage" in each and "gradient_allreduce_op" in each for each in varied.values())
    rows = [
        row
        for group in groups.values()
        for row in options_report.results(group, [], [], {case.name: group.name for case in group.cases})
    ]
    head, *lines = options_report.table(study, rows)
    assert head[1:3] == ["alone, sgd", "alone, adamw"]
    by_option = {line[0]: line[1:3] for line in lines}
    assert by_option["zero_stage = 3"] == [options_report.REFUSED_BY_US] * 2
    assert by_option["fp16 = true"] == ["", options_report.REFUSED_BY_US]


def test_a_table_goes_into_the_file_as_it_is(tmp_path):
    rule = {"layer_specs": [{"patterns": ["x"], "partition_type": "row"}]}
    vary = study_file.read(written(tmp_path)).vary
    run = variations.as_run(vary, variations.Case("x", {"tensor_parallel.partition_config": rule}))
    assert json.loads(run.flags["deepspeed_config"]) == {"tensor_parallel": {"partition_config": rule}}


def test_only_one_run_takes_its_neighbour_along(tmp_path, capsys):
    path = written(tmp_path)
    groups = variations.groups(study_file.read(path).vary)
    (case,) = [
        case for case in groups[0].cases if case.varied == "zero_optimization.stage3_max_live_parameters"
    ]
    (chosen,) = variations.only(groups, [case.name])
    assert {each.name for each in chosen.cases} == {case.name, case.neighbour}
    assert run_study.main([str(path), "--only", case.name, "--dry_run"]) == 0
    assert f"{groups[0].name}: 2 runs" in capsys.readouterr().out
    assert run_study.main([str(path), "--only", "nosuch"]) == 2
    assert "--only nosuch: the study has no such run; --dry_run shows its" in capsys.readouterr().err


def test_what_no_flag_sets_goes_into_the_file(tmp_path):
    vary = study_file.read(written(tmp_path)).vary
    choice = {"zero_stage": 3, "zero_optimization.stage3_max_live_parameters": 0}
    run = variations.as_run(vary, variations.Case("x", choice))
    assert run.flags["zero_stage"] == 3
    assert json.loads(run.flags["deepspeed_config"]) == {
        "zero_optimization": {"stage3_max_live_parameters": 0}
    }
    fsdp = vary.model_copy(update={"strategy": "fsdp"})
    with pytest.raises(UserError, match="takes no file of its library"):
        variations.as_run(fsdp, variations.Case("x", {"a.b": 1}))


def test_from_end_to_end(tmp_path, capsys):
    """Two options are right, one is refused by Lockstep, one by DeepSpeed, and one sums what the others average."""
    out = tmp_path / "out"
    status = run_study.main([str(written(tmp_path)), "--output_dir", str(out)])
    said = capsys.readouterr()
    assert status == 1 and said.out.endswith("FAIL\n"), said.out + said.err
    rows = json.loads((out / "report.json").read_text())["runs"]
    alone = {json.dumps(row["options"]): row for row in rows if row["varied"]}
    assert alone['{"zero_stage": 3}']["outcome"] == "PASS"
    assert alone['{"fp16": true}']["outcome"] == options_report.REFUSED_BY_US
    negative = alone['{"zero_optimization.reduce_bucket_size": -1}']
    assert (
        negative["outcome"] == options_report.REFUSED_BY_LIBRARY and "reduce_bucket_size" in negative["why"]
    )
    released = alone['{"zero_stage": 3, "zero_optimization.stage3_max_live_parameters": 0}']
    assert (released["outcome"], released["other"]) == ("PASS", ["collectives"])
    wrong = alone['{"gradient_allreduce_op": "sum"}']
    assert wrong["outcome"] == "FAIL" and "gradient/model.norm.weight" in wrong["why"]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            ('max_live_parameters" = { zero', 'max_alive" = { zero'),
            "line 31: .*max_alive is no option that is varied",
        ),
        (
            ("[vary.needs]\n", '[vary.needs]\n"zero_stage.7" = { fp16 = [true] }\n'),
            "line 31: zero_stage.7 is no",
        ),
        (("[vary.needs]\n", '[vary.differs]\nfp61 = "x"\n[vary.needs]\n'), "line 31: fp61 is no option"),
        (("[vary.flags]\n", '[vary.flags]\nrun_name = "x"\n'), "line 16: run_name is set by the study"),
        (
            ("[vary.flags]\n", 'alone_with = "zero_stage"\n[vary.flags]\n'),
            "line 15: zero_stage is no flag of",
        ),
    ],
)
def test_what_is_said_of_an_option_that_is_not_varied_is_refused(tmp_path, change, message):
    assert change[0] in VARIED
    with pytest.raises(UserError, match=message):
        study_file.read(written(tmp_path, VARIED.replace(*change)))


DDP = """title = "ddp"
tensors = 1

[shared]
batch_size = 1
seq_length = 32
debug_steps = 1
dp_size = 2

[control]

[vary]
strategy = "ddp"

[vary.options]
gradient_as_bucket_view = [false]

[vary.alone]
compress_gradients = ["bf16"]
"""


def test_an_option_that_changes_numbers_fails_unless_it_is_declared(tmp_path, capsys):
    """Compression: not comparable with the control. Declared, it is measured."""
    path, out = written(tmp_path, DDP), tmp_path / "out"
    assert run_study.main([str(path), "--output_dir", str(out)]) == 1
    assert outcomes(out) == {"default": "PASS", "alone-01": "PASS", "alone-02": "NOT COMPARABLE"}
    assert "reduction_dtype" in (out / "report.md").read_text()
    pages = listed.pages(out / "report.html")
    verdicts = {run.rpartition("/")[2]: view["verdict"] for run, (_, view) in pages.items()}
    # Of the tensors, which say it in other words
    assert {case: verdicts[case] for case in outcomes(out)} == {
        **outcomes(out),
        "alone-02": "CONFIGURED DIFFERENTLY",
    }
    written(tmp_path, f'{DDP}\n[vary.differs]\ncompress_gradients = "rounded to bfloat16"\n')
    assert run_study.main([str(path), "--output_dir", str(out), "--resume"]) == 0, capsys.readouterr().out
    assert outcomes(out)["alone-02"] == "measured"


def outcomes(out):
    rows = json.loads((out / "report.json").read_text())["runs"]
    return {row["case"]: row["outcome"] for row in rows if not row["case"].startswith("pairs")}
