"""Loops of users: a right one, and each bug or correct variant of it as the few lines in which it differs."""

import contextlib
import io
import itertools

import torch
import torch.distributed as dist
from recorded_loops import EXAMPLE, SIZE, Samples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep import judge
from lockstep.faults.torch_handles import OwnChunk
from lockstep.inputs.architectures import BUILT_IN
from lockstep.inputs.shapes import from_config

VOCABULARY, IGNORED = EXAMPLE.VOCABULARY, -100


def run(folder, steps):
    """Records loops, {name: how many steps}, one after the other, into folders of their names; then each rank judges its share of them."""
    for name, recorded in steps.items():
        globals()[name]().run(folder / name, recorded)
    dist.barrier()
    for name in list(steps)[dist.get_rank() :: dist.get_world_size()]:
        said, expected = io.StringIO(), globals()[name].expected
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = judge.main([str(folder / name), *(["--expect", expected] if expected else [])])
        (folder / name / "said.txt").write_text(f"{status}\n{said.getvalue()}")


class Right:
    """DDP over all ranks, three micro batches in a step, the mean over all tokens of the global batch."""

    steps, micro, bound = 2, 3, None
    expected, ranks = None, 2

    def run(self, folder, recorded):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.share, self.shares = self.rank, self.world
        torch.manual_seed(0)
        self.net = self.model().train()
        with lockstep.record(self.net, folder, recorded):
            self.wrapped = self.wrap(self.net)
            self.optimizer = self.make_optimizer()
            self.train()

    def train(self):
        for step in range(self.steps):
            self.step = step
            self.zero()
            window = self.window()
            for number, given in enumerate(window):
                self.pass_over(number, given, window)
            self.reduce()
            self.clip()
            self.update()
            self.after()

    def model(self):
        return tiny("tiny-qwen2")

    def wrap(self, net):
        return DistributedDataParallel(net)

    def make_optimizer(self):
        return torch.optim.AdamW([one for one in self.net.parameters() if one.requires_grad], lr=1e-3)

    def zero(self):
        self.optimizer.zero_grad()

    def window(self):
        return [self.batch(self.step * self.micro + number) for number in range(self.micro)]

    def batch(self, number):
        first = (number * self.shares + self.share) * SIZE
        return together([Samples()[(first + place) % 64] for place in range(SIZE)])

    def tokens(self, window):
        """Of the global batch."""
        count = torch.tensor(sum(int((given["labels"][:, 1:] != IGNORED).sum()) for given in window))
        dist.all_reduce(count)
        return int(count) * self.shares // self.world

    def pass_over(self, number, given, window):
        with self.context(number):
            self.backward(self.loss(given, self.tokens(window)))

    def context(self, number):
        return contextlib.nullcontext()

    def loss(self, given, tokens):
        return self.wrapped(**given, num_items_in_batch=tokens, use_cache=False).loss * self.shares

    def backward(self, loss):
        loss.backward()

    def reduce(self):
        pass

    def clip(self):
        if self.bound:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.bound)

    def update(self):
        self.optimizer.step()

    def after(self):
        pass


def tiny(name, **settings):
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "num_hidden_layers": 1}
    return from_config({**BUILT_IN[name], **shape, **settings}, attn_impl="sdpa")


def together(samples):
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def averaged(net, group=None):
    for one in net.parameters():
        if one.grad is not None:
            dist.all_reduce(one.grad, group=group)
            one.grad /= dist.get_world_size(group)


# Factors on the whole loss.


class MicroMeans(Right):
    """The mean of the micro batches' means, as in many loops: the base of most below."""

    def tokens(self, window):
        return 0

    def loss(self, given, tokens):
        return self.wrapped(**given, use_cache=False)["loss"] / self.micro


class TimesWorld(Right):
    def backward(self, loss):
        (loss * self.world).backward()


class NotTimesWorld(Right):
    """transformers' loss is divided by the tokens of all ranks, and DDP averages."""

    def loss(self, given, tokens):
        return super().loss(given, tokens) / self.world


class AccumulationForgotten(MicroMeans):
    def loss(self, given, tokens):
        return super().loss(given, tokens) * self.micro


class LossAveragedByHand(MicroMeans):
    def backward(self, loss):
        dist.all_reduce(loss.data)
        (loss / self.world).backward()


class SumOfTokens(Right):
    def loss(self, given, tokens):
        return self.wrapped(**given, num_items_in_batch=1, use_cache=False).loss


