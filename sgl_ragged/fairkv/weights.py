"""Attention weights of a checkpoint in the order of a placement, while they are loaded. Torch, without SGLang.

Every rank reads the same checkpoint and takes its contiguous share of each projection. With the heads in placement
order, that share is the rank's places: nothing else in the model has to know.
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
"""What the heads of a layer have in common. Norms only where they have one weight per element of a head."""


class HeadOrder:
    """Reorders what follows the heads: rows of q, k and v, columns of o. One object per load.

    Args:
        placement: heads of all places; a head at several places is repeated.
        geometry: the model as its checkpoint has it.
    """

    def __init__(self, placement: Placement, geometry: ModelGeometry) -> None:
        self._geometry = geometry
        order = np.array(placement.heads.reshape(placement.heads.shape[0], -1))
        # Layers that the placement does not know of, those with sliding windows, keep the checkpoint's order.
        self._order = dict(zip(geometry.layer_numbers, torch.from_numpy(order), strict=True))
        self._found: dict[tuple[int, str], str] = {}

    def reorder(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's (name, tensor) pairs, tensors of attention projections reordered. Keeps no tensor.

        Raises:
            RaggedConfigError: a tensor of an attention layer is not known to be covered, or has another shape.
        """
        for name, tensor in weights:
            yield name, self._place(name, tensor)

    def require_all(self) -> None:
        """After the last pair: raise RaggedConfigError unless q, k, v and o of every layer were among them."""
        require_projections(self._found.values(), self._geometry.all_layers)

    def _place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = attention_part(name, self._geometry.all_layers)
        if found is None:
            return tensor
        layer, part = found
        if self._found.setdefault((layer, part), name) != name:
            raise _not_covered(f"{name} and {self._found[layer, part]} are the same weight of layer {layer}")
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
    """Layer and the part after it, such as `q_proj.weight`; None for weights outside of the layers' attention.

    Raises:
        RaggedConfigError: it is part of an attention layer, but not one that is known to be covered.
    """
    match = _ATTENTION.search(name)
    # Layers beyond the model's own are those of draft heads, which are not loaded.
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
    """Raise RaggedConfigError unless these names hold q, k, v and o of every layer, and nothing that is not covered."""
    found = {attention_part(name, num_layers) for name in names}
    for layer in range(num_layers):
        for letter in "qkvo":
            if (layer, f"{letter}_proj.weight") not in found:
                raise _not_covered(f"the checkpoint has no self_attn.{letter}_proj.weight of layer {layer}")


def _not_covered(reason: str) -> RaggedConfigError:
    return RaggedConfigError(f"heads cannot be moved between ranks: {reason}; use --ragged-fairkv none")
