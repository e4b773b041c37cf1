"""Trackers that runs and verifications are reported to, each through its own client (--report_to).

A client's own environment variables, such as WANDB_MODE and MLFLOW_TRACKING_URI, say where it writes; else it writes into the run's folder.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lockstep.ground.collective import stopping_together
from lockstep.ground.errors import UserError, first_line
from lockstep.plan.config import Config

Found = Mapping[str, str | float]
PROJECT = "lockstep"  # of Weights & Biases, and the experiment of MLflow, unless their environment variables name another


class Tracker(Protocol):
    """A run of a tracker. It is made with its name, a folder, and what it is about."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """The metrics of a step, by name."""

    def result(self, values: Found, files: Sequence[Path]) -> None:
        """What was found in the end: texts and numbers by name, and files."""

    def close(self, *, failed: bool) -> None:
        """Write what is left."""


class TensorBoard:
    def __init__(self, name: str, folder: Path, about: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        # It would add to an older run of the name.
        self.writer = SummaryWriter(str(folder / "tensorboard" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"))
        self.writer.add_text("about", f"```\n{json.dumps(about, indent=1)}\n```")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def result(self, values: Found, files: Sequence[Path]) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value)
            else:
                self.writer.add_scalar(name, value)
        for path in files:  # it shows Markdown, and of any other file where it is
            self.writer.add_text(path.name, path.read_text() if path.suffix == ".md" else str(path))

    def close(self, *, failed: bool) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, name: str, folder: Path, about: dict[str, Any]):
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            dir=folder,
            config=about,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def result(self, values: Found, files: Sequence[Path]) -> None:
        self.run.summary.update(dict(values))
        for path in files:  # a copy: it links to what is saved, which a later run may replace
            shutil.copy(path, self.run.dir)

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MLflow:
    def __init__(self, name: str, folder: Path, about: dict[str, Any]):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        own = "MLFLOW_TRACKING_URI" in os.environ
        self.client = MlflowClient(None if own else f"sqlite:///{folder}/mlflow.db")
        place = None if own else (folder / "mlartifacts").as_uri()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self.client.create_experiment(experiment, place)
        self.run = self.client.create_run(number, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in about.items()]
        self.client.log_batch(self.run, params=params)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self.client.log_batch(self.run, [Metric(key, value, now, step) for key, value in values.items()])

    def result(self, values: Found, files: Sequence[Path]) -> None:
        for name, value in values.items():
            log = self.client.set_tag if isinstance(value, str) else self.client.log_metric
            log(self.run, name, value)
        for path in files:
            self.client.log_artifact(self.run, str(path))

    def close(self, *, failed: bool) -> None:
        self.client.set_terminated(self.run, "FAILED" if failed else "FINISHED")


# By the name of the package, which --report_to takes.
TRACKERS: dict[str, Callable[[str, Path, dict[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


class Trackers:
    """The trackers of a run, all of which are told the same. Their errors are raised as UserError."""

    def __init__(self, names: Sequence[str], name: str, folder: Path, about: dict[str, Any]):
        self._all: dict[str, Tracker] = {}
        for each in names:
            with _named(each):
                self._all[each] = TRACKERS[each](name, folder, about)

    def step(self, step: dict[str, Any]) -> None:
        """Tell them of a step of the history."""
        values = {name: step[name] for name in ("loss", "grad_norm", "learning_rate")}
        values["tokens_per_second"] = step["tokens"] / step["seconds"]
        self.tell(lambda each: each.metrics(values, step["step"]))

    def tell(self, say: Callable[[Tracker], None]) -> None:
        for name, each in self._all.items():
            with _named(name):
                say(each)


@contextlib.contextmanager
def _named(tracker: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UserError(
            f"--report_to {tracker}: {first_line(error)}; set its environment variables, or leave it out"
        ) from error


@contextlib.contextmanager
def tracking(config: Config, *, lead: bool) -> Iterator[Trackers]:
    """The trackers of a training run, on the `lead` rank; others have none. Collective at its begin and its end."""
    with stopping_together():
        name = config.history_path.stem.removeprefix("loss_")
        told = Trackers(config.report_to if lead else (), name, config.loss_output_dir, config.recorded())
    try:
        yield told
    except BaseException:
        with contextlib.suppress(UserError):  # the error above is the reason
            told.tell(lambda each: each.close(failed=True))
        raise
    with stopping_together():
        told.tell(lambda each: each.close(failed=False))