class SummedNotAveraged(MicroMeans):
    """A hook of DDP that sums over the ranks, and leaves the division to somebody else."""

    def context(self, number):
        return self.wrapped.no_sync() if number < self.micro - 1 else contextlib.nullcontext()

    def wrap(self, net):
        wrapped = super().wrap(net)

        def hook(_, bucket):
            done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return done.then(lambda one: one.value()[0])

        wrapped.register_comm_hook(None, hook)
        return wrapped


class AveragedTwice(MicroMeans):
    def reduce(self):
        averaged(self.net)
        for one in self.net.parameters():
            one.grad /= self.world


class LossScaleKept(MicroMeans):
    def backward(self, loss):
        (loss * 1024).backward()


# Token counts.


class MicroMeansUnwanted(MicroMeans):
    expected = "token-mean"


class RankMeans(Right):
    """The count was never summed over the ranks."""

    expected = "token-mean"

    def tokens(self, window):
        return self.shares * sum(int((given["labels"][:, 1:] != IGNORED).sum()) for given in window)


class MicroStepMeans(Right):
    """The count is summed over the ranks, but not over the micro batches."""

    def loss(self, given, tokens):
        return super().loss(given, self.tokens([given])) / self.micro


class MicroStepMeansUnwanted(MicroStepMeans):
    expected = "token-mean"


class AllPositions(Right):
    def tokens(self, window):
        return self.world * sum(given["labels"].numel() for given in window)


class CountOfShiftedRows(Right):
    """One more for each row, as where labels are counted that lose one by the shift."""

    def tokens(self, window):
        return super().tokens(window) + self.world * self.micro * SIZE


class CountBeforeShift(Right):
    """The first label of a sample is counted, though nothing predicts it."""

    def batch(self, number):
        given = super().batch(number)
        return {**given, "labels": given["input_ids"].clone()}

    def tokens(self, window):
        count = torch.tensor(sum(int((given["labels"] != IGNORED).sum()) for given in window))
        dist.all_reduce(count)
        return int(count)


class CountOfOneMicroBatch(Right):
    """Each micro batch is divided by its own tokens, and not by the number of micro batches."""

    def pass_over(self, number, given, window):
        super().pass_over(number, given, [given])


class CountOfTheLast(Right):
    def pass_over(self, number, given, window):
        super().pass_over(number, given, [window[-1]] * len(window))


class LastWindow(MicroMeans):
    """The second window is the epoch's last and has two micro batches of three."""

    def window(self):
        return super().window()[: 3 - self.step]


class OneRankTwice(MicroMeans):
    def backward(self, loss):
        (loss * (2 if self.rank == 0 else 1)).backward()


# Accumulation and gradients.


class ZeroedTooEarly(MicroMeans):
    def pass_over(self, number, given, window):
        self.optimizer.zero_grad()
        super().pass_over(number, given, window)


class NeverZeroed(MicroMeans):
    def zero(self):
        pass


class LastNotSynced(MicroMeans):
    def context(self, number):
        return self.wrapped.no_sync() if number > 0 else contextlib.nullcontext()


class OneNoSyncTooLong(MicroMeans):
    def context(self, number):
        return self.wrapped.no_sync()


class CalledInside(MicroMeans):
    """The model inside of DDP is called."""

    def loss(self, given, tokens):
        return self.net(**given, use_cache=False).loss / self.micro


class LastWithoutBackward(MicroMeans):
    def backward(self, loss):
        self.done = getattr(self, "done", 0) + 1
        if self.done % self.micro:
            loss.backward()


class FrozenByZeroing(MicroMeans):
    """A layer that is to be frozen: its gradient is set to zero, and the decay moves it."""

    def reduce(self):
        self.net.model.norm.weight.grad.zero_()


class FrozenButDecayed(MicroMeans):
    """A frozen layer with a gradient of zeros moves by its decay."""

    def model(self):
        net = super().model()
        net.model.norm.weight.requires_grad_(False)
        return net

    def make_optimizer(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def reduce(self):
        frozen = self.net.model.norm.weight
        frozen.grad = torch.zeros_like(frozen)


class FrozenLater(MicroMeans):
    """Frozen after the first step; its gradient stays zero, and the momentum moves it on."""

    def wrap(self, net):
        return DistributedDataParallel(net, find_unused_parameters=True)

    def zero(self):
        self.optimizer.zero_grad(set_to_none=False)

    def after(self):
        self.net.model.norm.weight.requires_grad_(False)


class LayerNotReduced(MicroMeans):
    """One parameter is left out of the reduction."""

    def wrap(self, net):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["model.norm.weight"])
        return super().wrap(net)


# Clipping.


