"""The float64 mode computes what an implementation of its own computes in float64 (oracle.py), in every number of a step."""

import math

import families
import oracle
import pytest
import torch
from families import one_thread  # noqa: F401 - a fixture

from lockstep.dumps.trace import layout_of
from lockstep.inputs.architectures import BUILT_IN
from lockstep.verdict.float64 import Float64, Told, make_exact

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = ["tiny-qwen2", "tiny-qwen3", "tiny-llama", "tiny-mistral", "tiny-gpt2"]
# Relative; rounding errors of float64 are a thousandth of it, those of float32 ten thousand times it
EXACT = 1e-12
ROTARY = "model.rotary_emb"


def step(model, mode=None):
    """(outputs of all modules and the loss, gradients of all parameters) of a batch, all by name."""
    ids = torch.randint(0, 2048, (2, 49), generator=torch.Generator().manual_seed(0))
    seen, _, gradients = families.step(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mode)
    return seen, gradients


def built(name, attn_impl="sdpa"):
    return families.built(BUILT_IN[name], attn_impl)


def by_mode(name, attn_impl, tables=None, change=None):
    model = built(name, attn_impl)
    make_exact(model, layout_of(BUILT_IN[name], attn_impl).tables if tables is None else tables)
    if change:
        change(model)
    return step(model, Float64())


def by_oracle(name, attn_impl):
    model = built(name)
    oracle.make_exact(model, attn_impl=attn_impl)
    return step(model)


def farthest(mine, theirs):
    """The largest relative distance. Of a gradient that is nearly zero, as that of a bias of k, it is to the largest of all."""
    (outputs, gradients), (right, right_gradients) = mine, theirs
    assert outputs.keys() == right.keys() and gradients.keys() == right_gradients.keys()
    largest = max(float(gradient.norm()) for gradient in right_gradients.values())
    pairs = [(outputs[name], right[name], 0.0) for name in right]
    pairs += [(gradients[name], right_gradients[name], 1e-3 * largest) for name in right_gradients]
    distances = []
    for one, other, least in pairs:
        assert one.dtype == other.dtype == torch.float64 and one.shape == other.shape
        scale = max(float(other.norm()), least)
        distances.append(float((one - other).norm()) / scale if scale else float(one.norm()))
    return max(distances)


