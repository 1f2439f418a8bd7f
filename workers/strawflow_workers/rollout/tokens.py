"""Prompts to token ids and back, with the checkpoint's own tokenizer.

Plain text goes through the `tokenizers` library alone, which loads in milliseconds; chat messages need the checkpoint's
template and load transformers on first use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from strawflow.errors import ConfigError
from strawflow.flow.claim import Prompt


class PromptTokenizer:
    """Encodes stored prompts; one per worker."""

    def __init__(self, model_path: Path) -> None:
        """Load the tokenizer of a Hugging Face checkpoint.

        Raises:
            ConfigError: the folder has no tokenizer.json or no end-of-sequence token.
        """
        self._model_path = model_path
        path = model_path / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{path} is missing; the model folder needs its tokenizer")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.eos_id = self._read_eos()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the prompt's token ids, without special tokens for text, by the chat template for messages."""
        if prompt.prompt_format == "text":
            return list(self._tokenizer.encode(prompt.prompt, add_special_tokens=False).ids)
        messages = json.loads(prompt.prompt)
        return list(self._chat.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response without its closing end of sequence.

        Other special tokens stay visible: a right answer with padding in it is not a right answer.
        """
        closed = bool(ids) and ids[-1] == self.eos_id
        return str(self._tokenizer.decode(list(ids[:-1] if closed else ids), skip_special_tokens=False))

    @cached_property
    def _chat(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self._model_path), local_files_only=True)

    def _read_eos(self) -> int:
        config = json.loads((self._model_path / "config.json").read_text(encoding="utf-8"))
        eos = config.get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) else eos
        if not isinstance(eos, int):
            raise ConfigError(f"{self._model_path}/config.json names no eos_token_id")
        return eos