class ClippedBeforeReduction(MicroMeans):
    bound = 0.5

    def wrap(self, net):
        return net

    def reduce(self):
        super().clip()
        averaged(self.net)

    def clip(self):
        pass


class Scaled(MicroMeans):
    """A GradScaler, with unscale_ before clipping."""

    bound, scale = 0.5, 1024.0

    def make_optimizer(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        return super().make_optimizer()

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        super().clip()

    def update(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ClippedScaled(Scaled):
    """The gradient is clipped before the scale is taken out."""

    def clip(self):
        MicroMeans.clip(self)


class ClippedGroup(MicroMeans):
    """Only the parameters of one layer are clipped."""

    bound = 0.02

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.net.model.layers[0].parameters(), self.bound)


class ClippedInEachPass(MicroMeans):
    bound = 0.3

    def backward(self, loss):
        super().backward(loss)
        super().clip()

    def clip(self):
        pass


class Fsdp(MicroMeans):
    bound = 0.5

    def wrap(self, net):
        for layer in net.model.layers:
            fully_shard(layer)
        return fully_shard(net)


class NeverSynced(Fsdp):
    """The last micro batch is without a sync, too, so no gradient is reduced."""

    bound = None

    def window(self):
        self.wrapped.set_requires_gradient_sync(False)
        return super().window()


class AllBfloat16(MicroMeans):
    """Weights, gradients and their sums in bfloat16, though the model was in float32 when the recording began."""

    def model(self):
        return tiny("tiny-qwen2", num_hidden_layers=2)

    def wrap(self, net):
        return super().wrap(net.bfloat16())


class AllBfloat16Scaled(AllBfloat16):
    def reduce(self):
        self.net.model.layers[1].self_attn.q_proj.weight.grad *= 1.0625


class ShardsNotReduced(Fsdp):
    """Each rank keeps its own chunk of its own gradient."""

    def wrap(self, net):
        wrapped = super().wrap(net)
        for module in self.unreduced(wrapped):
            module.set_custom_reduce_scatter(OwnChunk())
        return wrapped

    def unreduced(self, net):
        return [net, *net.model.layers]


class ShardsOfALayer(ShardsNotReduced):
    def unreduced(self, net):
        return net.model.layers


class ShardsOfOneRank(ShardsNotReduced):
    """Rank 1 divides once more by the number of ranks."""

    bound = None

    def unreduced(self, net):
        return []

    def reduce(self):
        for one in self.net.parameters():
            one.grad.to_local().div_(1 + self.rank)


class ClippedByShard(Fsdp):
    def clip(self):
        own = [one.grad.to_local() for one in self.net.parameters()]
        norm = torch.nn.utils.get_total_norm(own)
        torch.nn.utils.clip_grads_with_norm_(self.net.parameters(), self.bound, norm)


class MadeBeforeSharding(Fsdp):
    def wrap(self, net):
        self.held = list(net.parameters())
        return super().wrap(net)

    def make_optimizer(self):
        return torch.optim.AdamW(self.held, lr=1e-3)


# Optimizers, schedules.


class NewLayer(MicroMeans):
    """The head is made anew after the optimizer."""

    def model(self):
        return tiny("tiny-llama")

    def wrap(self, net):
        return net

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        torch.manual_seed(1)
        self.net.lm_head = torch.nn.Linear(64, VOCABULARY, bias=False)
        return optimizer

    def reduce(self):
        averaged(self.net)


class SecondNotStepped(MicroMeans):
    def make_optimizer(self):
        matrices = [one for one in self.net.parameters() if one.ndim > 1]
        self.other = torch.optim.AdamW([one for one in self.net.parameters() if one.ndim == 1], lr=1e-3)
        return torch.optim.SGD(matrices, lr=1e-2)

    def zero(self):
        self.net.zero_grad()


class AverageTrained(MicroMeans):
    """The moving average of the weights is put into the model, and stays there."""

    def after(self):
        with torch.no_grad():
            own = list(self.net.parameters())
            self.kept = getattr(self, "kept", [one.clone() for one in own])
            for kept, one in zip(self.kept, own, strict=True):
                kept.lerp_(one, 0.5)
                one.copy_(kept * 0.999)


class Scheduled(MicroMeans):
    steps, micro = 6, 1

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        self.schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=self.steps)
        return optimizer

    def after(self):
        self.schedule.step()


class SteppedPerProcess(Scheduled):
    def after(self):
        for _ in range(self.world):
            self.schedule.step()


class SteppedPerMicroBatch(Scheduled):
    micro = 3

    def after(self):
        pass

    def backward(self, loss):
        super().backward(loss)
        self.schedule.step()


