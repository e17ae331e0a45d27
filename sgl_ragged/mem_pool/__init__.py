"""The pool: slabs, tails, sealing and sizing."""
