import pytest

from lockstep.mesh import Mesh


def test_tp_peers_are_neighbours():
    mesh = Mesh(dp_size=2, tp_size=3)
    assert [mesh.coordinates(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert all(mesh.rank(*mesh.coordinates(rank)) == rank for rank in range(6))


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_off_the_mesh_is_an_error(rank):
    with pytest.raises(ValueError, match="not on a mesh of 2 x 2"):
        Mesh(2, 2).coordinates(rank)


def test_drawing_names_every_rank():
    assert Mesh(2, 2).draw().splitlines()[2].split() == ["dp", "1", "rank", "2", "rank", "3"]
