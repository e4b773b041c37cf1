"""What JSON files must look like: a strict pydantic model for each kind of file, and one way to check a file against it.

Strict means: no 1.5 for a count, no `true` or "1" for a number, no NaN unless allowed, no unknown keys.
"""

import re
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.ground.errors import UserError, printable

Count = Annotated[int, Field(ge=1, le=2**40)]
Whole = Annotated[int, Field(ge=0, le=2**63 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[Finite, Field(ge=0)]
Depth = Annotated[int, Field(ge=1, le=10_000)]  # layers
MayBreakDown = float  # may be NaN or infinite, as in a run that broke down
# May be shown: it has no control characters
Name = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
Names = Annotated[tuple[Name, ...], Field(strict=False)]  # JSON has lists for tuples
Threads = Annotated[int, Field(ge=0, le=4096)]  # of a process; 0: not known
Size = Annotated[int, Field(ge=0, le=2**40)]
Shape = Annotated[tuple[Size, ...], Field(strict=False, max_length=8)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """The base of all schemas."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=True, frozen=True)


class Origin(Strict):
    """Where and when a run was made (lockstep/ground/origin.py)."""

    lockstep: Name
    commit: Name
    python: Name
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    cpu: Name
    cores: Count
    instruction_sets: list[Name]  # of those that kernels are chosen by


class Architecture(Strict):
    """The entries of a model's config.json that the readers use.

    There may be any others: the model is built from all of them.
    """

    model_config = ConfigDict(extra="allow")

    model_type: Name
    vocab_size: Count
    hidden_size: Count | None = None
    num_hidden_layers: Depth | None = None
    num_attention_heads: Count | None = None
    head_dim: Count | None = None
    initializer_range: NotNegative | None = None
    tie_word_embeddings: bool = False


Schema = TypeVar("Schema", bound=BaseModel)
# What pydantic adds to the place of an error for the member of a union that it tried: "constrained-int",
# "list[constrained-int]", "bool".
UNION_MEMBER = re.compile(r"constrained-\w+|\w+\[.*\]|bool|int")


def validate(schema: type[Schema], content: object, where: object, remedy: str) -> Schema:
    """`content`, read from a JSON file, as an object of the schema.

    Raises UserError that names the place (`where`), the first field that is wrong and the `remedy`.
    """
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        parts = [str(part) for part in first["loc"] if not UNION_MEMBER.fullmatch(str(part))]
        place = ".".join(parts) or "the whole"
        value = printable(repr(first["input"]), 60)
        if first["type"] == "missing":  # the input is then all that is around it
            raise UserError(f"{where}: {printable(place, 200)} is missing; {remedy}") from error
        raise UserError(
            f"{where}: {printable(place, 200)} is {value}: {first['msg'].lower()}; {remedy}"
        ) from error
    except RecursionError:
        raise UserError(f"{where}: nested too deeply; {remedy}") from None
