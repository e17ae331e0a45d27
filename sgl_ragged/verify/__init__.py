"""`sgl-ragged verify`: measure how far a running server's distributions are from another server's."""
