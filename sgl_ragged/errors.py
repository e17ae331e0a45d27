"""The one error that users are meant to read, and the exit statuses of workers that ended with it."""

TO_COMMAND_LINE, TO_ENGINE = 78, 79
"""Exit statuses of a worker that has printed its reason, by who started it: EX_CONFIG of sysexits.h, and an unused
one."""


class RaggedConfigError(ValueError):
    """The settings cannot be served. The message gives the reason and what to do, in one line."""
