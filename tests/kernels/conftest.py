"""Triton decides when a kernel is decorated whether to interpret it: these tests need a process of their own.

`tests/test_interpreted.py` runs them; by hand: TRITON_INTERPRET=1 python -m pytest tests/kernels.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
