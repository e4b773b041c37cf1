"""Another way to compute attention is named where it explains the output, and only there. torch and transformers compute the ways here."""

import functools
import math

import pytest
import torch
from one_tensor import case_of
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lockstep.diagnosis.attention import another_way, another_way_back

SAMPLES, HEADS, SHARED, LENGTH, SIZE = 3, 4, 2, 12, 16
LAYER, BEFORE = "model.layers.1.self_attn", "model.layers.0.self_attn"
OUTPUT, ROTARY = f"forward/{LAYER}.o_proj.input", "forward/model.rotary_emb"
WORDS = ("queries", "keys", "values")
PLACE = torch.arange(LENGTH)
CAUSAL = PLACE[:, None] >= PLACE
OWNER = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0])  # the cp rank of each position
DOCUMENTS = torch.tensor(
    [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3], [*range(12)], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
)
APART = ((DOCUMENTS == 0).cumsum(1)[:, :, None] == (DOCUMENTS == 0).cumsum(1)[:, None])[:, None]
TOKENS = (torch.tensor([[12], [7], [9]]) > PLACE).long()


ARRIVED = torch.randn(SAMPLES, LENGTH, HEADS * SIZE, generator=torch.Generator().manual_seed(4)).double()


@functools.cache
def of_layer(number):
    """The outputs of the projections: (samples, positions, heads x size)."""
    generator = torch.Generator().manual_seed(number)
    return [
        torch.randn(SAMPLES, LENGTH, n * SIZE, generator=generator).double() for n in (HEADS, SHARED, SHARED)
    ]


def angles(positions):
    frequencies = 100.0 ** -(torch.arange(0, SIZE, 2).double() / SIZE)
    turned = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return turned.cos(), turned.sin()