@pytest.mark.parametrize("attn_impl", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_every_number_is_the_oracles(name, attn_impl):
    mine, theirs = by_mode(name, attn_impl), by_oracle(name, attn_impl)
    assert len(mine[0]) >= 30 and any(key.endswith("attn.1") for key in mine[0]) == (attn_impl == "eager")
    assert farthest(mine, theirs) < EXACT


class Leaving(Float64):
    """The mode with a hole: calls of one function are left as they are."""

    def __init__(self, function):
        super().__init__()
        self.left, self.calls = function, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is self.left:
            self.calls += 1
            return function(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize(
    "name, function, where",
    [
        ("tiny-qwen2", torch.Tensor.float, "logits, in the loss"),
        ("tiny-llama", torch.Tensor.to, "norms"),
        ("tiny-mistral", torch.nn.functional.softmax, "eager attention"),
        ("tiny-gpt2", torch.Tensor.float, "logits, in the loss"),
    ],
)
def test_one_cast_to_float32_is_seen(name, function, where):
    """Negative control: for each kind of cast that transformers makes."""
    mode = Leaving(function)
    model = built(name, "eager")
    make_exact(model, layout_of(BUILT_IN[name], "eager").tables)
    outputs, gradients = step(model, mode)
    assert mode.calls, where
    widened = {key: tensor.double() for key, tensor in outputs.items()}
    assert farthest((widened, gradients), by_oracle(name, "eager")) > 1000 * EXACT


def test_a_cast_in_one_module_is_seen():
    """Negative control: the last norm alone rounds what it returns."""

    def rounding(_module, _inputs, output):
        with torch._C.DisableTorchFunction():
            return output.float().double()

    mine = by_mode("tiny-qwen3", "sdpa", change=lambda m: m.model.norm.register_forward_hook(rounding))
    assert farthest(mine, by_oracle("tiny-qwen3", "sdpa")) > 1000 * EXACT


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-mistral"])
def test_a_rotary_table_in_float64_is_another_table(name):
    """Negative control: inside of the mode the angles are not those of the runs."""
    assert layout_of(BUILT_IN[name], "sdpa").tables == (ROTARY,)
    assert farthest(by_mode(name, "sdpa", tables=()), by_oracle(name, "sdpa")) > 1000 * EXACT


def test_a_table_has_the_numbers_of_a_run():
    outputs, _ = by_mode("tiny-llama", "sdpa")
    of_run, _ = step(built("tiny-llama"))
    for name in (ROTARY, f"{ROTARY}.1"):
        assert of_run[name].dtype is torch.float32 and torch.equal(outputs[name], of_run[name].double())


def test_the_mode_ends():
    ones = torch.ones(2)
    with Float64():
        assert torch.zeros(2).dtype is ones.float().dtype is torch.float64
        assert ones.to(torch.float32).dtype is ones.type(dtype=torch.float32).dtype is torch.float64
        assert ones.bfloat16().dtype is ones.half().dtype is ones.long().float().dtype is torch.float64
        assert torch.finfo(torch.float64).eps == 2**-23
    with pytest.raises(ZeroDivisionError), Float64():
        1 / 0  # noqa: B018
    assert torch.zeros(2).dtype is ones.double().float().dtype is torch.float32
    assert torch.finfo(torch.float64).eps == 2**-52 and ones.bfloat16().dtype is torch.bfloat16


def test_a_table_is_widened_even_if_it_raises():
    """What is the default outside is the default again."""
    model = torch.nn.ModuleDict({"table": torch.nn.Identity()})
    model["table"].forward = lambda given: torch.zeros(1) if given is None else 1 / 0
    make_exact(model, ["table"])
    with Float64():
        assert model["table"](None).dtype is torch.float64
        with pytest.raises(ZeroDivisionError):
            model["table"](torch.ones(1))
        assert torch.get_default_dtype() is torch.float64


def test_a_choice_is_taken_and_judged():
    """The indices that are told, and by how much a score that was left out is above one that was taken."""
    scores = torch.tensor(
        [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.4, 0.4, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]
    )
    told = torch.tensor([[0, 1], [1, 0], [1, 0], [0, 0], [0, 3]])
    with Float64({1: told}) as mode:
        torch.topk(scores, 1, dim=-1)  # another call, which is not told
        values, indices = torch.topk(scores.double(), 2, dim=-1)
    assert indices[:3].equal(told[:3]) and values[1].tolist() == pytest.approx([0.6, 0.1])
    regrets = mode.regrets[1].tolist()
    assert regrets[:3] == pytest.approx([-0.1, 0.2, -0.2]) and regrets[3:] == [math.inf] * 2


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_choice_of_the_smallest_along_any_dim(dim):
    """Such as of the nearest neighbours. The same two are told in another order, then one that is farther than one left out."""
    scores = torch.tensor([0.2, 0.1, 0.5, 0.3]).unsqueeze(1 - dim % 2)
    for told, regret in (([0, 1], -0.1), ([1, 2], 0.3)):
        told = torch.tensor(told).unsqueeze(1 - dim % 2)
        with Told({0: told}) as mode:
            values, indices = torch.topk(input=scores, k=2, dim=dim, largest=False)
        assert indices.equal(told) and values.equal(scores.gather(dim, told))
        assert mode.regrets[0].tolist() == pytest.approx([regret])


def router(logits, of_groups, of_experts):
    """DeepSeek's: the best groups, then the best experts in them."""
    groups = torch.topk(logits.view(-1, 4, 2).sum(-1), of_groups, dim=-1).indices
    inside = torch.zeros(len(logits), 4).scatter(1, groups, 1).repeat_interleave(2, 1)
    return torch.topk(logits.masked_fill(inside == 0, -torch.inf), of_experts, dim=-1).indices


def test_groups_are_told_by_their_experts():
    """Which groups a run chose is not captured. Those of its experts are taken, and judged as its choice."""
    scores = torch.tensor(
        [[0.5, 0.4, 0.3, 0.3, 0.2, 0.1, 0.0, 0.0], [0.5, 0.4, 0.1, 0.1, 0.3, 0.2, 0.0, 0.0]]
    )
    told = torch.tensor([[0, 2], [1, 2]])  # the second row's groups are 0 and 1, though 2 is better
    with Told({1: told}, {1: 8}) as mode:
        assert router(scores, 2, 2).equal(told)
    taken = mode.taken({1: "gate.2"})
    assert {name: pytest.approx(one.regret) for name, one in taken.items()} == {
        "gate.2 (groups)": 0.3,
        "gate.2": 0.4,
    }
    with Told(
        {1: told}
    ) as mode:  # negative control: without the number of experts, the groups are the mode's own
        router(scores, 2, 2)
    assert mode.taken({1: "gate.2"})["gate.2"].regret == math.inf
