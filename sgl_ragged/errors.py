"""The one error that users are meant to read."""


class RaggedConfigError(ValueError):
    """The settings cannot be served. The message says why and what to do, in one line."""
