"""What samples can be made for which runs. Nothing here imports torch."""

from lockstep.ground import user_file
from lockstep.ground.errors import UserError
from lockstep.plan.config import Config


def require(config: Config, architecture: dict) -> None:
    """Raise UserError for samples that a model cannot be given."""
    further = config.samples.further
    if len(further) > 1:
        raise UserError(
            f"--padding {config.padding} --documents apart: given a mask, transformers does not look where positions begin again, and documents "
            "see each other; leave one of them out"
        )
    if further and user_file.is_named(architecture["model_type"]):
        raise UserError(
            f"--padding {config.padding} --documents {config.documents} --model {config.model_name}: a module of your own is called with ids and "
            "labels alone; leave them out"
        )
