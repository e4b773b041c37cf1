"""Bugs that the catalogue does not have (foreign.py), in real distributed runs: each is caught, the right tensor is named first, and the
cause is named right or not at all. A sample; `pytest --all` runs all of them."""

import json
import shlex

import pytest
from compared import compared, replays
from ranks import run_groups

from lockstep.diagnosis.diagnose import diagnose
from lockstep.dumps.dump import Dump

FLAGS = shlex.split(
    "--batch_size 2 --seq_length 32 --debug_steps 2 --capture_steps 2 --dp_size 2 --precision fp32"
)
ATTENTION, INTO_MLP = (
    "forward/model.layers.1.self_attn.o_proj.input",
    "model.layers.1.post_attention_layernorm",
)
UP = "model.layers.1.mlp.up_proj.weight"
# bug -> (the first wrong tensor, its step, the only cause that may be named, words that the report must have)
SHARDED = {
    "wrong attention scale": (ATTENTION, 1, "module settings", "position 0 of 32 is right"),
    "lost causal mask": (ATTENTION, 1, "attention mask", "position 31 of 32 is right"),
    "causal mask off by one": (ATTENTION, 1, "attention mask", "position 31 of 32 is right"),
    "another norm epsilon": ("forward/model.layers.1.input_layernorm", 1, "module settings", ""),
    "another norm epsilon on one tp rank": (
        "forward/model.layers.1.input_layernorm",
        1,
        "module settings",
        "1 (dp 0, tp 1), 3 (dp 1, tp 1)",
    ),
    "other rotary theta": ("forward/model.rotary_emb", 1, "rotary angles", "position 0 of 32 is right"),
    "rotary angles of one layer doubled": (ATTENTION, 1, "rotary angles", "position 0 of 32 is right"),
    "two heads swapped": (
        "forward/model.layers.1.self_attn.q_proj",
        1,
        "pieces exchanged",
        "head 0 has the values of head 1, head 1 has the values of head 0",
    ),
    "bias left out": (
        "gradient/model.layers.1.self_attn.k_proj.bias",
        1,
        None,
        "all elements are zero",
    ),  # it is zero in the first step
    "residual added twice": ("forward/model.layers.1", 1, "module inputs", ""),
    "gelu for silu": ("forward/model.layers.1.mlp.act_fn", 1, "activation function", ""),
    "last position zeroed": (f"forward/{INTO_MLP}", 1, None, "only position 31 of 32 is wrong"),
    "embedding scaled": ("forward/model.embed_tokens", 1, "output scale", "8 times the right one"),
    "activations of one replica scaled": (
        "forward/model.layers.1.mlp.down_proj",
        1,
        None,
        "only DP rank 1 of 2",
    ),
    "share of one tp rank counted twice": ("forward/model.layers.1.mlp.down_proj", 1, None, ""),
    "loss of one replica counts twice": ("backward/lm_head", 1, "rank weights", "only DP rank 1 of 2"),
    "gradient of one activation scaled": (f"gradient/{INTO_MLP}.weight", 1, None, "1.5 times the right one"),
    "gradient of some positions lost": ("gradient/model.layers.1.input_layernorm.weight", 1, None, ""),
    "one stale gradient": (f"gradient/{UP}", 2, "stale gradients", ""),
    "gradient of one parameter zeroed": (f"gradient/{UP}", 1, None, "all elements are zero"),
    "gradient of one tp rank negated": (f"gradient/{UP}", 1, None, "only in the share of tp rank 1 of 2"),
    "exponent bit of one gradient element": (f"gradient/{UP}", 1, None, ""),
    "one weight never updated": (f"parameter/{UP}", 1, "update left out", ""),
    "updates of one weight doubled": (
        f"parameter/{UP}",
        1,
        "update scale",
        "its change is 2 times the right one",
    ),
}
FSDP = {
    "sign of one gradient element": (f"gradient/{UP}", 1, None, "its sign is flipped"),
    "one dp rank has noise in its gradient": (
        f"gradient/{UP}",
        1,
        None,
        "only in the share of dp rank 1 of 2",
    ),
    "sign of one weight element": (f"parameter/{UP}", 1, None, "its sign is flipped"),
    "first moment of one parameter lost": ("exp_avg/", 2, "moments lost", ""),
    "replica missed one update": (
        "parameter/model.embed_tokens.weight",
        2,
        "update left out",
        "share of dp rank 1 of 2",
    ),
}
DDP = {
    "one stale gradient": (f"gradient/{UP}", 2, "stale gradients", ""),
    "gradient of one parameter zeroed": (f"gradient/{UP}", 1, None, "all elements are zero"),
    "sign of one weight element": (f"parameter/{UP}", 1, None, "its sign is flipped"),
    "replica missed one update": ("parameter/model.embed_tokens.weight", 2, "update left out", ""),
    "lost causal mask": (ATTENTION, 1, "attention mask", "position 31 of 32 is right"),
}
BUGS = {"ddp": DDP, "fsdp": {**SHARDED, **FSDP}, "deepspeed": SHARDED}
# What every run of the tests has, because a bug is seen in another way in each; --all takes all.
SAMPLE = {
    "ddp": ["one stale gradient", "replica missed one update"],
    "fsdp": [
        "wrong attention scale",
        "two heads swapped",
        "updates of one weight doubled",
        "sign of one gradient element",
        "one dp rank has noise in its gradient",
        "first moment of one parameter lost",
    ],
    "deepspeed": [
        "another norm epsilon on one tp rank",
        "activations of one replica scaled",
        "exponent bit of one gradient element",
    ],
}


