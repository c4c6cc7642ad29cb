"""Push a directory to the Hugging Face Hub, where it is private by default.

The token comes from the environment only, and no message contains it.
"""

import os
import re
from pathlib import Path
from typing import Literal

from horizonrl.common.errors import ConfigError, MissingDependency, RunFailed
from horizonrl.learner.engine.checkpoint.model_directory import MODEL_FILES
from horizonrl.ops.publish.dataset import CARD, SHARDS

TOKEN = "HF_TOKEN"
"""The environment variable that `huggingface_hub` reads as well; HF_ENDPOINT names another hub."""
WRITTEN = {
    "dataset": [CARD, "schema.json", f"data/{SHARDS}"],
    "model": ["README.md", "model.safetensors", *MODEL_FILES],
}
"""What is pushed of a folder: the files that `dataset` and `export` write."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def require_push(name: str) -> str:
    """Return the token. Raises ConfigError if the name is not that of a repository, or without a token."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--push {name}: a repository is named OWNER/NAME")
    token = os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(
            f"--push needs a token with write access: set the environment variable {TOKEN}"
        )
    return token


def push(
    folder: Path, name: str, kind: Literal["model", "dataset"], *, public: bool = False
) -> str:
    """Make the repository if there is none, upload what we wrote in one commit, and return the commit's address."""
    token = require_push(name)
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise MissingDependency(
            f"--push needs {error.name}: pip install huggingface_hub"
        ) from error
    # With the token: without one, the library would take that of a login on this machine.
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        api.create_repo(name, repo_type=kind, private=not public, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            repo_type=kind,
            folder_path=folder,
            commit_message="Upload from HorizonRL",
            allow_patterns=WRITTEN[kind],
            ignore_patterns=[".*"],
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        # What a library puts into its messages is not ours to know: the token might be in a header or an address.
        reason = str(error).replace(token, "***")
        raise RunFailed(
            f"{folder} is complete but was not pushed to {name}: {type(error).__name__}: {reason}"
        ) from None
    return str(commit.commit_url)
