"""Large tensors are compared in spans, which threads share; nothing depends on the number of threads."""

import math

import pytest
import torch

from lockstep.verdict import spans
from lockstep.verdict.distance import distances_of, size_of
from lockstep.verdict.normalisation import fit


@pytest.fixture
def threads(monkeypatch):
    """Sets the number of threads, of tensors in spans of 1,000 elements."""
    monkeypatch.setattr(spans, "SPAN", 1000)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def tensors():
    generator = torch.Generator().manual_seed(0)
    reference, before = torch.randn(2, 12_345, dtype=torch.float64, generator=generator)
    return reference, before, reference.float(), reference + 1e-3 * torch.randn(12_345, generator=generator)


def test_distances_do_not_depend_on_the_number_of_threads(threads):
    reference, before, *own = tensors()
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append((distances_of(own, reference, before), size_of(own[0])))
    assert found[0] == found[1] == found[2]
    for distance, tensor in zip(found[0][0], own, strict=True):
        error, change = tensor.double() - reference, reference - before
        assert distance.error == pytest.approx(float(error.norm()), rel=1e-12)
        assert distance.largest_error == float(error.abs().max())
        assert distance.change == pytest.approx(float(change.norm()), rel=1e-12)
        assert distance.scale == pytest.approx(1 + float(error @ change) / float(change @ change), rel=1e-12)
        assert distance.own_norm == pytest.approx(float(tensor.double().norm()), rel=1e-12)


def test_one_element_that_is_not_finite_is_found_in_any_span(threads):
    threads(2)
    for place in (0, 999, 1000, 12_344):
        reference, _, own, _ = tensors()
        own[place] = math.nan
        assert distances_of([own], reference)[0].error == math.inf


def test_weights_do_not_depend_on_the_number_of_threads(threads):
    first, second, *_ = tensors()
    observed = {"weight": (2 * first + 0.5 * second).float()}
    columns = [{"weight": first}, {"weight": second}]
    fits = []
    for number in (1, 3):
        threads(number)
        fits.append(fit(observed, columns))
    assert torch.equal(fits[0].weights, fits[1].weights) and fits[0].rest == fits[1].rest
    assert fits[0].weights.tolist() == pytest.approx([2, 0.5]) and fits[0].rest["weight"] < 1e-7


def test_a_tensor_without_elements_has_one_span():
    assert spans.of_spans(lambda span: span, 0) == [slice(0, spans.SPAN)]
    assert size_of(torch.empty(0)) == (0.0, 0.0)
