import itertools

import pytest

from lockstep.plan.mesh import AXES, Coordinates, Cuts, Geometry, Mesh

FOUR = Mesh(pp=2, dp=3, cp=2, tp=4)


def test_the_innermost_axis_has_the_neighbours():
    mesh = Mesh(dp=2, tp=3)
    assert [(c.dp, c.tp) for c in map(mesh.coordinates, range(6))] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


@pytest.mark.parametrize("sizes", itertools.product((1, 2, 3), repeat=4))
def test_ranks_and_coordinates_are_one_to_one(sizes):
    mesh = Mesh(*sizes)
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert len(set(places)) == mesh.world_size and [mesh.rank(place) for place in places] == list(
        range(mesh.world_size)
    )
    assert all(0 <= place.along(axis) < size for place in places for axis, size in mesh.sizes.items())


def test_only_an_axis_that_cuts_samples_gives_other_samples():
    assert FOUR.num_sample_shares == 3
    for rank, axis in itertools.product(range(FOUR.world_size), AXES):
        same = FOUR.sample_share(rank) == FOUR.sample_share(FOUR.neighbour(rank, axis))
        assert same == (AXES[axis] is not Cuts.SAMPLES)
    assert [FOUR.sample_share(FOUR.first_with_share(share)) for share in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_off_the_mesh_is_an_error(rank):
    with pytest.raises(ValueError, match="not on a mesh of 4 ranks"):
        Mesh(dp=2, tp=2).coordinates(rank)


def test_drawing_names_every_rank():
    assert Mesh(dp=2, tp=2).draw().splitlines()[2].split() == ["dp", "1", "rank", "2", "rank", "3"]
    drawn = FOUR.draw()
    assert (
        all(f"rank {rank:<4}".rstrip() in drawn for rank in range(FOUR.world_size))
        and "pp 1  dp 2  cp 1" in drawn
    )


def test_geometry_in_words():
    assert str(Geometry(Mesh(dp=2), Coordinates(dp=1))) == "dp 1 of 2, tp 0 of 1"
    assert Mesh(dp=2, tp=2).label == "TP=2, DP=2" and FOUR.label == "TP=4, DP=3, PP=2, CP=2"
