"""A study that varies options: for each value of each option, whether its runs compute the same."""

import json
from pathlib import Path
from typing import Any

from extras.studies import compositions, report, training, variations
from extras.studies.report import DID_NOT_RUN, MEASURED
from extras.studies.study import Planned, Study, Vary
from extras.studies.variations import Case, Group
from lockstep.dumps import history
from lockstep.ground.errors import LIBRARY_REFUSES, printable
from lockstep.ground.words import in_columns
from lockstep.verdict.loss_curves import PASS

REFUSED_BY_US, REFUSED_BY_LIBRARY = "refused by Lockstep", "refused by the library"
REFUSALS = (REFUSED_BY_US, REFUSED_BY_LIBRARY)
NOT_SEEN = "no: not seen to act"
OTHER, IN_PAIRS = "other bits or collectives than without it", "passes in pairs"


class VariedOptions:
    """See `Kind` in run_study.py: groups of runs, each against its own control. What is refused is a result, too."""

    def __init__(self, study: Study, vary: Vary, only: list[str], place: Path):
        self.study, self.vary, self.place = study, vary, place
        groups = compositions.groups(vary) if vary.each_up_to else variations.groups(vary)
        self.groups = variations.only(groups, only) if only else groups

    def show(self) -> None:
        for group in self.groups:
            print(f"{group.name}: {len(group.cases)} runs")
            for case in group.cases:
                print(f"  {case.name}: {json.dumps(case.choice)}")

    def run(self, command: str) -> bool:
        rows = []
        for number, group in enumerate(self.groups):
            folder = self.place / "groups" / group.name
            planned, refused = variations.plan(self.study, self.vary, group, folder)
            report.note(
                f"{number + 1} of {len(self.groups)}, {group.name}: {len(group.cases)} runs, {len(refused)} refused"
            )
            failed = training.train(planned, folder, apart=False, note=lambda line: report.note(f"  {line}"))
            training.reference([run for run in planned if run.name not in failed], folder)
            found = report.rows(self.study, planned, failed, folder)
            rows += results(group, planned, found, refused)
            machine = report.provenance(planned[0])
            write(self.study, rows, self.place, command, machine)  # what is known so far
        print("", *in_columns(table(self.study, rows)), "", sep="\n")
        print(f"Report  {printable(self.place / 'report.md')}")
        return good(rows)


def results(
    group: Group, planned: list[Planned], found: list[dict[str, Any]], refused: dict[str, str]
) -> list[dict[str, Any]]:
    """A row for each case of a group: outcome, why, and in what it differs from the run without the option."""
    outcomes = {row["run"]: row for row in found}
    runs = {run.name: run for run in planned}
    rows = []
    for case in group.cases:
        row = outcomes.get(case.name, {})
        outcome, why = row.get("outcome", REFUSED_BY_US), row.get("why") or refused.get(case.name, "")
        # A library's own file is held against the library's classes before a start; other values are refused by the ranks.
        if outcome in (DID_NOT_RUN, REFUSED_BY_US) and LIBRARY_REFUSES in why:
            outcome = REFUSED_BY_LIBRARY
        first = row.get("first wrong") or []
        rows.append(
            {
                "group": group.name,
                "shared": group.shared,
                "case": case.name,
                "options": case.choice,
                "varied": case.varied,
                "outcome": outcome,
                "why": why or (f"first wrong tensor: {first[0]}" if first else ""),
                "worst tensor of tolerated": row.get("worst tensor of tolerated"),
                "other": _differs_in(case, runs),
                "page": f"groups/{group.name}/{row['page']}" if row.get("page") else "",
            }
        )
    return rows


