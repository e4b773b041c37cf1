"""Files of the Hugging Face hub, asked for with patience that ends."""

import http.client
import os
import threading
import urllib.error
import urllib.request
from pathlib import Path

from lockstep.errors import first_line

HUB_TIMEOUT, HUB_PATIENCE = 2.0, 5.0  # seconds, of one operation and of all


def hub_file(repo: str, filename: str) -> tuple[Path | None, str]:
    """One file of a hub repository: its cached path and "", or None and the reason in a few words."""
    if repo.count("/") != 1 or os.path.isabs(repo):
        return None, "not a hub id of the form owner/name"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import (
        constants,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        cached = try_to_load_from_cache(repo, filename)
        if isinstance(cached, str):
            return Path(cached), ""
        if constants.HF_HUB_OFFLINE:
            return None, "HF_HUB_OFFLINE is set and the file is not cached"
        if not hub_answers(hf_hub_url(repo, filename)):  # hf_hub_download would retry for half a minute
            return None, "the hub cannot be reached and the file is not cached"
        return Path(hf_hub_download(repo, filename)), ""
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        return None, first_line(error)


def hub_answers(url: str) -> bool:
    """Whether a server answers for this address at all, be it with "not found", within HUB_PATIENCE seconds."""
    answer: list[bool] = []
    asking = threading.Thread(target=lambda: answer.append(_answers(url)), daemon=True)
    asking.start()  # a name server that is silent is not bound by the timeout of a connection
    asking.join(HUB_PATIENCE)
    return answer == [True]


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):  # no network, or no address that could be asked
        return False
    return True
