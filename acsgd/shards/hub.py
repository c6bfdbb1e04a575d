"""Find the directory of a model or checkpoint, copying it from the Hugging Face Hub or another address if needed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from acsgd.errors import missing, nearest_path
from acsgd.io.files.remote import (
    RemoteDirectory,
    check_address,
    explain_remote,
    fetch_directory,
    hub_refusal,
    is_address,
)
from acsgd.notes import print_note
from acsgd.shards.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, has_tokenizer
from acsgd.shards.manifest import MANIFEST

MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.spm")
"""Patterns of the files of a repository besides its weights: config, indices and tokenizer."""
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""Patterns of files with weights, the preferred one first. Other files hold the same weights in other forms."""


def find_model(name: str, *, option: str, weights: bool = True, config_only: bool = False) -> Path:
    """Return the local directory of a model; copy it if its name is a Hugging Face id or an address.

    option: name of the option for messages; weights: whether a download includes them; config_only: whether it is of
    nothing but config.json. Raises ValueError.
    """
    if is_address(name):
        return find_remote(name, option=option, weights=weights, config_only=config_only)
    path = Path(name)
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise ValueError(f"{option}={name[:80]} cannot be read ({error.strerror}); give a directory") from None
    if is_directory:
        if not os.path.lexists(path / CONFIG):
            if os.path.lexists(path / ADAPTER_CONFIG):
                raise ValueError(
                    f"{option}={name} is an adapter directory of PEFT, not a model; give the model that it was trained "
                    f"on, and to generate text with both: acsgd generate MODEL --adapter {name}"
                )
            if newest := max([*path.glob(f"step-*/{MANIFEST}"), *path.glob(f"*/step-*/{MANIFEST}")], default=None):
                raise ValueError(f"{option}={name} holds checkpoints of a run; give one of them, {newest.parent}")
            raise ValueError(
                f"{option}={name} is a directory without config.json; give a Hugging Face model directory or a "
                "layer-shard directory"
            )
        return path
    if path.exists():
        raise ValueError(f"{option}={name} is not a directory; give a directory or a Hugging Face id, owner/name")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{option}={name} {missing(path)}; give a directory or a Hugging Face id, owner/name")
    patterns = [CONFIG] if config_only else [*MODEL_FILES, *([_weights_pattern(name)] if weights else [])]
    return find_model(_download(name, patterns, option=option), option=option)


def refuse_unknown(name: str, adapter: Path | None) -> None:
    """Raise ValueError if a name of a model is neither a path nor an id of the Hub: before imports that take seconds.

    adapter: as `check_adapter`, None = none. Downloads files other than weights.
    """
    if adapter is not None:
        check_adapter(adapter)
    if not os.path.lexists(name):
        find_model(name, option="model", weights=False)


def check_adapter(directory: Path) -> None:
    """Raise ValueError if a directory is not an adapter directory of PEFT."""
    if not os.path.lexists(directory):
        raise ValueError(f"--adapter {directory} {missing(directory)}; give an adapter directory of PEFT")
    if os.path.lexists(directory / MANIFEST):
        raise ValueError(
            f"--adapter {directory} is a checkpoint; it holds model and adapter, so give it as the model, or convert "
            f"its adapter: acsgd convert to-peft {directory} DIRECTORY"
        )
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not os.path.lexists(directory / name):
            raise ValueError(f"--adapter {directory} is not an adapter directory of PEFT: it has no {name}")


def find_remote(address: str, *, option: str, weights: bool = True, config_only: bool = False) -> Path:
    """Return a local copy of the model or checkpoint at an address; of several checkpoints there, of the newest.

    See `find_model`. Raises ValueError.
    """
    from huggingface_hub.constants import HF_HOME

    with _opened(address, option) as remote:
        names = remote.list()
        if CONFIG not in names and (steps := _complete_steps(remote)):
            remote = remote.of(steps[max(steps)])
            names = remote.list()
        if CONFIG not in names:
            raise FileNotFoundError(f"it has no {CONFIG}, and no checkpoint that is complete")
        found = next((pattern for pattern in WEIGHTS if any(fnmatch(name, pattern) for name in names)), WEIGHTS[0])
        patterns = ["[!.]*"] if MANIFEST in names else [*MODEL_FILES, *([found] if weights else [])]
        patterns = [CONFIG] if config_only else patterns
        return fetch_directory(remote, Path(HF_HOME) / "acsgd", patterns, note=print_note)


