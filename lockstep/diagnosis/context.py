"""Rules of context parallelism: what shows that each rank along cp computed with its own positions alone."""

import torch

from lockstep.diagnosis import recompute
from lockstep.diagnosis.case import Case, describe
from lockstep.diagnosis.gradients import some_known
from lockstep.diagnosis.odd import numbered, places_of, samples_and_positions, wrong_elements
from lockstep.verdict.result import Cause


def own_queries_only(case: Case) -> Cause | None:
    """With context parallelism, the gradient is wrong at the positions that queries of other ranks see, and at no others."""
    dims = [dim for word, dim in samples_and_positions(case) if word == "position"]
    attention, _, projection = case.path.rpartition(".")
    if not case.pieces or not dims or projection not in ("k_proj", "v_proj"):
        return None
    if not case.has(f"backward/{attention}.q_proj") or case.is_wrong(f"backward/{attention}.q_proj"):
        return None  # what queries of another rank send back is wrong, not lost
    own, right = case.own(case.first), case.right(case.first)
    wrong = set(places_of(wrong_elements(case, own, right), dims[0]))
    owner = case.cp_rank_of(own.shape[dims[0]]).tolist()
    # By rank, the last position of any other rank
    last = {
        rank: max((place for place, other in enumerate(owner) if other != rank), default=-1)
        for rank in set(owner)
    }
    seen = {place for place, rank in enumerate(owner) if place < last[rank]}
    # Positions of whole ranks would say less: any error of these ranks alone is at these positions.
    of_ranks = {owner[place] for place in wrong}
    if wrong != seen or wrong == {place for place, rank in enumerate(owner) if rank in of_ranks}:
        return None
    return Cause(
        "cp reduction missing",
        f"the gradient of {describe(case.path)} is wrong at {numbered('position', sorted(wrong))}, which queries of other "
        "cp ranks see, and right at the others: what comes back from these queries is lost",
    )


def one_cp_rank_only(case: Case) -> Cause | None:
    """Each part of the gradients comes from the positions of one cp rank alone, as they are or cp times."""
    cp = case.mesh.cp
    if any(case.factor([row]) is not None for row in case.wrong("gradient")):
        return None  # of an embedding, one rank's part may be all of it: a factor says less
    known = some_known(case, by_cp_rank=True) if case.pieces and not case.wrong("backward") else []
    for times in (1, cp):

        def terms(contributions: torch.Tensor, times: int = times) -> torch.Tensor:
            return times * contributions.unflatten(0, (-1, cp)).sum(0)

        found = [(one.parameter, *recompute.nearest_terms(one, terms)) for one in known]
        if found and all(case.leaves_little(f"gradient/{name}", left) for name, _, left in found):
            shown = "; ".join(f"{name}: cp rank {' or '.join(map(str, ranks))}'s" for name, ranks, _ in found)
            return Cause(
                "cp reduction missing",
                f"each part of these gradients is {f'{cp} = cp times ' * (times > 1)}what one cp rank's positions contribute, "
                f"without the others', as recomputed ({shown})",
            )
    return None


BACKWARD_RULES = (own_queries_only,)
GRADIENT_RULES = (one_cp_rank_only,)
