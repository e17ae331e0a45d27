"""Prompts for `sgl-ragged verify`: four texts that calibration has not seen, or a file of the user's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sgl_ragged.errors import RaggedConfigError

Prompt = str | list[dict[str, Any]] | list[int]
"""Text, messages in OpenAI's format, or token ids."""

BUILT_IN = ("prose", "code", "chat", "german")


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt and its name in tables."""

    name: str
    prompt: Prompt


@dataclass(frozen=True)
class TokenizedPrompt:
    """Token ids of a prompt, and its name in tables."""

    name: str
    ids: list[int]


def built_in_texts() -> dict[str, str]:
    """Return the texts in `texts/` by name, 1,655 to 2,787 tokens each with the tokenizer of SmolLM2."""
    folder = files("sgl_ragged.verify") / "texts"
    return {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in BUILT_IN}


def built_in_prompts() -> list[NamedPrompt]:
    """Return the built-in texts as prompts."""
    return [NamedPrompt(name, text) for name, text in built_in_texts().items()]


def read_prompts(path: Path) -> list[NamedPrompt]:
    """Read a file of prompts.

    A `.jsonl` file has on each line an object with `messages`, as OpenAI's chat endpoint takes them, `prompt` or
    `text`, or `input_ids`. Any other file is one text.

    Raises:
        RaggedConfigError: the file cannot be read, or a line has no prompt.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RaggedConfigError(f"--prompts {path} cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        return [NamedPrompt(path.name, content)]
    found = []
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            found.append(NamedPrompt(f"line {number}", _prompt_of(path, number, line)))
    if not found:
        raise RaggedConfigError(f"--prompts {path} is empty")
    return found


def _prompt_of(path: Path, number: int, line: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise RaggedConfigError(f"--prompts {path}: line {number} is not JSON ({error.msg})") from error
    if isinstance(entry, str):
        return entry
    for name, kind in (("messages", dict), ("prompt", str), ("text", str), ("input_ids", int)):
        value = entry.get(name) if isinstance(entry, dict) else None
        if kind is str and isinstance(value, str) and value:
            return value
        if kind is not str and isinstance(value, list) and value and all(isinstance(one, kind) for one in value):
            return value
    raise RaggedConfigError(
        f"--prompts {path}: line {number} has no prompt; write an object with messages, prompt, text or input_ids"
    )
