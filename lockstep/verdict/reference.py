"""The float64 reference: one process, the global batch, the same initial weights.

`python -m lockstep.reference` writes, beside the dumps of the runs,

    runs/dumps/reference      the first --capture_steps steps, and as step 0 the initial parameters
    runs/dumps/replay_NAME    for every dump NAME there with more than one step: its later steps, each from the
                              parameters that the run itself had reached
    runs/dumps/alone_NAME.json  what is wrong with the modules of dump NAME by themselves (lockstep/verdict/forced.py)

Replays are needed because Adam divides noise by noise where a gradient is nearly zero. Two correct runs differ visibly in a few weights
after one step, by chance. From the same weights they must agree. A replay also takes the discrete choices that the run made, such as a
router's of experts. Where the run's choices in step 1 are not the reference's, the replay begins with step 1.

All of this is computed in float64 (lockstep/verdict/float64.py).
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.dumps import dump
from lockstep.dumps.capture import Capture
from lockstep.dumps.layout import Choice
from lockstep.dumps.manifest import REFERENCE_LABEL as LABEL
from lockstep.dumps.trace import layout_of
from lockstep.ground import files
from lockstep.ground.blocks import CalledModules, Held
from lockstep.ground.errors import TrainingFailure
from lockstep.inputs import weights
from lockstep.inputs.data import Inputs, global_batch_hash, window_hashes
from lockstep.inputs.model import build_model, causal_lm_loss
from lockstep.inputs.samples import IGNORED
from lockstep.plan import rates
from lockstep.plan.config import BASELINE, BETAS, EPS, JUDGED, REPLAY, Config
from lockstep.plan.mesh import Mesh
from lockstep.training.observe import provenance
from lockstep.training.optim import (
    AnyOptimizer,
    Named,
    WeightAverage,
    build_optimizer,
    gradient_of,
    held_whole,
    named_trained,
    parameter_groups,
    set_rate,
    state_kinds,
    total_norm,
    trained,
)
from lockstep.training.strategy import MicroBatch
from lockstep.verdict import forced, module_results
from lockstep.verdict.comparable_dumps import require_comparable_dumps
from lockstep.verdict.distance import Size, clip_factor, size_of
from lockstep.verdict.float64 import Float64, make_exact

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_reference(
    inputs: Inputs, *, seed: int, attn_impl: str, init_weights_path: Path | None
) -> "PreTrainedModel":
    """Build the model in float64. It must be run in `Float64`."""
    model, _ = build_model(
        inputs.architecture, seed=seed, attn_impl=attn_impl, init_weights_path=init_weights_path
    )
    make_exact(model, layout_of(inputs.architecture, attn_impl).tables)
    return model


class ReferenceStrategy:
    """A strategy of one process in float64, with what `Capture` needs: a model, and what is held of each parameter."""

    optimizer: AnyOptimizer
    loss_shares = 1  # this process computes the global batch

    def __init__(self, model: "PreTrainedModel", config: Config, choices: dict[str, Choice]):
        self.model, self.config, self.choices = model, config, choices
        self.renew_optimizer()
        self.average = WeightAverage(model, config.ema_decay) if config.ema_decay < 1 else None

    def renew_optimizer(self) -> None:
        """Build an optimizer that has not stepped yet; one of the user's own a second time, for parameters in the run's dtype."""
        config = self.config
        if config.optimizer == "adamw":  # not fused
            groups = parameter_groups(trained(self.model), config.weight_decay)
            self.optimizer = torch.optim.AdamW(
                groups, lr=config.learning_rate, betas=BETAS, eps=EPS, foreach=False
            )
            return
        self.optimizer = self._built(named_trained(self.model))
        if config.has_own_optimizer:
            self.rounded = [
                (name, torch.nn.Parameter(parameter.detach().to(config.parameter_dtype)))
                for name, parameter in named_trained(self.model)
            ]
            self.rounded_optimizer = self._built(self.rounded)

    def _built(self, named: Named) -> AnyOptimizer:
        config = self.config
        groups = parameter_groups([parameter for _, parameter in named], config.weight_decay)
        return build_optimizer(
            groups, optimizer=config.optimizer, learning_rate=config.learning_rate, named=named
        )

    def step_as(self, theirs: dump.Dump, index: int) -> tuple[bool, dict[str, Size]]:
        """Step the user's own optimizer from a run's own gradients and state, in float64, and once more in the run's dtype.

        `theirs` is the run's dump, `index` the number of the step less one. Numbers that the optimizer counts, such as steps, are its own.
        Returns whether the optimizer lowers the precision itself, and the rounding errors of each updated tensor in the run's dtype.
        """
        clip = clip_factor(theirs.run["config"], theirs.steps[index + 1]["grad_norm"])
        pairs = list(zip(named_trained(self.model), self.rounded, strict=True))
        for (name, exact), (_, rounded) in pairs:
            gradient = theirs.tensor(index + 1, f"gradient/{name}")
            with torch.no_grad():
                rounded.copy_(exact)
            exact.grad, rounded.grad = gradient.double() * clip, (gradient * clip).to(rounded.dtype)
            for kind, shapes in theirs.layout.state.items() if index else ():
                if name in shapes:
                    value = theirs.tensor(index, f"{kind}/{name}")
                    self.optimizer.state[exact][kind].copy_(value)
                    self.rounded_optimizer.state[rounded][kind].copy_(value)
        groups = zip(self.optimizer.param_groups, self.rounded_optimizer.param_groups, strict=True)
        for group, rounded_group in groups:
            rounded_group["lr"] = group["lr"]
        with Float64() as mode:
            self.optimizer.step()
        self.rounded_optimizer.step()
        errors = {}
        for (name, exact), (_, rounded) in pairs:
            errors[f"parameter/{name}"] = size_of(rounded.double() - exact)
            state, rounded_state = (
                optimizer.state.get(parameter, {})  # one without state has none
                for optimizer, parameter in ((self.optimizer, exact), (self.rounded_optimizer, rounded))
            )
            for kind in self.state_kinds():
                if kind in state:
                    errors[f"{kind}/{name}"] = size_of(rounded_state[kind].double() - state[kind])
        return mode.lowered, errors

    def state_kinds(self) -> list[str]:
        return state_kinds(self.optimizer)

    def forward_backward(
        self, micro_batches: list[MicroBatch], chosen: dict[str, torch.Tensor] | None = None
    ) -> list[float]:
        """Compute the gradient of the mean loss over the micro batches of all DP ranks. Return each rank's mean loss.

        The micro batches of a rank follow each other. `chosen` are discrete choices to take, by name: indices of the whole batch. `regrets`
        then has the largest regret of each choice.
        """
        self.optimizer.zero_grad()
        regrets: dict[str, list[float]] = collections.defaultdict(lambda: [0.0])
        name_by_call = {choice.call: name for name, choice in self.choices.items()}
        widths = {choice.call: choice.width for choice in self.choices.values()}
        losses, first = [], 0
        counted = self.config.samples.counted
        number = sum(int((labels != IGNORED).sum()) for _, labels, *_ in micro_batches) if counted else None
        for input_ids, labels, *further in micro_batches:
            rows = slice(first, first + len(input_ids))
            first = rows.stop
            choices = {self.choices[name].call: indices[rows] for name, indices in (chosen or {}).items()}
            with Float64(choices, widths) as mode:
                inputs = self.config.samples.named(further)
                loss = causal_lm_loss(self.model, input_ids, labels, num_labels=number, **inputs)
                loss = loss * len(micro_batches) if counted else loss
                (loss / len(micro_batches)).backward()
            for name, taken in mode.taken(name_by_call).items():
                regrets[name].append(taken.regret)
            losses.append(loss.detach())
        # The maximum of a tensor is NaN if one element is.
        self.regrets = {name: float(torch.tensor(values).max()) for name, values in regrets.items()}
        return torch.stack(losses).view(self.config.dp_size, -1).mean(dim=-1).tolist()

    def called(self) -> CalledModules:
        return [(self.model, {name: name for name in self.config.samples.inputs})]

    def grad_norm(self) -> float:
        return float(total_norm(map(gradient_of, trained(self.model))))

    def update(self) -> float:
        grad_norm = self.grad_norm()
        clip = clip_factor(vars(self.config), grad_norm)
        for parameter in trained(self.model):
            gradient_of(parameter).mul_(clip)
        with Float64():
            self.optimizer.step()
        if self.average is not None:
            self.average.update()
        return grad_norm

    def held(self, kind: str) -> Held:
        return held_whole(self.model, self.optimizer, kind, self.average)


def run(config: Config, inputs: Inputs, dumps: Sequence[Path] | None = None) -> str:
    """Write the reference's dump, the replays of runs, and what is wrong with the runs' modules by themselves. Return a line about it.

    Replayed are the baseline's dump and `dumps`; None: all dumps beside the reference's. Needs a process group of one rank.
    """
    model = build_reference(
        inputs,
        seed=inputs.start.seed,
        attn_impl=config.attn_impl,
        init_weights_path=inputs.start.file(),
    )
    with torch.no_grad():
        # The parameters of a run in bfloat16 are rounded before its first step.
        for parameter in model.parameters():
            parameter.copy_(parameter.to(config.parameter_dtype))
    strategy = ReferenceStrategy(model, config, layout_of(inputs.architecture, config.attn_impl).choices)
    initial = (
        (name, parameter.detach().to(config.parameter_dtype)) for name, parameter in model.named_parameters()
    )
    initial_sha256 = weights.combined_sha256(weights.checksums(initial))
    capture = _capture(config, inputs, "reference", initial_sha256)
    capture.only_parameters(strategy)
    for index in range(config.capture_steps):
        loss = _one_step(config, inputs, strategy, capture, index)
    parent = capture.folder.parent
    reference = dump.Dump(capture.folder)
    folders = captured(parent) if dumps is None else dict.fromkeys([parent / BASELINE, *dumps])
    run_dumps = [dump.Dump(folder) for folder in folders if (folder / dump.MANIFEST).is_file()]
    for run_dump in run_dumps:
        require_comparable_dumps(run_dump, reference, same_steps=False)
        replay(config, inputs, strategy, run_dump, reference)
    if run_dumps and config.precision in JUDGED:
        yardstick_model = forced.model_of(run_dumps[0])
        for run_dump in run_dumps:
            module_results.write(forced.judge(run_dump, reference, model, yardstick_model), run_dump.folder)
    return f"{LABEL}: {config.capture_steps} steps, last loss {loss:.9f}, {capture.folder}"


def captured(folder: Path) -> list[Path]:
    """Return the dumps of runs in a folder, without reference and replays, by name."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        path
        for path in paths
        if (path / dump.MANIFEST).is_file() and path.name != "reference" and not path.name.startswith(REPLAY)
    ]


