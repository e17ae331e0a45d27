"""How a worker ends that cannot serve: with one line on stderr, and a status that the launcher knows.

SGLang would print the traceback of the worker and then that of the launcher, and end with another status each time.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from sgl_ragged.errors import TO_COMMAND_LINE, TO_ENGINE, RaggedConfigError

_OTHER_RANKS_WAIT_S = 5.0


def end_worker(error: RaggedConfigError, from_command_line: bool, rank: int) -> NoReturn:
    """Print the reason and end this worker process at once. All ranks find the same reason; the first prints it."""
    if rank:
        # The launcher ends all workers when the first has ended. If only this one refuses, its line is printed after
        # the wait.
        time.sleep(_OTHER_RANKS_WAIT_S)
    print(f"sgl_ragged: {error}", file=sys.stderr, flush=True)
    # No exception: SGLang would answer it with tracebacks. Nothing has been served yet, nothing is lost.
    os._exit(TO_COMMAND_LINE if from_command_line else TO_ENGINE)


def ending_worker(function: Callable, from_command_line: bool) -> Callable:
    """Return the function with refusals turned into the end of this worker, with one line."""

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RaggedConfigError as error:
            from sglang.srt.runtime_context import get_parallel

            end_worker(error, from_command_line, get_parallel().launch_world_rank)

    return bound