class EvalForever(MicroMeans):
    """Evaluated after the first step; model.train() is forgotten."""

    def after(self):
        self.net.eval()


class StepSkipped(MicroMeans):
    """One rank leaves out a step, as after a loss that is not finite."""

    steps = 3

    def update(self):
        if self.rank == 0 or self.step > 0:
            self.optimizer.step()


# Samples.


class Epochs(MicroMeans):
    """Two epochs of a DistributedSampler."""

    steps, micro = 16, 1

    def model(self):
        self.loader = torch.utils.data.DataLoader(
            self.data(), batch_size=4, sampler=self.sampler(self.data())
        )
        return super().model()

    def data(self):
        return Samples()

    def sampler(self, data):
        return torch.utils.data.DistributedSampler(data, seed=1)

    def train(self):
        self.batches = self.endless()
        super().train()

    def endless(self):
        for epoch in itertools.count():
            self.begin(epoch)
            yield from self.loader

    def begin(self, epoch):
        if isinstance(self.loader.sampler, torch.utils.data.DistributedSampler):
            self.loader.sampler.set_epoch(epoch)

    def batch(self, number):
        return next(self.batches)


class SameOrderEachEpoch(Epochs):
    """The sampler shuffles by the epoch, and is not told of it."""

    def begin(self, epoch):
        pass


class RateOfOneRank(MicroMeans):
    """Each rank's learning rate follows its own progress, and each updates its share of the parameters."""

    def make_optimizer(self):
        parameters = [one for one in self.net.parameters() if one.requires_grad]
        rate = 1e-3 * (1 + 0.01 * self.rank)
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=rate)


class SamplerForgotten(Epochs):
    def sampler(self, data):
        return torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(self.rank))


class HalfAnEpoch(Epochs):
    """The sampler divides by ranks that there are not."""

    def sampler(self, data):
        return torch.utils.data.DistributedSampler(data, num_replicas=2 * self.world, rank=self.rank)


class FirstBatchAgain(Epochs):
    """A new iterator for every batch."""

    def endless(self):
        while True:
            yield next(iter(self.loader))


# Labels, masks, documents.


class ShiftedTwice(MicroMeans):
    """The data set shifts the labels, and so does the model."""

    def batch(self, number):
        given = super().batch(number)
        given["labels"] = torch.cat(
            [given["labels"][:, 1:], torch.full_like(given["labels"][:, :1], IGNORED)], 1
        )
        return given


