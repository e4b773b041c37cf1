"""Draw results/faults.png, which verdict sees how many planted faults, and write the table of all of them to results/faults.md.

Draw results/loss_converging.png again, from the report of the study.

python run_faults.py --precision P --output results/faults-P.json, for fp32, autocast and bf16
python results/figures.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from extras.studies import converging_report
from extras.studies.converging import Converging
from lockstep.plan.config import BLUE, JUDGED, VERMILION
from lockstep.plan.strategies import recorded

HERE = Path(__file__).parent
SEEN = {
    "loss curve": lambda row: row["loss_step"] is not None,
    "loss curve or gradient norm": lambda row: row["loss_step"] is not None
    or row["grad_norm_step"] is not None,
    "tensors": lambda row: row["caught"],
}


def summary(contents: dict[str, dict]) -> list[str]:
    """How many runs each verdict saw, and how many causes were right, by precision."""

    def share(rows: list[dict], wanted) -> str:
        return f"{sum(map(wanted, rows))} of {len(rows)}"

    def named(word: str):
        return lambda row: row["caught"] and row["named"] == word

    lines = {
        "caught by tensors": SEEN["tensors"],
        "first tensor as foretold": lambda row: row["first_right"],
        "cause named right": named("right"),
        "cause not explained": named("not explained"),
        "cause named wrong": named("wrong"),
        "missed by the loss curve": lambda row: not SEEN["loss curve"](row),
        "missed by loss curve and gradient norm": lambda row: not SEEN["loss curve or gradient norm"](row),
    }
    head = [f"| | {' | '.join(contents)} |", f"|---|{'---|' * len(contents)}"]
    return head + [
        f"| {what} | {' | '.join(share(content['rows'], wanted) for content in contents.values())} |"
        for what, wanted in lines.items()
    ]


def table(contents: dict[str, dict]) -> list[str]:
    """One row for each fault; the strategies in the registry's order where they differ."""
    found: dict[str, dict] = {precision: {} for precision in contents}
    for precision, content in contents.items():
        for row in content["rows"]:
            found[precision].setdefault(row["fault"], []).append(row)

    def cell(rows: list[dict], read) -> str:
        values = list(dict.fromkeys(read(row) for row in rows))
        return (
            " / ".join(str(read(row)) for row in rows)
            if len(values) > 1
            else str(values[0])
            if values
            else "not planted"
        )

    def step(key: str):
        return lambda row: "-" if row[key] is None else row[key]

    columns = ["fault", "class", "strategies"]
    columns += [f"{what}, {precision}" for what in ("loss curve", "grad norm") for precision in contents]
    columns += ["first tensor", "cause"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for name, rows in found["fp32"].items():
        cells = [f"`{name}`", rows[0]["class"], ", ".join(recorded(row["strategy"]).label for row in rows)]
        for key in ("loss_step", "grad_norm_step"):
            cells += [cell(found[precision].get(name, []), step(key)) for precision in contents]
        cells += [cell(rows, lambda row: "right" if row["first_right"] else f"WRONG: {row['first']}")]
        cells += [
            cell(
                rows,
                lambda row: f"WRONG: {row['cause']}"
                if row["named"] == "wrong"
                else row["cause"] or "not explained",
            )
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(contents: dict[str, dict]) -> str:
    """The text of results/faults.md."""
    steps = contents["fp32"]["steps"]
    return "\n".join(
        [
            "# Planted faults",
            "",
            "Made by `python results/figures.py` from `faults-fp32.json`, `faults-autocast.json` and `faults-bf16.json`.",
            "[docs/faults.md](../docs/faults.md) says how the faults are planted.",
            "",
            *summary(contents),
            "",
            f"The numbers are the step, of {steps}, at which a verdict turns red; `-`: it never does. `not planted`: the fault only rounds to",
            "bfloat16, which is no fault there, or is planted in fp32 alone. First tensor and cause are those in fp32.",
            "",
            *table(contents),
            "",
        ]
    )


def read() -> dict[str, dict]:
    contents = {
        precision: json.loads((HERE / f"faults-{precision}.json").read_text()) for precision in JUDGED
    }
    for content in contents.values():
        content["rows"] = [row for row in content["rows"] if not row.get("failed")]
    return contents


def draw(contents: dict[str, dict]) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    labels, places, longest = [], [], 0
    for number, (precision, content) in enumerate(contents.items()):
        rows = content["rows"]
        longest = max(longest, len(rows))
        for index, (what, seen) in enumerate(SEEN.items()):
            hits, place = sum(map(seen, rows)), -(number * (len(SEEN) + 0.6) + index)
            first = number == index == 0
            axes.barh(place, hits, color=BLUE, label="seen" if first else None)
            axes.barh(place, len(rows) - hits, left=hits, color=VERMILION, label="missed" if first else None)
            axes.text(
                len(rows) + 1, place, f"{len(rows) - hits} of {len(rows)} missed", va="center", fontsize=9
            )
            labels.append(f"{precision}: {what}")
            places.append(place)
    axes.set_yticks(places, labels)
    axes.set_xlim(0, longest * 1.3)  # room for the words behind a bar
    axes.set_xlabel(f"runs with a planted fault, {contents['fp32']['steps']} steps")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(HERE / "faults.png", dpi=120)


def main() -> None:
    contents = read()
    draw(contents)
    (HERE / "faults.md").write_text(page(contents))
    study = json.loads((HERE / "loss_converging.json").read_text())
    told = Converging(**study["converging"])
    converging_report.draw(told, study["runs"], HERE / "loss_converging.png")


if __name__ == "__main__":
    main()
