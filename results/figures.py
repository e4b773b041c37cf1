"""Draw results/faults.png from the tables of planted faults, which verdict sees how many, and print the README's table.

    python run_faults.py --output results/faults-fp32.json
    python run_faults.py --precision autocast --output results/faults-autocast.json
    python results/figures.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).parent
SEEN = {
    "loss curve": lambda row: row["loss_step"] is not None,
    "loss curve or gradient norm": lambda row: row["loss_step"] is not None or row["grad_norm_step"] is not None,
    "tensors": lambda row: row["caught"],
}


def print_table() -> None:
    """One row for each fault; AutoTP before FSDP where they differ."""
    found = {precision: {} for precision in ("fp32", "autocast")}
    for precision, rows in found.items():
        for row in json.loads((HERE / f"faults-{precision}.json").read_text())["rows"]:
            rows.setdefault(row["fault"], []).append(row)

    def cell(rows: list[dict], read) -> str:
        values = list(dict.fromkeys(read(row) for row in rows))
        return " / ".join(str(read(row)) for row in rows) if len(values) > 1 else str(values[0]) if values else "no effect"

    def step(key: str):
        return lambda row: "-" if row[key] is None else row[key]

    print("| fault | class | strategies | loss curve, fp32 | autocast | grad norm, fp32 | autocast | first tensor | cause |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, rows in found["fp32"].items():
        others = found["autocast"].get(name, [])
        cells = [f"`{name}`", rows[0]["class"], ", ".join({"deepspeed": "AutoTP", "fsdp": "FSDP"}[row["strategy"]] for row in rows)]
        for key in ("loss_step", "grad_norm_step"):
            cells += [cell(rows, step(key)), cell(others, step(key))]
        cells += [cell(rows, lambda row: "right" if row["first_right"] else f"WRONG: {row['first']}")]
        cells += [cell(rows, lambda row: f"WRONG: {row['cause']}" if row["named"] == "wrong" else row["cause"] or "not explained")]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    print_table()
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    labels, places = [], []
    for number, precision in enumerate(("fp32", "autocast")):
        content = json.loads((HERE / f"faults-{precision}.json").read_text())
        rows = [row for row in content["rows"] if not row.get("failed")]
        for index, (what, seen) in enumerate(SEEN.items()):
            hits, place = sum(map(seen, rows)), -(number * (len(SEEN) + 0.6) + index)
            axes.barh(place, hits, color="tab:blue")
            axes.barh(place, len(rows) - hits, left=hits, color="tab:red")
            axes.text(len(rows) + 1, place, f"{len(rows) - hits} of {len(rows)} missed", va="center", fontsize=9)
            labels.append(f"{precision}: {what}")
            places.append(place)
            print(f"{labels[-1]}: {hits} of {len(rows)} seen")
    axes.set_yticks(places, labels)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.22)
    axes.set_xlabel(f"planted faults seen within {content['steps']} steps (blue) and missed (red)")
    figure.savefig(HERE / "faults.png", dpi=120)


if __name__ == "__main__":
    main()
