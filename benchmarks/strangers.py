"""Bugs and correct variants in users' own strategy files: what does one command say of each?

    PYTHONPATH=. python benchmarks/strangers.py --output results/strangers.json                 all, about forty minutes on two cores
    PYTHONPATH=. python benchmarks/strangers.py ZLoss AmsGrad --output results/strangers.json    replaces their rows
    PYTHONPATH=. python benchmarks/strangers.py --set variants --output results/strangers.json   one of the sets

Every bug of tests/strangers/bugs.py is trained by run_verification.py, alone or with others that have the same flags, and held against
what is written down there: is it caught, in the right step, with the right kind of tensor first, in a report, and is each named cause
one that is allowed? The variants of tests/strangers/variants.py must PASS. The sets "experts" and "expert variants" are the same of
tests/strangers/experts.py. Exit status: 0 all is as expected; 1 something is not; 2 a usage error.
"""

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outputs import output

from lockstep.ground import origin, processes, user_file
from lockstep.ground.errors import UserError, run_program
from lockstep.ground.files import read_json, write_result
from lockstep.plan.config import BASELINE
from lockstep.training.observe import versions

ROOT = Path(__file__).parents[1]
BUGS, VARIANTS, EXPERTS = (
    ROOT / "tests" / "strangers" / f"{name}.py" for name in ("bugs", "variants", "experts")
)
TITLE = "# Strategies of strangers"
BEGINS = '{\n "of": "strategies of strangers"'
LIMIT = 600  # seconds of a command with one strategy; each further one adds a tenth
SETS = ("bugs", "autocast", "variants", "experts", "expert variants")
CHECKS = ("caught", "step", "kind", "tensor", "report", "causes")


def of_file(path: Path, name: str):
    return getattr(user_file.import_file(path), name)


