"""What a diagnosis must say of a planted fault, beside the name of the cause."""

import math
import re
from collections.abc import Callable

# A sentence, several of which any will do, or a function that says whether a sentence will do.
Evidence = str | tuple[str, ...] | Callable[[str], bool]
# No rule has a true sentence for this fault, so every cause that is named, with whatever evidence, is wrong.
NO_SENTENCE: Evidence = ()
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
# A factor from bfloat16 products is off by up to two in a thousand; a learning rate after one decay too many by four.
RELATIVE, ABSOLUTE = 3e-3, 1e-6


def agrees(expected: Evidence, said: str) -> bool:
    """Whether a sentence is the expected one.

    In the expected one, `#` is any number and `...` any text. A number that is written there is held, to three in a thousand.
    """
    if callable(expected):
        return expected(said)
    if isinstance(expected, tuple):
        return any(agrees(one, said) for one in expected)
    parts = re.split(rf"({NUMBER}|#|\.\.\.)", expected)
    marks = {"#": NUMBER, "...": ".*"}
    pattern = [
        marks.get(part, f"({NUMBER})") if index % 2 else re.escape(part) for index, part in enumerate(parts)
    ]
    found = re.fullmatch("".join(pattern), said, re.DOTALL)
    held = [float(part) for part in parts[1::2] if part not in marks]
    return found is not None and all(
        math.isclose(float(number), wanted, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        for number, wanted in zip(found.groups(), held, strict=True)
    )
