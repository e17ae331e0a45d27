"""One streamed request through the OpenAI-compatible API, and its times."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import httpx
import openai

from benchmarks.harness.errors import PointFailed, ServerLost

TIMEOUT_S = 600


@dataclass(frozen=True)
class Answer:
    """One answered request. Times in seconds, `sent_s` since the point began; lengths in tokens.

    Attributes:
        number, client, round: of the request.
        itl_ms: time between two tokens, one entry for each token after the first. Tokens that came in one chunk
            share its gap evenly, as in SGLang's own benchmark.
        cached: prompt tokens that the server took from its cache.
        reusable: prompt tokens that a cache of any size, token by token, could have had: sent before in a request
            that was answered before this one was sent.
        right: whether the first word was the right one, None where no word is.
    """

    number: int
    client: int
    round: int
    sent_s: float
    ttft_s: float
    latency_s: float
    itl_ms: tuple[float, ...]
    prompt: int
    cached: int
    output: int
    reusable: int
    right: bool | None


@dataclass(frozen=True)
class Streamed:
    """What one stream gave: text, its times in seconds since it was sent, and the server's token counts."""

    text: str
    ttft_s: float
    latency_s: float
    itl_ms: tuple[float, ...]
    prompt: int
    cached: int
    output: int


class Client:
    """An asynchronous client of one server."""

    def __init__(self, url: str, model: str) -> None:
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
        self._model = model

    async def close(self) -> None:
        await self._openai.close()

    async def ask(self, messages: list[dict[str, str]], output_length: int) -> Streamed:
        """Stream an answer of exactly `output_length` tokens.

        Raises:
            ServerLost: the connection failed or broke.
            PointFailed: the server refused the request or broke it off.
        """
        began = time.perf_counter()
        arrivals: list[tuple[float, int]] = []
        pieces: list[str] = []
        usage = None
        try:
            stream = await self._openai.chat.completions.create(  # type: ignore[call-overload]
                model=self._model,
                messages=messages,
                temperature=0,
                max_tokens=output_length,
                stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
                # All answers take the same work, and their text is what the next prompt has to be read back from.
                extra_body={"ignore_eos": True, "skip_special_tokens": False},
            )
            async for chunk in stream:
                now = time.perf_counter() - began
                usage = chunk.usage or usage
                if chunk.choices and chunk.choices[0].delta.content:
                    pieces.append(chunk.choices[0].delta.content)
                if usage is not None and usage.completion_tokens > (arrivals[-1][1] if arrivals else 0):
                    arrivals.append((now, usage.completion_tokens))
        except openai.APIStatusError as error:
            raise PointFailed(f"a request was refused: {error.message.splitlines()[0]}") from None
        except (openai.APIConnectionError, httpx.TransportError) as error:
            raise ServerLost(f"{type(error).__name__} in a request") from None
        except openai.APIError as error:
            raise PointFailed(f"a request was broken off: {error.message.splitlines()[0]}") from None
        latency_s = time.perf_counter() - began
        if usage is None or not arrivals:
            raise PointFailed("a stream ended without a token or without its token counts")
        if usage.completion_tokens != output_length:
            raise PointFailed(f"an answer has {usage.completion_tokens} tokens instead of {output_length}")
        details = usage.prompt_tokens_details
        if details is None:
            raise PointFailed("the server does not report cached tokens: start it with --enable-cache-report")
        return Streamed(
            text="".join(pieces),
            ttft_s=arrivals[0][0],
            latency_s=latency_s,
            itl_ms=gaps_ms(arrivals),
            prompt=usage.prompt_tokens,
            cached=details.cached_tokens or 0,
            output=usage.completion_tokens,
        )


def gaps_ms(arrivals: list[tuple[float, int]]) -> tuple[float, ...]:
    """Milliseconds between tokens, from (seconds, tokens so far) of each chunk; the first chunk gives none."""
    gaps: list[float] = []
    for (before_s, before), (after_s, after) in itertools.pairwise(arrivals):
        gaps += [round(1000 * (after_s - before_s) / (after - before), 3)] * (after - before)
    return tuple(gaps)
