import json

import pytest

from lockstep import history
from lockstep.errors import UserError


RUN = {"label": "DDP", "config": {}, "architecture": {}, "num_steps": 3, "versions": {}}


def step(number, **changes):
    values = {"loss": 5.0 - number, "rank_losses": [5.0, 5.0], "grad_norm": 1.0, "learning_rate": 1e-3}
    return {"step": number, **values, "tokens": 64, "seconds": 0.1, "batch_hash": f"h{number}", **changes}


def written(tmp_path, steps=3):
    record = history.History(run=RUN)
    for number in range(1, steps + 1):
        record.add(step(number))
        record.save(tmp_path / "loss_ddp.json")
    return tmp_path / "loss_ddp.json"


def test_every_save_is_a_whole_file(tmp_path):
    record = history.History(run=RUN)
    for number in range(1, 4):
        record.add(step(number))
        record.save(tmp_path / "loss_ddp.json")
        read = history.read(tmp_path / "loss_ddp.json")
        assert [s["step"] for s in read.steps] == list(range(1, number + 1)) and read.ended is None
    assert [p.name for p in tmp_path.iterdir()] == ["loss_ddp.json"]


def test_numbers_keep_full_precision(tmp_path):
    record = history.History(run=RUN)
    record.add(step(1, loss=0.1 + 0.2))
    record.save(tmp_path / "h.json")
    assert history.read(tmp_path / "h.json").steps[0]["loss"] == 0.1 + 0.2


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.pop("contract"), "incomplete"),
        (lambda c: c["run"].pop("versions"), "says nothing of versions"),
        (lambda c: c.update(weights=3), "says nothing of its weights"),
        (lambda c: c.update(format=0), "format 1"),
        (lambda c: c["steps"].pop(1), "step 2 is missing"),
        (lambda c: c["steps"][0].pop("grad_norm"), "incomplete"),
        (lambda c: c["steps"][0].update(loss="low"), "has loss = 'low'"),
    ],
)
def test_strict_reading(tmp_path, change, message):
    path = written(tmp_path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        history.read(path)


def test_truncated_file(tmp_path):
    path = written(tmp_path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match="not a readable history"):
        history.read(path)


def test_full_disk_is_one_line(tmp_path):
    """/dev/full fails every write with "no space left": the message names the file."""
    from lockstep import files

    def write(temporary):
        with open("/dev/full", "w") as full:
            full.write("x" * 10)

    with pytest.raises(UserError, match="cannot write .*No space left"):
        files.write_atomically(tmp_path / "x.json", write)
    assert not list(tmp_path.iterdir())