def replay(
    config: Config, inputs: Inputs, strategy: "ReferenceStrategy", theirs: dump.Dump, reference: dump.Dump
) -> None:
    """Write the replay of a run's dump `theirs` as replay_NAME beside it. `config` is the reference's.

    The replay has forward, backward and gradients of steps 2 and later, each from the run's own parameters, on its micro batches and with
    its choices. It has step 1, too, if the run's micro batches or choices there are not the reference's, and for an optimizer of the
    user's own.
    """
    folder, options = theirs.folder, theirs.run["config"]
    # A mixture's term for the balance of its experts is a mean over micro batches, not over tokens.
    has_other_batches = bool(strategy.choices) and options["batch_size"] != config.batch_size
    first = 0 if config.has_own_optimizer or has_other_batches or _chose_otherwise(theirs, reference) else 1
    if len(theirs.steps) <= first:
        files.remove_captured(folder.with_name(f"{REPLAY}{folder.name}"))  # an older dump's
        return
    sizes = {key: options[key] for key in ("batch_size", "dp_size", "gradient_accumulation_steps")}
    config = dataclasses.replace(config, capture_dir=folder.parent, num_workers=options["dp_size"], **sizes)
    strategy.config = config
    capture = _capture(config, inputs, f"{REPLAY}{folder.name}", reference.manifest["initial_sha256"])
    capture.kinds = tuple(kind for kind in capture.kinds if kind != "average")
    strategy.renew_optimizer()
    for index in range(first, len(theirs.steps)):
        source = theirs if index else reference  # of the parameters before the step
        with torch.no_grad():
            for name, parameter in strategy.model.named_parameters():
                parameter.copy_(source.tensor(index, f"parameter/{name}"))
        chosen = {
            name: choice.of(theirs.tensor(index + 1, f"forward/{name}"))
            for name, choice in strategy.choices.items()
            if theirs.has(index + 1, f"forward/{name}")
        }
        digest = source.parameter_digest(index)
        again = functools.partial(strategy.step_as, theirs, index) if config.has_own_optimizer else None
        _one_step(config, inputs, strategy, capture, index, started_from=digest, chosen=chosen, again=again)


