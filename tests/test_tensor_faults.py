"""Bugs planted in real distributed runs: the tensor-level verdict finds each, and names the right tensor first."""

import pytest
from planted import FLIPPED
from ranks import run_groups

from lockstep.tensors.comparison import compare_dumps
from lockstep.tensors.dump import Dump

COMMON = ["--batch_size", "2", "--seq_length", "64", "--debug_steps", "1", "--dp_size", "2"]
FIRST = {
    "none": None,
    "a flipped exponent bit": f"gradient/{FLIPPED}",
    "norm_weight_differs_on_one_tp_rank": "forward/model.layers.1.input_layernorm",
}
PRECISIONS = {"fp32": "deepspeed", "autocast": "fsdp"}  # the catalogue (run_faults.py) has both in both


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One step of DDP in both precisions, and of another strategy with every fault. Then the references."""
    folder = tmp_path_factory.mktemp("faults")

    def job(strategy, fault, precision):
        name = f"{precision} {fault}"
        arguments = [*COMMON, "--precision", precision, "--capture_dir", str(folder / name)]
        return {"name": name, "strategy": strategy, "fault": fault, "arguments": arguments}

    groups = [
        (2, "jobs:histories", folder / "ddp", {"runs": [job("ddp", "none", p) for p in PRECISIONS]}),
        *(
            (
                4,
                "jobs:histories",
                folder / strategy,
                {"runs": [job(strategy, fault, precision) for fault in FIRST]},
            )
            for precision, strategy in PRECISIONS.items()
        ),
        *(
            (
                0,
                "jobs:reference",
                folder / f"reference {p}",
                {"arguments": job("ddp", "none", p)["arguments"]},
            )
            for p in PRECISIONS
        ),
    ]
    run_groups(groups)
    return folder


@pytest.mark.parametrize("precision, strategy", PRECISIONS.items())
@pytest.mark.parametrize("fault", FIRST)
def test_the_first_tensor_is_the_right_one(runs, fault, strategy, precision):
    clean = runs / f"{precision} none"
    dumps = {"ddp": Dump(clean / "ddp"), strategy: Dump(runs / f"{precision} {fault}" / strategy)}
    result = compare_dumps(Dump(clean / "reference"), dumps, {})
    failures = result.runs[strategy].failures
    assert (failures[0][2] if failures else None) == FIRST[fault], failures[:3]
    assert (
        result.verdict(strategy) == ("FAIL" if FIRST[fault] else "PASS") and result.verdict("ddp") == "PASS"
    )


@pytest.mark.parametrize("precision, strategy", PRECISIONS.items())
def test_the_replicas_name_the_ranks(runs, precision, strategy):
    entry = Dump(runs / f"{precision} norm_weight_differs_on_one_tp_rank" / strategy).steps["1"]
    assert entry["replicas_differ"]["forward/model.layers.1.input_layernorm"] == [
        1,
        3,
    ]  # tp rank 1 of both replicas
