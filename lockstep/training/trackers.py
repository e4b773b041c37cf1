"""Trackers that runs and verifications are reported to, each through its own client (--report_to).

A client's own environment variables, such as WANDB_MODE and MLFLOW_TRACKING_URI, say where it writes; otherwise it writes into the run's
folder. Each class here is made with a run's name, its folder and its settings. `metrics` takes those of a step, by name. `result` takes
texts and numbers by name, and files. `close` takes whether the run failed.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.ground.collective import stopping_together
from lockstep.ground.errors import UserError, first_line

# The project of Weights & Biases and the experiment of MLflow, unless their environment variables name another
PROJECT = "lockstep"


class TensorBoard:
    def __init__(self, name: str, folder: Path, about: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        # Without the time, it would add to an older run of the same name.
        self.writer = SummaryWriter(str(folder / "tensorboard" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"))
        self.writer.add_text("about", f"```\n{json.dumps(about, indent=1)}\n```")
        self.close = lambda failed: self.writer.close()

    def metrics(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def result(self, texts: dict[str, str], numbers: dict[str, float], files: Sequence[Path]) -> None:
        # TensorBoard shows Markdown. Of any other file it shows the path.
        shown = {path.name: path.read_text() if path.suffix == ".md" else str(path) for path in files}
        for name, text in (texts | shown).items():
            self.writer.add_text(name, text)
        self.metrics(numbers, 0)


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
        self.metrics, self.close = self.run.log, self.run.finish

    def result(self, texts: dict[str, str], numbers: dict[str, float], files: Sequence[Path]) -> None:
        self.run.summary.update(texts | numbers)
        # A copy: its own `save` makes a link, and a later run may replace the file
        for path in files:
            shutil.copy(path, self.run.dir)


class MLflow:
    def __init__(self, name: str, folder: Path, about: dict[str, Any]):
        import mlflow

        self.client, artifacts = mlflow, None
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
            artifacts = (folder / "mlartifacts").as_uri()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if mlflow.get_experiment_by_name(experiment) is None:
            mlflow.create_experiment(experiment, artifacts)
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=name)
        mlflow.log_params(about)
        self.metrics = mlflow.log_metrics
        self.close = lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED")

    def result(self, texts: dict[str, str], numbers: dict[str, float], files: Sequence[Path]) -> None:
        self.client.set_tags(texts)
        self.client.log_metrics(numbers)
        for path in files:
            self.client.log_artifact(str(path))


# By the package's name, which --report_to takes
TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}


class Trackers:
    """The trackers of a run. All of them are told the same. Their errors are raised as UserError."""

    def __init__(self, trackers: Iterable[str], name: str, folder: Path, about: dict[str, Any]):
        self._clients: dict[str, Any] = {}
        for tracker in trackers:
            try:
                with _named(tracker):
                    self._clients[tracker] = TRACKERS[tracker](name, folder, about)
            except UserError:
                with contextlib.suppress(UserError):  # the error above is the reason
                    self.tell(lambda client: client.close(1))
                raise

    def tell(self, say: Callable[[Any], object]) -> None:
        for name, client in self._clients.items():
            with _named(name):
                say(client)

    def step(self, step: dict[str, Any]) -> None:
        """Tell them of a step of the history."""
        values = {name: step[name] for name in ("loss", "grad_norm", "learning_rate")}
        values["tokens_per_second"] = step["tokens"] / step["seconds"]
        self.tell(lambda client: client.metrics(values, step=step["step"]))


@contextlib.contextmanager
def _named(tracker: str) -> Iterator[None]:
    """Raise an error inside as UserError that names the tracker."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"--report_to {tracker}: {first_line(error)}; set its environment variables, or leave it out"
        ) from error


@contextlib.contextmanager
def tracking(names: Iterable[str], history: Path, about: dict[str, Any]) -> Iterator[Trackers]:
    """The trackers of a training run with this history; only rank 0 names any. Collective at its begin and its end."""
    with stopping_together():
        trackers = Trackers(names, history.stem.removeprefix("loss_"), history.parent, about)
    try:
        yield trackers
    except BaseException:
        with contextlib.suppress(UserError):  # the error above is the reason
            trackers.tell(lambda client: client.close(1))
        raise
    with stopping_together():
        trackers.tell(lambda client: client.close(0))
