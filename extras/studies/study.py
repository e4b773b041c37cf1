"""The file of a study, and the configuration of each of its runs.

title = "ZeRO stages"
tensors = 1                    # steps that are captured and judged tensor by tensor; 0: losses only
memory = true                  # measure the peak memory of each run, which then has a start of its own

[shared]                       # flags of all runs, as on a command line
model_name = "tiny-qwen2"

[control]                      # flags of the control: DDP, which every run is compared with

[runs.sharded]                 # a run, by the name that its files get
strategy = "fsdp"
tp_size = 1

[runs.ddp-bf16]
strategy = "ddp"
precision = "bf16"
differs = "bfloat16 weights"   # it need not agree with the control: it is measured, not judged

[runs.fsdp-bf16]
strategy = "fsdp"
tp_size = 1
precision = "bf16"
against = "ddp-bf16"           # its losses are judged by this run of DDP, which gets a control run of its own

In the place of runs, a study may have a table [vary] (extras/studies/variations.py). With a table [converging] every run
is trained with several seeds, and may have a planted fault (extras/studies/converging.py).
"""

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from extras.studies.converging import Converging
from lockstep.ground.errors import UserError, first_line
from lockstep.ground.files import require_regular
from lockstep.ground.schemas import Name, Strict, Whole, validate
from lockstep.inputs.data import Inputs
from lockstep.plan import command_line
from lockstep.plan.config import BASELINE, Config
from lockstep.plan.strategies import spec_of
from lockstep.training import preflight

LARGEST = 1 << 20  # bytes of a study
REMEDY = "see extras/studies/study.py for what a study may hold"
SET_HERE = (
    "run_name", "init_weights_path", "save_init_weights", "loss_output_dir", "storage_path", "experiment_name",
    "capture_dir", "capture_steps", "overwrite", "dry_run", "control", "noise_control", "num_workers",
)  # fmt: skip
Value = str | int | float | bool
Flag = Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
Flags = dict[Flag, Value]
Option = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,60}(\.[a-z0-9_]{1,60})*$")]
Values = Annotated[list[Value], Field(min_length=1, max_length=20)]
Varied = Value | dict[str, Any]  # of an option; a table goes into the library's file as it is
VariedValues = Annotated[list[Varied], Field(min_length=1, max_length=20)]
DEFAULT = "default"  # among the values of an option: it is left out


class Run(Strict):
    """A run: its strategy, why it may differ from the control or which other run it is judged by, and flags."""

    model_config = ConfigDict(extra="allow")
    strategy: Name
    differs: Name | None = None
    against: Name | None = None
    fault: Name | None = None  # a planted one of extras/studies/slow.py: is it found?

    @property
    def flags(self) -> Flags:
        return self.model_extra or {}


class Vary(Strict):
    """Options that are varied one by one and in pairs."""

    strategy: Name
    flags: Flags = {}  # of all runs but the control
    shared: dict[Flag, Values] = {}
    alone_with: Flag | None = None  # a shared flag: one by one with each of its values
    # Every choice of up to so many options has a run (compositions.py)
    each_up_to: Annotated[int, Field(ge=0, le=3)] = 0
    options: Annotated[dict[Option, VariedValues], Field(min_length=1)]
    alone: dict[Option, VariedValues] = {}  # options that are varied one by one only
    # What an option needs, or one value of it (`place_of`)
    needs: dict[Option, dict[Option, Values]] = {}
    # options that change numbers by design, and how: measured, not judged
    differs: dict[Option, Name] = {}


class Study(Strict):
    """The whole file."""

    title: Name
    about: Annotated[str, Field(max_length=4000)] = ""
    tensors: Whole = 0
    memory: bool = False
    shared: Flags = {}
    control: Flags = {}
    runs: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,60}$")], Run] = {}
    vary: Vary | None = None
    converging: Converging | None = None


@dataclass(frozen=True)
class Planned:
    """One run of a study, checked."""

    name: str  # in file names
    differs: str | None  # why it need not agree with the control
    against: str | None  # the run that it is judged by, if that is not the control
    # another run is judged by it: it has a folder of histories, and a control run, of its own
    is_base: bool
    fault: str | None
    arguments: tuple[str, ...]  # flags of its training script
    config: Config
    inputs: Inputs

    @property
    def strategy(self) -> str:
        return self.config.spec.place


