"""The Hugging Face hub: files from it and to it, and the card of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_xl.errors import CheckpointError, counted

CARD_FILE = "README.md"

_CARD = """---
library_name: {library}
{task}tags:
- transformer-xl
---
# {name}

A model of kind `{config.kind}` with {n_parameter:,} parameters: {layers} of width {config.d_model},
mem_len {config.mem_len:,}, {config.vocab_size:,} tokens.

```python
{load}
```
{training}"""


def model_card(model: Any, *, name: str, load: str, library: str = "transformer_xl", training: str = "") -> str:
    """Return the README.md of a model: `load` is Python code, `training` Markdown that says what it has learned from."""
    config, n_parameter = model.config, sum(parameter.numel() for parameter in model.parameters())
    task = "pipeline_tag: text-generation\n" if config.predicts == "token" and config.head is None else ""
    fields = {"library": library, "task": task, "name": name, "config": config, "n_parameter": n_parameter, "load": load}
    return _CARD.format(**fields, layers=counted(config.n_layer, "layer"), training=training)


def download(repo_id: str, files: Sequence[str], *, revision: str | None, token: str | None) -> Path:
    """Return a local directory with those of `files` that a repository has.

    Raises:
        CheckpointError: the repository cannot be read. The message only says why, so that callers can quote it in theirs.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=list(files)))
    except Exception as error:  # the hub raises many kinds: no network, no such id, no permission
        raise CheckpointError(_first_line(error)) from None


def upload(folder: str | Path, repo_id: str, *, private: bool, token: str | None, commit_message: str) -> str:
    """Upload a directory as one commit, into a new repository if there is none, and return the address of the commit."""
    from huggingface_hub import HfApi

    try:
        hub = HfApi(token=token)
        hub.create_repo(repo_id, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message))
    except Exception as error:  # the hub raises many kinds: no network, no permission, an impossible name
        raise CheckpointError(
            f"cannot upload to '{repo_id}' ({_first_line(error)}); check the name (user/name), the network and the token"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