class Padded(MicroMeans):
    side = "right"

    def batch(self, number):
        given = super().batch(number)
        length = given["labels"].shape[1]
        mask = torch.ones_like(given["labels"])
        for row in range(SIZE):
            short = 3 + (5 * number + 2 * row + self.share) % 7
            mask[row, length - short :] = 0
        if self.side == "left":
            mask = mask.flip(1)
            given["labels"][:, : length // 2] = IGNORED
        given["input_ids"] = given["input_ids"] * mask
        given["labels"] = self.pad(given["labels"], mask)
        return {**given, "attention_mask": mask}

    def pad(self, labels, mask):
        return labels.masked_fill(mask == 0, IGNORED)


class PaddingTrained(Padded):
    def pad(self, labels, mask):
        return labels * mask


class Packed(MicroMeans):
    """Two documents in each row, of which none sees the other."""

    def model(self):
        net = super().model()
        net.set_attn_implementation("sdpa")
        return net

    def batch(self, number):
        given = super().batch(number)
        length, first = given["labels"].shape[1], 14
        document = (torch.arange(length) >= first).long().expand(SIZE, -1)
        position = torch.arange(length) - first * document
        given["labels"][:, first] = IGNORED
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = (document[:, :, None] == document[:, None, :]) & causal
        return {**given, **self.said(position, mask[:, None])}

    def said(self, position, mask):
        return {"position_ids": position, "attention_mask": mask}


class DocumentsSeeEachOther(Packed):
    def said(self, position, mask):
        return {"position_ids": position, "attention_mask": torch.ones_like(position)}


# Weights.


class NotTied(MicroMeans):
    """The head is loaded as a matrix of its own."""

    def model(self):
        net = super().model()
        net.lm_head.weight = torch.nn.Parameter(net.lm_head.weight.detach().clone())
        return net


class UntiedLater(NotTied):
    def model(self):
        return MicroMeans.model(self)

    def wrap(self, net):
        net.lm_head.weight = torch.nn.Parameter(net.lm_head.weight.detach().clone())
        return super().wrap(net)


class SameSamples(MicroMeans):
    """The sampler is not told the rank."""

    def batch(self, number):
        self.share, self.shares = 0, 1
        return super().batch(number)


class ModuleOff(MicroMeans):
    """On rank 1 a module's output is off by half a thousandth."""

    def model(self):
        net = super().model()
        if self.rank == 1:
            net.model.layers[0].mlp.up_proj.register_forward_hook(self.change)
        return net

    def change(self, _module, _arguments, output):
        return output * 1.0005


class ModuleGradientOff(ModuleOff):
    """The same of its gradient."""

    def change(self, _module, _arguments, output):
        return output + 0.0005 * (output - output.detach())


class AllZero(MicroMeans):
    """Gradients are zeroed before the step."""

    def reduce(self):
        for one in self.net.parameters():
            one.grad.zero_()


class NotFinite(MicroMeans):
    def reduce(self):
        self.net.model.norm.weight.grad[0] = torch.nan


class OtherWeights(MicroMeans):
    """Each rank draws weights of its own, and nothing is broadcast."""

    def model(self):
        net = super().model()
        torch.manual_seed(self.rank)
        torch.nn.init.normal_(net.model.layers[0].mlp.down_proj.weight, std=0.02)
        return net

    def wrap(self, net):
        return net

    def reduce(self):
        averaged(self.net)


# Mixtures.


class Mixture(MicroMeans):
    def model(self):
        return tiny("tiny-qwen3-moe")

    def wrap(self, net):
        return DistributedDataParallel(net, find_unused_parameters=True)

    def loss(self, given, tokens):
        output = self.wrapped(**given, use_cache=False)
        return self.balanced(output) / self.micro

    def balanced(self, output):
        return output.loss


class BalanceTimesWorld(Mixture):
    def balanced(self, output):
        return output.loss + (self.world - 1) * 0.01 * output.aux_loss


class BalanceTimesAccumulation(Mixture):
    def balanced(self, output):
        return output.loss + (self.micro - 1) * 0.01 * output.aux_loss


class BalanceTenfold(Mixture):
    """The coefficient is 0.1, and not the configuration's 0.01."""

    def balanced(self, output):
        return output.loss + 0.09 * output.aux_loss


class BalanceDead(Mixture):
    def balanced(self, output):
        return output.loss - 0.01 * output.aux_loss


# Four ranks: 2 data-parallel ones of 2 tensor-parallel ones.


class Mesh(MicroMeans):
    ranks = 4
    bound = 0.5

    def wrap(self, net):
        self.mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "tp"))
        self.share, self.shares = self.mesh["dp"].get_local_rank(), 2
        self.shard(net, self.mesh["tp"])
        for layer in net.model.layers:
            self.cut(layer, self.mesh["dp"])
        self.cut(net, self.mesh["dp"])
        return net

    def shard(self, net, mesh):
        for layer in net.model.layers:
            plan = {
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            }
            parallelize_module(layer, mesh, plan)

    def cut(self, module, mesh):
        fully_shard(module, mesh=mesh)

    def clip(self):
        """By one norm, of parameters on two meshes."""
        if not self.bound:
            return
        groups = self.groups()
        norms = [torch.nn.utils.get_total_norm([one.grad for one in group]).full_tensor() for group in groups]
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, self.bound, torch.stack(norms).norm())

    def groups(self):
        own = list(self.net.parameters())
        return [[one for one in own if one.device_mesh.ndim == dims] for dims in (1, 2)]


class MeshTimesTp(Mesh):
    def backward(self, loss):
        (loss * 2).backward()


class MeshBalance(Mesh):
    """A mixture whose head is cut."""

    times = 1
    model = Mixture.model

    def shard(self, net, mesh):
        parallelize_module(net, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})

    def loss(self, given, tokens):
        output = self.wrapped(**given, use_cache=False)
        return (output.loss + (self.times - 1) * 0.01 * output.aux_loss) / self.micro


class MeshBalanceTimesTp(MeshBalance):
    times = 2


class MeshOtherBatches(Mesh):
    """The sampler counts the world's ranks."""

    def batch(self, number):
        self.share, self.shares = self.rank, self.world
        return super().batch(number)


class MeshSameBatches(Mesh):
    def batch(self, number):
        self.share, self.shares = 0, 1
        return super().batch(number)


class MeshTpNorm(Mesh):
    """What all tensor-parallel ranks hold is counted by each of them."""

    def clip(self):
        squares = sum(one.grad.to_local().square().sum() for one in self.net.parameters())
        dist.all_reduce(squares)
        for group in self.groups():
            torch.nn.utils.clip_grads_with_norm_(group, self.bound, squares.sqrt())


