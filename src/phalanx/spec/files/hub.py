"""Models on the Hugging Face hub: `org/name`, or `org/name@revision` as in the `hf://` paths of huggingface_hub.

Their files are those of the local cache, which huggingface_hub fills. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE
apply. The package is imported for names of the hub only, because the import takes half a second.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from phalanx.spec.errors import UserError
from phalanx.spec.extras import missing_package

NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w./-]*))?")
DEFAULT_REVISION = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
FILE_SUFFIXES = (".json", ".toml")
"""Endings of names of local files, which may be missing."""
REQUEST_SECONDS = 10.0
"""Maximum time for the first answer of the hub."""
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
FILES_NEXT_TO_WEIGHTS = (
    "generation_config.json",
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*",
    "LICENSE*",
    "NOTICE*",
)
"""Glob patterns of the Hugging Face files that remain valid for the trained model. The model card is not among them."""


class HubName(NamedTuple):
    """A model on the hub."""

    repo: str
    """Organization and name."""
    revision: str
    """Branch, tag or commit."""

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"


def hub_name(source: str | Path) -> HubName | None:
    """Return the model on the hub that a name stands for; None if it is or looks like a local path."""
    match = NAME.fullmatch(str(source))
    if match is None or str(source).endswith(FILE_SUFFIXES) or Path(source).exists():
        return None
    return HubName(match["repo"], match["revision"] or DEFAULT_REVISION)


def pin_revision(field: str, source: str, file: str = CONFIG_FILE) -> str:
    """Return the name of a model on the hub with its commit; a local path unchanged.

    The commit is that of `file`, which every use of the name reads."""
    name = hub_name(source)
    if name is None or COMMIT.fullmatch(name.revision):
        return source
    # The cache has a directory for each commit.
    return str(name._replace(revision=hub_file(field, name, file).parent.name))


def hub_file(field: str, name: HubName, file: str) -> Path:
    """Return the path of a small file of a model in the local cache, and download it if the cache lacks it.

    `field` names the model. Raises UserError if there is no such model or file, or if the hub cannot be reached.
    """
    with hub_errors(field, name, file):
        from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(name.repo, file, revision=name.revision)
        if isinstance(cached, str):
            return Path(cached)
        # A download tries for half a minute, which is too long for a misspelled path on a machine without network.
        HfApi().model_info(name.repo, revision=name.revision, timeout=REQUEST_SECONDS)
        return Path(hf_hub_download(name.repo, file, revision=name.revision))


def tokenizer_directory(field: str, name: HubName) -> Path:
    """Return the directory with the tokenizer of a model in the local cache, and download what the cache lacks.

    Raises UserError as `hub_file` does.
    """
    directory = hub_file(field, name, TOKENIZER_FILE).parent
    if (directory / TOKENIZER_CONFIG_FILE).is_file():
        return directory
    return download_files(field, name._replace(revision=directory.name), weights=())


def download_files(field: str, name: HubName, weights: Sequence[str]) -> Path:
    """Download files of weights and the files next to them, unless the local cache has them; return their directory.

    Raises UserError as `hub_file` does.
    """
    with hub_errors(field, name, "files"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import tqdm

        class TerminalProgress(tqdm):
            """A progress bar on a terminal, and none in a log."""

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options | {"disable": not sys.stderr.isatty()})  # type: ignore[no-untyped-call]

        patterns = [CONFIG_FILE, *FILES_NEXT_TO_WEIGHTS, *weights]
        directory = snapshot_download(
            name.repo, revision=name.revision, allow_patterns=patterns, tqdm_class=TerminalProgress
        )
        return Path(directory)


def hub_file_names(field: str, name: HubName) -> list[str]:
    """Return the names of all files of a model on the hub. Raises UserError as `hub_file` does."""
    with hub_errors(field, name, "files"):
        from huggingface_hub import HfApi

        return HfApi().list_repo_files(name.repo, revision=name.revision)


@contextmanager
def hub_errors(field: str, name: HubName, file: str) -> Iterator[None]:
    """Raise UserError for an error of huggingface_hub that occurs while it reads a file.

    The message has no text of the error, which may have addresses with signatures."""
    try:
        import huggingface_hub.errors as known
        from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
    except ImportError:
        raise missing_package(field, str(name), "huggingface_hub", "use the path of a local directory") from None
    hub = urlsplit(ENDPOINT).netloc.rpartition("@")[2]
    try:
        yield
    except Exception as error:  # of huggingface_hub, and of the HTTP client that its version has
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, known.GatedRepoError):
            problem = f"is gated: {hub} shows it to users who have accepted its terms"
            fix = f"accept them on {hub}/{name.repo}, and set HF_TOKEN to your token"
        elif isinstance(error, known.RepositoryNotFoundError | known.HFValidationError):
            problem = f"is neither a local path nor a model on {hub} that may be read"
            fix = "check the name; for a private model, set HF_TOKEN"
        elif isinstance(error, known.RevisionNotFoundError):
            problem = f"is not a revision of this model on {hub}"
            fix = "write org/name@revision with a branch, a tag or a commit"
        elif isinstance(error, known.EntryNotFoundError) and not isinstance(error, known.LocalEntryNotFoundError):
            problem = f"has no {file} on {hub}"
            fix = "name a model in the format of transformers"
        elif status == 401:
            problem = f"cannot be read, because {hub} refuses the token"
            fix = "set HF_TOKEN to a valid token, or unset it"
        elif isinstance(error, OSError) and error.errno and status is None:
            problem = f"cannot be written to the local cache: {error.strerror}"
            fix = "set HF_HOME to a writable directory with enough space"
        elif HF_HUB_OFFLINE:
            problem = f"is not a local path, and the local cache lacks its {file}, while HF_HUB_OFFLINE is set"
            fix = f"unset HF_HUB_OFFLINE, or fill the cache of HF_HOME elsewhere: hf download {name.repo}"
        else:
            reason = f"HTTP {status}" if status else type(error).__name__
            problem = f"is not a local path, and {hub} did not send its {file}, which the local cache lacks ({reason})"
            fix = "check the path and the network, and start again: what is complete remains in the cache"
        raise UserError(field, str(name), problem, fix) from None
