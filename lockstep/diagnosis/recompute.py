"""What single ranks and samples contribute to a tensor, recomputed from what the run captured.

A layer y = x W^T + b whose weight is cut over tp has, on tp rank r,

    row-parallel      W = [W_0 W_1 ...]      y = sum_r x_r W_r^T          in forward
    column-parallel   W = [W_0; W_1; ...]    dL/dx = sum_r g_r W_r        in backward, g = dL/dy

and over the samples i, each a DP rank's micro batch, dL/dW = sum_i g_i^T x_i. x, g and W are all in the dump, so each term of a sum
can be computed alone and compared with what the run has. Here a rank's share is its term, and a sample's contribution is its term.
"""

from collections.abc import Callable, Iterator

import torch

from lockstep.diagnosis import evidence
from lockstep.diagnosis.case import Case
from lockstep.dumps.layout import SEQUENCE

NOTHING = 1e-24  # the share of a squared norm that is rounding errors
BLOCK_ROWS = 4096  # of a weight's gradient, looked at together


def forward_shares(case: Case, module: str) -> list[torch.Tensor]:
    """Return each tp rank's share of the output of a module that sums over tp, without a bias; [] for any other module."""
    weight = case.weight_of(module)
    if weight is None or not _sums_over_tp(case, module):
        return []
    before = case.before(weight)
    name = f"parameter/{weight}"
    if case.is_linear(module):
        source = f"forward/{case.source(module)}"
        if not case.has(source):
            return []
        pieces = case.own(source).chunk(case.mesh.tp, -1)
        return [x @ w[0].T for x, w in zip(pieces, case.shares(name, "tp", before), strict=True)]
    if (
        case.dump.layout.sources.get(module) == ()
        and case.sharded(name).get("tp") == 0
        and case.has("batch/input_ids")
    ):
        ids, shares, first = case.own("batch/input_ids").long(), [], 0
        # An embedding: an id of another rank looks up zeros
        for (rows,) in case.shares(name, "tp", before):
            is_own = (ids >= first) & (ids < first + len(rows))
            shares.append(rows[(ids - first).clamp(0, len(rows) - 1)] * is_own[..., None])
            first += len(rows)
        return shares
    return []


def _sums_over_tp(case: Case, module: str) -> bool:
    """Whether a module's weight is cut over tp, and its output is not cut along its features: row-parallel, or an embedding."""
    names = (f"parameter/{case.weight_of(module)}", f"forward/{module}")
    return (
        case.has(names[1])
        and names[0] in case.entry["tensors"]
        and "tp" in case.sharded(names[0])
        and case.sharded(names[1]).get("tp", 1)
        == 1  # with sequence parallelism it is cut along its positions
    )


def backward_shares(case: Case, name: str) -> dict[str, list[torch.Tensor]]:
    """Return column-parallel layer that a tensor enters -> each tp rank's share of the gradient that comes back through it.

    {} unless the tensor enters such layers only.
    """
    shares: dict[str, list[torch.Tensor]] = {}
    consumers = [other for other, sources in case.dump.layout.sources.items() if name in sources]
    for module in consumers:
        weight = f"parameter/{case.weight_of(module)}"
        if (
            not case.is_linear(module)
            or case.is_transposed(module)
            or not case.has(f"backward/{module}")
            or (case.mesh.tp > 1 and case.sharded(weight).get("tp") != 0)
        ):
            return {}
        before = case.before(weight.removeprefix("parameter/"))
        weights = case.shares(weight, "tp", before) if case.mesh.tp > 1 else [[before]]
        start, shares[module] = 0, []
        gradient = case.own(f"backward/{module}")
        for (rows,) in weights:
            shares[module].append(gradient[..., start : start + len(rows)] @ rows)
            start += len(rows)
    return shares


def norm_gradient_shares(case: Case, parameter: str) -> list[torch.Tensor]:
    """Return each tp rank's share of the gradient of a norm's weight that all ranks hold, while each norms its own heads only.

    With y = w z, the gradient of w is the sum of dL/dy z over tokens and heads. [] for any other parameter.
    """
    module = parameter.removesuffix(".weight")
    forward, backward = f"forward/{module}", f"backward/{module}"
    if (
        parameter == module
        or not case.has(forward, backward)
        or not case.is_replicated(f"parameter/{parameter}")
    ):
        return []
    dim = case.sharded(forward).get("tp")
    weight = case.before(parameter)
    if weight.ndim != 1 or dim is None or bool((weight == 0).any()):
        return []
    product = case.own(forward) / weight * case.own(backward)
    return [piece.flatten(0, -2).sum(0) for piece in product.chunk(case.mesh.tp, dim)]


