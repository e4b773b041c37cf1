"""Pipeline, context and sequence parallelism: who has which positions and layers. In real runs: test_combinations.py; what is refused: test_options.py."""

from lockstep.faults import CATALOGUE
from lockstep.plan import cuts
from lockstep.plan.mesh import Mesh, balanced_share, runs


def test_there_are_planted_bugs_of_every_dimension():
    classes = [fault.bug_class for fault in CATALOGUE.values()]
    assert classes.count("context parallelism") >= 8 and classes.count("pipeline") >= 8
    assert classes.count("sequence parallelism") >= 3


def test_every_position_and_every_layer_belongs_to_one_rank():
    for size in (1, 2, 4):
        own = [balanced_share(64, rank, size) for rank in range(size)]
        assert sorted(
            at for of_rank in own for start, n in of_rank for at in range(start, start + n)
        ) == list(range(64))
        work = [
            sum(start + n for start, n in of_rank) for of_rank in own
        ]  # keys that the last query of a piece sees
        assert len(set(work)) == 1
    assert runs([0, 1, 5, 6, 7]) == [[0, 2], [5, 3]] and runs([]) == []
    for schedule in cuts.SCHEDULES:
        for size in (2, 4):
            count = cuts.num_stages(schedule, size)
            assert sorted(
                stage for rank in range(size) for stage in cuts.stages_of(schedule, rank, size)
            ) == list(range(count))
            units = [unit for stage in range(count) for unit in cuts.units_of(stage, count, 8)]
            assert units == ["embedding", *range(8), "lm_head"]
    assert Mesh.of_options({"dp_size": 2, "tp_size": 4}) == Mesh(dp=2, tp=4)
