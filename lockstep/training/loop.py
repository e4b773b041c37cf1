"""THE loop: seeding, one step, the loss record. It drives a `Strategy` (strategy.py) and imports no strategy and no launcher.

The loop does not know how a strategy works. It feeds every rank its micro batches, gathers what every rank saw, and stops all
ranks if something is wrong. `run` makes all that the steps need from the configuration.
"""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import transformers.modeling_utils  # noqa: F401 - the model's module needs it, and it takes seconds: in `startup.importing`

from lockstep.dumps.capture import Capture
from lockstep.dumps.history import History
from lockstep.ground import hang, progress
from lockstep.ground.collective import gather_objects, stop_together, stopping_together
from lockstep.ground.errors import TrainingFailure, UserError
from lockstep.ground.files import write_text
from lockstep.inputs import weights
from lockstep.inputs.data import Batches, Inputs, global_batch_hash, window_hashes
from lockstep.inputs.model import checkpoint_layers
from lockstep.plan import compiled, cuts
from lockstep.plan.config import Config
from lockstep.plan.mesh import Geometry, Mesh
from lockstep.training import trackers
from lockstep.training.agreement import Agreement
from lockstep.training.listeners import CountedCollectives, GroupNorms, LearningRate, Listener, held_out
from lockstep.training.observe import demanded, own_peak_memory, peak_memory, provenance
from lockstep.training.profiled import Profile
from lockstep.training.starting_weights import initial_model, live_checksums, require_file_weights
from lockstep.training.strategy import MakeStrategy, Strategy


def run_with_control(
    config: Config, inputs: Inputs, make_strategy: MakeStrategy, device: torch.device
) -> str:
    """Call `run`; with --control, then the control run in the same process. Returns the closing sentence of the last run."""
    line = run(config, inputs, make_strategy, device)
    if not config.control:
        return line
    if dist.get_rank() == 0:
        progress.screen.note(line)
    # Strategies hold cycles; the first model must be gone before the second is made.
    gc.collect()
    control = config.of_control()
    return run(control, replace(inputs, start=control.start), make_strategy, device)


@hang.watched()
def run(config: Config, inputs: Inputs, make_strategy: MakeStrategy, device: torch.device) -> str:
    """Train in this process, on this device, as one rank of an initialised process group; returns a closing sentence.

    `make_strategy(model, config, mesh, device)` builds the Strategy. Raises TrainingFailure on every rank.
    """
    start, mesh = time.monotonic(), config.mesh
    planned = Geometry.of_rank(mesh, dist.get_rank())
    hang.at("making the initial weights")
    with stopping_together():  # a user's file need not be there on every machine
        library_config = config.spec.told(config, inputs.architecture)
        record = History(provenance(config, inputs, library_config))
    _require_same_library_config(record.run)
    source, quiet = record.run["initial_weights"], config.quiet
    model, file_sums = initial_model(inputs, source, attn_impl=config.attn_impl, quiet=quiet)
    if config.activation_checkpointing:
        checkpoint_layers(model)
    capture = None
    if config.capture_dir:
        positions = cuts.positions(config, planned.coordinates.cp)
        capture = Capture(record.run, mesh, config.capture_folder, positions)
    hang.at("making the strategy")
    strategy = make_strategy(model, config, mesh, device)
    if config.compile != "off":
        compiled.enable(strategy.model, config.compile)
    actual = strategy.geometry()
    stop_together(
        f"rank {dist.get_rank()}: the strategy's groups put it at {actual}, the mesh at {planned}"
        if actual != planned
        else ""
    )
    try:
        is_cast = config.precision == "bf16"
        initial_sums = require_file_weights(strategy, inputs, None if is_cast else file_sums)
        if initial_sums is not None:
            record.weights = {"initial_sha256": weights.combined_sha256(initial_sums)}
            if capture:
                capture.manifest["initial_sha256"] = record.weights["initial_sha256"]
        _train(config, inputs, strategy, device, record, capture, library_config)
        _measure(inputs, strategy, device, record, initial_sums)
    except BaseException as error:
        record.ended = f"{type(error).__name__}: {error}".splitlines()[0]
        if capture:
            capture.abandon()
        # Without a step, an older history stays.
        if dist.get_rank() == 0 and record.steps:
            # The disk may be full; then the error above says which file filled it.
            with contextlib.suppress(UserError):
                record.save(config.history_path)
        raise
    with stopping_together():
        if dist.get_rank() == 0:
            record.save(config.history_path)
    first, last = record.steps[0], record.steps[-1]
    duration = progress.duration(time.monotonic() - start)
    return f"{config.label}: {len(record.steps)} steps in {duration}, loss {first['loss']:.6f} -> {last['loss']:.6f}, {config.history_path}"


