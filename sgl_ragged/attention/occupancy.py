"""Occupancy: the CTAs of a compiled kernel that a GPU holds at once, which the CTA map hands out.

Registers are allocated to warps in units of 256, and warps in fours, one for each quarter of a multiprocessor; shared
memory to CTAs in units of 128 bytes, after 1 KiB of its own that the driver takes for each. Sources: CUDA C++
Programming Guide, "Technical Specifications per Compute Capability"; the rules of the CUDA Occupancy Calculator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_ragged.errors import RaggedConfigError

WARP = 32
REGISTER_UNIT = 256
WARP_UNIT = 4
SHARED_UNIT = 128
SHARED_RESERVED = 1024


@dataclass(frozen=True)
class SMLimits:
    """Limits of one multiprocessor: 32-bit registers, bytes of shared memory, resident warps and resident CTAs."""

    registers: int
    shared_bytes: int
    warps: int
    ctas: int


KNOWN_LIMITS = {
    (8, 0): SMLimits(65536, 164 << 10, 64, 32),
    (8, 6): SMLimits(65536, 100 << 10, 48, 16),
    (8, 9): SMLimits(65536, 100 << 10, 48, 24),
    (9, 0): SMLimits(65536, 228 << 10, 64, 32),
    (10, 0): SMLimits(65536, 228 << 10, 64, 32),
    (10, 3): SMLimits(65536, 228 << 10, 64, 32),
    (12, 0): SMLimits(65536, 100 << 10, 48, 24),
}
"""By compute capability."""


def ctas_per_sm(registers: int, warps: int, shared_bytes: int, limits: SMLimits) -> int:
    """Return the CTAs of a kernel that one multiprocessor holds; 0 if none fits.

    Args:
        registers: 32-bit registers of each thread.
        warps: warps of each CTA.
        shared_bytes: shared memory of each CTA.
    """
    warp_registers = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    warps_by_registers = limits.registers // max(warp_registers, 1) // WARP_UNIT * WARP_UNIT
    shared = -(-(shared_bytes + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
    return min(
        limits.ctas,
        limits.warps // warps,
        warps_by_registers // warps if registers else limits.ctas,
        limits.shared_bytes // shared,
    )


def device_limits(properties: Any) -> SMLimits:
    """Return the limits of a GPU from torch's properties, and missing ones by compute capability.

    torch tells the largest number of CTAs in no version.

    Raises:
        RaggedConfigError: a limit is known neither to torch nor in `KNOWN_LIMITS`.
    """
    capability = (properties.major, properties.minor)
    known = KNOWN_LIMITS.get(capability)
    threads = getattr(properties, "max_threads_per_multi_processor", None)
    told = {
        "registers": getattr(properties, "regs_per_multiprocessor", None),
        "shared_bytes": getattr(properties, "shared_memory_per_multiprocessor", None),
        "warps": threads and threads // WARP,
        "ctas": None,
    }
    missing = [name for name, value in told.items() if value is None]
    if known is None and missing:
        raise RaggedConfigError(
            f"the limits of a multiprocessor of compute capability {capability[0]}.{capability[1]} are not known "
            f"({', '.join(missing)}): add them to KNOWN_LIMITS in sgl_ragged/attention/occupancy.py"
        )
    return SMLimits(**{name: getattr(known, name) if value is None else value for name, value in told.items()})


@dataclass(frozen=True)
class Resources:
    """Resources of one CTA of a compiled kernel: registers per thread, bytes of shared memory, warps.

    spills: 4-byte words of local memory per thread that stand in for registers; 0 in a healthy kernel.
    """

    registers: int
    shared_bytes: int
    warps: int
    spills: int

    @classmethod
    def of(cls, kernel: Any) -> Resources:
        """Read the resources of a compiled Triton kernel, as its launch returns it; loads it to the GPU if needed."""
        if getattr(kernel, "n_regs", None) is None:
            kernel._init_handles()
        metadata = kernel.metadata
        return cls(int(kernel.n_regs), int(metadata.shared), int(metadata.num_warps), int(kernel.n_spills))


def resident_ctas(kernel: Any, device: Any = None) -> int:
    """Return the CTAs of a compiled kernel that the GPU holds at once: multiprocessors * CTAs of each.

    Args:
        kernel: what a launch of a Triton kernel returns.
        device: a CUDA device as torch names it; None for the current one.

    Raises:
        RaggedConfigError: the GPU's limits are not known.
    """
    import torch

    properties = torch.cuda.get_device_properties(device)
    used = Resources.of(kernel)
    each = ctas_per_sm(used.registers, used.warps, used.shared_bytes, device_limits(properties))
    return properties.multi_processor_count * max(each, 1)
