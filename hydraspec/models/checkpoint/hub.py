"""Downloads checkpoints from the Hugging Face hub: weights, json and tokenizer files, never code.
One small pickle is fetched and not read, so that its drafter is refused instead of drafting badly.
"""

from __future__ import annotations

from pathlib import Path

from hydraspec.errors import CheckpointError

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt", "mask_embedding.pt"]
SECOND_COPY = ["consolidated*"]  # Mistral's format; many releases have both


def download(hub_id: str) -> Path:
    """The local folder of a hub id, fetched if need be.

    Raises CheckpointError when it is neither cached nor reachable.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(hub_id, allow_patterns=PATTERNS, ignore_patterns=SECOND_COPY)
        )
        if any(folder.glob("*.safetensors")):
            return folder
        return Path(snapshot_download(hub_id, allow_patterns=PATTERNS))
    except Exception as error:  # the hub client raises its own, requests', httpx' and OS errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CheckpointError(
            f"checkpoint {hub_id!r} is neither a folder here nor reachable on the Hugging Face hub "
            f"({type(error).__name__}: {reason}). If it is a folder, check the path; if a hub id, "
            "check the spelling, the network and access rights (`hf auth login`), or fetch it "
            f"elsewhere with `hf download {hub_id}` and give the folder"
        ) from None
