import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from small_inputs import batches, corpus

from lockstep.ground.errors import UserError
from lockstep.inputs.data import (
    global_batch_hash,
    independent_tokens,
    window_hashes,
)
from lockstep.plan.command_line import parse_config
from lockstep.training.preflight import load_inputs


def all_windows(one):
    return one.windows(np.arange(one.num_windows))


def test_deterministic_and_disjoint_over_dp_ranks_and_steps():
    one, two = batches(), batches()
    assert (one.windows(3, 1) == two.windows(3, 1)).all()
    seen = {w.tobytes() for step in range(5) for dp in range(2) for m in one.windows(step, dp) for w in m}
    assert len(seen) == 5 * 2 * 4 * 2


def test_an_epoch_is_every_window_once_and_the_next_is_in_another_order():
    b = batches(seq=512)
    epoch = [b.windows(step, dp) for step in range(b.steps_per_epoch) for dp in range(2)]
    assert len({w.tobytes() for x in epoch for m in x for w in m}) == b.steps_per_epoch * b.windows_per_step
    assert not (b.windows(0, 0) == b.windows(b.steps_per_epoch, 0)).all()


def flags(*more):
    return ["--batch_size", "2", "--seq_length", "32", *more]


@pytest.mark.parametrize("longer", [["--debug_steps", "300"], ["--debug_steps", "0"]])
def test_the_batches_do_not_depend_on_how_long_a_run_trains(longer):
    """What one captured step proves must hold for step 1 of a long run."""
    short, long = (
        load_inputs(parse_config("ddp", flags(*steps))) for steps in (["--debug_steps", "1"], longer)
    )
    assert short.num_steps != long.num_steps and short.batches.corpus.sha256 == long.batches.corpus.sha256
    for dp_rank in (0, 1):
        assert (short.batches.windows(0, dp_rank) == long.batches.windows(0, dp_rank)).all()


def test_the_corpus_hash_does_not_depend_on_the_windows():
    assert corpus(seq=64).sha256 == corpus(seq=100).sha256 != corpus(vocab=2047).sha256


def test_windows_that_are_kept_are_those_of_the_step_and_of_the_cut():
    kept = batches()
    first = kept.windows(3, 1).copy()
    other = kept.windows(4, 1)
    assert not (first == other).all() and (kept.windows(3, 1) == first).all()
    wide = dataclasses.replace(kept, dp_size=4)
    assert (wide.windows(3, 3) == batches(dp_size=4).windows(3, 3)).all()
    with pytest.raises(ValueError, match="read-only"):
        other[0, 0, 0] = 1


def test_labels_are_the_next_tokens_and_nothing_is_padded():
    ids, labels = batches().micro_batches(0, 0, "cpu")[0]
    assert ids.shape == labels.shape == (4, 64) and ids.dtype == torch.int64
    assert torch.equal(ids[:, 1:], labels[:, :-1]) and (labels >= 0).all()


def test_every_quarter_of_the_vocabulary_is_used():
    used = np.unique(all_windows(corpus(vocab=50_257)))
    assert (np.histogram(used, bins=4, range=(0, 50_257))[0] > 0.15 * len(used)).all()


def test_hash_sees_one_changed_token():
    micro = batches().micro_batches(0, 0, "cpu")
    before = window_hashes(micro)
    assert before == window_hashes(batches().micro_batches(0, 0, "cpu")) and max(before) < 2**48
    micro[1][1][2, 3] += 1  # the third window of the second micro batch
    assert [number for number, one in enumerate(window_hashes(micro)) if one != before[number]] == [6]
    assert global_batch_hash([1, 2]) != global_batch_hash([2, 1])


def test_the_hash_of_a_batch_does_not_depend_on_its_cut():
    def hashed(dp_size, **options):
        cut = batches(dp_size=dp_size, **options)
        shares = (cut.micro_batches(3, dp, "cpu") for dp in range(dp_size))
        return global_batch_hash([one for share in shares for one in window_hashes(share)])

    assert hashed(1, batch_size=8) == hashed(2, batch_size=4) == hashed(4, batch_size=2)
    assert hashed(2, batch_size=4, seed=1) != hashed(2, batch_size=4)


@pytest.mark.parametrize("content, message", [("", "is empty"), ("a few words only", "one step needs 4")])
def test_too_little_text(tmp_path, content, message):
    (tmp_path / "t.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        corpus(str(tmp_path / "t.txt"))


def test_where_tokens_are_kept_is_absolute_and_no_part_of_the_experiment(monkeypatch, tmp_path):
    from lockstep.training.observe import provenance

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = parse_config("ddp", [])
    assert config.data_cache_dir == tmp_path / "lockstep"
    assert parse_config("ddp", ["--data_cache_dir", "here"]).data_cache_dir == Path("here").absolute()
    with monkeypatch.context() as relative:  # to be ignored, says the XDG specification
        relative.setenv("XDG_CACHE_HOME", "not/absolute")
        assert parse_config("ddp", []).data_cache_dir == Path.home() / ".cache/lockstep"
    about = provenance(config, load_inputs(config))["config"]
    assert "dataset_name" in about and "data_cache_dir" not in about


@pytest.mark.parametrize(
    "ids, labels, independent",
    [
        ([1, 2, 3, 4], [2, 3, 4, 5], 4.0),
        ([1, 1, 2, 3], [1, 1, 3, 4], 16 / 6),
        ([1, 1], [1, 2], 2.0),
    ],
)
def test_equal_tokens_are_not_independent(ids, labels, independent):
    assert independent_tokens(np.array(ids), np.array(labels)) == independent
