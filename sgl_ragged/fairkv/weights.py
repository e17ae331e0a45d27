"""Reordering of a checkpoint's attention weights by a placement, while they are loaded. Torch, without SGLang.

Every rank reads the same checkpoint and takes its contiguous share of each projection. With heads in placement order,
this share is that of the rank's places, so nothing else in the model changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from sgl_ragged.errors import RaggedConfigError
from sgl_ragged.fairkv.placement import Placement
from sgl_ragged.profiles.geometry import ModelGeometry

_ATTENTION = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:self_attn|self_attention|attention|attn)\.(.+)$")
_PROJECTION = re.compile(r"([qkvo])_proj\.(weight|bias)")
_FUSED = re.compile(r"qkv|query_key_value|w_pack|c_attn|kv_proj", re.IGNORECASE)
_QUANTISED = re.compile(r"scale|zero|qweight|g_idx|absmax|quant", re.IGNORECASE)

_SHARED = ("q_norm.weight", "k_norm.weight", "rotary_emb.inv_freq", "o_proj.bias")
"""Weights that all heads of a layer share. Norms count only if they have one weight per element of a head."""


class HeadOrder:
    """Reorders weights by head: rows of q, k and v, columns of o. One object per load.

    Args:
        placement: heads of all places; a head at several places is repeated.
        geometry: geometry of the checkpoint.
    """

    def __init__(self, placement: Placement, geometry: ModelGeometry) -> None:
        self._geometry = geometry
        order = np.array(placement.heads.reshape(placement.heads.shape[0], -1))
        # Sliding-window layers are not in the placement and keep the checkpoint's order.
        self._order = dict(zip(geometry.layer_numbers, torch.from_numpy(order), strict=True))
        self._names: dict[tuple[int, str], str] = {}

    def reorder(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's (name, tensor) pairs with reordered attention projections. Stores no tensor.

        Raises:
            RaggedConfigError: a tensor of an attention layer is unknown or has an unexpected shape.
        """
        for name, tensor in weights:
            yield name, self._reorder_tensor(name, tensor)

    def require_all(self) -> None:
        """Raise RaggedConfigError unless q, k, v and o of every layer were reordered; call after the last pair."""
        require_projections(self._names.values(), self._geometry.all_layers)

    def _reorder_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        layer_part = attention_part(name, self._geometry.all_layers)
        if layer_part is None:
            return tensor
        layer, part = layer_part
        if self._names.setdefault((layer, part), name) != name:
            raise _not_covered(f"{name} and {self._names[layer, part]} are the same weight of layer {layer}")
        if layer not in self._order:
            return tensor
        if part in _SHARED:
            if part.endswith("norm.weight") and tensor.shape != (self._geometry.head_dim,):
                raise _not_covered(f"{name} {tuple(tensor.shape)} normalises over all heads together")
            return tensor
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise _not_covered(f"{name} is quantised ({tensor.dtype})")
        heads = self._geometry.num_heads
        block = self._geometry.head_dim * (self._geometry.q_per_kv if part[0] in "qo" else 1)
        axis = 1 if part[0] == "o" else 0
        if tensor.ndim <= axis or tensor.shape[axis] != heads * block:
            raise _not_covered(
                f"{name} {tuple(tensor.shape)} does not have {heads} heads of {block} on axis {axis} "
                f"(doubled for a gate, or padded?)"
            )
        order = self._order[layer].to(tensor.device)
        return tensor.unflatten(axis, (heads, block)).index_select(axis, order).flatten(axis, axis + 1)


def attention_part(name: str, num_layers: int) -> tuple[int, str] | None:
    """Split a weight's name into its layer and its part, such as `q_proj.weight`.

    Returns:
        None for weights that do not belong to the attention of a layer.

    Raises:
        RaggedConfigError: the weight belongs to the attention of a layer, but its part is unknown.
    """
    match = _ATTENTION.search(name)
    # Layers after the model's own belong to draft heads, which are not loaded.
    if match is None or int(match[1]) >= num_layers:
        return None
    part = match[2]
    if part not in _SHARED and not _PROJECTION.fullmatch(part):
        if _QUANTISED.search(part):
            raise _not_covered(f"the checkpoint is quantised ({name}); blocks of weights may cross heads")
        if _FUSED.search(part):
            raise _not_covered(f"the checkpoint has queries, keys and values in one tensor ({name})")
        raise _not_covered(f"{name} is not known to be the same for all heads")
    return int(match[1]), part


def require_projections(names: Iterable[str], num_layers: int) -> None:
    """Raise RaggedConfigError if q, k, v or o of a layer is not among the names, or an attention weight is unknown."""
    parts = {attention_part(name, num_layers) for name in names}
    for layer in range(num_layers):
        for letter in "qkvo":
            if (layer, f"{letter}_proj.weight") not in parts:
                raise _not_covered(f"the checkpoint has no self_attn.{letter}_proj.weight of layer {layer}")


def _not_covered(reason: str) -> RaggedConfigError:
    return RaggedConfigError(f"heads cannot be moved between ranks: {reason}; use --ragged-fairkv none")
