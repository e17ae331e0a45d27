"""Which requests SGLang's scheduler may cut: of one batch of prefill no more than one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

from sgl_ragged.launch.options import RaggedOptions


def cut_one_request(options: RaggedOptions, original: Callable, adder: Any, req: Any) -> Any:
    """Nobody is admitted behind a request that was cut, as SGLang does it wherever it counts in pages.

    With --disable-radix-cache it admits requests that ignore EOS in another way, which counts in tokens. Decode within
    prefill leaves less than a page of the batch, and the next prompt is cut to that. The scheduler goes on with the
    request that was cut last; the one before would be decoded as if its first chunk were its whole prompt.
    """
    return AddReqResult.OTHER if adder.new_chunked_req is not None else original(adder, req)
