"""What a captured run writes down, for whom, and when it refuses to."""

import shutil
import signal

import pytest
import small_dumps
import torch
from edited import flip_byte
from programs import in_process
from ranks import CAPTURED, run_ranks
from safetensors import safe_open

from lockstep.dumps import capture, step_file
from lockstep.dumps.dump import Dump
from lockstep.dumps.layout import BATCH, SEQUENCE
from lockstep.dumps.placement import Placement
from lockstep.ground.errors import UserError
from lockstep.ground.files import require_new_folder
from lockstep.plan.mesh import Mesh


def test_every_tensor_of_a_step_is_there(dumps):
    entry = Dump(dumps / "fsdp").steps[1]["tensors"]
    kinds = {name.split("/")[0] for name in entry}
    assert kinds == {"batch", "forward", "backward", "gradient", "exp_avg", "exp_avg_sq", "parameter"}
    modules = {name.removeprefix("forward/") for name in entry if name.startswith("forward/")}
    assert {
        "model.embed_tokens",
        "model.layers.1.mlp.act_fn",
        "model.layers.0.self_attn",
        "model.layers.1",
        "lm_head",
    } <= modules
    assert entry["forward/model.layers.0.self_attn.o_proj.input"]["sharded"] == {"dp": 0, "tp": 2}
    assert entry["backward/model.layers.0.mlp.down_proj.input"]["sharded"] == {"dp": 0, "tp": 2}
    assert Dump(dumps / "fsdp").missing == []
    assert entry["forward/lm_head"]["shape"] == [
        8,
        32,
        2048,
    ]  # dp x accumulation x batch rows, the whole vocabulary
    assert entry["forward/lm_head"]["sharded"] == {"dp": 0, "tp": 2}
    assert entry["parameter/model.layers.0.self_attn.o_proj.weight"]["sharded"] == {"dp": 0, "tp": 1}
    names = list(entry)
    assert (
        names.index("forward/lm_head")
        < names.index("backward/lm_head")
        < names.index("gradient/model.norm.weight")
    )


def test_any_safetensors_reader_can_read_it(dumps):
    mine = Dump(dumps / "fsdp")
    with safe_open(dumps / "fsdp" / "step_1.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(mine.steps[1]["tensors"])
        for name in ("forward/lm_head", "gradient/model.layers.0.mlp.down_proj.weight", "batch/labels"):
            assert torch.equal(file.get_tensor(name), mine.tensor(1, name))


def test_the_reference_keeps_the_initial_weights(dumps):
    tensors = Dump(dumps / "reference").steps[0]["tensors"]
    assert tensors and all(name.startswith("parameter/") for name in tensors)


def test_the_parameters_after_a_step_are_the_input_of_its_replay(dumps):
    assert list(Dump(dumps / "replay_fsdp").steps) == [2]
    first = Dump(dumps / "fsdp").tensor(1, "parameter/model.embed_tokens.weight")
    ids = Dump(dumps / "replay_fsdp").tensor(2, "batch/input_ids")
    assert torch.equal(
        Dump(dumps / "replay_fsdp").tensor(2, "forward/model.embed_tokens"), first.double()[ids]
    )


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "fsdp").write_text("")
    with pytest.raises(UserError, match="already exists"):
        require_new_folder(tmp_path / "fsdp", "--capture_dir")


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a limit on file sizes")
def test_a_full_disk_stops_every_rank(tmp_path):
    """One rank cannot write: all say so, and nothing is left that looks like a dump. The history is not blamed."""
    run = {
        "strategy": "fsdp",
        "fault": "no room for files on rank 1",
        "arguments": [*CAPTURED, "--capture_dir", str(tmp_path)],
    }
    run_ranks(4, "jobs:refused", tmp_path / "work", run)
    for rank in range(4):
        said = (tmp_path / "work" / f"error{rank}.txt").read_text()
        assert said.startswith(
            f"cannot write {tmp_path / 'fsdp' / 'step_1.safetensors.part'} (capture of step 1, rank 1): File too large; "
        )
        assert "free space or choose another --capture_dir" in said
    assert not (tmp_path / "fsdp").exists()
    with pytest.raises(UserError, match="no dump"):
        Dump(tmp_path / "fsdp")