def read(path: Path) -> Study:
    """Read the file of a study. Raises UserError, with the line, for a file that is none."""
    try:
        if require_regular(path) > LARGEST:
            raise UserError(f"{path}: too large for a study ({LARGEST >> 20} MiB at most)")
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: is not TOML ({first_line(error)}); correct it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from error
    try:
        study = validate(Study, content, path, REMEDY)
    except UserError as error:
        raise UserError(_at_line(text, path, str(error))) from error
    if bool(study.runs) == bool(study.vary):
        raise UserError(f"{path}, line 1: a study has either tables [runs.NAME] or a table [vary]; {REMEDY}")
    if study.vary:
        _require_varied(study.vary, text, path)
    for name, run in study.runs.items():
        if run.fault is not None and study.converging is None:
            line = line_of(text, f"runs.{name}", "fault")
            raise UserError(
                f"{path}, line {line}: only a study with a table [converging] has faults; leave it out"
            )
    tables: dict[str, Collection[str]] = {
        "shared": study.shared,
        "control": study.control,
        **{f"runs.{name}": run.flags for name, run in study.runs.items()},
    }
    if study.vary:
        tables |= {"vary.flags": study.vary.flags, "vary.shared": study.vary.shared}
    for table, flags in tables.items():
        allowed = ("noise_control",) if study.converging else ()  # its twin
        taken = next((flag for flag in flags if flag in SET_HERE and flag not in allowed), None)
        if taken:
            raise UserError(
                f"{path}, line {line_of(text, table, taken)}: {taken} is set by the study itself; leave it out"
            )
    return study


def _require_varied(vary: Vary, text: str, path: Path) -> None:
    """Raise UserError unless the tables about options are about those that are varied."""
    for table, names in (("needs", set(vary.needs)), ("differs", set(vary.differs))):
        for stranger in sorted(names - _named(vary)):
            line = line_of(text, f"vary.{table}", stranger)
            raise UserError(f"{path}, line {line}: {stranger} is no option that is varied; {REMEDY}")
    several = next((flag for flag, values in vary.shared.items() if len(values) > 1), None)
    if vary.each_up_to and (several or vary.alone or vary.alone_with):
        key = "alone_with" if vary.alone_with else "each_up_to"
        raise UserError(
            f"{path}, line {line_of(text, 'vary', key)}: each_up_to has one control: give [vary.shared] one value each, and leave "
            "[vary.alone] and alone_with out"
        )
    if vary.alone_with is not None and vary.alone_with not in vary.shared:
        line = line_of(text, "vary", "alone_with")
        raise UserError(f"{path}, line {line}: {vary.alone_with} is no flag of [vary.shared]; {REMEDY}")


def place_of(option: str, value: Varied) -> str:
    """OPTION.VALUE, as [vary.needs] names one value of an option."""
    return f"{option}.{str(value).lower() if isinstance(value, bool) else value}"


def _named(vary: Vary) -> set[str]:
    """What [vary.needs] and [vary.differs] can be about."""
    varied = [*vary.options.items(), *vary.alone.items()]
    return {name for option, values in varied for name in (option, *(place_of(option, v) for v in values))}


def _at_line(text: str, path: Path, message: str) -> str:
    """The message of `validate`, with the line of the field that it names."""
    place = message.removeprefix(f"{path}: ").split(" is ")[0]
    table, _, key = place.rpartition(".")
    return message.replace(str(path), f"{path}, line {line_of(text, table, key)}", 1)


def line_of(text: str, table: str, key: str) -> int:
    """The line of a key in a table of a TOML text; the table's own line, or 1, where the key has none."""
    header_line, inside = 1, table == ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[([^\]]*)\]", line)
        if header:
            name = header[1].replace('"', "").replace(" ", "")
            inside = name == table
            if name in (table, f"{table}.{key}".strip(".")):
                header_line = number
        elif inside and re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line):
            return number
    return header_line


