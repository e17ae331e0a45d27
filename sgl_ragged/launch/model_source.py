"""Read what a model path names, be it a folder, a GGUF file or a hub's name: configuration, tokenizer, weights.

Everything is read by SGLang's own functions with the server's settings, so that calibration sees what is served.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.profile_cache import WEIGHTS

CONFIG_SETTINGS = ("revision", "dtype", "quantization", "model_impl", "model_config_parser")
"""Settings of the server that SGLang's ModelConfig takes under the same names."""

_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Samples of a file of weights, from its first byte to its last, and their length."""


def model_folder(view: Any) -> Path:
    """Return where the model's files are: its path (a folder or a GGUF file), or the hub's snapshot of it.

    Args:
        view: SGLang's resolved settings; a ModelScope name is a folder by then, a hub's GGUF file a path.

    Raises:
        RaggedConfigError: they are not on this machine.
    """
    from sglang.srt.utils.common import is_remote_url

    path = Path(view.model_path)
    if path.exists():
        return path
    if is_remote_url(view.model_path):
        raise RaggedConfigError(
            f"the weights of {view.model_path} are not on this machine, so they cannot be told from weights that "
            f"may replace them: copy the model to a folder and name that as --model-path"
        )
    from transformers.utils import cached_file

    cached = cached_config(view.model_path, view.revision)
    if cached is not None:
        return cached.parent
    try:
        return Path(cached_file(view.model_path, "config.json", revision=view.revision)).parent
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise RaggedConfigError(f"the files of {view.model_path} cannot be found: {reason}") from None


def cached_config(name: str, revision: str | None = None) -> Path | None:
    """Return the path of a hub model's config.json in Hugging Face's cache on this machine, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def config_folder(model: str, revision: str | None = None) -> Path:
    """Return the folder of a model's config.json, without network.

    Args:
        model: folder, path of a config.json, or name of a hub's model.

    Raises:
        RaggedConfigError: it is none of these, or the model's config has not been fetched.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        if path.name != "config.json":
            raise RaggedConfigError(f"--model {model} is a file; give a folder or a config.json")
        return path.parent
    cached = cached_config(model, revision)
    if cached is None:
        raise RaggedConfigError(
            f"--model {model}: there is no such folder or config.json, and no config of a model of this name in "
            f"Hugging Face's cache; fetch it with `hf download {model} config.json`"
        )
    return cached.parent


def weights_sample(view: Any) -> str | None:
    """Return 16 hex digits of the weights, equal on all machines: names, sizes and samples of files.

    `profile_cache.weights_identity` names times, which copies of a file do not share, and hashing all of it would take
    as long as loading it. None where there are no weights yet, or none at all.

    Args:
        view: as in `model_folder`.
    """
    try:
        source = model_folder(view)
    except RaggedConfigError:
        return None
    every = [source] if source.is_file() else [path for pattern in WEIGHTS for path in sorted(source.glob(pattern))]
    files = [path for path in every if path.suffix == ".safetensors"] or every
    state = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for part in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * part // (_SAMPLES - 1))
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()[:16] if files else None


def read_config(model: str, settings: Mapping[str, Any]) -> Any:
    """Return SGLang's ModelConfig of any model that the server takes.

    Args:
        settings: the server's, by their names in SGLang; absent ones have SGLang's defaults.

    Raises:
        RaggedConfigError: it cannot be read.
    """
    given = {name: settings[name] for name in CONFIG_SETTINGS if settings.get(name) not in (None, "")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.configs.model_config import ModelConfig

        try:
            return ModelConfig(
                model_path=model,
                # Its own default is to trust.
                trust_remote_code=bool(settings.get("trust_remote_code")),
                model_override_args=settings.get("json_model_override_args") or "{}",
                **given,
            )
        except Exception as error:
            # SGLang, transformers and the model's own code raise whatever they like.
            raise RaggedConfigError(f"cannot read the config of {model}: {_reason(error)}") from None


def load_tokenizer(model: str, settings: Mapping[str, Any]) -> Any:
    """Return the tokenizer that the server has, or would have without --skip-tokenizer-init.

    Args:
        settings: as in `read_config`.

    Raises:
        RaggedConfigError: there is none, or it cannot be read.
    """
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    path = settings.get("tokenizer_path") or model
    try:
        return get_tokenizer(
            path,
            tokenizer_mode=settings.get("tokenizer_mode") or "auto",
            trust_remote_code=bool(settings.get("trust_remote_code")),
            revision=settings.get("revision") or None,
        )
    except Exception as error:
        raise RaggedConfigError(
            f"{path} has no tokenizer that can be read ({_reason(error)}), and the samples are texts: name one with "
            f"--tokenizer-path, with --trust-remote-code if it brings code of its own"
        ) from None


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(" :.") if text else type(error).__name__
