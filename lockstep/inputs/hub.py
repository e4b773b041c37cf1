"""Files of the Hugging Face hub."""

import os
from pathlib import Path

from lockstep.ground.errors import first_line

PATIENCE = 2.0  # seconds for one answer of the hub


def hub_file(repo: str, filename: str) -> tuple[Path | None, str]:
    """One file of a hub repository: its cached path and "", or None and the reason in a few words."""
    if repo.count("/") != 1 or os.path.isabs(repo):
        return None, "not a hub id of the form owner/name"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(repo, filename)
        if not isinstance(cached, str):
            # This asks once. hf_hub_download would ask a hub that does not answer six more times, for a minute each.
            get_hf_file_metadata(hf_hub_url(repo, filename), timeout=PATIENCE)
            cached = hf_hub_download(repo, filename, etag_timeout=PATIENCE)
        return Path(cached), ""
    except Exception as error:  # noqa: BLE001 - the library's own errors, and those of the network library below it
        return None, first_line(error)
