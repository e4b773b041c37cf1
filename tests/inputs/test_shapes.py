"""The shapes of a model's parameters are found once, and kept."""

import json
import sys

import pytest
from programs import completed

from lockstep.inputs import shapes
from lockstep.inputs.architectures import BUILT_IN

TINY = BUILT_IN["tiny-llama"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shapes._described.cache_clear()
    yield tmp_path / "lockstep"
    shapes._described.cache_clear()


def again(monkeypatch):
    """The shapes, by another process: what the first one knew is forgotten. Fails if a model must be built."""
    shapes._described.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(shapes, "build_empty", lambda *_, **__: pytest.fail("built a model"))
        return shapes.parameter_shapes(TINY)


def test_they_are_kept(folder, monkeypatch):
    found = shapes.parameter_shapes(TINY)
    assert found["lm_head.weight"] == (2048, 64) and again(monkeypatch) == found
    code = "import sys; sys.modules.update(torch=None, transformers=None); from lockstep.inputs import architectures, shapes; "
    code += "print(len(shapes.parameter_shapes(architectures.BUILT_IN['tiny-llama'])))"
    done = completed([sys.executable, "-c", code])
    assert done.stdout.strip() == str(len(found)), done.stderr
    shapes.parameter_shapes({**TINY, "num_hidden_layers": 1})
    assert len(list(folder.glob("model-*.json"))) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("2048", "2049"),
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: json.dumps({"found": 1, "sha256": "x"}),
        lambda text: json.dumps({"found": [{"a": 1}, {}], "sha256": "x"}),
    ],
)
def test_what_was_not_written_here_is_not_used(folder, damage):
    found = shapes.parameter_shapes(TINY)
    (path,) = folder.glob("model-*.json")
    path.write_text(damage(path.read_text()))
    shapes._described.cache_clear()
    assert shapes.parameter_shapes(TINY) == found
    assert "2048" in path.read_text()  # and written again


def test_where_nothing_can_be_written_the_model_is_built(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    shapes._described.cache_clear()
    assert shapes.parameter_shapes(TINY)["lm_head.weight"] == (2048, 64)