def _chose_otherwise(theirs: dump.Dump, reference: dump.Dump) -> bool:
    """Whether the run of the dump `theirs` made other choices in step 1 than the reference, or in another order."""
    return any(
        theirs.has(1, tensor_name)
        and not torch.equal(*(choice.of(source.tensor(1, tensor_name)) for source in (theirs, reference)))
        for tensor_name, choice in (
            (f"forward/{name}", choice) for name, choice in reference.layout.choices.items()
        )
    )


def _capture(config: Config, inputs: Inputs, name: str, initial_sha256: str) -> Capture:
    """Return the capture of one process that computes the global batch."""
    assert config.capture_dir is not None, "`main` asks for it"
    about = {**provenance(config, inputs), "label": LABEL, "exact": True}
    capture = Capture(about, Mesh(), config.capture_dir / name, [(0, config.seq_length)])
    capture.manifest["initial_sha256"] = initial_sha256
    return capture


def _one_step(
    config: Config,
    inputs: Inputs,
    strategy: ReferenceStrategy,
    capture: Capture,
    index: int,
    *,
    started_from: str = "",
    chosen: dict[str, torch.Tensor] | None = None,
    again: Callable[[], tuple[bool, dict[str, Size]]] | None = None,
) -> float:
    """Compute and capture one step on the micro batches of all DP ranks. Return the mean loss.

    `started_from` identifies the parameters that a step of a replay starts from; "" for the reference. A replay takes the choices `chosen`
    and makes no update, except with an optimizer of the user's own. `again` is then `ReferenceStrategy.step_as` for the run.
    """
    rate = rates.rate_of(vars(config), index + 1, inputs.num_steps)
    set_rate(strategy.optimizer, rate, config.learning_rate)
    by_rank = [inputs.batches.micro_batches(index, rank, "cpu") for rank in range(inputs.batches.dp_size)]
    parts = zip(*(micro_batch for of_rank in by_rank for micro_batch in of_rank), strict=True)
    whole = map(torch.cat, parts)
    micro_batches = list(zip(*(tensor.split(config.batch_size) for tensor in whole), strict=True))
    capture.begin(strategy, index + 1, micro_batches)
    rank_losses = strategy.forward_backward(micro_batches, chosen)
    capture.gradients()
    grad_norm = strategy.grad_norm() if started_from else strategy.update()
    loss = sum(rank_losses) / len(rank_losses)
    if not math.isfinite(loss + grad_norm):
        raise TrainingFailure(
            f"{LABEL}: step {index + 1} has loss {loss} and gradient norm {grad_norm}; lower --learning_rate"
        )
    record: dict[str, Any] = {
        "loss": loss,
        "rank_losses": rank_losses,
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "batch_hash": global_batch_hash(window_hashes(micro_batches)),
    }
    if started_from:
        record["started_from"] = started_from
    if chosen:
        record["regrets"] = strategy.regrets
    if again:
        record["lowered"], errors = again()
        record["update_errors"] = {
            name: list(error) for name, error in errors.items() if all(map(math.isfinite, error))
        }
    capture.end(record, updated=not started_from or again is not None)
    return loss
