"""Settings for all tests."""

from __future__ import annotations

import torch

# The tensors of the unit tests are small: on shared cores more threads only wait for each other.
torch.set_num_threads(1)