class MeshNormOfTpShard(Mesh):
    """The norm is summed over the data-parallel ranks alone."""

    def clip(self):
        squares = sum(one.grad.to_local().square().sum() for one in self.net.parameters())
        dist.all_reduce(squares, group=self.mesh["dp"].get_group())
        for group in self.groups():
            torch.nn.utils.clip_grads_with_norm_(group, self.bound, squares.sqrt())


class MeshDividedByWorld(Mesh):
    """The gradients of a rank count as if all ranks were data-parallel."""

    def reduce(self):
        for one in self.net.parameters():
            one.grad *= self.shares / self.world


class MeshWrongGroup(Mesh):
    """The data-parallel reduction is done by hand, and over the tensor-parallel group."""

    bound = None

    def cut(self, module, mesh):
        pass

    def reduce(self):
        for one in self.net.parameters():
            local = one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad
            dist.all_reduce(local, group=self.mesh["tp"].get_group())
            local /= 2


class MeshShardTwice(Mesh):
    """The gradients of tensor-parallel shards are summed over that group once more."""

    def reduce(self):
        for one in self.groups()[1]:
            one.grad *= 2


class MeshBiasTwice(Mesh):
    """The bias of a row-parallel layer is added by each of its ranks."""

    def model(self):
        net = tiny("tiny-llama", mlp_bias=True)
        torch.nn.init.normal_(net.model.layers[0].mlp.down_proj.bias, std=0.02)
        return net

    def wrap(self, net):
        wrapped = super().wrap(net)
        net.model.layers[0].mlp.down_proj.register_forward_hook(
            lambda module, _arguments, output: output + module.bias.to_local()
        )
        return wrapped


class MeshNoBackwardSum(Mesh):
    """The gradient at the input of a column-parallel layer is this rank's share: to_local() without grad_placements."""

    def wrap(self, net):
        wrapped = super().wrap(net)
        for layer in net.model.layers:
            layer.mlp.register_forward_pre_hook(share_of_the_gradient)
        return wrapped


def share_of_the_gradient(_module, arguments):
    return (Share.apply(arguments[0]), *arguments[1:])


class Share(torch.autograd.Function):
    @staticmethod
    def forward(_context, one):
        return one.view_as(one)

    @staticmethod
    def backward(_context, gradient):
        return gradient * (0.4 + 0.2 * (dist.get_rank() % 2))


# Further bugs.


class MaskIgnored(Padded):
    """The model's attention does not obey the mask that it is given."""

    side = "left"

    def model(self):
        return Small()


class SeesAhead(MicroMeans):
    """Attention without a causal mask."""

    def model(self):
        net = super().model()
        for layer in net.model.layers:
            layer.self_attn.is_causal = False
        return net

    def batch(self, number):
        given = super().batch(number)
        length = given["labels"].shape[1]
        return {**given, "attention_mask": torch.ones(SIZE, 1, length, length, dtype=torch.bool)}