def _require_same_library_config(about: dict[str, Any]) -> None:
    """Raise TrainingFailure if ranks have read different files of a user: under a launcher, each reads the file for itself."""
    if len(set(gather_objects(about.get("told_sha256")))) > 1:
        raise TrainingFailure(
            "ranks were given different configurations of the strategy's library; give the same file on every machine"
        )


def _train(
    config: Config,
    inputs: Inputs,
    strategy: Strategy,
    device: torch.device,
    record: History,
    capture: Capture | None,
    library_config: str,
) -> None:
    """Train every step, with its listeners. If rank 0 cannot write something, all ranks stop in the next step."""
    is_lead, mesh, path, problem = dist.get_rank() == 0, config.mesh, config.history_path, ""
    display = progress.Steps(config.label, inputs.num_steps, config.log_interval)
    profile = Profile(config.trace_path(dist.get_rank()), config.profiled)
    agreement, collectives = Agreement(record, mesh, capture), CountedCollectives(inputs.num_steps)
    listeners: list[Listener] = [
        LearningRate(record.run["config"], inputs.num_steps),
        profile,
        *([GroupNorms(inputs.num_steps)] if config.group_norms else []),
        *([capture] if capture else []),
        agreement,
        *([collectives] if config.count_collectives else []),
    ]
    tracker_names = config.report_to if is_lead else ()
    with trackers.tracking(tracker_names, path, record.run["config"]) as run_trackers:
        for index in range(inputs.num_steps):
            listening = [listener for listener in listeners if index + 1 in listener.steps]
            step_record, losses = train_step(
                strategy, inputs.batches, mesh, device, index, listening, problem=problem
            )
            record.steps.append(step_record)
            try:
                # It replaces that of an older run.
                if is_lead and index == 0:
                    config.told_path.unlink(missing_ok=True)
                    if library_config:
                        write_text(config.told_path, library_config)
            except UserError as error:
                problem = str(error)
            problem = _require_finite(step_record, losses, mesh) or problem
            if index == 0:
                # First, because a norm of NaN would contradict the options.
                stop_together(problem)
                contract = demanded(config, inputs)
                agreement.require(contract, step_record["grad_norm"])
            try:
                if is_lead:
                    record.save_if_due(path)
                    display.add(step_record, own_peak_memory(device))
                run_trackers.step(step_record)
            except UserError as error:
                problem = str(error)
        stop_together(problem)
        if config.profile:
            line = f"{config.label}: {profile.line()}; {config.trace_path(0)} and the other ranks'"
            if is_lead:
                progress.screen.note(line)
        if config.count_collectives:
            record.run["collectives"] = collectives.counted


def _measure(
    inputs: Inputs, strategy: Strategy, device: torch.device, record: History, before: dict[str, str] | None
) -> None:
    """After the last step, record memory, held-out text and which weights moved. `before` are the initial checksums, on rank 0 alone."""
    hang.at("gathering the weights after the last step")
    after = live_checksums(strategy)
    hang.at("measuring")
    memory = peak_memory(device)
    is_lead = before is not None
    held_out_result = held_out(strategy, inputs, record.run["config"]["attn_impl"], lead=is_lead)
    if before is not None and after is not None:
        record.weights |= {
            "final_sha256": weights.combined_sha256(after),
            "moved": sorted(name for name in after if after[name] != before[name]),
        }
        record.run["peak_memory"] = memory
        if held_out_result:
            record.run["held_out"] = held_out_result
        record.ended = "finished"


