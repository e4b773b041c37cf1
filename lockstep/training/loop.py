"""THE loop: seeding, one step, the loss record. It drives a `Strategy` (strategy.py) and imports no strategy and no launcher.

The loop does not know how a strategy works. It feeds every rank its micro batches, gathers what every rank saw, and stops all
ranks if something is wrong.
"""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers.modeling_utils  # noqa: F401 - the model's module needs it, and it takes seconds: in `startup.importing`

from lockstep.dumps import history as history_file
from lockstep.dumps.capture import Capture
from lockstep.ground import hang, progress
from lockstep.ground.collective import gather_objects, stop_together, stopping_together
from lockstep.ground.errors import TrainingFailure, UserError
from lockstep.inputs import weights
from lockstep.inputs.data import Batches, Inputs, global_batch_hash, window_hashes
from lockstep.inputs.model import checkpoint_layers
from lockstep.plan import compiled, rates
from lockstep.plan.config import Config
from lockstep.plan.contract import contradiction, left_to_the_verdict, of_all_ranks
from lockstep.plan.mesh import Geometry, Mesh
from lockstep.training import trackers
from lockstep.training.listeners import ComputeDtypes, CountedCollectives, GroupNorms, Listener, held_out
from lockstep.training.observe import (
    clipping_problem,
    demanded,
    learning_rate,
    own_peak_memory,
    peak_memory,
)
from lockstep.training.optim import set_rate
from lockstep.training.profiled import Profile
from lockstep.training.provenance import provenance, require_told_alike, write_told
from lockstep.training.starting_weights import initial_model, live_checksums, require_file_weights
from lockstep.training.strategy import MakeStrategy, Strategy


def run_with_control(
    config: Config, inputs: Inputs, make_strategy: MakeStrategy, device: torch.device
) -> str:
    """`run`; with --control, then the control run in the same process. Returns the closing sentence of the last run."""
    line = run(config, inputs, make_strategy, device)
    if not config.control:
        return line
    if dist.get_rank() == 0:
        progress.screen.note(line)
    gc.collect()  # strategies hold cycles; the first model must be gone before the second is made
    return run(config.of_control(), inputs, make_strategy, device)


@hang.watched()
def run(config: Config, inputs: Inputs, make_strategy: MakeStrategy, device: torch.device) -> str:
    """Train in this process, on this device, as one rank of an initialised process group; returns a closing sentence.

    `make_strategy(model, config, mesh, device)` builds the Strategy. Raises TrainingFailure on every rank.
    """
    begin = time.monotonic()
    rank = dist.get_rank()
    hang.at("making the initial weights")
    model, file_sums = initial_model(config, inputs, rank)
    if config.activation_checkpointing:
        checkpoint_layers(model)
    about = provenance(config, inputs)
    require_told_alike(about.get("told_sha256"))
    capture = Capture(config, model, about) if config.capture_dir else None
    hang.at("making the strategy")
    strategy = make_strategy(model, config, config.mesh, device)
    if config.compile != "off":
        compiled.enable(strategy.model, config.compile)
    expected, actual = Geometry.of_rank(config.mesh, rank), strategy.geometry()
    stop_together(
        f"rank {rank}: the strategy's groups put it at {actual}, the mesh at {expected}"
        if actual != expected
        else ""
    )

    record = history_file.History(run=about)
    path = config.history_path
    try:
        before = require_file_weights(strategy, inputs, config, file_sums)
        if before is not None:
            record.weights = {"initial_sha256": weights.combined_sha256(before)}
            if capture:
                capture.manifest["initial_sha256"] = record.weights["initial_sha256"]
        with trackers.tracking(config, lead=rank == 0) as tracked:
            _train(config, inputs, strategy, device, record, capture, tracked)
        _measure(config, inputs, strategy, device, record, before)
    except BaseException as error:
        record.ended = f"{type(error).__name__}: {error}".splitlines()[0]
        if capture:
            capture.abandon()
        if rank == 0 and record.steps:  # without a step, an older history stays
            with contextlib.suppress(UserError):  # on a full disk: the error above says which file filled it
                record.save(path)
        raise
    with stopping_together():
        if rank == 0:
            record.save(path)
    first, last = record.steps[0], record.steps[-1]
    took = progress.duration(time.monotonic() - begin)
    return f"{config.label}: {len(record.steps)} steps in {took}, loss {first['loss']:.6f} -> {last['loss']:.6f}, {path}"


