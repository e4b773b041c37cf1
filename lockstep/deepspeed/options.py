"""The flags that only train_deepspeed.py has."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.errors import UserError, first_line
from lockstep.files import parse_json, read_json
from lockstep.flags import flag

WHERE = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class UserFile:
    """A user's configuration of DeepSpeed. It is read where the run is started: other machines need not have the file."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def read(cls, text: str) -> "UserFile":
        """A file, or JSON itself. Raises ArgumentTypeError, which argparse expects, unless it is a JSON object."""
        try:
            if text.startswith("{"):
                return cls(Path("--deepspeed_config"), parse_json(text))
            content = read_json(Path(text).expanduser())
        except (UserError, ValueError) as error:
            raise argparse.ArgumentTypeError(first_line(error)) from error
        if not isinstance(content, dict):
            raise argparse.ArgumentTypeError(
                f"{text}: must be a JSON object, as DeepSpeed's configurations are"
            )
        return cls(Path(text), content)

    @property
    def recorded(self) -> dict[str, Any]:
        return self.content


@dataclass(frozen=True)
class Options:
    zero_stage: int = flag(
        1,
        "what is sharded over dp: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights",
        choices=range(4),
    )
    offload_optimizer: str = flag(
        "none", "where the optimizer state is kept (from stage 1 on)", choices=WHERE
    )
    offload_param: str = flag("none", "where the weights are kept (stage 3)", choices=WHERE)
    nvme_path: Path | None = flag(None, "folder for what is kept on nvme", recorded=False)
    deepspeed_config: UserFile | None = flag(
        None,
        "DeepSpeed's JSON, a file or the text itself: \"auto\" takes the flag's value, any other value must agree with the flags",
        parse=UserFile.read,
        recorded_as=dict[str, Any] | None,
    )


def of(config: Config) -> Options:
    return Options(**config.own)
