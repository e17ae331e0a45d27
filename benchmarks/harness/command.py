"""How benchmarks end as commands, and what their result files say of the command that made them."""

from __future__ import annotations

import contextlib
import datetime
import shlex
import signal
import sys
from collections.abc import Iterator

from benchmarks.harness.errors import BenchmarkError, ServerFailed
from sgl_ragged.errors import RaggedConfigError


@contextlib.contextmanager
def command(name: str) -> Iterator[None]:
    """Around the work of a command: what it raises becomes one line, `name: why`, and an exit status.

    The status is 1 after a BenchmarkError or RaggedConfigError, 130 after Ctrl-C and 143 after SIGTERM. All of them
    unwind the stack, so that the servers of the command end with it.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except ServerFailed as error:
        sys.exit(f"{name}: a server did not start: {error.reason}")
    except (BenchmarkError, RaggedConfigError) as error:
        # Messages of libraries that ours quote may run over several lines.
        sys.exit(f"{name}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def provenance(name: str) -> dict[str, str]:
    """Return date (ISO 8601, UTC) and command line of this process, which runs a benchmark, for a result file."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", name, *sys.argv[1:]]),
    }
