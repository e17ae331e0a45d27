"""Features of a server, each with a half for the launcher and a half for workers."""
