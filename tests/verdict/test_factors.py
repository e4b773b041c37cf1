"""Projections: a factor that a distance hides is seen, and rounding errors of every kind that correct runs have are not one."""

import resource

import pytest
import torch

from lockstep.ground.errors import UserError
from lockstep.verdict.factors import NOTHING, Factor, Factors
from lockstep.verdict.lazy import Lazy, OnDisk
from lockstep.verdict.normalisation import Sum, accumulated

SHAPE = (4, 64, 128)
NOISE = 2e-3  # relative


def noise(kind: str, reference: torch.Tensor) -> torch.Tensor:
    """Errors of every element, or those that all of a row or of a column share."""
    shape = {"element": reference.shape, "row": (*reference.shape[:-1], 1), "column": reference.shape[-1:]}[
        kind
    ]
    return reference * NOISE * torch.randn(shape, dtype=torch.float64)


def found(own: torch.Tensor, yardstick: torch.Tensor, reference: torch.Tensor, *, is_weight: bool = False):
    factors = Factors(steps=1)
    factors.add("x", own, yardstick, reference, is_weight=is_weight)
    return factors.beyond()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["element", "row", "column"])
def test_rounding_errors_are_no_factor(kind):
    for _ in range(100):
        reference = torch.randn(SHAPE, dtype=torch.float64)
        assert not found(
            reference + noise(kind, reference), reference + noise("element", reference), reference
        )


@pytest.mark.parametrize("kind", ["row", "column"])
def test_shared_errors_would_be_taken_for_a_factor(kind):
    """Negative control: if each element's error were its own, correct runs would fail."""
    factors = Factors(steps=1)
    for _ in range(100):
        reference = torch.randn(SHAPE, dtype=torch.float64)
        factors.add("x", reference + noise(kind, reference), reference, reference, is_weight=False)
    for one in factors.found:
        one.errors[1:] = 0
    assert factors.beyond()


@pytest.mark.parametrize(
    "place, factor, part, excess",
    [
        ((...,), 1.001, None, 0.001),
        ((2,), 1.003, (0, 2, 3), 0.003),
        ((slice(None), slice(32, 64)), 0.99, None, -0.005),  # a block of positions has few rows
        ((..., slice(16, 32)), 1.01, (2, 16, 32), 0.01),
    ],
)
def test_a_factor_is_seen(place, factor, part, excess):
    """Each is smaller than the errors, or no larger, so the distance hardly changes."""
    reference = torch.randn(SHAPE, dtype=torch.float64)
    own = reference + noise("element", reference)
    own[place] *= factor
    (one,) = found(own, reference + noise("element", reference), reference)
    assert one.part == part and one.excess == pytest.approx(excess, abs=one.tolerated), one.describe()


@pytest.mark.parametrize("shape", [(300, 1100), (1100, 300)])
def test_a_factor_in_a_shard_of_a_large_weight_is_seen(shape):
    """It has more elements than are looked at one by one."""
    reference = torch.randn(shape, dtype=torch.float64)
    for dim in (0, 1):
        own = reference + noise("element", reference)
        half = shape[dim] // 2
        own.narrow(dim, half, shape[dim] - half).mul_(1.01)
        (one,) = found(own, reference, reference, is_weight=True)
        # Of nine blocks or more, one has indices of both halves.
        assert one.part[::2] == (dim, shape[dim]) and abs(one.part[1] - half) <= shape[dim] // 9, one.part


@pytest.mark.parametrize("start, stop", [(0, 32), (64, 128), (96, 128)])
def test_a_part_has_all_neighbours_with_its_factor(start, stop):
    """A rank's shard, not the block of it that is farthest off. Neither what is right is in it, nor what has another factor."""
    reference = torch.randn(128, 64, dtype=torch.float64)
    own = reference + noise("element", reference)
    own[start:stop] *= 1.03
    own[32:64] *= 1.01
    (one,) = found(own, reference + noise("element", reference), reference, is_weight=True)
    assert one.part == (0, start, stop), one.describe()
    assert f"rows {start} to {stop - 1} of 128 are " in one.describe()


def test_what_float32_leaves_is_no_factor():
    reference = torch.randn(SHAPE, dtype=torch.float64)
    assert not found(reference * (1 + NOTHING / 2), reference, reference)
    assert found(reference * (1 + 2 * NOTHING), reference, reference)


@pytest.mark.parametrize("nothing", [NOTHING, 2 * NOTHING])  # 2: on another device
def test_what_is_right_is_none_the_worse_for_a_yardstick_that_is_not(nothing):
    reference = torch.randn(SHAPE, dtype=torch.float64)
    yardstick = reference * 1.001 + noise("element", reference)
    for times, number in ((1.0, 0), (1.0005, 1)):
        factors = Factors(1, nothing)
        own = reference * times + noise("element", reference)
        factors.add("forward/one", own, yardstick, reference, is_weight=False)
        assert len(factors.beyond()) == number


def test_where_errors_are_independent_a_factor_of_a_part_is_no_error_of_the_yardstick():
    reference = torch.randn(2, 16, 64, dtype=torch.float64)
    own = reference + noise("element", reference)
    own[..., :8] *= 1.03
    yardstick = reference + noise("element", reference)
    assert float((own - reference).norm()) < float((own - yardstick).norm())
    (one,) = found(own, yardstick, reference)
    assert one.part == (2, 0, 8)


