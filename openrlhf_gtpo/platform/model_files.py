"""A Hugging Face model's files on this host: where they lie, and what of a model of the Hub is fetched."""

import json
import socket
from pathlib import Path

from openrlhf_gtpo.errors import UsageError

INDEX = "model.safetensors.index.json"
WEIGHTS = "*.safetensors"
SIDE_FILE_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "sentencepiece*",
    "spiece.model",
    "chat_template*",
    "LICENSE*",
)


def model_folder(source: str | Path, *, weights: bool = True) -> Path:
    """The folder of the model ``source`` on this host; one that is a name on the Hub is fetched into the cache first.

    Of the processes that ask at once, one fetches each file and the others wait for it (huggingface_hub 1.33.0,
    file_download.py, ``WeakFileLock``). With HF_HUB_OFFLINE, or without a network, what is cached has to do.

    Args:
        weights: fetch safetensors too, and not configuration, tokenizer and templates alone.

    Raises:
        UsageError: there is neither such a folder nor such a name, or the Hub and the cache do not have all of it.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    import httpx
    from huggingface_hub import constants, errors, snapshot_download

    where = f"{source} is not a folder on {socket.gethostname()}"
    cache = f"the cache {constants.HF_HUB_CACHE} does not have all of it"
    patterns = [*SIDE_FILE_PATTERNS, *((WEIGHTS, INDEX) if weights else ())]
    try:
        # Subfolders hold other formats, and consolidated.safetensors is the whole of a Mistral model once more.
        folder = Path(
            snapshot_download(str(source), allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"])
        )
    except errors.HFValidationError as error:
        raise UsageError(f"{where}, and no name on the Hugging Face Hub either.") from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"{where}, and the Hugging Face Hub shows no model of that name; check it, and set HF_TOKEN if the model "
            "is private or gated."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        offline = isinstance(error.__cause__, errors.OfflineModeIsEnabled)
        reason = "HF_HUB_OFFLINE is set" if offline else f"the Hugging Face Hub cannot be reached ({error.__cause__})"
        raise UsageError(
            f"{where}, {reason}, and {cache}; fetch it where there is a network (hf download {source}), or give a "
            "folder."
        ) from error
    except (OSError, httpx.HTTPError) as error:
        raise UsageError(f"{where}, and could not be fetched from the Hugging Face Hub: {error}") from error
    # What Transformers alone has cached has no listing of the whole, by which a part would be told.
    index = folder / INDEX
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {WEIGHTS}
    missing = sorted(shard for shard in shards if not any(folder.glob(shard))) if weights else []
    if missing:
        raise UsageError(
            f"{where}, and of its weights {folder} lacks {missing[0]}; fetch them where there is a network "
            f"(hf download {source}), or give a model with safetensors."
        )
    return folder