def _train(
    config: Config,
    inputs: Inputs,
    strategy: Strategy,
    device: torch.device,
    record: history_file.History,
    capture: Capture | None,
    tracked: trackers.Trackers,
) -> None:
    """Every step, with what listens to it. What rank 0 cannot write stops all ranks in the step after."""
    lead = dist.get_rank() == 0
    shown = progress.Steps(config.label, inputs.num_steps, config.log_interval)
    dtypes, counted = ComputeDtypes(config.compile), CountedCollectives()
    profile = Profile(config.trace_path(dist.get_rank()), config.profiled.stop - 1)
    problem = ""
    for index in range(inputs.num_steps):
        capturing = capture if capture is not None and index < config.capture_steps else None
        listeners: list[Listener] = [
            *([profile] if index + 1 in config.profiled else []),
            *([GroupNorms()] if config.group_norms else []),
            *([capturing] if capturing else []),
            *([dtypes] if index == 0 else []),
            *([counted] if config.count_collectives and index == inputs.num_steps - 1 else []),
        ]
        step, losses = train_step(strategy, inputs.batches, config, device, index, listeners, problem=problem)
        record.add(step)
        try:
            if lead and index == 0:
                write_told(config, inputs)
        except UserError as error:
            problem = str(error)
        _require_finite_losses(step["step"], losses, config.mesh)
        if not math.isfinite(step["grad_norm"]):
            problem = _not_finite(
                step["step"], "gradient norm", step["grad_norm"], dist.get_rank(), config.mesh
            )
        if index == 0:
            stop_together(problem)  # before a norm of NaN is held against the options
            own = {**strategy.effective_contract(), **dtypes.seen()}
            record.contract = of_all_ranks(gather_objects(own), config.mesh)
            _require_contract(config, inputs, record, capturing)
            if capturing is None:
                norms = step["grad_norm"], strategy.clipped_norm()
                odd = clipping_problem(config.max_grad_norm, *norms, config.precision)
                stop_together(f"{config.label}: step 1, rank {dist.get_rank()}: {odd}" if odd else "")
        try:
            if lead:
                record.save_if_due(config.history_path)
                shown.add(step, own_peak_memory(device))
            tracked.step(step)
        except UserError as error:
            problem = str(error)
    stop_together(problem)
    if profile.steps:
        line = f"{config.label}: {profile.line()}; {config.trace_path(0)} and the other ranks'"
        if lead:
            progress.screen.note(line)
    if config.count_collectives:
        record.run["collectives"] = counted.counted


def _require_contract(
    config: Config, inputs: Inputs, record: history_file.History, capture: Capture | None
) -> None:
    """Stop all ranks unless the live objects are what the options ask for; what a captured tensor shows better is left to the verdict."""
    assert record.contract is not None
    if dist.get_rank() == 0 and capture:
        capture.state_contract(record.contract)
    wanted = demanded(config, inputs)
    later = left_to_the_verdict(wanted, record.contract) if capture else ()
    difference = contradiction(wanted, record.contract, later)
    stop_together(
        f"{config.label}: the live objects contradict the options: {difference}" if difference else ""
    )


def _measure(
    config: Config,
    inputs: Inputs,
    strategy: Strategy,
    device: torch.device,
    record: history_file.History,
    before: dict[str, str] | None,
) -> None:
    """After the last step: memory, held-out text, and which weights moved. `before` are their checksums, on rank 0 alone."""
    hang.at("gathering the weights after the last step")
    after = live_checksums(strategy)
    hang.at("measuring")
    memory = peak_memory(device)
    lead = before is not None
    measured = held_out(strategy, inputs, config.attn_impl, lead=lead) if config.held_out else None
    if before is not None and after is not None:
        record.weights |= {
            "final_sha256": weights.combined_sha256(after),
            "moved": sorted(name for name in after if after[name] != before[name]),
        }
        record.run["peak_memory"] = memory
        if measured:
            record.run["held_out"] = measured
        record.ended = "finished"