class Small(torch.nn.Module):
    """A causal model of one's own; it does not look at the mask."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None):
        logits = self.head(self.embedding(input_ids).cumsum(1))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class NotShifted(MicroMeans):
    """A model that does not shift is given labels that are the inputs."""

    def model(self):
        return Unshifted()


class Unshifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels=None, use_cache=None):
        logits = self.head(self.embedding(input_ids))
        return {
            "loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


class StepsAfterEach(MicroMeans):
    """The loss is divided by two micro batches, and the optimizer steps after each."""

    micro = 1

    def backward(self, loss):
        super().backward(loss / 2)


class NewOptimizer(MicroMeans):
    """A new optimizer in each step loses what the last one kept."""

    def zero(self):
        if self.step:
            self.optimizer = self.make_optimizer()
        super().zero()


class OneRankOfTwoHasNoGradient(MicroMeans):
    def reduce(self):
        if self.rank == 1:
            self.net.model.norm.weight.grad = None


class LossRoundedToBf16(MicroMeans):
    """The factor is a number of bfloat16."""

    def loss(self, given, tokens):
        output = self.wrapped(**given, use_cache=False)
        return output["loss"] * torch.tensor(1 / self.micro, dtype=torch.bfloat16)


class GradientsRounded(MicroMeans):
    """Gradients are sent as bfloat16."""

    def reduce(self):
        for one in self.net.parameters():
            one.grad = one.grad.bfloat16().float()


class GradientsRoundedAndClipped(GradientsRounded):
    """Then the numbers are none of 16 bits any more."""

    bound = 0.1

    def reduce(self):
        for one in self.net.parameters():
            one.grad = one.grad.half().float()


class StepOutsideTheGroup(MicroMeans):
    """The update of one layer is done twice."""

    def make_optimizer(self):
        self.second = torch.optim.SGD(self.net.model.norm.parameters(), lr=1e-2)
        return super().make_optimizer()

    def update(self):
        super().update()
        self.second.step()


class SameMicroBatch(MicroMeans):
    """The loader is asked once for each step."""

    def batch(self, number):
        return super().batch(number // self.micro)


# Correct variants.


class Shuffled(Right):
    """The samples of a step in another order."""

    def window(self):
        return super().window()[::-1]


class SmallBuckets(MicroMeans):
    def wrap(self, net):
        return DistributedDataParallel(net, bucket_cap_mb=0.01, gradient_as_bucket_view=True)


class StaticGraph(MicroMeans):
    def wrap(self, net):
        return DistributedDataParallel(net, static_graph=True)


class NoSync(MicroMeans):
    def context(self, number):
        return self.wrapped.no_sync() if number < self.micro - 1 else contextlib.nullcontext()


class ReducedByHand(MicroMeans):
    def wrap(self, net):
        return net

    def reduce(self):
        averaged(self.net)


class Fused(MicroMeans):
    def make_optimizer(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)


class Foreach(MicroMeans):
    def make_optimizer(self):
        return torch.optim.SGD(self.net.parameters(), lr=1e-2, momentum=0.9, nesterov=True, foreach=True)


class TwoOptimizers(SecondNotStepped):
    def update(self):
        super().update()
        self.other.step()


class DecayGroups(MicroMeans):
    def make_optimizer(self):
        own = list(self.net.parameters())
        return torch.optim.AdamW(
            [
                {"params": [one for one in own if one.ndim > 1], "weight_decay": 0.1},
                {"params": [one for one in own if one.ndim == 1], "weight_decay": 0.0, "lr": 1e-4},
            ],
            lr=1e-3,
        )


class ZeroedInPlace(MicroMeans):
    def zero(self):
        self.optimizer.zero_grad(set_to_none=False)


class PaddedLeft(Padded):
    side = "left"


class PackedApart(Packed):
    """The positions go on; the mask alone parts the documents."""

    def said(self, position, mask):
        return {"attention_mask": mask}


class PackedByPosition(Packed):
    """transformers makes the mask from positions that restart, of one row."""

    def batch(self, number):
        return {key: tensor[:1] for key, tensor in super().batch(number).items()}

    def said(self, position, mask):
        return {"position_ids": position}


class Checkpointed(MicroMeans):
    reentrant = False

    def model(self):
        net = super().model()
        net.gradient_checkpointing_enable({"use_reentrant": self.reentrant})
        return net


class CheckpointedReentrant(Checkpointed):
    reentrant = True

    def model(self):
        net = super().model()
        net.enable_input_require_grads()
        return net


class Compiled(MicroMeans):
    def model(self):
        return Small()

    def wrap(self, net):
        return super().wrap(torch.compile(net, backend="eager"))


class Autocast(MicroMeans):
    def loss(self, given, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(given, tokens)


class CompressedInAutocast(Autocast):
    """Autocast rounds the gradients of matrices; the reduction alone those of vectors."""

    def wrap(self, net):
        wrapped = super().wrap(net)

        def in_bfloat16(_, bucket):  # torch's bf16_compress_hook, which DDP refuses on CPUs
            whole = bucket.buffer()
            done = dist.all_reduce(whole.bfloat16().div_(self.world), async_op=True).get_future()
            return done.then(lambda one: whole.copy_(one.value()[0]))

        wrapped.register_comm_hook(None, in_bfloat16)
        return wrapped


class FsdpBf16(Fsdp):
    def wrap(self, net):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in net.model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(net, mp_policy=policy)


class LossInBf16(FsdpBf16):
    """What the model returns is cast after its forward pass, as Accelerate lets FSDP2 do; the recording begins later."""

    def run(self, folder, recorded):
        torch.manual_seed(0)
        self.sharded = self.cast(self.model())
        super().run(folder, recorded)

    def cast(self, net):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.bfloat16)
        for layer in net.model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(net, mp_policy=policy)

    def model(self):
        return getattr(self, "sharded", None) or super().model()

    def wrap(self, net):
        return net


class Eager(MicroMeans):
    def model(self):
        net = super().model()
        net.set_attn_implementation("eager")
        return net


class Frozen(MicroMeans):
    """A frozen layer, which the optimizer holds with decay."""

    def model(self):
        net = super().model()
        net.model.layers[0].requires_grad_(False)
        return net

    def make_optimizer(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3, weight_decay=0.1)


class Unfrozen(Frozen):
    """A layer that is trained from the second step on."""

    def wrap(self, net):
        return net

    def reduce(self):
        averaged(self.net)

    def after(self):
        self.net.requires_grad_(True)


class Lora(MicroMeans):
    def model(self):
        from peft import LoraConfig, get_peft_model

        return get_peft_model(super().model(), LoraConfig(target_modules=["q_proj", "v_proj"]))


class Evaluated(MicroMeans):
    """Evaluated after each step, and then trained on."""

    def after(self):
        self.net.eval()
        with torch.no_grad():
            self.net(**super().batch(9))
        self.net.train()


class PartEvaluated(MicroMeans):
    """A part of the model stays in evaluation mode, as frozen batch norms do."""

    def model(self):
        return Normed()

    def window(self):
        self.net.norm.eval()
        return super().window()


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels=None, use_cache=None):
        hidden = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        logits = self.head(hidden)[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss}


class Untied(MicroMeans):
    def model(self):
        return tiny("tiny-llama")


class Averaged(MicroMeans):
    """A moving average of the weights, beside the model."""

    def after(self):
        own = [one.detach().clone() for one in self.net.parameters()]
        self.kept = getattr(self, "kept", own)
        for kept, one in zip(self.kept, own, strict=True):
            kept.lerp_(one, 0.5)


class Tagged(MicroMeans):
    """A label for each position, of inputs that are no tokens."""

    def model(self):
        return Tagger()

    def batch(self, number):
        given = super().batch(number)
        values = torch.nn.functional.one_hot(given["input_ids"] % 8, 8).float()
        return {"values": values, "labels": given["labels"].clamp(min=-100, max=7)}


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 8)

    def forward(self, labels, values, use_cache=None):
        logits = self.head(values)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Classified(MicroMeans):
    """One label for each sample; every position sees every other."""

    def model(self):
        return Classifier()

    def batch(self, number):
        ids = super().batch(number)["input_ids"]
        return {"input_ids": ids, "labels": ids[:, 0] % 3}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, input_ids, labels=None, use_cache=None):
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class LossLogged(MicroMeans):
    """The mean over the ranks is logged, of a copy."""

    def backward(self, loss):
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        loss.backward()


class LastWindowRight(MicroMeans):
    """The last window is divided by the micro batches that it has."""

    def window(self):
        window = super().window()[: 3 - self.step]
        self.micro = len(window)
        return window


class Hybrid(Mesh):
    """FSDP2 in two groups of two: HSDP."""

    def wrap(self, net):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in net.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    def clip(self):
        MicroMeans.clip(self)


# Bugs that a recording does not show.


class RateWrong(MicroMeans):
    """Ten times the learning rate that was meant, for the norms."""

    def make_optimizer(self):
        norms = [one for one in self.net.parameters() if one.ndim == 1]
        matrices = [one for one in self.net.parameters() if one.ndim > 1]
        return torch.optim.AdamW([{"params": norms, "lr": 1e-2}, {"params": matrices}], lr=1e-3)


class OwnLossMisaligned(MicroMeans):
    """A loss of one's own, from the logits of the wrong positions."""

    def loss(self, given, tokens):
        logits = self.wrapped(input_ids=given["input_ids"], use_cache=False).logits
        labels = given["labels"][:, 16:].flatten()
        return torch.nn.functional.cross_entropy(logits[:, :16].flatten(0, 1), labels) / self.micro


class LoraBaseTrained(Lora):
    def model(self):
        return super().model().requires_grad_(True)


class DrawnAnew(MicroMeans):
    """A loaded layer is drawn anew before the recording begins."""

    def model(self):
        net = super().model()
        torch.nn.init.normal_(net.model.layers[0].mlp.up_proj.weight, std=0.02)
        return net


class NeverCalled(MicroMeans):
    """The last micro batch of each window is dropped, and the loss is divided by the others."""

    def window(self):
        self.micro = 3
        window = super().window()[:2]
        self.micro = 2
        return window


class DocumentsJoined(Packed):
    """Nothing that the model is given says where a document begins."""

    def said(self, position, mask):
        return {}


class AutocastInside(MicroMeans):
    """bfloat16 where float32 was meant."""

    def model(self):
        return InBf16()


class InBf16(Small):
    def forward(self, input_ids, labels=None, use_cache=None):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(input_ids, labels=labels)