def attention(
    seen=CAUSAL,
    scale=None,
    positions=PLACE[None],
    turn=apply_rotary_pos_emb,
    keys_of=1,
    change=lambda q, k, v: (q, k, v),
    attend=scaled_dot_product_attention,
    tensors=None,
):
    """The output, (samples, heads, positions, head size)."""
    (q, _, _), (_, k, v) = (tensors, tensors) if tensors else (of_layer(1), of_layer(keys_of))
    q, k, v = (tensor.unflatten(-1, (-1, SIZE)).transpose(1, 2) for tensor in (q, k, v))
    q, k = turn(q, k, *angles(positions))
    q, k, v = change(q, *(tensor.repeat_interleave(HEADS // SHARED, 1) for tensor in (k, v)))
    return attend(q, k, v, seen, scale=scale)


def laid_out(output):
    return output.transpose(1, 2).flatten(2)


def case(own, right, *, first=OUTPUT, positions=PLACE[None], window=None, context=False, batch=(), **options):
    """A case whose layers have these queries, keys and values, and whose first wrong tensor is `own`."""
    tensors = {
        f"forward/{layer}.{part}_proj": tensor
        for number, layer in enumerate((BEFORE, LAYER))
        for part, tensor in zip("qkv", of_layer(number), strict=True)
    }
    tensors |= dict(zip((ROTARY, f"{ROTARY}.1"), angles(positions), strict=True))
    tensors |= {f"batch/{name}": tensor.double() for name, tensor in dict(batch).items()}
    tensors[f"backward/{LAYER}.o_proj.input"] = ARRIVED
    return case_of(
        first,
        own,
        right,
        tensors,
        pieces=[[[0, 3], [9, 3]], [[3, 6]]] if context else [],
        cp_rank_of=lambda _length: OWNER,
        architecture={"sliding_window": window},
        **options,
    )


def in_bfloat16(q, k, v, seen, scale):
    scores = (q @ k.transpose(-1, -2) * SIZE**-0.5).bfloat16().masked_fill(~seen, -math.inf)
    return scores.softmax(-1).double() @ v


def of_each_rank(q, k, v, seen, scale):
    """Ring attention without the log-sum-exp: the mean of what the keys of each rank give to those that see some."""
    parts = [scaled_dot_product_attention(q, k, v, seen & (rank == OWNER)) for rank in (0, 1)]
    has_some = [(seen & (rank == OWNER)).any(-1, keepdim=True) for rank in (0, 1)]
    total = sum(torch.where(some, part, 0.0) for part, some in zip(parts, has_some, strict=True))
    return total / sum(some.double() for some in has_some)


def of_turned():
    """Queries and keys after the rotary angles, and values, as projections have them."""
    q, k, v = (tensor.unflatten(-1, (-1, SIZE)).transpose(1, 2) for tensor in of_layer(1))
    return [laid_out(x) for x in (*apply_rotary_pos_emb(q, k, *angles(PLACE[None])), v)]


def neighbours(q, k, cos, sin):
    def turned(x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        half = SIZE // 2
        return torch.view_as_real(pairs * torch.complex(cos, sin)[..., :half]).flatten(-2)

    return turned(q), turned(k)


def turned_otherwise(times_q, times_k):
    def turn(q, k, *_):
        return apply_rotary_pos_emb(q, q, *angles(times_q(PLACE[None])))[0], apply_rotary_pos_emb(
            k, k, *angles(times_k(PLACE[None]))
        )[0]

    return turn


def same(x):
    return x


def zero(x):
    return 0 * x


NEXT, NOT_ITSELF = CAUSAL.roll(1, 0).tril(1) | CAUSAL, CAUSAL.tril(-1)
NOT_ITSELF[0, 0] = True  # what a query that sees no key has is an accident
WAYS = {
    "each position sees the next one": {"seen": PLACE[:, None] >= PLACE - 1},
    "each position sees the next 2": {"seen": PLACE[:, None] >= PLACE - 2},
    "no position sees itself": {"seen": NOT_ITSELF},
    "each value is that of the position before": {"change": lambda q, k, v: (q, k, v.roll(1, 2))},
    "each position sees all later ones": {"seen": torch.ones(LENGTH, LENGTH, dtype=torch.bool)},
    "there is a window of 5 positions": {"seen": CAUSAL & (PLACE[:, None] - PLACE < 5)},
    "heads 0 to 1 attend to KV head 1 and heads 2 to 3 attend to KV head 0": {
        "change": lambda q, k, v: (q, k.roll(2, 1), v.roll(2, 1))
    },
    "head 1 attends to KV head 1 and head 2 attends to KV head 0": {
        "change": lambda q, k, v: (q, k[:, [0, 2, 1, 3]], v[:, [0, 2, 1, 3]])
    },
    "heads 0 to 1 attend to the keys of KV head 1 and heads 2 to 3 attend to the keys of KV head 0": {
        "change": lambda q, k, v: (q, k.roll(2, 1), v)
    },
    "head 1 attends to the values of KV head 1 and head 2 attends to the values of KV head 0": {
        "change": lambda q, k, v: (q, k, v[:, [0, 2, 1, 3]])
    },
    f"keys and values are those of {BEFORE}": {"keys_of": 0},
    "queries and keys are not rotated": {"turn": turned_otherwise(zero, zero)},
    "queries are not rotated": {"turn": turned_otherwise(zero, same)},
    "keys are not rotated": {"turn": turned_otherwise(same, zero)},
    "neighbouring elements are rotated as pairs, where the model has pairs of halves": {"turn": neighbours},
    "queries and keys are rotated backwards": {"turn": turned_otherwise(lambda x: -x, lambda x: -x)},
    "queries and keys are rotated twice": {"turn": turned_otherwise(lambda x: 2 * x, lambda x: 2 * x)},
    "queries are rotated by one position more than keys": {"turn": turned_otherwise(lambda x: x + 1, same)},
    "queries are rotated by two positions more than keys": {"turn": turned_otherwise(lambda x: x + 2, same)},
    "queries are rotated by one position less than keys": {"turn": turned_otherwise(same, lambda x: x + 1)},
    "the scores are multiplied by 1, not by 0.25": {"scale": 1.0},
    "the scores are multiplied by 0.125, not by 0.25": {"scale": 0.125},
    "the scores are multiplied by 0.3, not by 0.25": {"scale": 0.3},
}


def gradient(part, **changes):
    """The gradient of queries, keys or values, as their projection has it."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in of_layer(1))
    laid_out(attention(tensors=(q, k, v), **changes)).backward(ARRIVED)
    return {"q": q, "k": k, "v": v}[part].grad


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("part", "qkv")
@pytest.mark.parametrize(
    "said",
    [
        "each position sees the next one",
        "there is a window of 5 positions",
        "queries and keys are not rotated",
        "queries are rotated by one position more than keys",
        "the scores are multiplied by 0.3, not by 0.25",
    ],
)
def test_a_way_of_the_backward_pass(said, part, precision):
    own, right = gradient(part, **WAYS[said]), gradient(part)
    first = f"backward/{LAYER}.{part}_proj"
    found = another_way_back(case(own, right, first=first, precision=precision))
    if "window" in said and part != "q":  # the first wrong query says how long it is
        assert found is None
    else:
        assert found is not None and found.evidence == f"{LAYER}: in the backward pass, {said}, as recomputed"
    assert another_way_back(case(1.1 * right, right, first=first, precision=precision)) is None
    assert another_way_back(case(own, 1.1 * right, first=first, precision=precision)) is None


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("said", WAYS)
def test_a_way_is_named(said, precision):
    right, own = attention(), attention(**WAYS[said])
    if precision == "autocast":
        own = own * (1 + 2.0**-9 * torch.randn(own.shape, generator=torch.Generator().manual_seed(9)))
    found = another_way(case(laid_out(own), laid_out(right), precision=precision))
    assert found is not None and found.evidence == f"{LAYER}: {said}, as recomputed"


@pytest.mark.parametrize("said", WAYS)
def test_a_way_of_one_sample_and_two_heads(said):
    right = attention()
    own = right.clone()
    own[1, :2] = attention(**WAYS[said])[1, :2]
    if torch.equal(own, right):
        pytest.skip("it changes nothing in these heads")
    found = another_way(case(laid_out(own), laid_out(right)))
    assert found is not None, "not named"
    if "attend" not in said:
        assert found.evidence == f"{LAYER}: heads 0 to 1 of 4: {said}, as recomputed"


@pytest.mark.parametrize("tp", [1, 2])
def test_heads_that_are_not_transposed_back(tp):
    right = attention()
    own = [heads.reshape(SAMPLES, LENGTH, -1) for heads in right.chunk(tp, 1)]
    found = another_way(case(torch.cat(own, 2), laid_out(right), tp=tp))
    assert found.evidence == f"{LAYER}: the output is laid out by heads, not by positions, as recomputed"
    assert tp == 1 or another_way(case(torch.cat(own, 2), laid_out(right))) is None


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bfloat16"), (torch.float16, "float16 or TF32")])
def test_rounded(dtype, name):
    right = laid_out(attention())
    own = laid_out(attention(change=lambda *tensors: tuple(x.to(dtype).double() for x in tensors)))
    said = f"queries, keys and values are rounded to {name}"
    assert another_way(case(own, right)).evidence == f"{LAYER}: {said}, as recomputed"
    assert another_way(case(own, right, precision="autocast")) is None


@pytest.mark.parametrize("which", ["queries", "keys", "values", "queries and keys", "keys and values"])
def test_only_those_that_are_rounded_are_named(which):
    low = [x.bfloat16().double() if word in which else x for word, x in zip(WORDS, of_turned(), strict=True)]
    own = laid_out(attention(turn=lambda q, k, *_: (q, k), tensors=low))
    found = another_way(case(own, laid_out(attention())))
    assert found.evidence == f"{LAYER}: {which} are rounded to bfloat16, as recomputed"


def test_the_softmax_in_bfloat16():
    found = another_way(case(laid_out(attention(attend=in_bfloat16)), laid_out(attention())))
    assert found.evidence == f"{LAYER}: the softmax is computed in bfloat16, as recomputed"


@pytest.mark.parametrize(
    "said, changes",
    {
        "the mask counts the positions of each cp rank from 0": {
            "seen": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5])[:, None] >= PLACE
        },
        "each cp rank sees its own positions alone": {"seen": CAUSAL & (OWNER[:, None] == OWNER)},
        "the outputs from the keys of each cp rank are averaged, without the weights of their softmaxes": {
            "attend": of_each_rank
        },
    }.items(),
)
def test_context_parallelism(said, changes):
    own, right = laid_out(attention(**changes)), laid_out(attention())
    found = another_way(case(own, right, context=True))
    assert (found.name, found.evidence) == ("context parallelism", f"{LAYER}: {said}, as recomputed")
    assert another_way(case(own, right)) is None


def test_keys_that_other_ranks_sent_a_layer_before():
    mine = OWNER[:, None] == OWNER
    _, new_keys, new_values = of_layer(1)
    _, old_keys, old_values = of_layer(0)
    parts = []
    for rank in (0, 1):
        k, v = (
            torch.where((rank == OWNER)[:, None], new, old)
            for new, old in ((new_keys, old_keys), (new_values, old_values))
        )

        def changed(q, *_, k=k, v=v):
            k, v = (tensor.unflatten(-1, (-1, SIZE)).transpose(1, 2) for tensor in (k, v))
            k = apply_rotary_pos_emb(k, k, *angles(PLACE[None]))[0]
            return q, *(tensor.repeat_interleave(2, 1) for tensor in (k, v))

        parts.append(attention(change=changed))
    own = torch.where((OWNER == 0)[:, None], *parts)
    assert mine.any()
    found = another_way(case(laid_out(own), laid_out(attention()), context=True))
    assert (
        found.evidence == f"{LAYER}: keys and values of other cp ranks are those of {BEFORE}, as recomputed"
    )


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("part", "kv")
def test_what_queries_of_other_ranks_send_back(part, precision):
    """It is lost. If it counts twice, it is not."""
    of_ranks = [
        gradient(
            part,
            attend=lambda q, k, v, seen, scale, rank=rank: (rank == OWNER)[:, None]
            * scaled_dot_product_attention(q, k, v, seen, scale=scale),
        )
        for rank in (0, 1)
    ]
    right, own = sum(of_ranks), sum((rank == OWNER)[:, None] * one for rank, one in enumerate(of_ranks))
    make = functools.partial(
        case, right=right, first=f"backward/{LAYER}.{part}_proj", context=True, precision=precision
    )
    found = another_way_back(make(own))
    assert found.name == "cp reduction missing"
    assert (
        found.evidence
        == f"{LAYER}: in the backward pass, what queries of other cp ranks send back is lost, as recomputed"
    )
    assert another_way_back(make(2 * right - own)) is None


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("parts", ["keys and values", "keys", "values"])
def test_keys_and_values_of_another_sample(parts, precision):
    def changed(q, k, v):
        k, v = (x[[1, 0, 2]] if word in parts else x for word, x in (("keys", k), ("values", v)))
        return q, k, v

    own, right = laid_out(attention(change=changed)), laid_out(attention())
    said = " and ".join(
        f"sample {one} attends to the {parts} of sample {other}" for one, other in ((0, 1), (1, 0))
    )
    assert another_way(case(own, right, precision=precision)).evidence == f"{LAYER}: {said}, as recomputed"
    # Their outputs are exchanged. Another rule says so.
    assert another_way(case(right[[1, 0, 2]], right, precision=precision)) is None


def test_documents_that_begin_elsewhere():
    late = [[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0] * 12, [0, 0, 0, *[1] * 9]]
    early = [[0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2], [0] * 12, [0, *[1] * 11]]
    for words, document in (("late", torch.tensor(late)), ("early", torch.tensor(early))):
        seen = CAUSAL & (document[:, :, None] == document[:, None])[:, None]
        own, right = (laid_out(attention(which, positions=DOCUMENTS)) for which in (seen, CAUSAL & APART))
        found = another_way(case(own, right, positions=DOCUMENTS, batch={"position_ids": DOCUMENTS}))
        assert (
            found.evidence == f"{LAYER}: each later document begins one position too {words}, as recomputed"
        )


def test_documents_and_padding():
    right = laid_out(attention(CAUSAL & APART, positions=DOCUMENTS))
    own = laid_out(attention(CAUSAL, positions=DOCUMENTS))
    found = another_way(case(own, right, positions=DOCUMENTS, batch={"position_ids": DOCUMENTS}))
    assert found.evidence == f"{LAYER}: documents see each other, as recomputed"
    seen = TOKENS.flip(1).bool()[:, None, None, :]  # padded on the left
    right, own = laid_out(attention(CAUSAL & seen)), laid_out(attention(CAUSAL))
    found = another_way(case(own, right, batch={"attention_mask": TOKENS.flip(1)}))
    assert found.evidence == f"{LAYER}: padding is seen, as recomputed"


def test_a_window_that_is_left_out():
    own, right = laid_out(attention()), laid_out(attention(CAUSAL & (PLACE[:, None] - PLACE < 4)))
    found = another_way(case(own, right, window=4))
    assert found.evidence == f"{LAYER}: the model's window is left out, as recomputed"


@pytest.mark.parametrize(
    "change",
    [
        lambda own: attention(PLACE[:, None] >= PLACE - 3),  # each position sees the next three
        lambda own: attention(scale=0.3, seen=NEXT),
        lambda own: 1.1 * own,
        lambda own: own + 0.1 * torch.randn(own.shape, generator=torch.Generator().manual_seed(5)),
        lambda own: own * math.nan,
        lambda own: torch.zeros_like(own),
        lambda own: own.roll(1, 0),
        lambda own: own.roll(1, 2),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_what_no_way_explains_is_not_named(change, precision):
    right = attention()
    assert (
        another_way(case(laid_out(change(right.clone())), laid_out(right), precision=precision, context=True))
        is None
    )


def test_a_model_that_computes_attention_otherwise_is_not_named():
    """Its reference is not what the right way gives."""
    right = laid_out(attention(scale=0.3))
    assert another_way(case(laid_out(attention(NEXT, scale=0.3)), right)) is None
    assert (
        another_way(
            case(laid_out(attention(turn=neighbours)), laid_out(attention(turn=neighbours, scale=0.3)))
        )
        is None
    )
