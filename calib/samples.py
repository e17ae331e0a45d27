"""Sample contexts from JSON lines, text files or the built-in ones, and their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.built_in import built_in_samples
from sgl_ragged.errors import RaggedConfigError


@dataclass(frozen=True)
class Sample:
    """One context: token ids, chat messages or text (exactly one of them), and its task.

    Args:
        answers: spans (start, stop) in `input_ids` of tokens that the model would generate.
    """

    task: str
    input_ids: tuple[int, ...] | None = None
    answers: tuple[tuple[int, int], ...] = ()
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None


@dataclass(frozen=True)
class TokenizedSample:
    """Token ids of one context, the spans (start, stop) of tokens that the model would generate, and the task."""

    task: str
    input_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...] = ()


def read_samples(paths: Sequence[Path], count: int, seed: int) -> list[Sample]:
    """Read the first `count` samples of the files in order, or make `count` built-in samples if there are no files.

    A .jsonl file holds an object per line with `input_ids`, `messages` or `text`, and optionally `task`; `input_ids`
    may come with `answers`, a list of [start, stop]. Any other file is one text, its task the name of its folder.

    Raises:
        RaggedConfigError: a file is missing, empty or malformed; the message names the line.
    """
    if not paths:
        return [
            Sample(task=task, text=content) if isinstance(content, str) else Sample(task=task, messages=content)
            for task, content in built_in_samples(count, seed)
        ]
    samples: list[Sample] = []
    for path in paths:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RaggedConfigError(f"cannot read samples from {path}: {error}") from None
        if path.suffix == ".jsonl":
            lines = enumerate(text.splitlines(), start=1)
            samples += [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
        else:
            samples.append(Sample(task=path.resolve().parent.name, text=text))
    if not samples:
        raise RaggedConfigError(f"no samples in {', '.join(map(str, paths))}; give other files with --data")
    return samples[:count]


def _parse(line: str, location: str) -> Sample:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise RaggedConfigError(f"{location}: not JSON: {error}") from None
    kinds = [kind for kind in ("input_ids", "messages", "text") if isinstance(entry, dict) and kind in entry]
    if len(kinds) != 1:
        raise RaggedConfigError(f"{location}: needs exactly one of input_ids, messages and text")
    kind, task = kinds[0], str(entry.get("task", "samples"))
    value = entry[kind]
    if kind == "text" and isinstance(value, str):
        return Sample(task=task, text=value)
    if kind == "input_ids" and isinstance(value, list) and all(isinstance(i, int) and i >= 0 for i in value):
        answers = _parse_spans(entry.get("answers", []), len(value), location)
        return Sample(task=task, input_ids=tuple(value), answers=answers)
    if kind == "messages" and isinstance(value, list) and all(isinstance(m, dict) and "content" in m for m in value):
        return Sample(task=task, messages=tuple(value))
    raise RaggedConfigError(f"{location}: {kind} is malformed")


def _parse_spans(value: Any, length: int, location: str) -> tuple[tuple[int, int], ...]:
    try:
        spans = tuple((int(start), int(stop)) for start, stop in value)
    except (TypeError, ValueError):
        raise RaggedConfigError(f"{location}: answers must be a list of [start, stop]") from None
    if any(not 0 < start < stop <= length for start, stop in spans):
        raise RaggedConfigError(f"{location}: answers must be inside input_ids, after the first token")
    return spans


def tokenize(
    samples: Sequence[Sample], load_tokenizer: Callable[[], Any], max_tokens: int, min_tokens: int
) -> list[TokenizedSample]:
    """Tokenize the samples and cut them to `max_tokens` tokens.

    The tokenizer is loaded only if a sample needs it. Messages are rendered with the model's chat template; without
    one, their texts are joined. The assistant's messages are the answers, if their tokens can be found in the rendered
    conversation.

    Raises:
        RaggedConfigError: a sample has fewer than `min_tokens` tokens, or `load_tokenizer` finds no tokenizer.
    """
    tokenizer = load_tokenizer() if any(sample.input_ids is None for sample in samples) else None
    tokenized = []
    for number, sample in enumerate(samples, start=1):
        ids, answers = _token_ids(sample, tokenizer)
        if len(ids) < min_tokens:
            raise RaggedConfigError(
                f"sample {number} has {len(ids)} tokens, but calibration needs at least {min_tokens}: later tokens "
                f"must look back at a whole segment; give longer samples or a shorter --segment"
            )
        inside = tuple((start, min(stop, max_tokens)) for start, stop in answers if start < max_tokens)
        tokenized.append(TokenizedSample(task=sample.task, input_ids=tuple(ids[:max_tokens]), answers=inside))
    return tokenized


def _token_ids(sample: Sample, tokenizer: Any) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
    """Return the token ids of a sample and the spans of its answers."""
    if sample.input_ids is not None:
        return sample.input_ids, sample.answers
    if sample.text is not None:
        return tokenizer.encode(sample.text), ()
    messages = list(sample.messages or ())
    if not tokenizer.chat_template:
        return tokenizer.encode("\n".join(message["content"] for message in messages)), ()

    def render(count: int, prompt: bool) -> list[int]:
        options = dict(tokenize=True, return_dict=True, add_generation_prompt=prompt)
        return list(tokenizer.apply_chat_template(messages[:count], **options)["input_ids"])

    ids = render(len(messages), False)
    spans = []
    for number, message in enumerate(messages):
        if message.get("role") == "assistant" and number > 0:
            before, after = render(number, True), render(number + 1, False)
            # A template that renders earlier turns differently from the last one gives no reliable spans.
            if ids[: len(before)] == before and ids[: len(after)] == after and len(before) < len(after):
                spans.append((len(before), len(after)))
    return ids, spans


def dataset_hash(samples: Sequence[TokenizedSample]) -> str:
    """Return 16 hex digits over tasks, token ids and answers."""
    content = json.dumps([[s.task, s.input_ids, s.answers] for s in samples])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