def test_where_the_run_rounds_as_the_yardstick_does_a_factor_within_the_rounding_errors_is_seen():
    reference = torch.randn(SHAPE, dtype=torch.float64)
    yardstick = reference + noise("element", reference)
    assert found(yardstick * (1 + 1e-5), yardstick, reference) and not found(yardstick, yardstick, reference)


def test_sums_in_16_bits_have_no_factor():
    """Negative control: half of all sums lie between two numbers, and weights that are off by 1e-5 send all of these to one side."""
    terms = [torch.randn(128, 64).bfloat16() for _ in range(2)]
    own, weights = terms[0] + terms[1], torch.tensor([1 + 1e-5] * 2)
    columns = [{"weight": one.double()} for one in terms]
    terms_of = Sum({"weight": own}, columns, weights)
    assert torch.equal(accumulated(terms_of, {"weight": torch.bfloat16})["weight"], own.double())
    off = terms_of["weight"].bfloat16().double() - own
    assert float((off * own.sign()).sum() / own.double().abs().sum()) > 1e-4


def test_sums_in_float16_are_as_large_as_in_the_run():
    """Negative control: small numbers have few digits, and not those of the run, which are larger by a loss's scale, and clipped later."""
    terms = [(torch.randn(128, 64) * 1e-3).half() for _ in range(2)]
    own = (terms[0] + terms[1]).double() / 2**14 / 2**7
    columns = [{"weight": one.double() / 2**14} for one in terms]
    terms_of = Sum({"weight": own}, columns, torch.ones(2), {"weight": 2**-7})
    for scale, is_same in ((2.0**14, True), (2.0**7, False), (1.0, False)):
        summed = accumulated(terms_of, {"weight": torch.float16}, scale)["weight"]
        assert torch.equal(summed, own) == is_same


@pytest.mark.parametrize("size, is_seen", [(2.0**-44, False), (2.0**-30, True)])
def test_what_is_zero_in_exact_arithmetic_has_no_factor(size, is_seen):
    """The gradient at the query of a first position: of both, nothing but rounding errors is there, and those of a head have one sign."""
    reference = torch.randn((64, 32, 16), dtype=torch.float64)
    reference[:, 0] *= size
    own = reference + noise("element", reference)
    own[:, 0] += 1e-9 * reference[:, 0].sign()
    assert bool(found(own, reference, reference)) == is_seen


def test_more_projections_allow_more():
    reference = torch.randn(SHAPE, dtype=torch.float64)
    own = reference + noise("element", reference)
    own *= 1.001
    one, many = Factors(steps=1), Factors(steps=1000)
    for factors in (one, many):
        factors.add("x", own, reference, reference, is_weight=False)
    assert one.beyond()[0].tolerated < many.beyond()[0].tolerated


def test_few_elements_say_nothing():
    reference = torch.randn(3, dtype=torch.float64)
    assert not found(reference * 2, reference, reference)


def test_one_number_many_times_says_nothing():
    """Columns of the gradient of a sum, and slices of a convolution's of which one element is not zero."""
    reference = torch.randn(16, dtype=torch.float64).expand(64, 16).clone()
    own = reference.clone()
    own[:, 7] *= 1 + 1e-5
    assert not found(own, reference, reference)
    slices = torch.zeros(32, 49, dtype=torch.float64)
    slices[:, 24] = reference[0].repeat(2)
    own = slices + 1e-4 * noise("element", slices)
    assert found((1 + 1e-3) * own, slices, slices)  # negative control
    own[7] *= 1 + 1e-5
    assert not found(own, slices, slices)


def test_tensors_on_disk_are_the_same(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn((), dtype=torch.float64),
        "d": torch.empty(0),
        "e": torch.randn(4, 6).T,
    }
    kept = OnDisk(tmp_path)
    kept.close()
    assert kept == {}
    kept = OnDisk(tmp_path)
    for name, tensor in tensors.items():
        kept[name] = torch.zeros(3)
        kept[name] = tensor
        assert kept[name].dtype is tensor.dtype and torch.equal(kept[name], tensor)
    assert not list(tmp_path.iterdir())
    kept.close()
    for name, tensor in tensors.items():
        assert kept[name].dtype is tensor.dtype and torch.equal(kept[name], tensor)
    del kept["a"]
    assert list(kept) == ["b", "c", "d", "e"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(UserError, match="tensors of the reference cannot be kept there"):
            OnDisk(tmp_path)["a"] = torch.zeros(10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_lazy_tensors_are_those_that_are_named():
    made = Lazy(["a"], lambda name: torch.ones(2))
    assert list(made) == ["a"] and len(made) == 1 and "b" not in made
    with pytest.raises(KeyError):
        made["b"]


@pytest.mark.parametrize(
    "shape, part, said",
    [
        ((8, 6), None, "all of it is"),
        ((8, 6), (0, 3, 4), "row 3 of 8 is"),
        ((8, 6), (1, 0, 2), "columns 0 to 1 of 6 are"),
        ((9,), (0, 4, 9), "elements 4 to 8 of 9 are"),
        ((2, 8, 6), (2, 1, 6), "columns 1 to 5 of 6 are"),
        ((2, 8, 6), (1, 0, 4), "slices 0 to 3 of 8 along dim 1 are"),
    ],
)
def test_a_part_in_words(shape, part, said):
    one = Factor("gradient/x", shape, part, 0.003, 1e-6)
    assert one.describe().startswith(f"{said} 1.003 times")
    one.where = "micro batch 0, rank 1"
    assert one.describe().startswith(f"in micro batch 0, rank 1, {said} 1.003 times")