def uploaded_steps(address: str, *, option: str) -> dict[int, str]:
    """Return the complete checkpoints at an address, by step. Raises ValueError."""
    with _opened(address, option) as remote:
        return _complete_steps(remote)


def _complete_steps(remote: RemoteDirectory) -> dict[int, str]:
    steps = {int(name[5:]): name for name in remote.list() if re.fullmatch(r"step-\d{8,}", name)}
    return {step: name for step, name in steps.items() if MANIFEST in remote.of(name).list()}


@contextlib.contextmanager
def _opened(address: str, option: str) -> Iterator[RemoteDirectory]:
    """Open an address. Raises ValueError if that, or what is done with it, fails."""
    check_address(address, option)
    try:
        yield RemoteDirectory.open(address)
    except Exception as error:  # packages of protocols raise errors of many classes
        if refusal := hub_refusal(error):
            raise ValueError(f"{option}={address} is {refusal}") from None
        raise ValueError(
            f"{option}={address} cannot be read: {explain_remote(error)}; check the address and its credentials"
        ) from None


def find_tokenizer(name: str) -> Path:
    """Return the local directory of a tokenizer, model.tokenizer; download it if it is a Hugging Face id.

    Raises ValueError.
    """
    return Path(name) if has_tokenizer(Path(name)) else find_model(name, option="model.tokenizer", weights=False)


def create_repository(address: str) -> str:
    """Create the repository of an address hf://owner/name, a private one if it is new; return its id.

    Raises ValueError if that is no address of one, or if this user may not write to it.
    """
    from huggingface_hub import HfApi

    name = address.removeprefix("hf://")
    if not re.fullmatch(r"hf://[\w.-]+(/[\w.-]+)?", address):
        raise ValueError(f"--push={address} must be a repository of the Hugging Face Hub, as hf://owner/name")
    try:
        return HfApi().create_repo(name, private=True, exist_ok=True).repo_id
    except Exception as error:  # errors of its HTTP library, too
        if refusal := hub_refusal(error):
            raise ValueError(f"--push={address} is {refusal}") from None
        raise ValueError(
            f"--push={address} cannot be written: {explain_remote(error)}; log in with hf auth login, or set HF_TOKEN"
        ) from None


def push(repository: str, directory: Path) -> str:
    """Upload a directory to a repository; return its address. Raises ValueError that says how to continue."""
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=repository, folder_path=directory)
    except Exception as error:  # errors of its HTTP library, too
        again = shlex.join(["hf", "upload", repository, str(directory)])
        raise ValueError(
            f"{directory} is complete, but could not be pushed: {explain_remote(error)}; continue with {again}"
        ) from None
    return f"https://huggingface.co/{repository}"


def _download(name: str, patterns: Sequence[str], *, option: str) -> str:
    """Download files of a Hugging Face id into its cache; return the directory. patterns: of their names."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # subfolders of a repository hold the same weights in other formats
        return snapshot_download(name, allow_patterns=[*patterns], ignore_patterns=["*/*"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if "/" in name and Path(name).parent.is_dir():
            raise ValueError(f"{option}={name} {missing(Path(name))}; give an existing directory") from None
        if refusal := hub_refusal(error):
            raise ValueError(
                f"{option}={name} is no local directory{nearest_path(Path(name))}, and {refusal}"
            ) from None
        cause = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(
            f"{option}={name} is neither a local directory{nearest_path(Path(name))} nor a model on the Hugging Face "
            f"Hub: {cause}; check the name or, without a network, give a directory with a copy (hf download {name} "
            "--local-dir DIRECTORY)"
        ) from None


def _weights_pattern(name: str) -> str:
    """Return the pattern of the files with the weights of a Hugging Face id: safetensors, if it has any."""
    from huggingface_hub import HfApi

    try:
        files = [file.rfilename for file in HfApi().model_info(name).siblings or []]
    except Exception:  # errors of its HTTP library, too; the download raises those that are not about the network
        return WEIGHTS[0]  # without network, the cache has the files chosen before
    return next((pattern for pattern in WEIGHTS if any(fnmatch(file, pattern) for file in files)), WEIGHTS[0])
