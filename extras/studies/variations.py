"""A [vary] table: options of a strategy, one by one and together in pairs.

Each run is judged against a control with the same model.

[vary]
strategy = "NAME"
alone_with = "optimizer"                    # one by one with each value of this shared flag; without it with the first of all

[vary.flags]                                # of all runs but the control
tp_size = 1

[vary.shared]                               # flags of the control, too: each combination that occurs has a control of its own
gradient_accumulation_steps = [1, 2, 3]
optimizer = ["sgd", "adamw"]

[vary.options]                              # flags of the strategy, or places in its library's file; beside the values, the default
zero_stage = [0, 2, 3]
"zero_optimization.overlap_comm" = [true]

[vary.alone]                                # the same, but not in pairs
"zero_optimization.stage3_max_live_parameters" = [0]

[vary.needs]                                # what an option needs to mean anything; "default" is the option left out
"zero_optimization.overlap_comm" = { zero_stage = [2, 3, "default"] }
"zero_stage.3" = { tp_size = ["default"] }  # of one value alone
"tensor_parallel.preset_model.qwen2" = { model_name = ["tiny-qwen2"] }  # a shared flag

[vary.differs]                              # options that change numbers by design: their runs are measured, not judged
"data_types.grad_accum_dtype" = "gradients are added in bfloat16"
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from extras.studies import study as study_file
from extras.studies.study import DEFAULT, Flags, Planned, Run, Study, Value, Varied, Vary
from lockstep.ground.errors import UserError
from lockstep.plan.command_line import build_parser
from lockstep.plan.config import Spec
from lockstep.plan.strategies import spec_of

Choice = dict[str, Varied]  # option -> value; one that is left out has its default


@dataclass(frozen=True)
class Case:
    """One run: what it varies, and the run that differs from it in `varied` alone (only of runs that vary one option)."""

    name: str
    choice: Choice
    varied: str | None = None
    neighbour: str | None = None


@dataclass
class Group:
    """The runs that share flags with one control."""

    name: str
    shared: Flags
    cases: list[Case] = field(default_factory=list)


def groups(vary: Vary) -> list[Group]:
    """One by one, then in pairs with all shared values. Raises UserError without the package covertable."""
    by_name = {
        name_of(shared): Group(name_of(shared), shared, one_by_one(vary, shared)) for shared in alone(vary)
    }
    for number, row in enumerate(_in_pairs(vary)):
        shared = {flag: row[flag] for flag in vary.shared}
        choice = {
            option: value for option, value in row.items() if option in vary.options and value != DEFAULT
        }
        group = by_name.setdefault(name_of(shared), Group(name_of(shared), shared))
        group.cases.append(Case(f"pairs-{number:02}", choice))
    return list(by_name.values())


def only(groups: list[Group], names: list[str]) -> list[Group]:
    """The runs of these names, and those that they are compared with. Raises UserError for a name that no run has."""
    known = [case.name for group in groups for case in group.cases]
    for name in names:
        if name not in known:
            raise UserError(
                f"--only {name}: the study has no such run; --dry_run shows its {len(known)} runs"
            )
    chosen = []
    for group in groups:
        kept = {*names, *(case.neighbour for case in group.cases if case.name in names)}
        cases = [case for case in group.cases if case.name in kept]
        if cases:
            chosen.append(dataclasses.replace(group, cases=cases))
    return chosen


def name_of(shared: Flags) -> str:
    return ",".join(f"{value}" for value in shared.values()) or "all"


def alone(vary: Vary) -> list[Flags]:
    """The shared flags of the runs one by one: the first values, and `alone_with` has each of its own."""
    first = {flag: values[0] for flag, values in vary.shared.items()}
    if vary.alone_with is None:
        return [first]
    return [{**first, vary.alone_with: value} for value in vary.shared[vary.alone_with]]


def one_by_one(vary: Vary, shared: Flags) -> list[Case]:
    """The cases of the default, and of each value of each option, with what the option needs and nothing else.

    An option that needs other values than the `shared` ones is left out.
    """
    cases = {"default": Case("default", {})}
    names = {_key({}): "default"}
    for option, values in (*vary.options.items(), *vary.alone.items()):
        for value in values:
            needs = needs_of(vary, option, value)
            if any(shared[key] not in allowed for key, allowed in needs.items() if key in shared):
                continue
            needed = {key: allowed[0] for key, allowed in needs.items() if key not in shared}
            without: Choice = {key: v for key, v in needed.items() if v != DEFAULT}
            choice = {**without, option: value}
            neighbour = names.setdefault(_key(without), f"base-{len(cases):02}")
            cases.setdefault(neighbour, Case(neighbour, without))
            name = names.setdefault(_key(choice), f"alone-{len(cases):02}")
            # The case may already be there as a neighbour
            cases[name] = Case(name, choice, option, neighbour)
    return list(cases.values())


def needs_of(vary: Vary, option: str, value: Varied) -> dict[str, list[Value]]:
    """Other option, or shared flag -> the values of it that this value of an option needs."""
    return {**vary.needs.get(option, {}), **vary.needs.get(study_file.place_of(option, value), {})}


def _key(choice: Choice) -> str:
    return json.dumps(choice, sort_keys=True)


def _in_pairs(vary: Vary) -> list[dict[str, Any]]:
    """Rows in which every two values of two options, or of an option and a shared flag, meet at least once."""
    try:
        import covertable
    except ImportError as error:
        raise UserError(
            "a study that varies options needs the package covertable; install requirements-studies.txt"
        ) from error
    factors = {**vary.shared, **{option: [DEFAULT, *values] for option, values in vary.options.items()}}
    # Numbers, because a dot in a key means a path there; functions, because its own conditions take twice as long.
    keys = {option: number for number, option in enumerate(factors)}

    def need(option: str, value: Any, other: str, allowed: list[Any]) -> dict[str, Any]:
        key, other_key = keys[option], keys[other]

        def holds(row: dict[int, Any]) -> bool:
            return row[key] != value or row[other_key] in allowed

        return {"operator": "fn", "requires": [key, other_key], "evaluate": holds}

    needs = [
        need(option, value, other, allowed)
        for option, values in vary.options.items()
        for value in values
        for other, allowed in needs_of(vary, option, value).items()
    ]
    rows = covertable.make({keys[option]: values for option, values in factors.items()}, constraints=needs)
    return [{option: row[key] for option, key in keys.items()} for row in rows]


def as_run(vary: Vary, case: Case) -> Run:
    """The case as a run of a study: flags as they are, everything else in the file of the strategy's library."""
    spec = spec_of(vary.strategy)
    actions = build_parser(vary.strategy)._actions
    flag_names = {name.removeprefix("--") for action in actions for name in action.option_strings}
    flags = {option: value for option, value in case.choice.items() if option in flag_names}
    content: dict[str, Any] = {}
    for option, value in case.choice.items():
        if option not in flag_names:
            *sections, key = option.split(".")
            section = content
            for name in sections:
                section = section.setdefault(name, {})
            section[key] = value
    if content:
        flags[_file_option(spec)] = json.dumps(content)
    differs = next((why for option, why in vary.differs.items() if option in case.choice), None)
    return Run.model_validate({"strategy": vary.strategy, "differs": differs, **flags})


def _file_option(spec: Spec) -> str:
    if not spec.file_option:
        raise UserError(f"{spec.name} takes no file of its library; vary its flags alone")
    return spec.file_option


def plan(study: Study, vary: Vary, group: Group, place: Path) -> tuple[list[Planned], dict[str, str]]:
    """The control and the runs of a group, and why the others are refused, by name."""
    control = study_file.plan_control(study, {**study.shared, **group.shared, **study.control}, place)
    accepted, refused = [control], {}
    for case in group.cases:
        run = as_run(vary, case)
        flags = {**study.shared, **group.shared, **vary.flags, **run.flags, "count_collectives": True}
        try:
            accepted.append(study_file.plan_run(study, case.name, run, flags, place))
        except UserError as error:
            refused[case.name] = str(error)
    return accepted, refused