class Contributions:
    """What each micro batch of each DP rank contributes to the gradient of one parameter, in blocks of rows.

    The contributions to a block of a weight have shape (samples, rows, columns). With `by_cp_rank`, each sample is divided further:
    into what the positions of each cp rank contribute. A vector is cut over tp (if it is sharded) and then over dp and cp, because a
    rank may hold one such part only; each part is a block of a single row.
    """

    def __init__(self, case: Case, parameter: str, by_cp_rank: bool = False):
        self.case, self.parameter = case, parameter
        self.module, _, self.what = parameter.rpartition(".")
        self._cp = case.mesh.cp if by_cp_rank else 1
        self.samples = case.mesh.num_sample_shares * case.micro_batches * self._cp

    @property
    def known(self) -> bool:
        """Whether all tensors that the gradient is computed from are captured and right, and the samples can be told apart."""
        case, module = self.case, self.module
        needed = [f"backward/{module}"]
        shape = case.dump.layout.parameters[self.parameter]
        if self._is_embedding:
            needed += ["batch/input_ids", f"forward/{module}"]
            needed += [case.names.logits_gradient, f"forward/{case.source(case.names.head)}"] * self._is_tied
        elif self.what == "bias" or len(shape) == 1:
            needed += [f"forward/{module}"]
        elif case.is_linear(module) and case.weight_of(module) == self.parameter:
            needed += [f"forward/{case.source(module)}"]
        else:
            return False
        are_right = case.has(*needed) and not any(case.is_wrong(name) for name in needed)
        num_parts = self._num_parts * self._cut_over_tp if len(shape) == 1 else 1
        if self._is_embedding and are_right and not self._is_looked_up:
            return False
        return are_right and 4 * self.samples <= shape[-1] // num_parts

    @property
    def _is_embedding(self) -> bool:
        return self.parameter == self.case.names.embedding_weight

    @property
    def _is_looked_up(self) -> bool:
        """Whether the embedding gives rows of its weight as they are, and does not scale them."""
        case = self.case
        rows = case.before(self.parameter)[case.own("batch/input_ids").long()]
        # The rows may have been rounded to bfloat16.
        return evidence.relative_error(case.own(f"forward/{self.module}"), rows) <= 2.0**-7

    @property
    def _is_tied(self) -> bool:
        """Whether the head has the weight of the embedding. The gradient is then a sum of two."""
        return self._is_embedding and self.parameter == self.case.weight_of(self.case.names.head)

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (the run's block, the contributions to it)."""
        case = self.case
        own = case.own(f"gradient/{self.parameter}")
        g = self._of_rank(case.own(f"backward/{self.module}"), case.dump.layout.outputs[self.module])
        if self._is_embedding:
            ids = self._by_sample(case.own("batch/input_ids")[..., None])[..., 0].long()
            if self._is_tied:
                logits = case.dump.layout.outputs[case.names.head]
                of_head = self._of_rank(case.own(case.names.logits_gradient), logits)
                x = self._by_sample(case.own(f"forward/{case.source(case.names.head)}"))
            for start in range(0, len(own), BLOCK_ROWS):
                rows = slice(start, start + BLOCK_ROWS)
                block = own[rows]
                contributed = g.new_zeros(self.samples, *block.shape)
                sample, token = ((start <= ids) & (ids < start + len(block))).nonzero(as_tuple=True)
                places = sample, ids[sample, token] - start
                contributed.index_put_(places, g[sample, token], accumulate=True)
                if self._is_tied:
                    contributed += of_head[..., rows].transpose(1, 2) @ x
                yield block, contributed
            return
        if self.what == "weight" and own.ndim == 2:
            x = self._by_sample(case.own(f"forward/{case.source(self.module)}"))
            # The gradient of W^T is x^T g
            if case.is_transposed(self.module):
                x, g = g, x
            for start in range(0, len(own), BLOCK_ROWS):
                rows = slice(start, start + BLOCK_ROWS)
                yield own[rows], g[..., rows].transpose(1, 2) @ x
            return
        if self.what == "bias":
            products = g.sum(1)
        else:  # a norm's weight: y = w z, or w z + b
            weight, bias = case.before(self.parameter), f"{self.module}.bias"
            normed = self._by_sample(case.own(f"forward/{self.module}"))
            if bias in case.dump.layout.parameters:
                normed = normed - case.before(bias)
            products = (normed / weight * g).sum(1)
        for own_part, contributed in zip(self._parts(own), self._parts(products), strict=True):
            yield own_part[None], contributed[:, None]

    def _parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a vector, cut over tp and then over dp and cp, along the last dim."""
        over_tp = vector.chunk(self._cut_over_tp, -1)
        return [part for shard in over_tp for part in shard.chunk(self._num_parts, -1)]

    @property
    def _num_parts(self) -> int:
        return self.case.mesh.dp * self._cp

    @property
    def _cut_over_tp(self) -> int:
        return self.case.mesh.tp if "tp" in self.case.sharded(f"gradient/{self.parameter}") else 1

    def _by_sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output, whose dim 0 is the global batch in the order of samples, with shape (samples, tokens, channels).

        The heads of a norm on heads count as tokens. By cp rank, each sample stands there once per rank.
        """
        by_sample = tensor.unflatten(0, (self.samples // self._cp, -1)).flatten(1, -2)
        return by_sample.repeat_interleave(self._cp, 0)

    def _of_rank(self, gradient: torch.Tensor, dims: tuple) -> torch.Tensor:
        """Return the gradient of an output by sample; by cp rank, it is zero at the positions of other ranks."""
        by_sample = self._by_sample(gradient)
        if self._cp == 1:
            return by_sample
        owner = self.case.cp_rank_of(gradient.shape[dims.index(SEQUENCE)])
        shape = [-1 if symbol == SEQUENCE else 1 for symbol in dims]
        rank_of_sample = torch.arange(self.samples)[:, None, None] % self._cp
        return by_sample * (self._by_sample(owner.view(shape).expand(gradient.shape)) == rank_of_sample)


def sample_weights(*steps: Contributions) -> tuple[torch.Tensor, float] | None:
    """Return (weights (steps, dp, micro batches) of each DP rank's micro batches in a gradient, the error left).

    Given several steps, the gradient is that of the first one. The weights are those that fit best (least squares); in the step of the
    gradient, 1 is right. None if something is not finite.
    """

    def blocks() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for of_steps in zip(*(step.blocks() for step in steps), strict=True):
            yield of_steps[0][0], torch.cat([contributions for _, contributions in of_steps])

    size = sum(step.samples for step in steps)
    gram = torch.zeros(size, size, dtype=torch.float64)
    projections = torch.zeros(size, dtype=torch.float64)
    for own, contributions in blocks():
        flat = contributions.flatten(1)
        gram += flat @ flat.T
        projections += flat @ own.flatten()
    if not bool(gram.isfinite().all() and projections.isfinite().all()):
        return None
    weights = torch.linalg.lstsq(gram, projections[:, None]).solution[:, 0]
    counted = gram.diagonal() > NOTHING * gram.diagonal().max()
    weights[~counted] = weights[counted].mean()  # a micro batch without labels has any weight
    squared_error = sum(
        float((own - (weights[:, None, None] * contributions).sum(0)).square().sum())
        for own, contributions in blocks()
    )
    case = steps[0].case
    return weights.view(len(steps), case.mesh.num_sample_shares, case.micro_batches), squared_error**0.5


def nearest_terms(
    found: Contributions, terms_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[int], float]:
    """Assign each row of a gradient to the nearest term: `terms_of` makes (terms, rows, columns) of the contributions to a block.

    Returns the terms that some row has, and the error that this leaves.
    """
    chosen: set[int] = set()
    squared_error = 0.0
    for own, contributions in found.blocks():
        errors = (terms_of(contributions) - own).square().sum(-1)
        squared_error += float(errors.min(0).values.sum())
        chosen |= set(errors.argmin(0).tolist())
    return sorted(chosen), squared_error**0.5
