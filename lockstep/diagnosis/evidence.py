"""What the shape of a divergence shows: factors, shares of the mesh, samples that are missing from a gradient.

Every function looks at whole tensors of finished dumps, in float64, and states a number; lockstep/diagnosis/diagnose.py says what
the numbers mean.
"""

import math
import re

import torch

from lockstep.tensors.dump import Dump
from lockstep.tensors.judgement import Result, Row

SAME = 1e-2  # what is left of an error when a factor explains it: well above rounding, well below another error
NEAR = 0.03  # how near a measured factor must be to tp, 1/dp, ... to be called that


def factor_of(own: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """(c, what c does not explain of the error, relative to the error) for the best factor c in own = c true.

    (NaN, inf) where there is no error or nothing to scale.
    """
    square, error = float((true * true).sum()), float((own - true).norm())
    if not (0 < square < math.inf and 0 < error < math.inf):
        return math.nan, math.inf
    factor = float((own * true).sum()) / square
    return factor, float((own - factor * true).norm()) / error


def multiple_of(own: torch.Tensor, base: torch.Tensor) -> tuple[float, float]:
    """(c, what is left of own - c base, relative to own) for the best factor c; (NaN, inf) where one of them is zero."""
    square, size = float((base * base).sum()), float(own.norm())
    if not (0 < square < math.inf and 0 < size < math.inf):
        return math.nan, math.inf
    factor = float((own * base).sum()) / square
    return factor, float((own - factor * base).norm()) / size


def common_factor(factors: list[float], leftovers: list[float]) -> float | None:
    """The one factor that explains several tensors, or None: each is a multiple, and the multiples are equal."""
    if not factors or not all(left <= SAME for left in leftovers):
        return None
    middle = sorted(factors)[len(factors) // 2]
    return middle if all(abs(factor - middle) <= SAME * abs(middle) for factor in factors) else None


def name_factor(factor: float, sizes: dict[str, int]) -> list[str]:
    """What a factor may be, from the sizes of the run ("tp", "dp", "accumulation steps"); [] where nothing is near."""
    sizes = {name: size for name, size in sizes.items() if size > 1}
    known = {name: float(size) for name, size in sizes.items()}
    if "tp" in sizes and "dp" in sizes:
        known["tp x dp"] = float(sizes["tp"] * sizes["dp"])
    if "tp" in sizes:
        known["sqrt(tp)"] = math.sqrt(sizes["tp"])
    known |= {f"1/{name}" if " x " not in name else f"1/({name})": 1 / value for name, value in known.items()}
    return [name for name, value in known.items() if abs(factor - value) <= NEAR * value]


def in_words(name: str) -> str:
    """What a captured name stands for: a module's output, its input, or a further one."""
    entering, further = re.fullmatch(r"(.*)\.input(\.\d+)?", name), re.fullmatch(r"(.*(?<!layers))\.(\d+)", name)
    if entering:
        return f"{entering[1]}'s input"
    return f"output {further[2]} of {further[1]}" if further else f"{name}'s output"


def relative_error(own: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    """Of several pieces together; 0 where the truth is zero."""
    error = sum(float((mine - exact).square().sum()) for mine, exact in zip(own, true, strict=True))
    size = sum(float(exact.square().sum()) for exact in true)
    return math.sqrt(error / size) if size else 0.0


def dropped_elements(own: torch.Tensor, true: torch.Tensor) -> float | None:
    """The share of elements that are zero where all others are 1 / (1 - share) times the truth: dropout. Else None."""
    zeros = (own == 0) & (true != 0)
    share = float(zeros.double().mean())
    if not 0.005 <= share <= 0.6:
        return None
    rest = ~zeros & (true != 0)
    factor, left = multiple_of(own[rest], true[rest])
    # the mask is drawn anew for every element, so the share itself is off by chance
    return share if left <= SAME and abs(factor * (1 - share) - 1) <= 0.1 else None


def is_rounded_to_bfloat16(own: torch.Tensor) -> bool:
    """Whether every element is a bfloat16 number, as those of a float32 tensor never all are by chance."""
    return bool((own == own.bfloat16().double()).all()) and bool((own != 0).any())


def sample_weights(dump: Dump, step: int, norm_weight: torch.Tensor) -> tuple[torch.Tensor, float] | None:
    """How much of every DP rank's and micro batch's samples is in the gradient of the last norm, 1 being right.

    That norm's y = w z has the gradient sum over tokens of dL/dy * z, and both are in the dump, so the share of any
    samples can be computed from the run itself. Returns weights (parts, dp, micro batches) of the gradient's two halves
    (a rank may hold only one), and what is left unexplained. None where there are too many samples to tell apart.
    """
    config = dump.run["config"]
    dp, micro = config["dp_size"], config["gradient_accumulation_steps"]
    forward, backward = (dump.tensor(step, f"{kind}/model.norm").double() for kind in ("forward", "backward"))
    own = dump.tensor(step, "gradient/model.norm.weight").double()
    if 4 * dp * micro > len(own) or not bool(own.isfinite().all()):
        return None
    shares = (forward / norm_weight * backward).flatten(0, 1).unflatten(0, (dp * micro, -1)).sum(dim=1)  # (dp * micro, H)
    if not bool(shares.isfinite().all()):
        return None
    found, left = [], 0.0
    for part, columns in zip(own.chunk(2), shares.chunk(2, dim=1), strict=True):
        solution = torch.linalg.lstsq(columns.T, part[:, None]).solution[:, 0]
        left += float((columns.T @ solution - part).square().sum())
        found.append(solution.view(dp, micro))
    return torch.stack(found), math.sqrt(left) / (float(own.norm()) or math.inf)


class Case:
    """One run and its first wrong tensor, in the step `step`; what its dump shows about it."""

    def __init__(self, result: Result, strategy: str, reference: Dump, replay: Dump | None):
        self.result, self.strategy, self.dump = result, strategy, result.dumps[strategy]
        self.reference, self.replay = reference, replay
        config = self.dump.run["config"]
        self.sizes = {"tp": config["tp_size"], "dp": config["dp_size"], "accumulation steps": config["gradient_accumulation_steps"]}
        self.failures = result.failures(strategy)
        if self.failures:
            self.step, _, self.first, _ = self.failures[0]
            self.entry = self.dump.steps[str(self.step)]
            self.rows = {row.name: row for row in result.rows if row.strategy == strategy and row.step == self.step}
            self.not_computed = [name for run, step, name in result.missing if (run, step) == (strategy, self.step)]

    def own(self, name: str, step: int | None = None) -> torch.Tensor:
        return self.dump.tensor(step or self.step, name).double()

    @property
    def truth(self) -> Dump:
        return self.reference if self.step == 1 else self.replay

    def true(self, name: str) -> torch.Tensor:
        return self.truth.tensor(self.step, name).double()

    def wrong(self, kind: str) -> list[Row]:
        return [row for name, row in self.rows.items() if name.startswith(f"{kind}/") and row.too_far]

    def judged(self, kind: str) -> list[Row]:
        return [row for name, row in self.rows.items() if name.startswith(f"{kind}/") and row.judged]

    def sharded(self, name: str) -> dict[str, int]:
        """Mesh axis -> the dim that it cuts, tp first."""
        return dict(sorted(self.entry["tensors"][name]["sharded"].items(), reverse=True))

    def shares(self, name: str, axis: str, tensor: torch.Tensor) -> list[list[torch.Tensor]]:
        """The pieces of a tensor that each rank along a mesh axis holds: tp cuts it first, dp what tp has left."""
        dims, size = self.sharded(name), self.sizes[axis]
        pieces = tensor.chunk(self.sizes["tp"], dims["tp"]) if axis == "dp" and "tp" in dims else [tensor]
        cut = [piece.chunk(size, dims[axis]) for piece in pieces]
        return [[chunks[rank] for chunks in cut if rank < len(chunks)] for rank in range(size)]

    def odd_ranks(self, name: str) -> list[int]:
        """The ranks that do not hold what others hold of the same place."""
        return self.entry["replicas_differ"].get(name, [])

    def peers_disagree(self, name: str) -> bool:
        return any(rank % self.sizes["tp"] for rank in self.odd_ranks(name))

    def factor(self, rows: list[Row]) -> float | None:
        """The one factor by which all of these tensors differ from the truth."""
        leftovers = []
        for row in rows:
            along = (row.distance.scale - 1) * row.distance.change
            across = math.sqrt(max(0.0, row.distance.error**2 - along**2))
            leftovers.append(across / row.distance.error if 0 < row.distance.error < math.inf else math.inf)
        return common_factor([row.distance.scale for row in rows], leftovers)

    def in_words(self, factor: float) -> str:
        names = name_factor(factor, self.sizes)
        return f"{factor:.4g}" + (f" = {' or '.join(names)}" if names else "")

    def share_that_is_wrong(self, name: str, own: torch.Tensor, true: torch.Tensor) -> tuple[str, int, int] | None:
        """(axis, rank, size) if a tensor is wrong in one share of one mesh axis only."""
        for axis in self.sharded(name):
            pairs = zip(self.shares(name, axis, own), self.shares(name, axis, true), strict=True)
            errors = [relative_error(*pair) for pair in pairs]
            worst = max(range(len(errors)), key=errors.__getitem__)
            if all(error < 1e-3 * errors[worst] for rank, error in enumerate(errors) if rank != worst):
                return axis, worst, self.sizes[axis]
        return None

    def computed_from(self, module: str) -> str:
        """A half sentence that names what an output is computed from, where that was captured and is right; or ""."""
        rows = {name: self.rows.get(f"forward/{name}") for name in self.dump.layout.sources[module]}
        seen = [in_words(name) for name, row in rows.items() if row is not None and row.judged and not row.too_far]
        return f", and what it is computed from is right: {', '.join(seen)}" if seen and len(seen) == len(rows) else ""

    def wrong_moments(self, parameter: str) -> bool:
        name = parameter.removeprefix("parameter/")
        return any(self.rows[key].too_far for key in (f"exp_avg/{name}", f"exp_avg_sq/{name}") if key in self.rows)

    def is_float32(self, name: str) -> bool:
        """Whether bfloat16 numbers would be a surprise: float32 arithmetic, or what autocast keeps in float32."""
        kind = name.split("/")[0]
        precision = self.dump.run["config"]["precision"]
        return self.entry["tensors"][name]["dtype"] == "F32" and (precision == "fp32" or kind in ("gradient", "parameter"))

    def is_sum_over_tp(self, module: str) -> bool:
        """Whether a module has its weight cut over tp and its output whole: row-parallel, or an embedding."""
        weight = f"parameter/{module}.weight"
        return weight in self.entry["tensors"] and "tp" in self.sharded(weight) and "tp" not in self.sharded(f"forward/{module}")

    def is_replicated(self, name: str) -> bool:
        """Whether every tp rank has the whole parameter (where there are several)."""
        return self.sizes["tp"] > 1 and "tp" not in self.sharded(name)

    def weight_before(self, name: str) -> torch.Tensor:
        source = self.reference if self.step == 1 else self.dump
        return source.tensor(self.step - 1, f"parameter/{name}").double()

    def micro_batch_factors(self) -> torch.Tensor | None:
        """(dp, micro batches) factors of the logits' gradient, if that is all that is wrong with it."""
        dp, micro = self.sizes["dp"], self.sizes["accumulation steps"]
        dumps = (self.dump, self.truth)
        own, true = (dump.tensor(self.step, "backward/lm_head").chunk(dp * micro) for dump in dumps)
        factors, error, left = [], 0.0, 0.0
        for mine, exact in zip(own, true, strict=True):  # one at a time in float64: these are the largest tensors
            mine, exact = mine.double(), exact.double()
            factor, _ = multiple_of(mine, exact)
            factors.append(0.0 if math.isnan(factor) else factor)
            error += float((mine - exact).square().sum())
            left += float((mine - factors[-1] * exact).square().sum())
        if not left <= SAME**2 * error:
            return None
        return torch.tensor(factors, dtype=torch.float64).view(dp, micro)

    def is_stale(self, names: list[str]) -> bool:
        if self.step == 1:
            return False
        for name in names[:5]:
            own, true = self.own(f"gradient/{name}"), self.true(f"gradient/{name}")
            _, left = multiple_of(own - true, self.own(f"gradient/{name}", self.step - 1))
            if left > SAME:
                return False
        return True

    def is_first_moment_fresh(self, rows: list[Row]) -> bool:
        """Whether the first moments are multiples of this step's gradients alone."""
        names = [row.name.removeprefix("exp_avg/") for row in rows[:5]]
        found = [multiple_of(self.own(f"exp_avg/{name}"), self.own(f"gradient/{name}")) for name in names]
        return common_factor([factor for factor, _ in found], [left for _, left in found]) is not None

    def factors_by_tp_rank(self, rows: list[Row]) -> list[float]:
        """The factor of every tp rank's share against its own gradient, relative to the truth's; [] if they are alike."""
        found: list[list[float]] = [[] for _ in range(self.sizes["tp"])]
        for row in rows:
            gradient = self.own(f"gradient/{row.name.removeprefix('exp_avg/')}")
            size = float(gradient.norm())
            if "tp" not in self.sharded(row.name) or self.step > 1 or not size:
                continue
            exact = row.distance.norm / size  # of a right first moment to its gradient
            pairs = zip(self.shares(row.name, "tp", self.own(row.name)), self.shares(row.name, "tp", gradient), strict=True)
            for rank, ((mine,), (whole,)) in enumerate(pairs):
                factor, left = multiple_of(mine, whole)
                if left > SAME:
                    return []
                found[rank].append(factor / exact)
        means = [sum(factors) / len(factors) for factors in found if factors]
        return means if means and max(means) - min(means) > SAME * max(means) else []

    def share_of_update(self, row: Row) -> str:
        """A sentence if only one share of a tensor failed to change."""
        name = row.name.split("/", 1)[1]
        own, before = self.own(f"parameter/{name}"), self.weight_before(name)
        for axis in self.sharded(f"parameter/{name}"):
            pairs = zip(*(self.shares(f"parameter/{name}", axis, tensor) for tensor in (own, before)), strict=True)
            moved = [any(bool((a != b).any()) for a, b in zip(*pair, strict=True)) for pair in pairs]
            if any(moved) and not all(moved):
                return f"{name}: the share of {axis} rank {moved.index(False)} of {self.sizes[axis]} did not change"
        return ""