def test_no_reference_is_made_from_a_damaged_dump(dumps, tmp_path):
    """The replay starts from the parameters of the dump: one flipped byte, and there is none. (The fixture is the negative control.)"""
    shutil.copytree(dumps / "ddp", tmp_path / "ddp")
    offset, _, _ = Dump(tmp_path / "ddp")._places[1]["parameter/model.norm.weight"]
    flip_byte(tmp_path / "ddp" / "step_1.safetensors", offset)
    folders = [f"--{name}={tmp_path}" for name in ("capture_dir", "loss_output_dir", "storage_path")]
    done = in_process("lockstep/reference.py", *small_dumps.FLAGS, *folders)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "parameter/model.norm.weight is damaged" in done.stderr and not (tmp_path / "replay_ddp").exists()


@pytest.mark.parametrize(
    "theirs, said",
    [
        ({"a": ((2,), torch.float32, 0)}, "rank 3 has no b, and rank 0 has: each rank names all tensors"),
        (
            {"b": ((4,), torch.bfloat16, 8), "a": ((2,), torch.float32, 0)},
            "b is [4] torch.float32 on rank 0, and [4]",
        ),
        (
            {"b": ((4,), torch.float32, 0), "a": ((2,), torch.float32, 16)},
            "rank 3 has b where rank 0 has a: both must",
        ),
    ],
)
def test_ranks_with_unlike_tensors_are_said(theirs, said):
    ours = {"a": ((2,), torch.float32, 0), "b": ((4,), torch.float32, 8)}
    assert said in capture._unlike(0, ours, 3, theirs)


def test_copies_that_differ_are_those_that_were_not_written():
    """Ranks take turns in writing what they all hold. What was written is judged."""
    mine, other = (step_file.Part((0,), (4,), sha) for sha in ("mine", "other"))
    written = step_file.Part((0,), (4,), "other", checksum=7)
    assert step_file.merge("x", [[mine], [written], [mine], [other]], (4,), 4) == (7, [0, 2])
    assert step_file.merge("x", [[other], [written], [other], [other]], (4,), 4) == (7, [])


@pytest.mark.parametrize(
    "name, hint",
    [
        (
            "batch/input_ids",
            "; each rank must go through all of its micro batches with all of their inputs, forward and backward",
        ),
        ("gradient/w", ""),
    ],
)
def test_parts_that_overlap_or_do_not_cover(name, hint):
    written = step_file.Part((0,), (2,), "a", checksum=7)
    remedy = "; a pass that is not trained on must compute no gradients" if hint else "$"
    with pytest.raises(ValueError, match=f"2 parts of it are written, and 1 would do: they overlap{remedy}"):
        step_file.merge(name, [[written], [written]], (2,), 4)
    with pytest.raises(ValueError, match=f"{name}: the ranks hold 2 of its 4 elements{hint}$"):
        step_file.merge(name, [[written]], (4,), 4)


@pytest.mark.parametrize("shape", [(11, 16), (2, 7, 16)])
def test_an_output_of_some_positions_is_refused(shape):
    mesh = Mesh(dp=2)
    placement = Placement(mesh, mesh.coordinates(1), rows=4, seq_length=8, positions=[(0, 8)])
    assert placement.of("forward/head", torch.zeros(2, 8, 16), (BATCH, SEQUENCE, 16))[0] == (4, 8, 16)
    with pytest.raises(
        ValueError, match="is no share of the full tensor .*: call each module with all positions"
    ):
        placement.of("forward/head", torch.zeros(shape), (BATCH, SEQUENCE, 16))


def test_an_output_of_samples_that_the_reference_has_once_is_refused():
    mesh = Mesh(dp=2)
    placement = Placement(mesh, mesh.coordinates(1), rows=4, seq_length=8, positions=[(0, 8)])
    assert placement.of("forward/rotary", torch.zeros(1, 8, 16), (1, SEQUENCE, 16))[0] == (1, 8, 16)
    with pytest.raises(
        ValueError, match="all samples share it in the reference: call the model with the inputs"
    ):
        placement.of("forward/rotary", torch.zeros(2, 8, 16), (1, SEQUENCE, 16))