def train_step(
    strategy: Strategy,
    batches: Batches,
    config: Config,
    device: torch.device,
    index: int,
    listeners: Sequence[Listener] = (),
    *,
    problem: str = "",
) -> tuple[dict[str, Any], list[float]]:
    """Step `index` (from 0): feed, forward and backward, update, gather what every rank saw.

    A `problem` that this rank has had since the last step stops all ranks, without a collective of its own in every step.

    Returns the record of the step, which keeps one loss per DP rank, and the loss of every rank.

    Raises TrainingFailure on every rank if ranks that share samples saw different batches, or others the same, and for a `problem`.
    """
    step, mesh = index + 1, config.mesh
    micro_batches = batches.micro_batches(index, mesh.sample_share(dist.get_rank()), device)
    start = time.perf_counter()
    hashes_fed = window_hashes(micro_batches)  # before a strategy may change them

    hang.at(f"step {step}, forward and backward")
    for each in listeners:
        each.begin(strategy, step, micro_batches)
    loss = strategy.forward_backward(micro_batches)

    hang.at(f"step {step}, update")
    for each in listeners:
        each.gradients()
    rate = _set_rate(strategy, config, batches, step)
    gathered = _start_gathering(loss, [float(bool(problem)), *hashes_fed], device)
    grad_norm = strategy.update()
    if not config.has_own_optimizer:  # whose groups may have several rates
        rate = learning_rate(strategy.optimizer.param_groups[0])

    independent_tokens = batches.independent_tokens(index)
    everyone = gathered()
    losses, hashes = [row[0] for row in everyone], [list(map(int, row[2:])) for row in everyone]
    if any(row[1] for row in everyone):
        stop_together(problem)
    require_right_batches(hashes, mesh, step)
    first_of = [mesh.first_with_share(share) for share in range(mesh.num_sample_shares)]
    record = {
        "step": step,
        "loss": sum(losses[rank] for rank in first_of) / len(first_of),
        "rank_losses": [losses[rank] for rank in first_of],
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "tokens": batches.windows_per_step * config.seq_length,
        "independent_tokens": independent_tokens,
        "batch_hash": global_batch_hash([each for rank in first_of for each in hashes[rank]]),
    }
    hang.at(f"the end of step {step}")
    for each in listeners:
        each.end(record)
    record["seconds"] = time.perf_counter() - start
    return record, losses


def _set_rate(strategy: Strategy, config: Config, batches: Batches, step: int) -> float:
    """Give the optimizer the rate of this step, which is returned."""
    num_steps = config.debug_steps or config.num_epochs * batches.steps_per_epoch
    rate = rates.rate_of(vars(config), step, num_steps)
    if rates.changes(vars(config)):
        set_rate(strategy.optimizer, rate, config.learning_rate)
    return rate


def require_right_batches(hashes: list[list[int]], mesh: Mesh, step: int) -> None:
    """Ranks with the same share of the global batch must see the same batch, ranks with different shares different ones."""
    for rank, value in enumerate(hashes):
        share = mesh.sample_share(rank)
        lead = mesh.first_with_share(share)
        if value != hashes[lead]:
            raise TrainingFailure(
                f"step {step}: rank {lead} and rank {rank} share samples (dp {share}) and saw different batches"
            )
        twin = next((other for other in range(share) if hashes[mesh.first_with_share(other)] == value), None)
        if twin is not None:
            raise TrainingFailure(
                f"step {step}: DP ranks {twin} and {share} saw the same batch; give a corpus without repetitions"
            )


def _require_finite_losses(step: int, losses: list[float], mesh: Mesh) -> None:
    for rank, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise TrainingFailure(_not_finite(step, "loss", loss, rank, mesh))


def _not_finite(step: int, what: str, value: float, rank: int, mesh: Mesh) -> str:
    where = f"on rank {rank} ({Geometry.of_rank(mesh, rank)})"
    return f"step {step}: the {what} is {value} {where}; lower --learning_rate, or check the weights"


def _start_gathering(
    loss: torch.Tensor, others: list[float], device: torch.device
) -> Callable[[], list[list[float]]]:
    """Send this rank's numbers; the function returned waits for (loss, *others) of every rank, in rank order.

    The strategy updates meanwhile. float64 carries the numbers exactly (a hash has 48 bits).
    """
    row = torch.tensor([0.0, *others], dtype=torch.float64, device=device)
    row[0] = loss  # float(loss) would wait for a GPU here
    everyone = row.new_empty(dist.get_world_size() * len(row))
    work = dist.all_gather_single(everyone, row, async_op=True)

    def finish() -> list[list[float]]:
        work.wait()
        return everyone.view(-1, len(row)).tolist()

    return finish
