"""What several ranks hold alike is written once, and read for each of them."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors import safe_open
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep import judge
from lockstep.recorded.cut_by_code import CutByCode
from lockstep.recorder.contents import AT_LEAST, CLAIMS, claim, content_of, forget, leave
from lockstep.recorder.hashes import digest
from lockstep.recorder.recording import Recording

SIDE = 160  # of a weight, so that it is large
assert SIDE * SIDE * 4 > AT_LEAST


def two_ranks(folder, reduced):
    """Record two steps of a model whose second weight is frozen."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE), torch.nn.Tanh())
    net[1].weight.requires_grad_(False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with lockstep.record(net, folder / "run"):
        wrapped = DistributedDataParallel(net) if reduced else net
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(torch.randn(2, SIDE, generator=generator)).square().mean().backward()
            optimizer.step()


def keys_of(run, step):
    """Return the large tensors that each rank wrote."""
    found = []
    for rank in range(2):
        with safe_open(run / f"rank_{rank}" / f"step_{step}.safetensors", framework="pt") as opened:
            found.append({key for key in opened.keys() if opened.get_tensor(key).nbytes >= AT_LEAST})  # noqa: SIM118 - of a file
    return found


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reduced")
    run_ranks(2, "recorder.test_contents:two_ranks", folder, True)
    return folder / "run"


def test_ranks_write_once_what_they_hold_alike(reduced, capsys):
    """Also a frozen weight, which is the same after each update, and the weights that the second step begins with."""
    first, second = (
        [len(one) + len(other), one & other] for one, other in (keys_of(reduced, 1), keys_of(reduced, 2))
    )
    assert first == [4, set()]  # two weights; a gradient and an updated weight
    assert second == [4, set()]  # a gradient, an updated weight and two moments
    recording = Recording(reduced)
    for step in (1, 2):
        for name in ("weight/0.weight", "weight/1.weight", "gradient/0.weight", "updated/0.weight"):
            one, other = (recording.part(rank, step, name) for rank in range(2))
            assert one.shape == (SIDE, SIDE) and torch.equal(one, other)
    assert torch.equal(recording.part(1, 1, "updated/0.weight"), recording.part(0, 2, "weight/0.weight"))
    assert not torch.equal(recording.part(1, 1, "weight/0.weight"), recording.part(1, 1, "updated/0.weight"))
    assert not (reduced / CLAIMS).exists()
    assert judge.main([str(reduced)]) == 0, capsys.readouterr()


def test_ranks_write_what_they_hold_otherwise(tmp_path, capsys):
    """The gradients are not reduced. Both are read, and the verdict says so."""
    run_ranks(2, "recorder.test_contents:two_ranks", tmp_path, False)
    first = keys_of(tmp_path / "run", 1)
    assert first[0] & first[1] == {"gradient/0.weight#0", "updated/0.weight#0"}
    once = first[0] ^ first[1]  # the frozen weight before the update or after it
    assert "weight/0.weight#0" in once and len(once) == 2
    assert judge.main([str(tmp_path / "run")]) == 1
    assert "0.weight on rank 1" in (said := capsys.readouterr().out) and "were not reduced" in said


def test_a_content_that_no_rank_wrote(reduced, tmp_path, capsys):
    """As of ranks of two runs in one folder."""
    (tmp_path / "rank_1").mkdir()
    for path in [*reduced.glob("*.*"), *reduced.glob("rank_*")]:
        (tmp_path / path.name).mkdir(exist_ok=True) if path.is_dir() else (tmp_path / path.name).symlink_to(
            path
        )
    for path in reduced.glob("rank_*/*"):
        (tmp_path / path.parent.name / path.name).write_bytes(path.read_bytes())
    for path in tmp_path.glob("rank_*/step_1.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "written": {}}))
    assert judge.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not here, and no other rank has written it" in line and "step_1.safetensors" in line


def test_the_rank_that_comes_first_writes(tmp_path):
    assert claim(tmp_path, "a") and not claim(tmp_path, "a") and claim(tmp_path, "b")
    forget(tmp_path)  # as a rank records anew
    assert claim(tmp_path, "a")
    for _ in range(2):
        leave(tmp_path, 0, 2)
    assert not claim(tmp_path, "a")
    leave(tmp_path, 1, 2)
    assert [*tmp_path.iterdir()] == []
    leave(tmp_path, 1, 2)
    forget(tmp_path)


def test_a_rank_writes_where_nothing_can_be_claimed(tmp_path):
    (tmp_path / CLAIMS / "a").mkdir(parents=True)
    assert claim(tmp_path, "b" * 300) and claim(tmp_path / "missing", "a") and not claim(tmp_path, "a")


def test_contents_differ_in_values_dtype_and_shape():
    ones = torch.ones(4, 6)
    others = [
        ones.half(),
        ones.flatten(),
        ones.reshape(6, 4),
        ones * 1.5,
        torch.zeros(4, 6),
        -torch.zeros(4, 6),
    ]
    contents = {content_of(one) for one in (ones, *others)}
    assert len(contents) == 7 and content_of(torch.ones(4, 6)) in contents


SIGNS = torch.randn(64, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("hashed", [content_of, digest])
@pytest.mark.parametrize(
    "one, other",
    [
        (SIGNS, -SIGNS),
        (SIGNS, SIGNS.abs()),
        (SIGNS.float(), SIGNS.float() * torch.tensor([1.0, -1.0])),
        (SIGNS.bfloat16(), SIGNS.bfloat16() * torch.tensor([1, -1])),
        (torch.zeros(64, dtype=torch.float64), -torch.zeros(64, dtype=torch.float64)),
        (torch.arange(12).reshape(3, 4), torch.arange(12).reshape(3, 4).flip(0)),
    ],
)
def test_flipped_signs_do_not_cancel(hashed, one, other):
    """The sign of the last number in eight bytes is their highest bit, of which a sum of multiples keeps only the parity."""
    assert hashed(one) != hashed(other)


@pytest.mark.parametrize("hashed", [content_of, digest])
def test_tensors_of_few_values_do_not_collide(hashed):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randint(0, 2, (64,), generator=generator).double() for _ in range(2000)]
    for draws in (values, [2 * draw - 1 for draw in values]):
        assert len({hashed(draw) for draw in draws}) == len(draws)


def launched(folder):
    """Record as one of two processes that have made no process group."""
    net = torch.nn.Linear(SIDE, SIDE)
    with lockstep.record(net, folder / "run", steps=1):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        net(torch.ones(2, SIDE)).square().mean().backward()
        optimizer.step()


def test_a_process_without_others_claims_nothing(tmp_path):
    (tmp_path / "run" / CLAIMS).mkdir(parents=True)
    (tmp_path / "run" / CLAIMS / "of-an-earlier-run").touch()
    launched(tmp_path)
    assert not (tmp_path / "run" / CLAIMS).exists()
    assert Recording(tmp_path / "run").part(0, 1, "weight/weight").shape == (SIDE, SIDE)


def test_a_block_that_the_models_code_cuts_further_has_no_content():
    """Its number among the pieces is not its number among what was written. Control: a block that lies in the whole as it is."""
    cut = object.__new__(CutByCode)
    cut.steps = [
        {0: SimpleNamespace(contents={"gradient/a#1": "of a whole block", "gradient/b#0": "of another"})}
    ]
    cut._slices = {(0, 1, "gradient/a#1"): ("gradient/a#0", 0, 4, 4)}
    assert cut._content(0, 1, "gradient/a#1") is None and cut._content(0, 1, "gradient/b#0") == "of another"
