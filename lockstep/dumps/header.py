"""What a history and a dump record of their run: one schema, one seal, and the rules for whether two runs can be compared."""

import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field, create_model

from lockstep.ground import flags
from lockstep.ground.errors import UserError, printable
from lockstep.ground.files import read_json, seal
from lockstep.ground.flags import Same
from lockstep.ground.origin import unlike
from lockstep.ground.schemas import (
    Architecture,
    Count,
    Finite,
    MayBreakDown,
    Name,
    Origin,
    Sha256,
    Strict,
    Threads,
    Whole,
    validate,
)
from lockstep.plan import strategies
from lockstep.plan.config import Config
from lockstep.plan.mesh import Axis, Mesh

Text = Annotated[str, Field(max_length=65536)]  # a path, a message: made harmless where it is shown


@functools.cache  # every history and dump that is read asks for it
def schema(of: type, **others: Any) -> type[Strict]:
    """Return the strict schema of what a run records of a dataclass of flags: its fields, of which some have the types in `others`."""
    hints = typing.get_type_hints(of)
    kinds: dict[str, Any] = {}
    for field in flags.recorded(of):
        about, choices = field.metadata, flags.choices_of(of, field)
        kind = about["recorded_as"] or (Literal[tuple(choices)] if choices else hints[field.name])
        kinds[field.name] = (_bounded(kind, about), ...)
    kinds |= {name: (kind, ...) for name, kind in others.items()}
    return create_model(of.__name__, __base__=Strict, **kinds)


def _bounded(kind: Any, about: Mapping[str, Any]) -> Any:
    """Return a type with the bounds of its flag on the numbers and text in it. Of `bool | int`, the int alone is bounded."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.Union[tuple(_bounded(member, about) for member in typing.get_args(kind))]  # noqa: UP007
    if kind is str:
        return Text
    if kind not in (int, float):
        return kind
    limits = {"ge": about["low"], "gt": about["above"], "le": about["high"]}
    base = Finite if kind is float else Count if about["low"] else Whole
    return Annotated[base, Field(**{name: limit for name, limit in limits.items() if limit is not None})]


if TYPE_CHECKING:
    RunConfig = Config
else:
    RunConfig = schema(
        Config,
        strategy=Name,
        own=dict[Name, Any],
        run_name=Name | None,
        # What "auto" was resolved to.
        device=Literal["cpu", "cuda"],
        backend=Literal["gloo", "nccl"],
    )


class Run(Strict):
    """What is known of a run before it begins."""

    label: Name
    mesh: dict[Axis, Count]  # axis -> size
    config: RunConfig
    architecture: Architecture
    architecture_source: Text
    initial_weights: Text  # where they came from, in words
    corpus_sha256: Sha256
    tokenizer: Name
    num_steps: Count
    versions: dict[Name, Name]
    threads: Annotated[Threads, Field(ge=1)]  # of each rank, in torch's kernels on a CPU
    origin: Origin
    told_sha256: Sha256 | None = None  # of what the strategy's library was told


LARGEST = 3.5e38  # no float32 is larger, so no loss is


def _float32(value: float) -> float:
    if LARGEST < abs(value) < math.inf:
        raise ValueError("too large for a float32")
    return value


def _norm(value: float) -> float:
    if value < 0:
        raise ValueError("a norm cannot be negative")
    return value


Loss = Annotated[MayBreakDown, AfterValidator(_float32)]
Norm = Annotated[MayBreakDown, AfterValidator(_norm)]


class Step(Strict):
    """What a run records of one step. Losses in nats."""

    loss: Loss  # mean over dp ranks (of the mean over tokens, of the mean over micro batches)
    # one per dp rank; where some tokens have no label, its part of the sum over all, times dp
    rank_losses: Annotated[list[Loss], Field(min_length=1)]
    grad_norm: Norm  # of the whole model's averaged gradient, before clipping
    batch_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    # Of the tokens of the global batch, by their rounding errors (lockstep/inputs/data.py)
    independent_tokens: Annotated[Finite, Field(ge=1)] | None = None


def is_finite(step: Mapping[str, Any]) -> bool:
    return all(map(math.isfinite, (step["loss"], step["grad_norm"], *step["rank_losses"])))


def is_mean(loss: float, rank_losses: list[float]) -> bool:
    """Whether `loss` is the mean of the ranks' losses, up to the rounding errors of a float64 sum in any order.

    If the mean is not finite, `loss` must not be finite either.
    """
    mean = sum(rank_losses) / len(rank_losses)
    if not math.isfinite(mean):
        return not math.isfinite(loss)
    return abs(loss - mean) <= 2.0**-52 * sum(
        map(abs, rank_losses)
    )  # two sums of n terms, n unit roundoffs (2^-53) each


def read_sealed(path: Path, kind: str, number: int, remedy: str) -> dict[str, Any]:
    """Return the content of a JSON file. Raises UserError unless its format is `number` and its content is what its seal says."""
    try:
        content = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    recorded = content.get("format") if isinstance(content, dict) else None
    if recorded != number or isinstance(recorded, bool):
        what = (
            f"format {printable(repr(recorded), 40)}, this version reads {number}"
            if recorded is not None
            else f"not {kind}"
        )
        raise UserError(f"{path}: {what}; {remedy} with this version")
    if content.get("sha256") != seal(content):
        raise UserError(f"{path}: damaged (its content is not what its sha256 says); {remedy}")
    return content


def contradictions(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about entries of a run that contradict each other."""
    options = run["config"]
    mesh = Mesh.of_options(options)
    if run["mesh"] != mesh.sizes or mesh.world_size != options["num_workers"]:
        yield (
            f"mesh {run['mesh']}, {options['num_workers']} workers, and {mesh.label} of the configuration do not go together"
        )
    if options["debug_steps"] and run["num_steps"] != options["debug_steps"]:
        yield f"num_steps is {run['num_steps']}, debug_steps {options['debug_steps']}"
    spec = strategies.recorded(options["strategy"])
    unused = next((axis for axis in mesh.axes if axis not in spec.axes), None)
    if unused:
        yield f"run.mesh has {unused} {mesh.size(unused)}, and {spec.label} has no such axis"
    if spec.factory:  # the file of a user's own strategy, which says what its options are, may be gone
        try:
            validate(
                schema(spec.options), options["own"], "run.config.own", f"that is no option of {spec.label}"
            )
        except UserError as error:
            yield str(error).replace("run.config.own: ", "run.config.own.", 1)
    depth = run["architecture"].get("num_hidden_layers")
    if options["num_layers"] not in (None, depth):
        yield f"run.config.num_layers is {options['num_layers']}, the architecture has {depth}"
    if not {"torch", "transformers"} <= run["versions"].keys():
        yield "run.versions does not name torch and transformers"