def plan(study: Study, path: Path, folder: Path) -> list[Planned]:
    """Every run, the control first. Raises UserError, with the line, for one that could not be started."""
    text = path.read_text(encoding="utf-8")
    planned = [plan_control(study, {**study.shared, **study.control}, folder)]
    for name, run in study.runs.items():
        if name == spec_of(BASELINE).name:
            raise UserError(
                f"{path}, line {line_of(text, f'runs.{name}', '')}: the name is the control's; choose another"
            )
        try:
            _require_base(study, run)
            planned.append(plan_run(study, name, run, {**study.shared, **run.flags}, folder))
        except UserError as error:
            flag = re.match(r"(?:unrecognized arguments: |argument )?--([a-z_]+)", str(error))
            key = flag[1] if flag else "against" if str(error).startswith("against") else "strategy"
            line = line_of(text, f"runs.{name}", key)
            raise UserError(f"{path}, line {line}: run {name}: {error}") from error
    return planned


def _require_base(study: Study, run: Run) -> None:
    """Raise UserError unless the run that this one is judged by is a run of the baseline, itself judged by none."""
    if run.against is None:
        return
    base = study.runs.get(run.against)
    if base is None or base.strategy != BASELINE or base.against is not None:
        raise UserError(
            f'against is "{run.against}", which is no run of {BASELINE} that stands for itself; name one'
        )
    if run.differs is not None:
        raise UserError('against: a run with "differs" is judged by none; leave one of them out')


def plan_control(study: Study, flags: Flags, folder: Path) -> Planned:
    """The control of a study, or of a group of its runs."""
    return plan_run(study, BASELINE, Run(strategy=BASELINE), flags, folder)


def plan_run(study: Study, name: str, run: Run, flags: Flags, folder: Path) -> Planned:
    """One run with all its flags, in a folder. Raises UserError if it could not be started."""
    arguments = arguments_of(run.strategy, flags)
    is_base = any(other.against == name for other in study.runs.values())
    # All control runs have the same name, so a run that has one needs a folder of its own
    has_folder = is_base or "noise_control" in flags
    losses = str(folder / "losses" / name if has_folder else folder / "losses")
    arguments += ["--loss_output_dir", losses, "--storage_path", losses]
    if name != BASELINE:
        arguments += ["--run_name", name]
    # The other runs are not compared with the reference, which is the control's
    if study.tensors and run.differs is None and run.against is None:
        arguments += [
            "--capture_dir",
            str(folder / "tensors"),
            "--capture_steps",
            str(study.tensors),
            "--overwrite",
        ]
    config, inputs = preflight.checked(run.strategy, arguments)
    return Planned(name, run.differs, run.against, is_base, run.fault, tuple(arguments), config, inputs)


def arguments_of(strategy: str, flags: Flags) -> list[str]:
    """Flags as words of a strategy's command line."""
    takes_none = {action.dest for action in command_line.build_parser(strategy)._actions if action.nargs == 0}
    return [word for flag, value in flags.items() for word in _words(flag, value, flag in takes_none)]


def _words(flag: str, value: Value, takes_none: bool) -> list[str]:
    """A flag on a command line.

    One that takes no value is on or left out. Others are given true or false as TOML writes them.
    """
    if isinstance(value, bool):
        return ([f"--{flag}"] if value else []) if takes_none else [f"--{flag}", str(value).lower()]
    return [f"--{flag}", str(value)]


def differences(run: Planned, control: Planned) -> dict[str, tuple[object, object]]:
    """Flag -> (the run's value, the control's) of all flags in which they differ, other than places."""
    mine, theirs = (
        {key: value for key, value in planned.config.recorded().items() if key != "run_name"}
        for planned in (run, control)
    )
    own_options, others = mine.pop("own"), theirs.pop("own")
    # What only one of two strategies can be told is a difference if it is told so.
    defaults = {option.name: option.default for option in fields(run.config.spec.options)}
    mine |= {key: value for key, value in own_options.items() if key in others or value != defaults[key]}
    theirs |= {key: value for key, value in others.items() if key in own_options}
    return {key: (value, theirs.get(key)) for key, value in mine.items() if value != theirs.get(key)}