def train_step(
    strategy: Strategy,
    batches: Batches,
    mesh: Mesh,
    device: torch.device,
    index: int,
    listeners: Sequence[Listener] = (),
    *,
    problem: str = "",
) -> tuple[dict[str, Any], list[float]]:
    """Run step `index` (from 0): feed, forward and backward, update, gather what every rank saw.

    If this rank has had a `problem` since the last step, all ranks stop. No step needs a further collective for this.

    Returns the record of the step, which keeps one loss per DP rank, and the loss of every rank.

    Raises TrainingFailure on every rank for a `problem`, if ranks that share samples saw different batches, or if other ranks saw the
    same.
    """
    step = index + 1
    micro_batches = batches.micro_batches(index, mesh.sample_share(dist.get_rank()), device)
    start = time.perf_counter()
    hashes_fed = window_hashes(micro_batches)  # before a strategy may change them

    hang.at(f"step {step}, forward and backward")
    for listener in listeners:
        listener.begin(strategy, step, micro_batches)
    loss = strategy.forward_backward(micro_batches)

    hang.at(f"step {step}, update")
    for listener in listeners:
        listener.gradients()
    finish_gathering = _start_gathering(loss, [float(bool(problem)), *hashes_fed], device)
    grad_norm = strategy.update()

    independent_tokens = batches.independent_tokens(index)
    rows = finish_gathering()
    losses, hashes = [row[0] for row in rows], [list(map(int, row[2:])) for row in rows]
    if any(row[1] for row in rows):
        stop_together(problem)
    require_right_batches(hashes, mesh, step)
    lead_ranks = [mesh.first_with_share(share) for share in range(mesh.num_sample_shares)]
    record = {
        "step": step,
        "loss": sum(losses[rank] for rank in lead_ranks) / len(lead_ranks),
        "rank_losses": [losses[rank] for rank in lead_ranks],
        "grad_norm": grad_norm,
        "tokens": batches.tokens_per_step,
        "independent_tokens": independent_tokens,
        "batch_hash": global_batch_hash([value for rank in lead_ranks for value in hashes[rank]]),
    }
    hang.at(f"the end of step {step}")
    for listener in listeners:
        listener.end(record)
    record["seconds"] = time.perf_counter() - start
    return record, losses


def require_right_batches(hashes: list[list[int]], mesh: Mesh, step: int) -> None:
    """Raise TrainingFailure unless ranks saw the same batch exactly if they have the same share of the global batch."""
    for rank, batch in enumerate(hashes):
        share = mesh.sample_share(rank)
        lead = mesh.first_with_share(share)
        if batch != hashes[lead]:
            raise TrainingFailure(
                f"step {step}: rank {lead} and rank {rank} share samples (dp {share}) and saw different batches"
            )
        twin = next((other for other in range(share) if hashes[mesh.first_with_share(other)] == batch), None)
        if twin is not None:
            raise TrainingFailure(
                f"step {step}: DP ranks {twin} and {share} saw the same batch; give a corpus without repetitions"
            )


def _require_finite(record: dict[str, Any], losses: list[float], mesh: Mesh) -> str:
    """Return what is wrong with this rank's gradient norm, or "". Raises TrainingFailure for a loss, which all ranks know."""
    step = record["step"]
    for rank, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise TrainingFailure(_not_finite(step, "loss", loss, rank, mesh))
    norm = record["grad_norm"]
    return "" if math.isfinite(norm) else _not_finite(step, "gradient norm", norm, dist.get_rank(), mesh)


def _not_finite(step: int, quantity: str, value: float, rank: int, mesh: Mesh) -> str:
    place = f"on rank {rank} ({Geometry.of_rank(mesh, rank)})"
    return f"step {step}: the {quantity} is {value} {place}; lower --learning_rate, or check the weights"


def _start_gathering(
    loss: torch.Tensor, numbers: list[float], device: torch.device
) -> Callable[[], list[list[float]]]:
    """Send this rank's loss and numbers. The returned function waits for (loss, *numbers) of every rank, in rank order.

    The strategy updates meanwhile. float64 carries the numbers exactly (a hash has 48 bits).
    """
    row = torch.tensor([0.0, *numbers], dtype=torch.float64, device=device)
    row[0] = loss  # float(loss) would wait for a GPU here
    rows = row.new_empty(dist.get_world_size() * len(row))
    work = dist.all_gather_single(rows, row, async_op=True)

    def finish() -> list[list[float]]:
        work.wait()
        return rows.view(-1, len(row)).tolist()

    return finish
