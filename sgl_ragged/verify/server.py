"""A server that is asked for distributions, however it is reached."""

from __future__ import annotations

import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.profiles.reference import LIKELIEST
from sgl_ragged.verify.distributions import Distributions


class Server(ABC):
    """A server of SGLang. Requests have cache namespaces of their own, so nothing is flushed and other traffic runs.

    Methods raise RaggedConfigError where the server refuses.
    """

    url: str
    """Where it is, for tables and messages."""

    segment = 256
    """Tokens per segment where /server_info does not say, as with SGLang's pool."""

    replicas = 1
    """Number of replicas (--dp-size). Requests of a namespace go to one of them, since each has a cache of its own."""

    likeliest = LIKELIEST
    """Tokens per position whose log-probabilities are asked for; at most as many as the model has."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return /server_info; an empty dictionary if the server has none."""

    @abstractmethod
    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a body of /generate."""

    def read(self, ids: Sequence[int], start: int = 0, namespace: str | None = None) -> Distributions:
        """Return what the server predicts for the tokens of a prompt after position `start`.

        Tokens before `start` come from the cache where the namespace has them; a new namespace has nothing.
        """
        meta = self._ask(ids, 1, namespace, logprob_start_len=start)["meta_info"]
        own, top = meta["input_token_logprobs"], meta.get("input_top_logprobs") or []
        if len(own) != len(top):
            raise RaggedConfigError(
                f"{self.url} does not return the likeliest tokens of prompts, as routers of prefill and decode servers "
                f"do not; use --url PREFILL --decode DECODE"
            )
        # The first entry is the token at `start`, which is not predicted.
        return Distributions.from_meta(start + 1, own[1:], top[1:])

    def go_on(self, ids: Sequence[int], count: int, namespace: str | None = None) -> tuple[list[int], Distributions]:
        """Return the next `count` tokens of greedy decoding and what was predicted for each."""
        answer = self._ask(ids, count, namespace, ignore_eos=True)
        meta = answer["meta_info"]
        own, top = meta["output_token_logprobs"], meta["output_top_logprobs"]
        return list(answer["output_ids"]), Distributions.from_meta(len(ids), own, top)

    def _ask(
        self, ids: Sequence[int], count: int, namespace: str | None, ignore_eos: bool = False, **more: Any
    ) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": ignore_eos}
        body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, **more}
        namespace = namespace or new_namespace()
        body |= {"top_logprobs_num": self.likeliest, "extra_key": namespace}
        if self.replicas > 1:
            body["routed_dp_rank"] = zlib.crc32(namespace.encode()) % self.replicas
        return self.generate(body)


def new_namespace() -> str:
    """Return a name under which a server has cached nothing."""
    return f"sgl-ragged-verify-{uuid.uuid4().hex}"
