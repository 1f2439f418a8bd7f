"""The quickstart's model: a small Qwen3 checkpoint with random weights and a byte-level tokenizer.

1. The folder is an ordinary Hugging Face checkpoint: any program that reads those reads it, offline.
2. Token ids: 0-255 are the byte values, 256 pad, 257 end of sequence, from 258 one per constant phrase of the prompts,
   then places that nothing encodes to, up to a multiple of 64.
3. The same arguments give the same bytes. The folder appears whole or not at all.
4. torch and transformers are imported only when a model is made.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strawflow.errors import AlreadyExistsError, InvalidInputError
from strawflow.packs.sync import sync_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD_ID, EOS_ID, FIRST_PHRASE_ID = 256, 257, 258
PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|end|>"
_VOCAB_MULTIPLE = 64
# Outside the byte-level alphabet, so no text encodes to such a token, and what it decodes to is never a right answer.
_UNUSED_PREFIX = "\ufffd"
_MIN_SUFFIX_CHARS = 4


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen3 model; head_dim and max_position_embeddings are in elements and tokens."""

    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    ffn_size: int = 512
    max_position_embeddings: int = 512


QUICKSTART = ModelShape()
TINY = ModelShape(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=128)
"""For tests: the same architecture, a moment to make and to run."""


def constant_phrases(prompts: Sequence[str]) -> list[str]:
    """Return the text that all prompts begin with (up to its last space) and end with, where there is any.

    One token for each spares a small model from learning to skip the same bytes in every prompt. An ending of fewer
    than four characters stays bytes, and no phrase is given when the prompts do not differ.
    """
    if len(set(prompts)) < 2:
        return []
    prefix = _common_beginning(prompts)
    prefix = prefix[: prefix.rfind(" ") + 1]
    suffix = _common_beginning([prompt[len(prefix) :][::-1] for prompt in prompts])[::-1]
    return [phrase for phrase in (prefix, suffix if len(suffix) >= _MIN_SUFFIX_CHARS else "") if phrase]


def _common_beginning(texts: Sequence[str]) -> str:
    # What the first and the last in order share, all between them share too.
    first, last = min(texts), max(texts)
    length = next(
        (place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    return first[:length]


def make_model(
    out_dir: Path, *, seed: int, phrases: Sequence[str] = (), shape: ModelShape = QUICKSTART
) -> Path:
    """Write a checkpoint with random weights and its tokenizer; return its folder.

    Args:
        out_dir: The folder to make; its parent is made when absent.
        seed: Seeds the weights. The caller's random state is left alone.
        phrases: Texts that get a token of their own, from id 258 on.
        shape: Sizes of the model.

    Raises:
        AlreadyExistsError: the folder exists.
        InvalidInputError: a phrase cannot be a token.
    """
    if out_dir.exists():
        raise AlreadyExistsError(f"{out_dir} exists and is not overwritten; remove it or name another folder")
    tokenizer = byte_tokenizer(phrases)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        _save_tokenizer(tokenizer, building, shape)
        _save_weights(building, seed=seed, vocab_size=tokenizer.get_vocab_size(), shape=shape)
        _sync(building)
        building.rename(out_dir)
    except BaseException:
        shutil.rmtree(building)
        raise
    return out_dir


def byte_tokenizer(phrases: Sequence[str] = ()) -> Tokenizer:
    """Return the tokenizer: a byte-level BPE without merges, whose added tokens are pad, end and the phrases.

    Raises:
        InvalidInputError: a phrase is empty, repeated, or would not survive encoding and decoding.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    added = [PAD_TOKEN, EOS_TOKEN, *phrases]
    if len(set(added)) != len(added) or not all(added):
        raise InvalidInputError(f"phrases must be distinct and not empty, got {list(phrases)}")
    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    vocabulary |= {text: PAD_ID + place for place, text in enumerate(added)}
    while len(vocabulary) % _VOCAB_MULTIPLE:
        vocabulary[f"{_UNUSED_PREFIX}{len(vocabulary)}"] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in added[:2]])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False, special=False) for phrase in phrases])
    for place, phrase in enumerate(phrases):
        ids = tokenizer.encode(phrase, add_special_tokens=False).ids
        if ids != [FIRST_PHRASE_ID + place] or tokenizer.decode(ids) != phrase:
            raise InvalidInputError(f"phrase {phrase!r} cannot be a token of its own; leave it out")
    return tokenizer


def _byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in byte-level BPE (GPT-2's mapping).

    Printable Latin-1 bytes stand for themselves; the others take, in order, the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, shape: ModelShape) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written here because the class name that transformers 5 would write is unknown to transformers 4.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "eos_token": EOS_TOKEN,
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _save_weights(folder: Path, *, seed: int, vocab_size: int, shape: ModelShape) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config: Any = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        architecture: Any = Qwen3ForCausalLM
        model = architecture(config).float()
    config.save_pretrained(str(folder))
    model.generation_config.save_pretrained(str(folder))
    # Tied: the output matrix is the embedding and is not stored twice.
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _sync(folder: Path) -> None:
    """Give the files ordinary permissions and bring them to the disk."""
    for path in (*folder.iterdir(), folder):
        path.chmod(0o755 if path.is_dir() else 0o644)
        sync_path(path)