def _differs_in(case: Case, runs: dict[str, Planned]) -> list[str] | None:
    """In what the run differs from its neighbour; None if one of the two did not finish.

    "bits": of losses, norms or final weights. "collectives": how many of each operation.
    """
    if case.neighbour is None or not {case.name, case.neighbour} <= runs.keys():
        return None
    compared = []
    for name in (case.name, case.neighbour):
        path = runs[name].config.history_path
        if not path.exists():
            return None
        record = history.read(path)
        if record.ended != "finished":
            return None
        numbers = [(step["loss"], step["grad_norm"]) for step in record.steps]
        compared.append(
            {
                "bits": (numbers, record.weights["final_sha256"]),
                "collectives": record.run.get("collectives"),
            }
        )
    own, neighbour = compared
    return [what for what in own if own[what] != neighbour[what]]


def table(study: Study, rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each value of each option; the outcome alone has a column for each value of `alone_with`."""
    vary = study.vary
    if vary is None:
        return []
    if vary.each_up_to:
        return compositions.table(vary, rows)
    flag = vary.alone_with
    alone_with = vary.shared[flag] if flag else [None]
    lines = [["option", *(f"alone, {value}" if flag else "alone" for value in alone_with), OTHER, IN_PAIRS]]
    for option, values in (*vary.options.items(), *vary.alone.items()):
        for value in values:
            with_it = [row for row in rows if row["options"].get(option, ...) == value]
            alone = [row for row in with_it if row["varied"] == option]
            outcomes = {row["shared"].get(flag): row["outcome"] for row in alone}
            pairs = [row for row in with_it if row["case"].startswith("pairs-")]
            passed = sum(row["outcome"] == PASS for row in pairs)
            refused = sum(row["outcome"] in REFUSALS for row in pairs)
            in_pairs = f"{passed} of {len(pairs)}" + (f", {refused} refused" if refused else "")
            lines.append(
                [
                    f"{option} = {json.dumps(value)}",
                    *(outcomes.get(flag_value, "") for flag_value in alone_with),
                    _acts(alone),
                    in_pairs if pairs else "",
                ]
            )
    return lines


def _acts(alone: list[dict[str, Any]]) -> str:
    """In what any of the runs with an option alone differs from the run without it."""
    known = [row["other"] for row in alone if row["other"] is not None]
    differ = [what for what in ("bits", "collectives") if any(what in differing for differing in known)]
    return (", ".join(differ) or NOT_SEEN) if known else ""


def good(rows: list[dict[str, Any]]) -> bool:
    return all(row["outcome"] in (PASS, MEASURED, *REFUSALS) for row in rows)


def write(
    study: Study, rows: list[dict[str, Any]], place: Path, command: str, machine: dict[str, Any]
) -> None:
    """Write the reports into the folder of the study. `machine` is the provenance."""
    others = [row for row in rows if row["outcome"] != PASS]
    heading = " The others:"
    if study.vary is not None and study.vary.each_up_to:
        others, heading = (
            compositions.unexplained(others),
            " Of the others, those that have no smaller choice among them:",
        )
    passed = sum(row["outcome"] == PASS for row in rows)
    further = ["", f"{len(rows)} runs. {passed} pass." + (heading if others else ""), ""]
    further += [
        f"- {row['group']}, {json.dumps(row['options'])}: {row['outcome']}: {printable(row['why'], 400)}"
        for row in others
    ]
    report.publish(
        study,
        rows,
        place,
        command,
        machine,
        good(rows),
        table=table(study, rows),
        further=further,
        listed=[(_cells(row), row["page"]) for row in rows],
        head=("run", "options", "outcome", "tensors / tolerated", "differs in", "why"),
    )


def _cells(row: dict[str, Any]) -> list[str]:
    """The line of a run on the page. The table of report.md has a line for each value of an option instead."""
    worst = row["worst tensor of tolerated"]
    return [
        f"{row['group']}/{row['case']}",
        ", ".join(f"{option} {json.dumps(value)}" for option, value in row["options"].items()),
        row["outcome"],
        "" if worst is None else f"{worst:.2g}",
        _acts([row]),
        printable(row["why"], 400),
    ]
