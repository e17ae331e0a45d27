"""How a worker ends that cannot serve: with one line on stderr, and a status that the launcher knows.

SGLang would print the traceback of the worker and then that of the launcher, and end with another status each time.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from sgl_ragged.errors import RaggedConfigError

if TYPE_CHECKING:
    from sgl_ragged.launch.options import RaggedOptions

TO_COMMAND_LINE, TO_ENGINE = 78, 79
"""Exit statuses of a worker that has said why, by who started it: EX_CONFIG of sysexits.h, and one that is free."""

_OTHERS_WAIT_S = 5.0


def end_worker(error: RaggedConfigError, options: RaggedOptions, rank: int) -> NoReturn:
    """Print the reason and end this worker process at once; all ranks find the same reason, the first one prints it."""
    if rank:
        # The launcher ends all workers when the first has ended. If only this one refuses, it is heard after all.
        time.sleep(_OTHERS_WAIT_S)
    print(f"sgl_ragged: {error}", file=sys.stderr, flush=True)
    # No exception: SGLang would answer it with tracebacks. Nothing has been served yet, nothing is lost.
    os._exit(TO_COMMAND_LINE if options.from_command_line else TO_ENGINE)


def bind(hook: Callable, options: RaggedOptions) -> Callable:
    """The hook as SGLang calls it, the original function first; a refusal ends the worker with one line."""

    @functools.wraps(hook)
    def bound(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(options, *args, **kwargs)
        except RaggedConfigError as error:
            from sglang.srt.runtime_context import get_parallel

            end_worker(error, options, get_parallel().launch_world_rank)

    return bound


def answer_dead_worker(original: Callable, rank: int, process: Any) -> Exception:
    """Replaces SGLang's error for a worker that died at start: if the worker printed why, the launcher just ends."""
    error = original(rank, process)
    if process.exitcode == TO_COMMAND_LINE:
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(os.getpid(), include_parent=False)
        # No SystemExit: on its way out the interpreter would wait for sockets whose other ends are gone.
        os._exit(1)
    if process.exitcode == TO_ENGINE:
        return RaggedConfigError("a worker refused to serve; the line above that starts with sgl_ragged says why")
    return error
