"""Agreement of tensor-parallel ranks at start."""

from __future__ import annotations

import torch

from sgl_ragged.errors import RaggedConfigError


def require_equal_digests(digest: str, ranks: int, group: torch.distributed.ProcessGroup | None) -> None:
    """Raise RaggedConfigError unless all ranks of the group have this digest of a plan; all of them must call."""
    if ranks == 1:
        return
    # 60 bits fit an int64; its negative's smallest value is the largest digest.
    number = int(digest, 16)
    extremes = torch.tensor([number, -number], dtype=torch.int64)
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MIN, group=group)
    least, most = int(extremes[0]), -int(extremes[1])
    if least != most:
        raise RaggedConfigError(
            f"ranks have different plans (digests {least:015x} and {most:015x}): start all of them from one launcher, "
            f"or with the same profile"
        )


def least_over_ranks(value: int, ranks: int, group: torch.distributed.ProcessGroup | None) -> int:
    """Return the smallest value of all ranks of the group; all of them must call.

    Budgets differ between the heads of ranks, page numbers must not.
    """
    if ranks == 1:
        return value
    least = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(least.item())
