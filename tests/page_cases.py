"""Pages made by hand: a comparison and a recording."""

import json
import re

import torch
from page_size import MODULES

from lockstep.page.payload import Count, Losses, Page, View
from lockstep.verdict.distance import distance_of
from lockstep.verdict.factors import Factor
from lockstep.verdict.judgement import Judgement
from lockstep.verdict.picture import draw

HOSTILE = '</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">'
WRONG = "gradient/model.layers.1.mlp.down_proj.weight"
HIDDEN = "gradient/lm_head.weight"  # a factor in it is smaller than its distance
HEADED = "exp_avg/model.layers.1.self_attn.q_proj.weight"  # 8 rows: 4 heads of 2
HEADLESS = "exp_avg/model.layers.1.self_attn.o_proj.weight"  # whose 6 columns are not 4 heads of 2
FOLLOWS = "gradient/model.norm.weight"  # and is right by itself
ALONE = (HIDDEN, WRONG)
SHARDS = [[8, 6], {"tp": 0}]
TOLERANCE = 1e-6
SHARDING = {"DDP": {"replicas": 2}, "FSDP": {"shards": [2, 4]}}


def names():
    layers = [f"model.layers.{layer}.{module}" for layer in range(2) for module in MODULES]
    modules = ["model.embed_tokens", *layers, "model.norm", "lm_head"]
    weights = [f"{module}.weight" for module in modules if not module.endswith(".mlp")]
    return [
        "batch/input_ids",
        *(f"forward/{module}" for module in modules),
        *(f"backward/{module}" for module in reversed(modules)),
        *(f"{kind}/{weight}" for kind in ("gradient", "exp_avg", "parameter") for weight in weights),
    ]


def row(step, name, wrong=False):
    """A tensor of 8 x 6 elements, right but for rounding; a wrong one has twice the right values in its last four rows."""
    reference = torch.arange(1.0, 49).reshape(8, 6).double() / 48
    own = reference * (1 + TOLERANCE / 5)
    if wrong:
        own[4:] *= 2
    found = Judgement(step, name, distance_of(own, reference), TOLERANCE * float(reference.norm()), TOLERANCE)
    if wrong or name == HIDDEN or name.endswith("lm_head"):
        found.picture = draw(own, reference, found.tolerated, found.tolerated_largest)
    return found


def view(label, rows, **further):
    far = [one for one in rows if one.too_far]
    first = (far[0].step, far[0].name, far[0].describe()) if far else None
    return View(
        label.lower(),
        label,
        "FAIL" if far else "PASS",
        first=first,
        **further,
    )


def comparison(verdict):
    """DDP and FSDP in two steps; if it fails, FSDP has a wrong shard, and a module with a hostile name. By itself, a factor is in another shard, too."""
    bad = verdict == "FAIL"
    versions = f"torch {'2.13.0' if bad else '2.12.0'}, numpy 2.4.6"
    page = Page(
        "verification",
        verdict,
        "tiny-qwen2 in fp32",
        "Every tensor was held against a float64 reference.",
        ["a note"],
        [("versions", versions), ("compared", "2026-01-01 by python -m lockstep.compare")],
        losses=Losses(
            ["ddp", "fsdp"],
            ["DDP", "FSDP"],
            [1, 2, 3],
            [[3.0, 2.0, 1.0], [3.0, 2.0, 1.000001]],
            [[1.0, 1.0, 1.0]] * 2,
            [1e-6] * 3,
            [0.0, 1e-7, 2e-7],
            3e-7,
        ),
        heads={"": [4, 2, None, 8]},
        command="python -m lockstep.compare ddp fsdp reference",
    )
    ranks = [{"dp": dp, "tp": tp} for dp in range(2) for tp in range(2)]
    for label, wrong in (("DDP", False), ("FSDP", bad)):
        tensors = [*names(), *([f"forward/{HOSTILE}"] if wrong else [])]
        rows = {
            step: [row(step, name, wrong and name in (WRONG, FOLLOWS, HEADED, HEADLESS)) for name in tensors]
            for step in (1, 2)
        }
        one = view(
            label, [*rows[1], *rows[2]], ranks=ranks, contract={"eps": 1e-8, "sharding": SHARDING[label]}
        )
        one.differing = [(1, WRONG, [3], [6])] if wrong else []
        one.causes = [("shard", f"see {HOSTILE}")] if wrong else []
        for step, of_step in rows.items():
            page.add(one, step, of_step, {WRONG: SHARDS, HIDDEN: SHARDS})
            alone = [row(step, name, wrong and name == WRONG) for name in ALONE]
            if wrong:
                alone[0].factor = Factor(HIDDEN, (8, 6), (0, 4, 8), 0.003, 1e-5)
            page.add(one, step, alone, {}, alone=True)
    return page