def configuration(run: Mapping[str, Any]) -> Config:
    """Return the configuration of a recorded run, without its paths."""
    options = {key: value for key, value in run["config"].items() if key != "strategy"}
    return Config(spec=strategies.recorded(run["config"]["strategy"]), **options)


class Recorded(Protocol):
    """A history or a dump."""

    run: dict[str, Any]

    @property
    def initial_sha256(self) -> str: ...

    @property
    def batch_hashes(self) -> dict[int, str]:
        """Step -> hash of its global batch."""
        ...


def require_comparable(
    one: Recorded, other: Recorded, level: Same, names: str, *, same_weights: bool = True
) -> None:
    """Raise UserError that names the first difference for which two runs cannot be compared.

    `names` are the two runs as an error calls them. Without `same_weights`, initial weights may differ. Batches are compared in the steps
    that both runs have.
    """
    pair = f"{names} cannot be compared"
    config, other_config = one.run["config"], other.run["config"]
    if one.run["architecture"] != other.run["architecture"]:
        raise UserError(f"{pair}: their models differ; use the same --model_name and --num_layers")
    for name in flags.must_agree(Config, level):
        if config[name] != other_config[name]:
            raise UserError(
                f"{pair}: they were configured differently, {name} is {config[name]!r} against {other_config[name]!r}; use the same --{name}"
            )
    sizes = [values["dp_size"] * values["batch_size"] for values in (config, other_config)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{pair}: their global batches differ, dp_size x batch_size is {sizes[0]} against {sizes[1]}; make them equal"
        )
    for key, what in (("corpus_sha256", "corpora"), ("tokenizer", "tokenizers")):
        if one.run[key] != other.run[key]:
            raise UserError(f"{pair}: their {what} differ; use the same --dataset_name and tokenizer")
    if same_weights and one.initial_sha256 != other.initial_sha256:
        raise UserError(
            f"{pair}: they started from different weights; give all runs the same --init_weights_path"
        )
    hashes = other.batch_hashes
    for step, batch_hash in one.batch_hashes.items():
        if hashes.get(step, batch_hash) != batch_hash:
            raise UserError(
                f"{pair}: step {step} was trained on different batches; use the same corpus, --seed, --seq_length and dp_size x batch_size"
            )
    if one.run["versions"] != other.run["versions"]:
        raise UserError(
            f"{pair}: their libraries differ, {unlike(one.run['versions'], other.run['versions'])}; use the same environment"
        )
