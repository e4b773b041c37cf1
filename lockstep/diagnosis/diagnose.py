"""From the shape of a divergence to its likely cause, in words, with the evidence. Ranked; the surest first.

A step runs batch -> forward -> loss -> backward -> gradients -> norm -> moments -> parameters, and everything behind
the first wrong tensor is wrong with it. So only the first wrong stage is looked into; what came before is excluded.
"""

import math
from dataclasses import dataclass, field

import torch

from lockstep.diagnosis import evidence
from lockstep.tensors.dump import Dump
from lockstep.tensors.judgement import Result, Row

# Entry of the effective contract -> the cause that a difference in it is
CONTRACT = {
    "learning_rates": "learning rate", "betas": "betas", "weight_decay": "weight decay", "max_grad_norm": "clipping",
    "gradient_accumulation_steps": "accumulation", "loss_is_mean_over": "accumulation", "tied_embeddings": "tied weights",
    "parameter_dtype": "precision", "compute_dtype": "precision", "reduction_dtype": "precision",
    "optimizer_dtype": "precision", "embedding_dtype": "precision", "attention": "attention implementation",
    "attention_dropout": "random numbers", "training_mode": "random numbers",
}  # fmt: skip
STAGES = ("batch", "forward", "loss", "backward", "gradients", "gradient norm", "moments", "parameters")
KINDS_OF = {
    "batch": ("batch",), "forward": ("forward",), "backward": ("backward",), "gradients": ("gradient",),
    "moments": ("exp_avg", "exp_avg_sq"), "parameters": ("parameter",),
}  # fmt: skip
SURE, LIKELY, POSSIBLE = 3, 2, 1


@dataclass
class Cause:
    """One possible cause and what speaks for it."""

    name: str
    evidence: str
    weight: int


@dataclass
class Diagnosis:
    """Causes, the likeliest first, and what was excluded on the way."""

    causes: list[Cause] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)


def diagnose(result: Result, strategy: str, reference: Dump, replays: dict[str, Dump]) -> Diagnosis:
    """Why a run of a finished comparison failed. `reference` and `replays` are what it was compared with."""
    return _Reasoning(result, strategy, reference, replays.get(strategy)).diagnosis()


