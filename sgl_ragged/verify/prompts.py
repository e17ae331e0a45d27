"""Prompts for `sgl-ragged verify`: four texts that calibration has not seen, or a file of the user's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.verify.running_server import Prompt

BUILT_IN = ("prose", "code", "chat", "german")


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt and its name in tables."""

    name: str
    prompt: Prompt


def built_in_prompts() -> list[NamedPrompt]:
    """Return the texts in `texts/`, 1,655 to 2,787 tokens each with the tokenizer of SmolLM2."""
    folder = files("sgl_ragged.verify") / "texts"
    return [NamedPrompt(name, (folder / f"{name}.txt").read_text(encoding="utf-8")) for name in BUILT_IN]


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
