"""Every choice of a few options, each in a run of its own: which of them go together?

A [vary] table with `each_up_to = 3` has a run for each value of each option, each pair and each triple, with what they
need and nothing else. (Without it, options go together in pairs, several pairs in one run: variations.py.)
"""

import itertools
import json
from collections.abc import Iterable
from typing import Any

from extras.studies import variations
from extras.studies.study import DEFAULT, Flags, Value, Varied, Vary
from extras.studies.variations import Case, Choice, Group, needs_of
from lockstep.verdict.loss_curves import PASS

Chosen = tuple[str, Varied]  # option, value


def cases(vary: Vary, shared: Flags) -> list[Case]:
    """One case for each choice.

    A choice that contradicts itself is left out: an option needs a value that another one does not have.
    """
    by_choice: dict[str, Case] = {}
    for number in range(1, vary.each_up_to + 1):
        for chosen in itertools.combinations(values(vary), number):
            choice = with_needs(vary, shared, dict(chosen)) if len(dict(chosen)) == number else None
            if choice is not None:
                key = json.dumps(choice, sort_keys=True)
                by_choice.setdefault(key, Case(f"{number}-{len(by_choice):03}", choice))
    return list(by_choice.values())


def groups(vary: Vary) -> list[Group]:
    """One group, whose runs share their flags with one control."""
    return [
        Group(variations.name_of(shared), shared, cases(vary, shared)) for shared in variations.alone(vary)
    ]


def values(vary: Vary) -> list[Chosen]:
    """(option, value) of every value of every option."""
    return [(option, value) for option, of_option in vary.options.items() for value in of_option]


def with_needs(vary: Vary, shared: Flags, choice: Choice) -> Choice | None:
    """The choice, what it needs, and what that needs; None if it contradicts itself or a shared flag."""
    whole, before = dict(choice), None
    while whole != before:
        before = dict(whole)
        allowed: dict[str, list[Value]] = {}
        for option, value in whole.items():
            for needed, values in needs_of(vary, option, value).items():
                allowed[needed] = [v for v in allowed.get(needed, values) if v in values]
        for needed, values in allowed.items():
            if not values or shared.get(needed, choice.get(needed, values[0])) not in values:
                return None
            chosen_value = choice.get(needed, values[0])
            if needed not in shared and chosen_value != DEFAULT:
                whole[needed] = chosen_value
    return whole


def label(chosen: Chosen) -> str:
    option, value = chosen
    return option if value is True else f"{option} {json.dumps(value).strip(chr(34))}"


def label_of(row: dict[str, Any]) -> str:
    """The choice of a run, with what it needs."""
    return ", ".join(label(chosen) for chosen in row["options"].items())


def table(vary: Vary, rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each value of each option: its outcome alone and with each other value, and how many triples with it pass."""
    outcomes = {json.dumps(row["options"], sort_keys=True): row["outcome"] for row in rows}
    every = values(vary)
    lines = [["", *map(label, every), "in triples"]]
    for chosen in every:
        cells = [
            _outcome(vary, rows, outcomes, dict([chosen, other])) if _can_combine(chosen, other) else ""
            for other in every
        ]
        triples = [
            _outcome(vary, rows, outcomes, dict([chosen, *pair]))
            for pair in itertools.combinations(
                [other for other in every if _can_combine(chosen, other) and other != chosen], 2
            )
            if _can_combine(*pair)
        ]
        ran = [outcome for outcome in triples if outcome]
        lines.append([label(chosen), *cells, f"{ran.count(PASS)} of {len(ran)}"])
    return lines


def _can_combine(one: Chosen, other: Chosen) -> bool:
    """Whether one run can have both: they are the same, or values of different options."""
    return one == other or one[0] != other[0]


def _outcome(vary: Vary, rows: list[dict[str, Any]], outcomes: dict[str, str], choice: Choice) -> str:
    """The outcome of the run with this choice and what it needs; "" if there is none."""
    whole = with_needs(vary, rows[0]["shared"], choice)
    return outcomes.get(json.dumps(whole, sort_keys=True), "") if whole is not None else ""


def unexplained(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the runs that do not pass, those that do not contain a smaller choice with the same reason."""
    kept: list[dict[str, Any]] = []
    for row in sorted((row for row in rows if row["outcome"] != PASS), key=lambda row: len(row["options"])):
        inside = (other for other in kept if other["options"].items() <= row["options"].items())
        if not any((other["outcome"], other["why"]) == (row["outcome"], row["why"]) for other in inside):
            kept.append(row)
    return kept
