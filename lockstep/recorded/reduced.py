"""Sum the gradients of micro batches as the run did: in the dtypes, and at the scale, that it reduced them in."""

import torch

from lockstep.recorded.model import dtype_of, policy_of
from lockstep.recorder.recording import Recording
from lockstep.verdict.lazy import Lazy
from lockstep.verdict.normalisation import Gradients, Sum, accumulated


class Reduction:
    """How the run summed the gradients of a step's micro batches.

    `dtypes` are those of the sums, by parameter. `arrived` are the gradients at the micro batches' losses, over `shares` data-parallel
    shares.
    """

    def __init__(self, recording: Recording, observed: Gradients, arrived: list[float], shares: int):
        self.dtypes = _dtypes_of(recording, observed)
        self.arrived, self.shares = torch.tensor(arrived, dtype=torch.float64), shares

    @property
    def in_16_bits(self) -> bool:
        return any(torch.finfo(dtype).bits <= 16 for dtype in self.dtypes.values())

    def finest(self, gradients: Gradients) -> Gradients:
        """Return the gradients that are rounded least: some may be in float32, as of a last layer."""
        least = min(map(eps_of, self.dtypes.values()))
        return Lazy(
            (name for name in gradients if eps_of(self.dtypes[name]) == least), lambda name: gradients[name]
        )

    def rounded(self, terms: Sum, weights: torch.Tensor) -> Lazy:
        """Return a sum of the yardstick's gradients, rounded as in the run. `weights` are those of the micro batches' losses."""
        return accumulated(terms, self.dtypes, self._scale(weights))

    def _scale(self, weights: torch.Tensor) -> float:
        """Return the power of two by which the run's gradients were larger when it summed them, as by the scale of a loss in float16."""
        times = (self.arrived / weights / self.shares).abs()
        known = times[times.isfinite() & (times > 0)]
        return float(known.median().log2().round().exp2()) if len(known) else 1.0


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _dtypes_of(recording: Recording, observed: Gradients) -> dict[str, torch.dtype]:
    """Return the dtypes in which gradients are summed. A gradient that was read from a float32 copy has fewer digits than the copy."""
    micro_batch = recording.steps[0][0].micro_batches[0]
    initial = {name: parameter.dtype for name, parameter in recording.parameters.items()}
    dtypes = {}
    for name in observed:
        policy = policy_of(name, micro_batch.policies)
        dtype = policy.reduce or policy.param if policy else micro_batch.param_dtype
        dtypes[name] = dtype_of(dtype) if dtype else max(initial[name], observed[name].dtype, key=eps_of)
    return dtypes
