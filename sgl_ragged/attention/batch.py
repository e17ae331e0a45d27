"""What attention needs to know about a batch, computed once per forward pass and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class ExtendRequest:
    """One request of an extend batch. Positions count tokens from the start of the sequence.

    `slots` (int64) lists the slots of all segments that are finished once this chunk is in, earlier ones first.
    """

    row: int
    prefix: int
    length: int
    batch_start: int
    slots: torch.Tensor


@dataclass(frozen=True)
class ExtendBatch:
    """Requests of an extend (prefill, chunk or mixed) batch, in batch order."""

    requests: tuple[ExtendRequest, ...]


@dataclass(frozen=True)
class DecodeBatch:
    """A decode batch: one query per request.

    rows, places: int64 [batch], tail row and place of the new token.
    slots: int64 [batch, most segments], slots of each request's sealed segments, padded with slot 0.
    segments: int64 [batch], sealed segments of each request.
    longest_tail: tokens in the longest open segment, the new one included.
    """

    rows: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    segments: torch.Tensor
    longest_tail: int
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask(self, kept: int) -> torch.Tensor:
        """bool [batch, 1, 1, most segments * kept + longest_tail]: what each query may see, made once per `kept`."""
        if kept not in self._masks:
            device = self.slots.device
            history = torch.arange(self.slots.shape[1] * kept, device=device) < self.segments[:, None] * kept
            tail = torch.arange(self.longest_tail, device=device) <= self.places[:, None]
            self._masks[kept] = torch.cat([history, tail], dim=1)[:, None, None, :]
        return self._masks[kept]


def extend_batch(
    req_to_token: torch.Tensor, rows: list[int], prefixes: list[int], lengths: list[int], segment: int
) -> ExtendBatch:
    """Describe an extend batch.

    Args:
        req_to_token: int32 [rows, context], SGLang's table of token locations (slot * segment + place).
        rows, prefixes, lengths: per request its table row, tokens before this chunk and tokens in it.
    """
    requests, start = [], 0
    for row, prefix, length in zip(rows, prefixes, lengths, strict=True):
        finished = (prefix + length) // segment
        slots = req_to_token[row, : finished * segment : segment].to(torch.int64) // segment
        requests.append(ExtendRequest(row=row, prefix=prefix, length=length, batch_start=start, slots=slots))
        start += length
    return ExtendBatch(requests=tuple(requests))


def decode_batch(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    segment: int,
) -> DecodeBatch:
    """Describe a decode batch.

    Args:
        rows: int64 [batch], rows of `req_to_token`.
        seq_lens: int64 [batch] on the device, lengths with the new token; `seq_lens_cpu` the same on the host.
    """
    positions = seq_lens.to(torch.int64) - 1
    host_positions = seq_lens_cpu.to(torch.int64) - 1
    most = int((host_positions // segment).max())
    segments = positions // segment
    slots = req_to_token[rows, : most * segment : segment].to(torch.int64) // segment
    slots = slots.masked_fill(torch.arange(most, device=slots.device) >= segments[:, None], 0)
    return DecodeBatch(
        rows=rows.to(torch.int64),
        places=positions % segment,
        slots=slots,
        segments=segments,
        longest_tail=int((host_positions % segment).max()) + 1,
    )
