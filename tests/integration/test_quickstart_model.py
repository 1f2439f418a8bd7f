"""The quickstart's task files and model folder, with the real package, transformers and torch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from strawflow.errors import AlreadyExistsError, InvalidInputError
from strawflow.prompts import PromptKeys, PromptSource, read_prompts
from strawflow_workers.quickstart.model import (
    EOS_ID,
    EOS_TOKEN,
    PAD_ID,
    PAD_TOKEN,
    TINY,
    byte_tokenizer,
    constant_phrases,
    make_model,
)
from strawflow_workers.quickstart.task import TaskFiles, export_task, task_named, task_names
from strawflow_workers.rollout.rewards.verifiers import load_verifier

pytestmark = pytest.mark.alone

KEYS = PromptKeys("prompt", "label", "metadata")
UNICODE = [
    "",
    "é",
    "Grüße \U0001f600\u2028\u0085\0\n",
    "日本語",
    "\ufffd1",
    "a\ufeffb",
    "Ġ",
    "<0x41>",
    " ",
    "\u0301e",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    return export_task(
        "spell_backward34", 0, out_dir=tmp_path_factory.mktemp("task"), num_train=500, num_held_out=100
    )


@pytest.fixture(scope="module")
def rows(files: TaskFiles) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files.train.read_text().split("\n")[:-1]]


@pytest.fixture(scope="module")
def model_path(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    phrases = constant_phrases([row["prompt"] for row in rows])
    return make_model(tmp_path_factory.mktemp("models") / "tiny", seed=3, phrases=phrases, shape=TINY)


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)


def expected_ids(text: str, phrases: list[str]) -> list[int]:
    """Tokenize by the rule alone: a phrase wherever one begins, else the bytes of the character."""
    ids: list[int] = []
    place = 0
    while place < len(text):
        found = next(
            (number for number, phrase in enumerate(phrases) if text.startswith(phrase, place)), None
        )
        ids += [258 + found] if found is not None else text[place].encode()
        place += len(phrases[found]) if found is not None else 1
    return ids


# --- the task


def test_the_exported_rows_are_good_prompt_rows_with_the_whole_entry(
    files: TaskFiles, rows: list[dict[str, Any]]
) -> None:
    read = list(read_prompts(PromptSource(files.train), KEYS))
    assert len(read) == files.num_train == len(rows) == 500
    assert (files.num_held_out, files.task.max_response_tokens) == (100, 6)
    for row, stored in zip(rows, read, strict=True):
        word = row["metadata"]["metadata"]["word"]
        assert row["prompt"] == f"Spell this word backward (example: sun -> nus): {word}\n" == stored.prompt
        assert row["label"] == word[::-1] == row["metadata"]["answer"]
        assert len(row["label"]) in (3, 4)
    assert len({row.content_digest for row in read}) == 500


def test_no_training_question_is_held_out_and_held_out_ones_are_distinct(
    files: TaskFiles, rows: list[dict[str, Any]]
) -> None:
    held_out = [json.loads(line)["prompt"].casefold() for line in files.held_out.read_text().splitlines()]
    assert len(set(held_out)) == len(held_out) == 100
    assert not set(held_out) & {row["prompt"].casefold() for row in rows}


def test_exporting_again_writes_the_same_bytes_and_another_seed_other_training_rows(
    files: TaskFiles, tmp_path: Path
) -> None:
    again = export_task("spell_backward34", 0, out_dir=tmp_path / "a", num_train=500, num_held_out=100)
    other = export_task("spell_backward34", 1, out_dir=tmp_path / "b", num_train=500, num_held_out=100)
    assert again.train.read_bytes() == files.train.read_bytes()
    assert again.held_out.read_bytes() == files.held_out.read_bytes() == other.held_out.read_bytes()
    assert other.train.read_bytes() != files.train.read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["held_out.jsonl", "train.jsonl"]


@pytest.mark.parametrize("name", task_names())
def test_the_right_answer_of_every_task_fits_and_scores_one_after_json(name: str, tmp_path: Path) -> None:
    files = export_task(name, 2, out_dir=tmp_path, num_train=60, num_held_out=30)
    verifier = load_verifier(f"reasoning_gym:{files.task.dataset}").function
    for row in read_prompts(PromptSource(files.train), KEYS):
        assert row.label is not None
        assert row.metadata is not None
        assert len(row.label.encode()) < files.task.max_response_tokens
        entry = json.loads(row.metadata)
        assert verifier(row.label, prompt=row.prompt, label=row.label, metadata=entry) == 1.0
        assert verifier("~", prompt=row.prompt, label=row.label, metadata=entry) < 1.0


def test_a_task_for_chat_asks_in_one_message_and_its_right_answer_scores_one(tmp_path: Path) -> None:
    files = export_task("gsm_symbolic", 0, out_dir=tmp_path, num_train=20, num_held_out=10)
    verifier = load_verifier("reasoning_gym:gsm_symbolic").function
    assert "gsm_symbolic" not in task_names()
    assert task_names(chat=True) == ["gsm_symbolic"]
    for row in read_prompts(PromptSource(files.train), KEYS):
        assert row.prompt_format == "messages"
        (message,) = json.loads(row.prompt)
        assert message["role"] == "user"
        assert message["content"].endswith("\nAnswer with the final number alone, without units or steps.")
        assert row.metadata is not None
        entry = json.loads(row.metadata)
        assert message["content"].startswith(entry["question"].strip())
        assert verifier(str(row.label), prompt=row.prompt, label=row.label, metadata=entry) == 1.0
        assert verifier("about", prompt=row.prompt, label=row.label, metadata=entry) == 0.0


def test_an_unknown_task_and_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match="unknown task 'spel'; known: spell_backward34, base_conversion"
    ):
        task_named("spel")
    with pytest.raises(InvalidInputError, match="ask for fewer held-out rows"):
        export_task("count_bits", 0, out_dir=tmp_path, num_train=10, num_held_out=5000)
    with pytest.raises(InvalidInputError, match="seed is -1"):
        export_task("gcd", -1, out_dir=tmp_path, num_train=10, num_held_out=10)
    assert list(tmp_path.iterdir()) == []


# --- the tokenizer


def test_the_question_becomes_one_token(rows: list[dict[str, Any]], tokenizer: Any) -> None:
    phrases = constant_phrases([row["prompt"] for row in rows])
    assert phrases == ["Spell this word backward (example: sun -> nus): "]
    word = rows[0]["metadata"]["metadata"]["word"]
    assert tokenizer(rows[0]["prompt"])["input_ids"] == [258, *word.encode(), 10]


def test_every_prompt_and_label_round_trips_with_the_expected_ids(
    rows: list[dict[str, Any]], tokenizer: Any
) -> None:
    phrases = constant_phrases([row["prompt"] for row in rows])
    for text in [row[key] for row in rows for key in ("prompt", "label")]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == expected_ids(text, phrases) == tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.decode([*ids, EOS_ID], skip_special_tokens=True) == text


def test_any_unicode_text_is_its_bytes_and_comes_back(tokenizer: Any) -> None:
    draw = random.Random(7)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    texts = UNICODE + ["".join(map(chr, draw.choices(points, k=draw.randrange(40)))) for _ in range(500)]
    for text in texts:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_any_ids_decode_as_their_bytes_do(tokenizer: Any) -> None:
    draw = random.Random(8)
    for _ in range(500):
        ids = [draw.randrange(256) for _ in range(draw.randrange(12))]
        assert tokenizer.decode(ids) == bytes(ids).decode("utf-8", "replace")


def test_unused_ids_never_decode_to_an_answer(tokenizer: Any) -> None:
    assert len(tokenizer) == 320
    for unused in range(259, 320):
        assert "\ufffd" in tokenizer.decode([97, unused, 98], skip_special_tokens=True)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (PAD_ID, EOS_ID, None)
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD_TOKEN, EOS_TOKEN)


def test_phrases_are_found_anywhere_with_the_expected_ids() -> None:
    phrases = ["Was ist größer: ", " oder? Ja bitte!\n"]
    tokenizer = byte_tokenizer(phrases)
    for text in [
        "Was ist größer: 1,2 oder? Ja bitte!\n",
        "é" + phrases[0] * 2 + "x",
        phrases[1][1:],
        phrases[0][:-1],
    ]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == expected_ids(text, phrases)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("phrases", [[""], ["a b", "a b"], [EOS_TOKEN], ["é"]])
def test_a_phrase_that_cannot_be_a_token_is_refused(phrases: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="phrase"):
        byte_tokenizer(phrases)


@pytest.mark.parametrize(
    "prompts, phrases",
    [
        (["What is 1 + 2?\n", "What is 3 + 44?\n"], ["What is "]),
        (["Count 1 apples in it.\n", "Count 22 apples in it.\n"], ["Count ", " apples in it.\n"]),
        (["abc\n", "abd\n"], []),
        (["same\n", "same\n"], []),
        (["aa bb", "aa bb bb"], ["aa "]),
        ([], []),
    ],
)
def test_constant_phrases_are_the_common_beginning_and_end(prompts: list[str], phrases: list[str]) -> None:
    assert constant_phrases(prompts) == phrases


# --- the checkpoint


def test_the_folder_is_an_ordinary_checkpoint_of_the_asked_shape(model_path: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(model_path), local_files_only=True)
    config = model.config
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("qwen3", 320, 64)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert (config.head_dim, config.intermediate_size, config.max_position_embeddings) == (32, 128, 512)
    assert (config.tie_word_embeddings, config.eos_token_id, config.pad_token_id) == (True, 257, 256)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    logits = model(torch.tensor([tokenizer.encode("hello\n")])).logits
    assert logits.shape == (1, 6, 320)
    assert bool(torch.isfinite(logits).all())
    assert json.loads((model_path / "config.json").read_text())["dtype"] == "float32"
    assert not list(model_path.parent.glob(".*"))


def test_the_same_seed_gives_the_same_bytes_and_leaves_the_caller_s_random_state_alone(
    tmp_path: Path,
) -> None:
    import torch

    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    first = make_model(tmp_path / "a", seed=5, shape=TINY)
    assert torch.equal(torch.rand(1), expected)
    second, other = (
        make_model(tmp_path / "b", seed=5, shape=TINY),
        make_model(tmp_path / "c", seed=6, shape=TINY),
    )
    names = sorted(path.name for path in first.iterdir())
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(names)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_an_existing_folder_is_not_overwritten(model_path: Path) -> None:
    with pytest.raises(AlreadyExistsError, match="not overwritten"):
        make_model(model_path, seed=0, shape=TINY)


def test_the_quickstart_model_has_two_and_a_half_million_parameters(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = make_model(tmp_path / "model", seed=0, phrases=["Spell this word: "])
    with safe_open(str(path / "model.safetensors"), framework="pt") as tensors:
        count = sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 (not a mapping)
    assert count == 2_443_776
