"""The GPU path run without a GPU: what would wait for the device, mix devices, launch, and move under a captured graph.

    python -m tests.gpu_contract [--quick] [--update] [-v] [SCENARIO ...]

Tensors claim to be on cuda:0 and have their numbers in host memory (`fake_tensor.py`), CUDA's run time and Triton's
launches are recorded (`fake_runtime.py`), and one rank's pool, backend and layers are run as SGLang's runners run them
(`server.py`, `scenarios.py`). What is found is compared with `launches.json` (`table.py`).

Kernels are not run, so this says nothing of what they compute, of races or of speed.
"""
