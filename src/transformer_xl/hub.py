"""Files from and to the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path

from transformer_xl.errors import CheckpointError


def download(repo_id: str, files: Sequence[str], *, revision: str | None = None, token: str | None = None) -> Path:
    """Return a local directory with files of a repository.

    Args:
        repo_id: `user/name`.
        files: those wanted; the ones that the repository lacks are left out.
        revision: a branch, tag or commit; None: the newest.
        token: of the hub; None: that of `hf auth login`.

    Returns:
        The directory, in the hub's cache.

    Raises:
        CheckpointError: no such repository, or it cannot be read; in a few words, for a caller to put into its own message.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=list(files)))
    except Exception as error:  # the hub raises many kinds: no network, no such id, no permission
        raise CheckpointError(_reason(error)) from None


def upload(folder: str | Path, repo_id: str, *, private: bool, token: str | None, commit_message: str) -> str:
    """Upload a directory as a commit, into a new repository if there is none.

    Args:
        folder: whose files are uploaded.
        repo_id: `user/name`.
        private: of a new repository.
        token: of the hub; None: that of `hf auth login`.
        commit_message: one line.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: the hub refused, or cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        hub = HfApi(token=token)
        hub.create_repo(repo_id, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message))
    except Exception as error:  # the hub raises many kinds: no network, no permission, a name that cannot be
        raise CheckpointError(
            f"cannot upload to '{repo_id}' ({_reason(error)}); check the name (user/name), the network and the token"
        ) from None


def _reason(error: Exception) -> str:
    """Return the first line of what an exception says."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
