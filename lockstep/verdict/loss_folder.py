"""The histories in a folder and the verdict on them, for plot_loss_curves.py and run_verification_main.sh."""

import datetime
import json
import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.dumps import history
from lockstep.dumps.history import History
from lockstep.ground.errors import UserError, printable
from lockstep.ground.files import plain, write_text
from lockstep.plan import strategies
from lockstep.plan.config import BASELINE, CONTROL, history_file
from lockstep.plan.mesh import Mesh
from lockstep.plan.strategies import in_order
from lockstep.verdict.loss_curves import (
    PASS,
    CurveVerdict,
    compare_curves,
    require_comparable_curves,
    tolerance_for,
    worst,
)
from lockstep.verdict.loss_tolerance import Tolerance


@dataclass(frozen=True)
class Judged:
    """The runs of a folder, by name, and how they compare with the baseline."""

    histories: dict[str, History]
    control: History | None
    tolerance: Tolerance | None  # None: `problem` says why there is no verdict
    verdicts: dict[str, CurveVerdict]
    problem: str  # why some or all cannot be compared, or ""

    @property
    def tolerated(self) -> Tolerance:
        """The tolerance. Raises UserError where there is none."""
        if self.tolerance is None:
            raise UserError(self.problem)
        return self.tolerance

    @property
    def outcome(self) -> str:
        return worst(verdict.outcome for verdict in self.verdicts.values())


def paths(input_dir: Path) -> dict[str, Path]:
    """NAME -> loss_NAME.json of a folder, the baseline's first, the control's last."""
    names = {path.stem.removeprefix("loss_") for path in input_dir.glob("loss_*.json")}
    ordered = in_order(names - {CONTROL})
    return {name: history_file(input_dir, name) for name in (*ordered, *(names & {CONTROL}))}


def read(found: dict[str, Path]) -> tuple[dict[str, History], History | None]:
    """The histories by name, and the control's. Raises UserError for one that is not what its name says."""
    histories = {name: history.read(path) for name, path in found.items() if os.path.lexists(path)}
    for name, one in histories.items():
        path, run = found[name], one.run
        config = run["config"]
        spec, mine = strategies.recorded(config["strategy"]), config.get("run_name") or config["strategy"]
        if mine != (BASELINE if name == CONTROL else name) or config["noise_control"] != (name == CONTROL):
            what = f"{mine}'s" + (" control" if config["noise_control"] else "")
            raise UserError(f"{path}: is the history of {what} run, not of the run in its name; rename it")
        label = spec.label_of(Mesh(**run["mesh"]), config) + (", control" if name == CONTROL else "")
        if run["label"] != label and spec.factory:
            raise UserError(
                f"{path}: label is {printable(run['label'], 80)!r}, it must be {label!r}; run its training again"
            )
        if not one.steps:
            raise UserError(
                f"{path}: no step was recorded ({printable(one.ended or 'killed', 200)}); run its training again"
            )
    control = histories.pop(CONTROL, None)
    return histories, control


def judge(input_dir: Path, histories: dict[str, History], control: History | None) -> Judged:
    """Hold every run against the baseline."""
    baseline = histories.get(BASELINE)
    others = {name: one for name, one in histories.items() if name != BASELINE}
    try:
        if baseline is None or not others:
            raise UserError(
                f"--input_dir {input_dir}: only {', '.join(histories)}; a verdict needs DDP and another run"
            )
        tolerance = tolerance_for(baseline, control)
    except UserError as error:
        return Judged(histories, control, None, {}, str(error))
    verdicts, refusals = {}, []
    for name, other in others.items():
        try:
            require_comparable_curves(baseline, other)
            verdicts[name] = compare_curves(baseline, other, tolerance)
        except UserError as error:
            refusals.append(str(error))
    return Judged(histories, control, tolerance, verdicts, "; ".join(refusals))


def write(judged: Judged, path: Path, command: str, *, tensors: str | None = None) -> None:
    """Write the comparison as data; `tensors` is the verdict on the tensors of the same runs, if there is one."""
    everyone = judged.histories | ({CONTROL: judged.control} if judged.control else {})
    outcome = worst((judged.outcome, tensors or judged.outcome))
    content = {
        "passed": outcome == PASS,
        "outcome": outcome,
        "losses": judged.outcome,
        "tensors": tensors,
        "precision": judged.histories[BASELINE].run["config"]["precision"],
        "tolerance": judged.tolerated.as_dict(),
        "control": judged.control.run["label"] if judged.control else None,
        "runs": {name: one.run["label"] for name, one in judged.histories.items()},
        "verdicts": [verdict.as_dict() for verdict in judged.verdicts.values()],
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "histories": {name: {"run": one.run, "weights": one.weights} for name, one in everyone.items()},
    }
    write_text(path, json.dumps(plain(content), indent=2) + "\n")
