"""A rule of context parallelism: what shows that each rank along cp computed with its own positions alone."""

import torch

from lockstep.diagnosis import recompute
from lockstep.diagnosis.case import Case
from lockstep.diagnosis.gradients import some_known
from lockstep.verdict.result import Cause


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


GRADIENT_RULES = (one_cp_rank_only,)
