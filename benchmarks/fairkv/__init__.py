"""How evenly placements of heads load tensor-parallel ranks: `python -m benchmarks fairkv`."""
