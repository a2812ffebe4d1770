"""Models by path or Hugging Face id. Only data files are fetched: JSON, safetensors, tokenizers; never pickles or code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from motet.shared.config import ConfigError

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
"""What a checkpoint may consist of: configs, weights, tokenizer files and the chat template."""
NOT_FETCHED = ("consolidated*", "original/*")
"""Files that contain the same weights again, in a vendor's layout."""


def resolve_model(path_or_hub_id: str, files: Sequence[str] = MODEL_FILES) -> Path:
    """The local directory of a model: the argument itself if it is a directory, else a (cached) download of the Hugging Face
    id.

    Only `files` (glob patterns) are downloaded. Raises ConfigError when the argument is neither, or when the model is not
    cached and cannot be downloaded.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model {path_or_hub_id!r} is a file; give the checkpoint's directory or a Hugging Face id")
    # imported here, because a local directory does not need it
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path_or_hub_id, allow_patterns=list(files), ignore_patterns=list(NOT_FETCHED)))
    except HFValidationError:
        raise ConfigError(f"model {path_or_hub_id!r} is neither a directory nor a Hugging Face id") from None
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"model {path_or_hub_id!r} is no local directory and not cached, and the Hugging Face hub cannot be reached"
        ) from None
    except HfHubHTTPError as error:
        raise ConfigError(f"model {path_or_hub_id!r} cannot be downloaded: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise ConfigError(f"model {path_or_hub_id!r} cannot be downloaded: {error}") from None