def hidden():
    """A page of which only a module by itself shows what is wrong."""
    page = comparison("PASS")
    view = page.views[1]
    view.verdict = "FAIL"
    view.first = (1, HIDDEN, "by itself, rows 4 to 7 of 8 are 1.003 times what they should be")
    view.by_itself = "1 of 2 tensors"
    alone = [row(1, name) for name in ALONE]
    alone[0].factor = Factor(HIDDEN, (8, 6), (0, 4, 8), 0.003, 1e-5)
    page.tables = [one for one in page.tables if not (one.view == 1 and one.step == 1 and one.alone)]
    view.counts["each module by itself"] = Count(2, 2)
    page.add(view, 1, alone, {}, alone=True)
    return page


def recording():
    page = Page(
        "recording",
        "FAIL",
        "a recorded run of 2 steps",
        "One gradient is wrong.",
        ["step 1: 2 micro batches"],
        [("versions", "torch 2.13.0")],
    )
    free = [name for name in names() if not name.startswith(("exp_avg", "batch"))]
    alone = [name for name in free if not name.startswith("parameter")]
    for label, tensors in (
        ("each module by itself", alone),
        ("from the batch", [*free, "loss of micro batch 0, rank 0"]),
    ):
        rows = [row(1, name, name == WRONG) for name in tensors]
        if tensors is alone:
            hidden = next(one for one in rows if one.name == HIDDEN)
            hidden.factor = Factor(HIDDEN, (8, 6), None, 0.003, 1e-5)
        one = view(label, rows, ranks=[{"rank": 0}, {"rank": 1}])
        if tensors is not alone:  # a recording has one first
            one.first = None
        page.add(one, 1, rows, {})
    return page


def copies():
    """A recording of four ranks: in step 1, the copies of one gradient and of its update differ, so outputs of rank 1 are wrong in step 2."""
    output, gradient, update = "forward/model.norm", WRONG, WRONG.replace("gradient/", "update/")
    ranks = [{"rank": rank} for rank in range(4)]
    page = Page(
        "recording",
        "FAIL",
        "a recorded run, 4 ranks",
        "step 1: gradients differ between ranks that hold the same",
        [
            "step 1: 4 micro batches",
            f"gradients differ between ranks that hold the same: {WRONG.removeprefix('gradient/')} on rank 1; they were not reduced",
            "3 of 3 tensors and losses are near enough; the farthest, forward/model.norm, is 0.2 of what is tolerated",
            "step 2: 4 micro batches",
            "forward/model.norm is the first of 1 of 1 outputs that are too far from the reference",
        ],
        [],
        causes=[("the gradients were not reduced", "")],
    )
    one = View("from the batch", "from the batch", "FAIL", ranks=ranks)
    one.first = (1, WRONG, "not the same on all ranks that hold it")
    one.differing = [(1, WRONG, [1], [6], [0.876]), (1, update, [1], [6], [0.001])]
    for step in (1, 2):
        rows = [row(step, name, step == 2 and name == output) for name in (output, gradient, update)]
        if step == 2:
            rows[0].where, rows[0].ranks = "micro batch 0, rank 1", {0: 0.2, 1: rows[0].multiple, 2: 0}
        whole = [[[0, 0], [8, 6]]]
        page.add(one, step, rows, {gradient: [whole] * 4, update: [whole] * 4})
    return page


