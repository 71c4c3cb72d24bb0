"""Names on the Hugging Face hub: a wrong one, or no network, is found in a moment.

The hub's own library tries again for most of a minute, with a warning each time, before it gives
up; it is asked only once the name is known to be there.
"""

from __future__ import annotations

from megatron_lengen.errors import BadInput

_SECONDS = 10.0


def check_on_hub(name: str, flag: str) -> None:
    """See that a hub id can be had: from the cache, or from the hub.

    Args:
        name: NAME or ORG/NAME, which is no folder.
        flag: what named it.

    Raises:
        BadInput: if neither has it, or the hub cannot be reached.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    if _is_cached(name):
        return
    if constants.HF_HUB_OFFLINE:
        raise BadInput(f"{flag}: no folder {name}, and the hub's cache has none (HF_HUB_OFFLINE)")
    url = f"{constants.ENDPOINT}/api/models/{name}"
    try:
        status = get_session().get(url, headers=build_hf_headers(), timeout=_SECONDS).status_code
    except Exception as error:  # of whichever library carries requests
        reason = " ".join(str(error).split())
        raise BadInput(
            f"{flag}: no folder {name}, and {constants.ENDPOINT} cannot be reached ({reason})"
        ) from error
    if status in (401, 403, 404):
        raise BadInput(
            f"{flag}: no folder {name}, and none on {constants.ENDPOINT} that is public "
            "or open to this login"
        )


def _is_cached(name: str) -> bool:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, local_files_only=True)
    except (OSError, ValueError):
        return False
    return True