def completed(arguments: list[str], folder: Path, limit: float) -> tuple[int | str, str]:
    """(exit status, standard error) of run_verification.py; `folder` is for what it says."""
    with open(folder / "stderr", "w+") as stderr:
        process = processes.start(
            [sys.executable, str(ROOT / "run_verification.py"), *arguments],
            cwd=ROOT,
            env=processes.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = "too long"
        finally:
            processes.end(process)
    return status, (folder / "stderr").read_text()


def verify(path: Path, names: list[str], flags: list[str]) -> dict[str, dict]:
    """What is said of each of these strategies, in one command. One that ends it without a report is left out, and the others run again."""
    found: dict[str, dict] = {}
    while names:
        outcome, said, reports = verify_together(path, names, flags)
        stopped = names if len(names) == 1 else [name for name in names if f"{path.name}:{name}," in said]
        if reports:
            return found | {name: {**outcome, "report": True, **reports[name]} for name in names}
        if not stopped:
            alone = [verify(path, [name], flags) for name in names]
            return functools.reduce(dict.__or__, alone, found)
        found |= {name: {**outcome, "said": said, "report": False} for name in stopped}
        names = [name for name in names if name not in stopped]
    return found


def verify_together(path: Path, names: list[str], flags: list[str]) -> tuple[dict, str, dict[str, dict]]:
    """(exit status and seconds, last line of stderr, what the report says of each strategy) of one command."""
    with tempfile.TemporaryDirectory(prefix="lockstep-strangers-") as name:
        folder = Path(name) / "verification"
        start = time.monotonic()
        strategies = ",".join([BASELINE, *(f"{path}:{each}" for each in names)])
        arguments = ["--output_dir", str(folder), "--strategies", strategies, *flags]
        status, stderr = completed(arguments, Path(name), LIMIT * (1 + len(names) / 10))
        lines = stderr.strip().splitlines()
        said = lines[-1].replace(name, "DIR").replace(str(ROOT), ".") if lines else ""
        outcome = {"status": status, "seconds": round(time.monotonic() - start), "together": len(names)}
        report = folder / "report.json"
        runs = read_json(report)["runs"] if report.exists() else {}
        return (
            outcome,
            said,
            {each: of_run(runs[each.lower()], runs[BASELINE]) for each in names if runs},
        )


def of_run(run: dict, baseline: dict) -> dict:
    """The entries of a report about one run that are judged here."""
    first = run["first_failure"]
    return {
        "verdict": run["verdict"],
        "baseline": baseline["verdict"],
        "configured_differently": run["configured_differently"],
        "missing": run["missing"],
        "num_failures": run["num_failures"],
        "first": first[0] if first else None,
        "diagnosis": run["diagnosis"],
    }


def kind_of(tensor: str) -> str:
    """Of a name in a report: "gradient/model.norm.weight", "gradient norm", "loss of DP rank 1"."""
    return "loss" if tensor.startswith("loss") else tensor.split("/")[0]


def causes_of(found: dict) -> list[str]:
    return [json.dumps(cause) for cause in (found.get("diagnosis") or {}).get("causes", [])]


def judge(name: str, expected, found: dict) -> dict[str, bool]:
    """Each of CHECKS. A bug that one line about contract or weights should stop is right if that line says what is wrong."""

    def has(pattern: str, text: str) -> bool:
        return bool(pattern) and re.search(pattern, text, re.IGNORECASE) is not None

    if not found["report"]:
        said = found["said"].replace(name, "")  # the name of a class says what its bug is
        allowed = has(expected.may, said) and not has(expected.never, said)
        line = expected.end == "line" and found["status"] in (1, 2) and allowed
        return {**dict.fromkeys(CHECKS, line), "caught": found["status"] in (1, 2)}
    step, _, tensor, _ = found["first"] or (0, 0, "", "")
    text = json.dumps(found["diagnosis"]) + json.dumps(found["configured_differently"])
    return {
        "caught": found["verdict"] not in ("PASS", "NOT JUDGED"),
        "step": step == expected.step,
        "kind": kind_of(tensor) in expected.kind.split("|"),
        "tensor": tensor.startswith(expected.tensor),
        "report": True,
        "causes": all(has(expected.may, cause) for cause in causes_of(found))
        and not has(expected.never, text),
    }


def in_groups(path: Path, cases: dict[str, tuple[str, ...]], together: int, alone: set[str]):
    """(name, flags, what is said of it); those with the same flags in commands of at most `together`, but for those `alone`."""
    groups: dict[tuple, list[str]] = {}
    for name, flags in cases.items():
        groups.setdefault((flags, name if name in alone else ""), []).append(name)
    for (flags, _), group in groups.items():
        for start in range(0, len(group), together):
            for name, found in verify(path, group[start : start + together], list(flags)).items():
                yield name, list(flags), found


def bugs(names: list[str], together: int, precision: str = "fp32", path: Path = BUGS):
    """(name, row) of each bug."""
    known = of_file(path, "BUGS")
    more = ("--precision", precision) if precision != "fp32" else ()
    cases = {name: (*known[name].flags, *more) for name in names}
    alone = {name for name in names if known[name].end == "line"}  # they would stop the others
    for name, flags, found in in_groups(path, cases, together, alone):
        right = judge(name, known[name], found)
        yield name, {"flags": flags, "expected": known[name]._asdict(), "found": found, "right": right}


def variants(names: list[str], together: int, path: Path = VARIANTS):
    """(name, row) of each correct variant."""
    known = of_file(path, "VARIANTS")
    cases = {name: known[name].flags for name in names}
    for name, flags, found in in_groups(path, cases, together, set()):
        yield name, {"flags": flags, "found": found, "right": {"passes": found.get("verdict") == "PASS"}}


def show(name: str, found: dict, wrong: list[str]) -> None:
    print(f"{name}: {found['status']}, {summary(found)}; wrong: {', '.join(wrong) or 'nothing'}", flush=True)


def summary(found: dict) -> str:
    if not found["report"]:
        return f"no report: {found['said']}"
    if found["configured_differently"]:
        return f"{found['verdict']}: {'; '.join(found['configured_differently'].values())}"
    if not found["first"]:
        return found["verdict"]
    step, _, tensor, how_far = found["first"]
    causes = causes_of(found) or ["not explained"]
    return f"{found['verdict']}: step {step}, {tensor}, {how_far}; {found['num_failures']} tensors; {'; '.join(causes)}"


def page(content: dict) -> str:
    """The tables as Markdown."""
    lines = [TITLE, "", f"`{content['command']}`.", ""]
    for each in ("bugs", "autocast", "experts"):
        rows = content[each]
        if not rows:
            continue
        right = sum(all(row["right"].values()) for row in rows.values())
        lines += [f"## {each.capitalize()}: {right} of {len(rows)} as expected", ""]
        lines += ["| bug | seen in | expected first | found | not as expected |", "|---|---|---|---|---|"]
        for name, row in rows.items():
            wanted = row["expected"]
            wrong = ", ".join(key for key, value in row["right"].items() if not value)
            first = f"step {wanted['step']}, {wanted['tensor'] or wanted['kind']}; {wanted['true']}"
            lines.append(
                f"| {name} | {wanted['seen_in']} | {first} | {cell(summary(row['found']))} | {wrong} |"
            )
        lines.append("")
    for each in ("variants", "expert variants"):
        rows = content[each]
        if not rows:
            continue
        right = sum(row["right"]["passes"] for row in rows.values())
        lines += [f"## Correct {each}: {right} of {len(rows)} pass", "", "| variant | flags | outcome |"]
        lines += ["|---|---|---|"]
        lines += [
            f"| {name} | {' '.join(row['flags'])} | {cell(summary(row['found']))} |"
            for name, row in rows.items()
        ]
        lines.append("")
    about = content["origin"]
    libraries = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    commits = sorted({row["commit"] for each in SETS for row in content[each].values()})
    lines.append(
        f"Machine: {about['cores']} cores of {about['cpu']}, Python {about['python']}. Libraries: {libraries}. Commits: {', '.join(commits)}."
    )
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="classes of either file (default: all)")
    parser.add_argument("--set", choices=SETS, dest="only", help="one of the sets (default: all)")
    parser.add_argument(
        "--together", type=int, default=8, help="strategies in one command (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=output(BEGINS, md=TITLE), default=Path("runs/strangers.json"), help=".md beside it"
    )
    options = parser.parse_args(argv)
    return run_program("strangers.py", functools.partial(run, options))


