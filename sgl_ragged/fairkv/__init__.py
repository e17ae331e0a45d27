"""FairKV: which tensor-parallel rank holds which heads, so that ranks have equally much to read."""