def uncounted():
    """A recording of which all tensors are near enough to a reference that counts micro batches as the run did."""
    page = Page(
        "recording",
        "FAIL",
        "a recorded run",
        "step 1: micro batches count 1 and 2 (in micro batch 0; by 1).",
        ["step 1: 2 micro batches"],
        [],
    )
    rows = [row(1, name) for name in names()[1:4]]
    page.add(view("from the batch", rows, ranks=[{"rank": 0}, {"rank": 1}]), 1, rows, {})
    return page


def fed():
    """A comparison in which FSDP was fed two ids of one sample from another place."""
    ids = torch.arange(32).reshape(4, 8)
    own = ids.clone()
    own[1, 3:5] += 1
    distance = distance_of(own, ids)
    distance.unequal = "2 of 32 are not what was to be fed, first at [1, 3]: 12, not 11"
    one = Judgement(1, "batch/input_ids", distance, 0.0, 0.0)
    one.picture = draw(own, ids, 0.0, 0.0, counted=True)
    page = Page("verification", "FAIL", "tiny-qwen2 in fp32", "Ids.", [], [])
    ranks = [{"dp": dp} for dp in range(2)]
    page.add(view("FSDP", [one], ranks=ranks), 1, [one], {one.name: [[4, 8], {"dp": 0}]})
    return page


def positions():
    """An output (samples, positions, 4 heads of 2) on cp 2 x tp 2. The wrong ones are of head 2, in both pieces that cp rank 0 has of each sequence."""
    name = "forward/model.layers.0.self_attn.q_proj"
    reference = torch.arange(1.0, 257).reshape(2, 16, 8).double() / 256
    own = reference.clone()
    own[:, [2, 3, 12], 4:6] *= 2
    one = Judgement(1, name, distance_of(own, reference), TOLERANCE, TOLERANCE)
    one.picture = draw(own, reference, TOLERANCE, TOLERANCE)
    page = Page(
        "verification", "FAIL", "tiny-qwen2 in fp32", "One output.", [], [], heads={"": [4, 2, None, 8]}
    )
    cuts = {"cp": [[[0, 4], [12, 4]], [[4, 8]]]}
    ranks = [{"cp": cp, "tp": tp} for cp in range(2) for tp in range(2)]
    one_view = view("FSDP", [one], ranks=ranks, contract={"cuts": cuts})
    page.add(one_view, 1, [one], {name: [[2, 16, 8], {"cp": 1, "tp": 2}]})
    return page


def study(runs=8):
    """The losses of a study's runs, each farther from the first than the one before. The second and the third have one label."""
    names = [f"run-{number}" for number in range(runs)]
    labels = ["DDP", "FSDP", "FSDP", *(f"FSDP {number}" for number in range(3, runs))]
    loss = [[3.0 + number * 1e-7, 2.0, 1.0] for number in range(runs)]
    views = [
        View(name, label, "PASS" if number else "control", "3 losses")
        for number, (name, label) in enumerate(zip(names, labels, strict=True))
    ]
    losses = Losses(names, labels, [4, 8, 12], loss, [], [1e-6] * 3)
    return Page("verification", "PASS", "a study", "Mean losses.", [], [], views, losses=losses)


def payload(text):
    """With numbers and places one by one."""
    content = json.loads(re.search(r'id="payload">(.*?)</script>', text, re.DOTALL)[1])
    for table in content["tables"]:
        for key in ("names", "far", "small", "excused"):
            table[key] = [first + more for first, count in table[key] for more in range(count)]
    return content
