"""`make processors`: numeric tests as other processors would run them, on one that can do as they do.

PyTorch and MKL choose their kernels by what the processor has; with fewer instructions sums have another order. Each
setting runs in a process of its own, since both libraries choose when they are loaded, and with its own cache of
compiled code: PyTorch's compiler would take code for wider registers from a shared one, and compute half of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent

FILES = (
    *(
        "tests/fitting/test_attention_matching.py",
        "tests/fitting/test_fitted.py",
        "tests/mem_pool/test_quantise.py",
        "tests/mem_pool/test_row_moments.py",
    ),
    *(
        "tests/scorers/test_scorers.py",
        "tests/attention/test_torch_ops.py",
        "tests/mem_pool/test_kv_dtype.py",
        "tests/calib/test_codebook.py",
    ),
    *("tests/server/test_fitted.py", "tests/server/test_slab_formats.py", "tests/server/test_scorers_served.py"),
    *("tests/server/test_fp8.py", "tests/server/test_semantics.py"),
)
"""Tests of fit, formats and scorers."""

KERNELS = {"default": (), "avx2": ("AVX2", "AVX512"), "avx512": ("AVX512",)}
"""Values of ATEN_CPU_CAPABILITY, and names that `get_cpu_capability` gives processors which have it; none: all have."""


def settings() -> dict[str, dict[str, str]]:
    """Environment variables by name of a setting, of those that this processor can follow."""
    found = torch.backends.cpu.get_cpu_capability()
    aten = {
        f"aten {name}": {"ATEN_CPU_CAPABILITY": name}
        for name, needed in KERNELS.items()
        if not needed or found in needed
    }
    mkl = {"mkl compatible": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}}
    if found in KERNELS["avx2"]:
        mkl["mkl avx2"] = {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    return aten | mkl


def main() -> None:
    """Run FILES under each setting; ends with status 1 if a test fails under any."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--margin", default="1", help="divide tolerances by this: tests that fail then are near theirs")
    parser.add_argument("files", nargs="*", default=FILES, help="test files [those of fit, formats and scorers]")
    options = parser.parse_args()
    failed = []
    for name, variables in settings().items():
        print(f"== {name}: {' '.join(f'{key}={value}' for key, value in variables.items())}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", f"--margin={options.margin}"]
        with tempfile.TemporaryDirectory() as compiled:
            own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": compiled}
            if subprocess.run([*command, *options.files], cwd=ROOT, env=os.environ | own | variables).returncode:
                failed.append(name)
    if failed:
        sys.exit(f"tests fail under: {', '.join(failed)}")


if __name__ == "__main__":
    main()