def chosen(config):
    """(strategy, bug) of every run with a bug."""
    bugs = BUGS if config.getoption("--all") else SAMPLE
    return [(strategy, bug) for strategy in bugs for bug in bugs[strategy]]


def pytest_generate_tests(metafunc):
    if "bug" in metafunc.fixturenames:
        metafunc.parametrize("strategy, bug", chosen(metafunc.config))


@pytest.fixture(scope="module")
def runs(new_folder, request):
    """One start of the workers for all the runs, and one process for all that is judged in float64."""
    folder = new_folder("foreign")
    cases = chosen(request.config)

    def job(strategy, bug):
        tp = ["--tp_size", "2"] if strategy != "ddp" else []
        arguments = [*FLAGS, *tp, "--capture_dir", str(folder / bug)]
        return {"name": bug, "strategy": strategy, "fault": bug, "arguments": arguments}

    starts = {2: [], 4: []}  # number of ranks -> runs
    for strategy, bug in [*((strategy, "none") for strategy in BUGS), *cases]:
        starts[2 if strategy == "ddp" else 4].append(job(strategy, bug))
    groups = [
        (ranks, "jobs:histories", folder / "work" / str(ranks), {"runs": jobs})
        for ranks, jobs in starts.items()
    ]
    replays = [str(folder / bug / strategy) for strategy, bug in [*((each, "none") for each in BUGS), *cases]]
    reference = {"arguments": [*FLAGS, "--capture_dir", str(folder / "none")], "replays": replays}
    run_groups([*groups, (0, "jobs:reference", folder / "work" / "reference", reference)], timeout=380)
    return folder


def judged(folder, strategy, bug):
    plain, dumps = folder / "none", {strategy: folder / bug / strategy}
    result = compared(plain, **dumps)
    own = replays(**{"ddp": plain / "ddp", **dumps})
    return result, diagnose(result, strategy, Dump(plain / "reference"), own)


def test_what_is_said_of_it_is_true(runs, strategy, bug):
    first, step, cause, words = BUGS[strategy][bug]
    result, diagnosis = judged(runs, strategy, bug)
    failures = result.runs[strategy].failures
    assert result.has_failed(strategy)
    assert failures[0][0] == step and failures[0][2].startswith(first), failures[:3]
    shown = json.dumps(
        [[one.name, one.evidence] for one in diagnosis.causes] + diagnosis.odd + diagnosis.excluded, indent=1
    )
    print(shown)
    assert {one.name for one in diagnosis.causes} <= {cause}, shown
    assert words in shown, shown


@pytest.mark.parametrize("strategy", BUGS)
def test_without_a_bug_nothing_is_found(runs, strategy):
    result, diagnosis = judged(runs, strategy, "none")
    assert result.verdict(strategy) == "PASS" and not diagnosis.causes
