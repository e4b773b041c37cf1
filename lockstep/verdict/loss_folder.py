"""The loss histories in a folder and the verdict on them, for plot_loss_curves.py and run_verification_main.sh."""

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
    """The runs in a folder, by name, and how they compare with the baseline."""

    histories: dict[str, History]
    control: History | None
    tolerance: Tolerance | None  # None: `problem` says why there is no verdict
    verdicts: dict[str, CurveVerdict]
    problem: str  # why some or all cannot be compared, or ""

    @property
    def tolerated(self) -> Tolerance:
        """The tolerance. Raises UserError if there is none."""
        if self.tolerance is None:
            raise UserError(self.problem)
        return self.tolerance

    @property
    def outcome(self) -> str:
        return worst(verdict.outcome for verdict in self.verdicts.values())


def paths(input_dir: Path) -> dict[str, Path]:
    """Return the path of each loss_NAME.json in a folder, by NAME: the baseline's first, the control's last."""
    names = {path.stem.removeprefix("loss_") for path in input_dir.glob("loss_*.json")}
    ordered = in_order(names - {CONTROL})
    return {name: history_file(input_dir, name) for name in (*ordered, *(names & {CONTROL}))}


def read(found: dict[str, Path]) -> tuple[dict[str, History], History | None]:
    """Read histories; `found` has their paths by name. Return the histories by name without the control's, and the control's.

    Raises UserError for a history that is not of the run in its name, and for one without steps.
    """
    histories = {name: history.read(path) for name, path in found.items() if os.path.lexists(path)}
    for name, run_history in histories.items():
        path, run = found[name], run_history.run
        config = run["config"]
        spec, owner = strategies.recorded(config["strategy"]), config.get("run_name") or config["strategy"]
        if owner != (BASELINE if name == CONTROL else name) or config["noise_control"] != (name == CONTROL):
            whose = f"{owner}'s" + (" control" if config["noise_control"] else "")
            raise UserError(f"{path}: is the history of {whose} run, not of the run in its name; rename it")
        label = spec.label_of(Mesh(**run["mesh"]), config) + (", control" if name == CONTROL else "")
        if run["label"] != label and spec.factory:
            raise UserError(
                f"{path}: label is {printable(run['label'], 80)!r}, it must be {label!r}; run its training again"
            )
        if not run_history.steps:
            raise UserError(
                f"{path}: no step was recorded ({printable(run_history.ended or 'killed', 200)}); run its training again"
            )
    control = histories.pop(CONTROL, None)
    return histories, control


def judge(input_dir: Path, histories: dict[str, History], control: History | None) -> Judged:
    """Compare every run with the baseline."""
    baseline = histories.get(BASELINE)
    others = {name: history for name, history in histories.items() if name != BASELINE}
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
    """Write the comparison as JSON. `tensors` is the verdict on the tensors of the same runs, if there is one."""
    histories = judged.histories | ({CONTROL: judged.control} if judged.control else {})
    outcome = worst((judged.outcome, tensors or judged.outcome))
    content = {
        "passed": outcome == PASS,
        "outcome": outcome,
        "losses": judged.outcome,
        "tensors": tensors,
        "precision": judged.histories[BASELINE].run["config"]["precision"],
        "tolerance": judged.tolerated.as_dict(),
        "control": judged.control.run["label"] if judged.control else None,
        "runs": {name: history.run["label"] for name, history in judged.histories.items()},
        "verdicts": [verdict.as_dict() for verdict in judged.verdicts.values()],
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "histories": {
            name: {"run": history.run, "weights": history.weights} for name, history in histories.items()
        },
    }
    write_text(path, json.dumps(plain(content), indent=2) + "\n")
