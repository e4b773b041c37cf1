import json
import time

import pytest
from synthetic import history as made_up
from synthetic import require_origin, rewrite, set_loss

from lockstep.dumps import header, history
from lockstep.dumps.header import seal
from lockstep.ground import origin as where
from lockstep.ground.errors import UserError
from lockstep.plan.command_line import parse_config
from lockstep.training.preflight import load_inputs


def written(tmp_path, **changes):
    path = tmp_path / "loss_ddp.json"
    made_up(steps=3, **changes).save(path)
    return path


def test_every_save_is_a_whole_file(tmp_path):
    whole = made_up(steps=3)
    record = history.History(run=whole.run, contract=whole.contract, weights={"initial_sha256": "a" * 64})
    for step in whole.steps:
        record.steps.append(step)
        record.save(tmp_path / "loss_ddp.json")
        read = history.read(tmp_path / "loss_ddp.json")
        assert [s["step"] for s in read.steps] == list(range(1, step["step"] + 1)) and read.ended is None
    assert [p.name for p in tmp_path.iterdir()] == ["loss_ddp.json"]


def test_what_is_read_is_what_was_written(tmp_path):
    one = made_up(steps=2)
    set_loss(one.steps[0], 0.1 + 0.2)
    one.save(tmp_path / "h.json")
    assert history.read(tmp_path / "h.json") == history.History(
        one.run, one.steps, one.contract, one.weights, one.ended
    )
    content = json.loads((tmp_path / "h.json").read_text())
    assert content["sha256"] == seal(content)


def test_a_run_that_broke_down(tmp_path):
    one = made_up(steps=2)
    del one.steps[1:], one.weights["final_sha256"], one.weights["moved"]
    one.contract, one.ended = None, "TrainingFailure: step 1: the loss is nan on rank 0"
    set_loss(one.steps[0], float("nan"))
    one.save(tmp_path / "h.json")
    assert not header.is_finite(history.read(tmp_path / "h.json").steps[0])


def test_the_schema_knows_what_a_run_records(tmp_path):
    from lockstep.training.observe import provenance

    config = parse_config(
        "ddp", ["--loss_output_dir", str(tmp_path), "--debug_steps", "1", "--device", "cpu"]
    )
    record = history.History(run=provenance(config, load_inputs(config)))
    record.save(tmp_path / "h.json")
    assert history.read(tmp_path / "h.json").run == record.run
    require_origin(record.run["versions"], record.run["origin"])


def test_instruction_sets_are_those_of_the_processor(tmp_path, monkeypatch):
    """As Linux writes them for x86 and ARM."""
    for text, found in (
        ("flags\t\t: fpu avx2 avx512f amx_bf16 hle", ["avx2", "avx512f", "amx_bf16"]),
        ("Features\t: fp asimd sve bf16 i8mm", ["asimd", "sve", "bf16"]),
        ("flags: fpu", []),
    ):
        (tmp_path / "cpuinfo").write_text(f"model name\t: One avx512_bf16\n{text}\n")
        monkeypatch.setattr(where, "CPUINFO", tmp_path / "cpuinfo")
        where.instruction_sets.cache_clear()
        assert where.instruction_sets() == found and where.has_bfloat16() == bool(
            {"amx_bf16", "bf16"} & set(found)
        )
    where.instruction_sets.cache_clear()


def _twice(content):
    content["weights"]["moved"].append("model.norm.weight")


def _nan_in_the_middle(content):
    set_loss(content["steps"][1], float("nan"))


WRONG = {
    "an entry is missing": (lambda c: c.pop("contract"), "contract is missing"),
    "an unknown entry": (lambda c: c.update(new=1), "new is 1: extra inputs are not permitted"),
    "text for a number": (lambda c: c["steps"][0].update(loss="low"), "steps.0.loss is 'low'"),
    "true for a number": (lambda c: c["steps"][0].update(grad_norm=True), "steps.0.grad_norm is True"),
    "a loss that no float32 is": (lambda c: set_loss(c["steps"][0], 1e39), "too large for a float32"),
    "a negative norm": (lambda c: c["steps"][0].update(grad_norm=-1.0), "a norm cannot be negative"),
    "no checksum": (lambda c: c["weights"].update(initial_sha256="a"), "weights.initial_sha256 is 'a'"),
    "a step is missing": (lambda c: c["steps"].pop(1), "2 of 3 steps, but says that it finished"),
    "steps that do not count": (lambda c: c["steps"][1].update(step=3), "step 2 is missing"),
    "another mean": (
        lambda c: c["steps"][1].update(loss=7.0),
        "step 2 has a loss of 7.0, which is not the mean",
    ),
    "a run that goes on after a nan": (_nan_in_the_middle, "step 2 is not finite, but the run went on"),
    "a rank too many": (
        lambda c: c["steps"][1]["rank_losses"].append(7.3),
        "step 2 has 3 rank losses; dp_size is 2",
    ),
    "other tokens": (
        lambda c: c["steps"][1].update(tokens=1),
        "step 2 has 1 tokens; its configuration makes it 2048",
    ),
    "another mesh": (
        lambda c: c["run"].update(mesh={"pp": 1, "dp": 2, "cp": 1, "tp": 2}),
        "do not go together",
    ),
    "another length": (lambda c: c["run"]["config"].update(debug_steps=4), "num_steps is 3, debug_steps 4"),
    "a stranger moved": (
        lambda c: c["weights"]["moved"].append("model.layers.2.bias"),
        "which is in no optimizer group of its contract",
    ),
    "moved, and no groups": (lambda c: c["contract"].pop("weight_decay"), "which is in no optimizer group"),
    "moved twice": (_twice, "moved is not a sorted list"),
    "moved, and the same": (lambda c: c["weights"].update(final_sha256="a" * 64), "say otherwise"),
    "moved without an end": (lambda c: c.update(ended="killed"), "when a run has finished, and not before"),
    "no contract": (lambda c: c.update(contract=None), "but it has no contract"),
    "memory of other ranks": (
        lambda c: c["run"].update(peak_memory={"kind": "x", "bytes_by_rank": [1]}),
        "peak_memory is of 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_strict_reading(tmp_path, name):
    """Every case is sealed again, as if it had been made on purpose."""
    path = written(tmp_path)
    history.read(path)
    rewrite(path, WRONG[name][0])
    with pytest.raises(UserError, match=WRONG[name][1]) as error:
        history.read(path)
    assert str(error.value).startswith(f"{path}: ") and str(error.value).endswith("run its training again")


def test_another_format(tmp_path):
    path = written(tmp_path)
    for number in (1, 0, True, None, "2"):
        rewrite(path, lambda c, number=number: c.update(format=number))
        with pytest.raises(UserError, match="this version reads 5|not a loss history"):
            history.read(path)


def test_one_digit(tmp_path):
    """What no rule can see, the seal does: one digit of a gradient norm. (Written out again in other words it still fits.)"""
    path = written(tmp_path)
    rewrite(path, lambda c: None, sealed=False)
    history.read(path)
    path.write_text(path.read_text().replace("1.5", "1.4", 1))
    with pytest.raises(UserError, match="its content is not what its sha256 says"):
        history.read(path)


def test_a_long_history_is_read_within_seconds(tmp_path):
    one = made_up(steps=100_000)
    one.save(tmp_path / "h.json")
    begin = time.perf_counter()
    assert len(history.read(tmp_path / "h.json").steps) == 100_000
    assert time.perf_counter() - begin < 20  # two or three seconds on one quiet core
