"""The one error that users are meant to read."""


class RaggedConfigError(ValueError):
    """What was asked for cannot be honoured. The message says why and what to do, in one line."""
