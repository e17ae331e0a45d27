"""Ids of LoRA adapters that change with the adapters' contents.

SGLang puts an adapter's id into the radix key, and so into the keys of pages on disk. Adapters that are loaded while a
server runs get a random id; the id of an adapter of --lora-paths is made from its name and path alone, so that a server
would read pages of an earlier adapter in the same folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from sgl_ragged.errors import RaggedConfigError

READ = ("*.json", "*.safetensors", "*.bin", "*.pt")
"""Patterns of the files that SGLang reads of an adapter: configuration, added tokens, weights."""


def adapter_digest(path: str) -> str:
    """Return 64 hex digits of names and contents of an adapter's files; downloads a hub's adapter, as SGLang does.

    The digest covers contents, not times and sizes as for models, because adapters are small and adapters of equal
    settings have equal sizes.

    Raises:
        RaggedConfigError: the adapter cannot be read.
    """
    folder = Path(path)
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(path, allow_patterns=list(READ)))
        contents = []
        for file in sorted({file for pattern in READ for file in folder.glob(pattern)}):
            with file.open("rb") as opened:
                contents.append([file.name, hashlib.file_digest(opened, "sha256").hexdigest()])
    except (OSError, ValueError) as error:
        # Errors of the hub's client have many lines.
        raise RaggedConfigError(
            f"LoRA adapter {path} is no folder that can be read, nor found on a hub "
            f"({str(error).strip().splitlines()[0]}): correct --lora-paths"
        ) from None
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def adapter_id(from_command_line: bool, original: Callable[[str, str], str], lora_name: str, lora_path: str) -> str:
    """Return an id of an adapter of --lora-paths from SGLang's id and its contents; 32 hex digits like SGLang's.

    Raises:
        RaggedConfigError: the adapter cannot be read; from the command line SystemExit with the same line.
    """
    try:
        digest = adapter_digest(lora_path)
    except RaggedConfigError as error:
        if from_command_line:
            raise SystemExit(f"sgl_ragged: {error}") from None
        raise
    return uuid5(NAMESPACE_URL, f"{original(lora_name, lora_path)}\0{digest}").hex