class _Reasoning(evidence.Case):
    """What the evidence means, one method for each stage that can be the first to be wrong."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.causes: list[Cause] = []

    def diagnosis(self) -> Diagnosis:
        for entry, sentence in self.result.configuration.get(self.strategy, {}).items():
            self.say(CONTRACT.get(entry, "optimizer settings"), f"configured differently: {sentence}", SURE)
        if not self.failures:
            return Diagnosis(self.causes, ["every tensor of every step is right"])
        stage = self.stage()
        getattr(self, "of_" + stage.replace(" ", "_"))()
        if self.step > 1:
            self.causes = [Cause(c.name, f"{c.evidence}; step {self.step - 1} was still right", c.weight) for c in self.causes]
        ranked = sorted(self.causes, key=lambda cause: -cause.weight)
        unique = {cause.name: cause for cause in reversed(ranked)}
        return Diagnosis([cause for cause in ranked if unique[cause.name] is cause], self.excluded(stage))

    def say(self, name: str, sentence: str, weight: int) -> None:
        self.causes.append(Cause(name, sentence, weight))

    def stage(self) -> str:
        kind = self.first.split("/")[0]
        if self.not_computed:  # evidence may need any tensor of the step, so that alone is said
            return "missing"
        if self.first == "backward/lm_head" or self.first.startswith("loss of"):
            return "loss"
        names = {"gradient": "gradients", "exp_avg": "moments", "exp_avg_sq": "moments", "parameter": "parameters"}
        return names.get(kind, kind)

    def excluded(self, stage: str) -> list[str]:
        if stage == "missing":
            return []
        before = list(KINDS_OF) if self.first.startswith("loss of") else STAGES[: STAGES.index(stage)]
        said = []
        for what in before:
            rows = [row for row in self.rows.values() if row.kind in KINDS_OF.get(what, ())]
            if rows and not any(row.too_far for row in rows):
                small = sum(not row.judged for row in rows)
                unseen = f" ({small} of {len(rows)} tensors too small to judge)" if small else ""
                said.append(f"{what}: right in step {self.step}{unseen}")
        return said + ([f"steps 1 to {self.step - 1}: right throughout"] if self.step > 1 else [])

    def of_missing(self) -> None:
        more = f" and {len(self.not_computed) - 1} more tensors" if len(self.not_computed) > 1 else ""
        self.say("not computed", f"{self.not_computed[0]}{more}: the model is another one, or does not run all of it", SURE)

    def of_batch(self) -> None:
        own, true = self.own(self.first), self.true(self.first)
        dp = self.sizes["dp"]
        mine, theirs = own.chunk(dp), true.chunk(dp)
        if self.peers_disagree(self.first):
            self.say("data", f"tensor-parallel peers were given different samples: ranks {self.odd_ranks(self.first)} differ", SURE)
        same = [(a, b) for a in range(dp) for b in range(dp) if a != b and torch.equal(mine[a], theirs[b])]
        if same:
            self.say("data", f"DP rank {same[0][0]} was given the samples of DP rank {same[0][1]}", SURE)
        if self.first == "batch/labels":
            self.say("data", "the input ids are right, the labels are not", SURE)
        rows = torch.cat([own, self.own("batch/labels")], dim=1) if self.first == "batch/input_ids" else own
        wanted = torch.cat([true, self.true("batch/labels")], dim=1) if self.first == "batch/input_ids" else true
        if sorted(map(tuple, rows.tolist())) == sorted(map(tuple, wanted.tolist())):
            self.say("data", "the right samples in another order", SURE)
        self.say("data", "the samples are not those of this step", LIKELY)

    def of_forward(self) -> None:
        module = self.first.removeprefix("forward/")
        what = evidence.in_words(module)
        own, true = self.own(self.first), self.true(self.first)
        dropped = evidence.dropped_elements(own, true)
        if dropped is not None:
            peers = ", not the same on tensor-parallel peers" if self.peers_disagree(self.first) else ""
            self.say("random numbers", f"{100 * dropped:.1f} % of {what} is zero, the rest too large by as much{peers}: dropout", SURE)
        own_weights = f"parameter/{module}."
        apart = [name for name in self.entry["replicas_differ"] if name.startswith(own_weights)]
        if apart:
            self.say("weights", f"{apart[0].removeprefix('parameter/')} is not the same on all ranks: {self.odd_ranks(apart[0])} differ", SURE)
        weights = [row for row in self.wrong("parameter") if row.name.startswith(own_weights)]
        if weights and not self.wrong_moments(weights[0].name):
            off = f"{weights[0].distance.relative:.1e}"
            self.say("weights", f"{weights[0].name.removeprefix('parameter/')} was {off} off before the step: its update is right, the sum is not", SURE)
        if self.is_float32(self.first) and evidence.is_rounded_to_bfloat16(own):
            self.say("precision", f"every element of {what} is a bfloat16 number, in a float32 run", SURE)
        factor, left = evidence.factor_of(own, true)
        if left <= evidence.SAME and "tp" in evidence.name_factor(factor, self.sizes):
            self.say("tp reduction repeated", f"{what} is {self.in_words(factor)} times what it should be", SURE)
        sums_over_tp = self.is_sum_over_tp(module)
        offset = (own - true).flatten(0, -2) if sums_over_tp else []
        if len(offset) > 1 and 0 < float(offset.norm()) and float((offset - offset[0]).norm()) <= evidence.SAME * float(offset.norm()):
            self.say("tp reduction repeated", f"{what} is off by the same vector for every token: a bias added once per rank", SURE)
        if sums_over_tp:
            if self.peers_disagree(self.first):
                self.say("tp reduction missing", f"{module} sums over the tensor-parallel ranks, and each of them has another result", LIKELY)
            self.say("tp reduction missing", f"{module} is where the tensor-parallel ranks' shares are summed", POSSIBLE)
        seen = f"{what} is not right{self.computed_from(module)}"
        inner = "attention implementation" if module.endswith("self_attn.o_proj.input") else "computation"
        self.say(*((inner, f"{seen}; no weights lie between") if module.endswith(".input") else ("weights", seen)), POSSIBLE)

    def of_loss(self) -> None:
        losses = [loss for loss in self.result.losses if loss.step == self.step]
        gaps = [loss.by_strategy[self.strategy] - loss.reference for loss in losses]
        if self.first.startswith("loss of"):
            mine = [loss.by_strategy[self.strategy] for loss in losses]
            equal = len(set(mine)) == 1 and len(mine) > 1
            what = "all DP ranks report one and the same loss" if equal else f"{self.first} is off by {max(gaps, key=abs):.3g}"
            self.say("reported loss", f"every tensor is right, but {what}", SURE)
            return
        tp = self.sizes["tp"]
        if tp > 1 and all(abs(abs(gap) - math.log(tp)) <= 1e-2 for gap in gaps):
            self.say("loss on vocabulary shards", f"the logits are right, the loss is off by {gaps[0]:.4f} = log(tp): summed over tp once too often", SURE)
        weights = self.micro_batch_factors()
        if weights is not None:
            self.say_weights(weights, "the gradient of the logits")
        if "tp" in self.sharded("backward/lm_head"):
            self.say("loss on vocabulary shards", "the logits are right, their gradient is not, and no factor explains it: labels or sums of a vocabulary shard", LIKELY)

    def of_backward(self) -> None:
        what = evidence.in_words(self.first.removeprefix("backward/"))
        if self.peers_disagree(self.first):
            self.say("tp reduction missing", f"forward is right; tensor-parallel peers have different gradients of {what}", SURE)
        factor = self.factor([self.rows[self.first]])
        if factor is not None:
            name = "tp reduction repeated" if "tp" in evidence.name_factor(factor, self.sizes) else "gradient scale"
            self.say(name, f"the gradient of {what} is {self.in_words(factor)} times what it should be", LIKELY)
        self.say("tp reduction missing", f"forward is right; the gradient of {what} is the first that is not", POSSIBLE)

    def of_gradients(self) -> None:
        wrong = self.wrong("gradient")
        if not wrong:
            name = "tp reduction missing" if self.peers_disagree(self.first) else "dp reduction missing"
            self.say(name, f"{self.first} is right on the rank that wrote it, and another one on ranks {self.odd_ranks(self.first)}", LIKELY)
            return
        names = [row.name.removeprefix("gradient/") for row in wrong]
        if self.is_stale(names):
            self.say("stale gradients", "what is too much in every gradient is the gradient of the step before", SURE)
        if all(self.is_float32(f"gradient/{name}") and evidence.is_rounded_to_bfloat16(self.own(f"gradient/{name}")) for name in names):
            self.say("precision", f"every element of {len(names)} gradients is a bfloat16 number, in a float32 run", SURE)
        everything, factor = len(wrong) >= 0.9 * len(self.judged("gradient")), self.factor(wrong)
        self.of_some_gradients(wrong, names, None if everything else factor)
        if everything:
            self.of_all_gradients(factor)
        if len(wrong) == 1:
            self.of_one_gradient(wrong[0])
        self.say("dp reduction missing", f"backward is right; {len(wrong)} gradients are not", POSSIBLE)

    def of_some_gradients(self, wrong: list[Row], names: list[str], factor: float | None) -> None:
        replicated = [row.name for row in self.judged("gradient") if self.is_replicated(row.name) and ".bias" not in row.name]
        if factor is not None:
            which = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
            close = evidence.name_factor(factor, self.sizes)
            what = "replicated parameters only" if all(row.name in replicated for row in wrong) else "only"
            name = "tp reduction repeated" if "tp" in close else "gradient scale"
            self.say(name, f"{which} ({what}): the gradient is {self.in_words(factor)} times what it should be", SURE)
        elif all(row.name in replicated for row in wrong):
            apart = any(self.peers_disagree(row.name) for row in wrong)
            peers = "each tensor-parallel rank has its own share" if apart else "and the tensor-parallel ranks agree"
            self.say("tp reduction missing", f"only replicated parameters are wrong ({', '.join(names[:3])}), {peers}", SURE if apart else POSSIBLE)

    def of_all_gradients(self, factor: float | None) -> None:
        found = evidence.sample_weights(self.dump, self.step, self.weight_before("model.norm.weight"))
        if found is not None and found[1] <= evidence.SAME:
            weights = found[0]
            if float((weights - 1).abs().max()) <= evidence.SAME:
                return  # the last norm is right
            if all(float((half - weights[0]).abs().max()) <= evidence.SAME for half in weights):
                self.say_weights(weights[0], "every gradient")
                return
            self.say_weights(weights[0], "what one rank holds of every gradient")
        if factor is not None:
            self.say("gradient scale", f"all gradients are {self.in_words(factor)} times what they should be", LIKELY)

    def say_weights(self, weights: torch.Tensor, what: str) -> None:
        """weights (dp, micro batches): how often each DP rank's micro batches count in something; 1 is right."""
        shown = "; ".join(f"DP rank {rank}: {', '.join(f'{value:.3g}' for value in row)}" for rank, row in enumerate(weights.tolist()))
        by_dp, by_micro = weights.mean(dim=1), weights.mean(dim=0)
        even = lambda values: float((values - values.mean()).abs().max()) <= evidence.SAME * max(1.0, float(values.abs().max()))  # noqa: E731
        if even(by_dp) and even(by_micro):
            factor = float(weights.mean())
            close = evidence.name_factor(factor, self.sizes)
            if close and all("accumulation" in name for name in close):
                self.say("accumulation", f"{what} is {self.in_words(factor)} times what it should be", SURE)
            else:
                excluded = "" if not close or "accumulation" in " ".join(close) else "; the accumulation steps are excluded"
                self.say("gradient scale", f"{what} is {self.in_words(factor)} times what it should be, evenly for all samples{excluded}", SURE)
        elif even(by_dp):
            self.say("accumulation", f"the micro batches do not count alike in {what} ({shown}; 1 is right)", SURE)
        else:
            self.say("dp reduction missing", f"the DP ranks' samples do not count alike in {what} ({shown}; 1 is right)", SURE)

    def of_one_gradient(self, row: Row) -> None:
        if self.dump.contract["tied_embeddings"] and row.name.endswith("embed_tokens.weight"):
            self.say("tied weights", "only the gradient of the tied embedding and head is wrong: one of the two does not contribute", SURE)
        share = self.share_that_is_wrong(row.name, self.own(row.name), self.true(row.name))
        if share:
            self.say("update left out", f"{row.name} is wrong in the share of {share[0]} rank {share[1]} only", LIKELY)

    def of_gradient_norm(self) -> None:
        norm = next(n for n in self.result.norms if n.strategy == self.strategy and n.step == self.step)
        ratio = norm.recorded / norm.held
        squares = {row.name: row.distance.own_norm**2 for name, row in self.rows.items() if name.startswith("gradient/")}
        copied = sum(square for name, square in squares.items() if self.is_replicated(name))
        tp = self.sizes["tp"]
        if tp > 1 and math.isclose(norm.recorded**2, norm.held**2 + (tp - 1) * copied, rel_tol=1e-4):
            self.say("clipping", f"gradients right, their norm {ratio:.4f} times too large: replicated parameters counted tp times", SURE)
        elif ratio < 1:
            self.say("clipping", f"gradients right, their norm is {ratio:.4f} of what it should be: not all shards are in it", SURE)
        self.say("clipping", f"gradients right, the norm that is clipped by is {self.in_words(ratio)} times theirs", LIKELY)

    def of_moments(self) -> None:
        if not self.wrong("exp_avg") and not self.wrong("exp_avg_sq"):
            self.say("clipping", f"{self.first} is right on the rank that wrote it, and another one on ranks {self.odd_ranks(self.first)}", LIKELY)
            return
        first, second = ([row for row in self.judged(kind)] for kind in ("exp_avg", "exp_avg_sq"))
        scale, square = self.factor(first), self.factor(second)
        if self.step > 1 and self.is_first_moment_fresh(first):
            self.say("moments lost", "both moments are those of a first step: what they had gathered is gone", SURE)
        if not self.wrong("exp_avg"):
            times = f", {square:.4g} times" if square is not None else ""
            self.say("betas", f"gradients and first moments are right, the second moments are not{times}: the second beta", SURE)
        elif scale is not None and not self.wrong("exp_avg_sq"):
            self.say("betas", f"gradients and second moments are right, the first moments are not, {scale:.4g} times: the first beta", SURE)
        elif scale is not None and square is not None and math.isclose(square, scale**2, rel_tol=3 * evidence.SAME):
            self.say("clipping", f"gradients and their norm are right, but {scale:.4g} times that reaches the optimizer: clipped otherwise", SURE)
        else:
            by_rank = self.factors_by_tp_rank(first)
            if by_rank:
                shown = ", ".join(f"{factor:.4g}" for factor in by_rank)
                self.say("clipping", f"gradients and their norm are right, but each tp rank clips otherwise ({shown} times what it should be)", SURE)
        row = self.rows[self.first]
        share = self.share_of_update(row)
        if share:
            self.say("update left out", share, LIKELY)
        self.say("clipping", "gradients are right, what reaches the optimizer is not", POSSIBLE)

    def of_parameters(self) -> None:
        wrong = self.wrong("parameter")
        if not wrong:
            self.say("weights", f"{self.first} is right on the rank that wrote it, and another one on ranks {self.odd_ranks(self.first)}", LIKELY)
            return
        names = [row.name.removeprefix("parameter/") for row in wrong]
        judged = self.judged("parameter")
        if all(self.is_float32(f"parameter/{name}") and evidence.is_rounded_to_bfloat16(self.own(f"parameter/{name}")) for name in names):
            self.say("precision", f"every element of {len(names)} parameters is a bfloat16 number", SURE)
        vectors = all(len(self.entry["tensors"][row.name]["shape"]) == 1 for row in wrong)
        if vectors and len(wrong) < len(judged):
            self.say("weight decay", f"moments right; only norms and biases are wrong ({', '.join(names[:3])}): decayed, though they should not be", SURE)
        factor = self.factor(wrong)
        if all(abs(row.distance.scale) <= evidence.SAME for row in wrong):
            self.say("update left out", f"moments right; {', '.join(names[:3])} did not change", SURE)
        elif factor is not None and len(wrong) >= 0.9 * len(judged):
            self.say("learning rate", f"moments right; every update is {self.in_words(factor)} times what it should be", SURE)
        share = self.share_of_update(wrong[0])
        if share:
            self.say("update left out", share, SURE)
        self.say("learning rate", f"moments right; {len(wrong)} updates are not", POSSIBLE)
