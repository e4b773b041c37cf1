"""From a command line to a configuration: one parser for all strategies, one set of flags with one meaning.

Nothing here imports torch, transformers or ray, so that a wrong command line is answered within seconds.
"""

import argparse
import os
import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.ground import files, user_file
from lockstep.ground.errors import UserError
from lockstep.ground.flags import Help, Parser, add_flag
from lockstep.inputs import architectures, texts
from lockstep.plan import strategies
from lockstep.plan.config import PARAM_DTYPES, PRECISIONS, REPLAY, TAKEN_NAMES, Config, Precision, is_taken
from lockstep.plan.resources import (
    device_elsewhere,
    require_one_process_or_ranks,
    resolve_device,
    resolve_mesh,
)

EPILOG = (
    "Environment: RAY_ADDRESS is the Ray cluster to join, as HOST:PORT (`ray start --head` prints it) or auto (unset: a Ray instance is "
    "started). RAY_AUTH_MODE is token or disabled (unset: a token is sent if the cluster asks for one). A built-in name takes precedence "
    "over a folder of that name."
)


def build_parser(strategy: str) -> argparse.ArgumentParser:
    """The parser of a strategy's script: the flags that all strategies have, and its own."""
    spec = strategies.spec_of(strategy)
    parser = Parser(prog=spec.program, allow_abbrev=False, formatter_class=Help, epilog=EPILOG)
    for field in fields(Config):
        if field.name == "precision":
            _add_precision(parser, field.metadata["help"])
        elif field.name == "own":
            for option in fields(spec.options):
                add_flag(parser, spec.options, option)
        elif field.metadata:
            add_flag(parser, Config, field, spec.also_called.get(field.name))
    # The deepspeed launcher passes --local_rank.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def _add_precision(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the three flags that name one precision (`_precision`)."""
    parser.add_argument("--precision", choices=PRECISIONS, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--autocast", action="store_true", help="the same as --precision autocast")
    parser.add_argument(
        "--param_dtype",
        choices=("float32", "bfloat16"),
        help="dtype that weights are cast to for computing; bfloat16 is the same as --precision mixed (default: the precision's)",
    )


def parse_config(strategy: str, argv: list[str] | None = None, *, elsewhere: bool = False) -> Config:
    """Parse and check a command line. Raises UserError, before anything is started, for what cannot work.

    A run `elsewhere` is not held against this machine's cores and GPUs; auto is then a GPU for each worker.
    """
    parser, spec = build_parser(strategy), strategies.spec_of(strategy)
    parsed = parser.parse_args(argv)
    defaults = spec.defaults(parsed)
    if defaults:
        # A file that a flag names gives other flags their defaults.
        parser.set_defaults(**defaults)
        parsed = parser.parse_args(argv)
    options = vars(parsed)
    options.pop("local_rank")
    options["precision"] = _precision(
        options.get("precision"), options.pop("autocast"), options.pop("param_dtype")
    )
    if options["run_name"] is not None:
        _require_run_name(options["run_name"])
    if options["noise_control"] and (not spec.is_baseline or options["save_init_weights"]):
        raise UserError(
            "--noise_control: works only in train_ddp.py, and without --save_init_weights; leave it out"
        )
    if options["control"] and (not spec.is_baseline or options["noise_control"]):
        raise UserError("--control: only train_ddp.py trains the control run, after its own; leave it out")
    if options["save_init_weights"] and not spec.is_baseline:
        raise UserError(
            "--save_init_weights: only train_ddp.py writes initial weights; run it first, then load them here"
        )
    if options["pretrained"] and options["init_weights_path"] and not options["save_init_weights"]:
        raise UserError(
            "--pretrained and --init_weights_path both give the initial weights; leave one out, or add --save_init_weights"
        )
    options["own"] = {option.name: _placed(options.pop(option.name)) for option in fields(spec.options)}
    require_one_process_or_ranks()
    options.update(resolve_mesh(spec, options))
    options.update(device_elsewhere(options) if elsewhere else resolve_device(spec, options))
    options["data_cache_dir"] = options["data_cache_dir"] or files.cache_folder()
    options = {name: _placed(value) for name, value in options.items()}
    is_own_model = user_file.is_named(options["model_name"])
    options["model_name"] = (
        user_file.absolute(options["model_name"])
        if is_own_model
        else _absolute(options["model_name"], architectures.BUILT_IN)
    )
    if user_file.is_named(options["optimizer"]):
        options["optimizer"] = user_file.absolute(options["optimizer"])
    options["dataset_name"] = _absolute(options["dataset_name"], (texts.BUILT_IN_CORPUS,))
    return Config(spec=spec, **options)


def _precision(given: Precision | None, autocast: bool, param_dtype: str | None) -> Precision:
    """The precision that three flags name together. Raises UserError if two of them contradict each other."""
    if autocast and given not in (None, "autocast"):
        raise UserError(f"--autocast contradicts --precision {given}; give one of them")
    precision: Precision = given or (
        "autocast" if autocast else "mixed" if param_dtype == "bfloat16" else Config.precision
    )
    if param_dtype and PARAM_DTYPES[precision] != param_dtype:
        raise UserError(
            f"--param_dtype {param_dtype} contradicts {'--autocast' if autocast else f'--precision {precision}'}; leave it out"
        )
    return precision


def _require_run_name(name: str) -> None:
    is_name = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name)
    if not is_name or is_taken(name):
        raise UserError(
            f"--run_name {name}: must be letters, digits, _, . and -, and not {', '.join(TAKEN_NAMES)} or {REPLAY}...; choose another name"
        )


def _placed(value: Any) -> Any:
    """A path made absolute, because workers run in other folders; anything else as it is."""
    return value.expanduser().absolute() if isinstance(value, Path) else value


def _absolute(name: str, built_in: Collection[str]) -> str:
    """The absolute path of an existing file or folder; any other name, or a built-in one, unchanged."""
    path = Path(os.path.expanduser(name))
    try:
        return str(path.absolute()) if name and name not in built_in and path.exists() else name
    except (OSError, ValueError):  # not a possible file name
        return name
