"""Prompts to token ids and back, with the checkpoint's own tokenizer; prompts with images, with its processor.

Plain text goes through the `tokenizers` library alone, which loads in milliseconds; chat messages need the checkpoint's
template, and images its processor: they load transformers on first use.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from strawflow.errors import ConfigError, InvalidInputError
from strawflow.flow.claim import Prompt

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class PromptInputs:
    """What a model is given of a prompt."""

    tokens: list[int]
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None
    """What the processor made of the images, by its names (pixel_values, image_grid_thw, ...); None without images."""


_OF_TOKENS = ("input_ids", "attention_mask")
"""Of a processor's answer: what is told by the token ids."""


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

    @property
    def has_processor(self) -> bool:
        """Whether the checkpoint says how images become its inputs."""
        return any((self._model_path / name).is_file() for name in _PROCESSOR_FILES)

    def inputs(self, prompt: Prompt) -> PromptInputs:
        """Return token ids and, of a prompt with images, what the checkpoint's processor made of them.

        Raises:
            InvalidInputError: the prompt has images and the checkpoint no processor, or the processor refuses them.
        """
        if not prompt.images:
            return PromptInputs(self.encode(prompt))
        if not self.has_processor:
            raise InvalidInputError(
                f"the prompt has images, and {self._model_path} has no processor ({' or '.join(_PROCESSOR_FILES)}): take a "
                "checkpoint with one, or a generate hook that makes the inputs (rollout.generate)"
            )
        from PIL import Image

        text = prompt.prompt
        if prompt.prompt_format == "messages":
            text = self._processor.apply_chat_template(json.loads(prompt.prompt), add_generation_prompt=True)
        try:
            images = [Image.open(io.BytesIO(image)).convert("RGB") for image in prompt.images]
            made = self._processor(images=images, text=text, return_tensors="np")
        except (OSError, ValueError) as error:  # no image; more or fewer of them than the text has places for
            raise InvalidInputError(f"the processor refuses the images of the prompt: {error}") from error
        tokens = [int(token) for token in made["input_ids"][0]]
        tensors = {name: np.asarray(value) for name, value in made.items() if name not in _OF_TOKENS}
        return PromptInputs(tokens, tensors)

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

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        loader: Any = AutoProcessor
        return loader.from_pretrained(str(self._model_path), local_files_only=True)

    def _read_eos(self) -> int:
        config = json.loads((self._model_path / "config.json").read_text(encoding="utf-8"))
        eos = config.get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) else eos
        if not isinstance(eos, int):
            raise ConfigError(f"{self._model_path}/config.json names no eos_token_id")
        return eos
