import itertools
import math

import numpy as np
import pytest

from lockstep.inputs import data
from lockstep.inputs.data import permuted


def whole(n, seed=0, epoch=0):
    return permuted(np.arange(n), n, seed=seed, epoch=epoch)


@pytest.mark.parametrize("n", [*range(1, 130), 255, 256, 257, 1025, 70_000])
def test_every_index_once(n):
    for seed in range(3):
        assert (np.sort(whole(n, seed)) == np.arange(n)).all()


def test_any_part_alone_is_that_part_of_the_whole():
    assert (permuted(np.array([5, 900, 17]), 1000, seed=3, epoch=2) == whole(1000, 3, 2)[[5, 900, 17]]).all()


def test_does_not_change():
    """Written down: another order is another experiment."""
    assert whole(10).tolist() == [4, 7, 5, 6, 8, 9, 2, 0, 3, 1]


def test_of_a_corpus_that_fits_nowhere():
    n = 10**12 + 39
    found = permuted(np.arange(10_000), n, seed=0, epoch=0)
    assert len(set(found.tolist())) == 10_000 and found.min() >= 0 and found.max() < n


def chi_square_is_plausible(counts, expected):
    """Within 5 standard deviations of what chance gives."""
    freedom = len(counts) - 1
    return sum((c - expected) ** 2 / expected for c in counts) < freedom + 5 * math.sqrt(2 * freedom)


def mixed(n, seeds):
    """Whether (where a window lands) and (which windows stand side by side) look as chance has them, over many seeds."""
    places, steps = np.zeros((n, n)), np.zeros(n)
    for seed in range(seeds):
        one = whole(n, seed)
        places[np.arange(n), one] += 1
        np.add.at(steps, (one[1:] - one[:-1]) % n, 1)
    fair = chi_square_is_plausible(places.ravel(), seeds / n)
    return fair and chi_square_is_plausible(steps[1:], steps[1:].mean()) and steps[0] == 0


@pytest.mark.parametrize("n", [7, 33, 64])
def test_as_well_mixed_as_chance(n):
    assert mixed(n, 600)


def test_few_rounds_are_seen(monkeypatch):
    monkeypatch.setattr(data, "ROUNDS", 2)
    assert not mixed(64, 600)


def test_seeds_and_epochs_have_nothing_in_common():
    n = 5000
    orders = [whole(n, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for one, two in itertools.combinations(orders, 2):
        assert (one == two).sum() < 10  # one is expected
        assert abs(np.corrcoef(one, two)[0, 1]) < 5 / math.sqrt(n)