def run(options: argparse.Namespace) -> int:
    known = {
        "bugs": [*of_file(BUGS, "BUGS")],
        "autocast": [*of_file(BUGS, "AUTOCAST")],
        "variants": [*of_file(VARIANTS, "VARIANTS")],
        "experts": [*of_file(EXPERTS, "BUGS")],
        "expert variants": [*of_file(EXPERTS, "VARIANTS")],
    }
    unknown = next((name for name in options.names if not any(name in each for each in known.values())), None)
    if unknown:
        raise UserError(f"there is no {unknown} in {BUGS}, {VARIANTS} or {EXPERTS}")
    content = {"of": "strategies of strangers", **{each: {} for each in SETS}}
    if options.output.exists():
        content |= read_json(options.output)
    content |= {"command": origin.command(), "origin": origin.about(), "versions": versions()}
    train = {
        "bugs": bugs,
        "autocast": functools.partial(bugs, precision="autocast"),
        "variants": variants,
        "experts": functools.partial(bugs, path=EXPERTS),
        "expert variants": functools.partial(variants, path=EXPERTS),
    }
    wrong = False
    for each in [options.only] if options.only else SETS:
        names = [name for name in known[each] if not options.names or name in options.names]
        for name, row in train[each](names, options.together):
            content[each][name] = {**row, "commit": content["origin"]["commit"]}
            content[each] = {one: content[each][one] for one in known[each] if one in content[each]}
            wrong |= not all(row["right"].values())
            show(name, row["found"], [key for key, value in row["right"].items() if not value])
            write_result(options.output, json.dumps(content, indent=1) + "\n")
            write_result(options.output.with_suffix(".md"), page(content))
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
