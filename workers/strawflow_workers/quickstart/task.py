"""Procedural tasks of the quickstart: reasoning-gym datasets exported as prompt files.

1. A file depends on (task, seed, sizes) alone: exporting again writes the same bytes.
2. No training question (case aside) is a held-out one; the held-out questions are distinct and the same for all seeds.
3. Each row's metadata is the dataset's whole entry, so the real verifier can score it later without the dataset.
4. A file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strawflow.errors import InvalidInputError

DEFAULT_TASK = "spell_backward34"

# The package draws item i of a dataset from Random(seed + i): seeds must lie further apart than any number of draws,
# or two seeds share their items.
_TRAIN_SEED = 1_000_000
_SEED_STRIDE = 10_000_000
_HELD_OUT_SEED = 900_000_000
_MAX_SEED = (_HELD_OUT_SEED - _TRAIN_SEED) // _SEED_STRIDE - 1
_DRAWS_PER_ROW = 20


@dataclass(frozen=True)
class GymTask:
    """A dataset of reasoning-gym at a fixed difficulty."""

    name: str
    dataset: str
    settings: Mapping[str, Any]
    max_response_tokens: int
    """Bytes of the longest right answer and the end-of-sequence token, with a little room; with an instruction, tokens."""
    instruction: str = ""
    """Follows the question in the chat message that a model with a chat template gets; empty: the question is plain text."""


@dataclass(frozen=True)
class TaskFiles:
    """What an export wrote: JSON Lines with the keys prompt, label and metadata."""

    task: GymTask
    train: Path
    held_out: Path
    num_train: int
    num_held_out: int
    num_overlapping: int
    """Training items that were drawn and left out because their question is held out."""


_TASKS = {
    task.name: task
    for task in (
        GymTask("spell_backward", "spell_backward", {"min_word_len": 3, "max_word_len": 5}, 8),
        GymTask("spell_backward34", "spell_backward", {"min_word_len": 3, "max_word_len": 4}, 6),
        GymTask("spell_backward46", "spell_backward", {"min_word_len": 4, "max_word_len": 6}, 8),
        GymTask("spell_backward58", "spell_backward", {"min_word_len": 5, "max_word_len": 8}, 10),
        GymTask(
            "chain_sum", "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, 6
        ),
        GymTask(
            "chain_sum22", "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, 6
        ),
        GymTask("count_bits", "count_bits", {"min_n": 1, "max_n": 4095}, 4),
        GymTask("gcd", "gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 100}, 4),
        GymTask(
            "base_conversion",
            "base_conversion",
            {"min_base": 2, "max_base": 4, "min_value": 0, "max_value": 255},
            10,
        ),
        GymTask("letter_counting", "letter_counting", {"min_words": 3, "max_words": 5}, 3),
        GymTask(
            "products", "products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, 6
        ),
        GymTask(
            "gsm_symbolic",
            "gsm_symbolic",
            {},
            64,
            instruction="Answer with the final number alone, without units or steps.",
        ),
    )
}


def task_names(*, chat: bool = False) -> list[str]:
    """Return the names of the tasks for models with a chat template, or of those for models without, the default first."""
    names = [name for name, task in _TASKS.items() if bool(task.instruction) == chat]
    return sorted(names, key=lambda name: (name != DEFAULT_TASK, name))


def task_named(name: str) -> GymTask:
    """Return a task.

    Raises:
        InvalidInputError: no such task; the message lists the names.
    """
    try:
        return _TASKS[name]
    except KeyError:
        known = [*task_names(), *task_names(chat=True)]
        raise InvalidInputError(f"unknown task {name!r}; known: {', '.join(known)}") from None


def export_task(task: str, seed: int, *, out_dir: Path, num_train: int, num_held_out: int) -> TaskFiles:
    """Write `train.jsonl` and `held_out.jsonl` of a task, each atomically, replacing older ones.

    Args:
        task: Name of the task.
        seed: Chooses the training items; the held-out items are the same for every seed.
        out_dir: Folder of the files; made when absent.
        num_train: Rows of the training file. Questions may repeat, as the dataset draws them.
        num_held_out: Rows of the held-out file, distinct questions.

    Raises:
        InvalidInputError: unknown task, seed out of range, or more rows than the task has questions for.
    """
    chosen = task_named(task)
    if not 0 <= seed <= _MAX_SEED:
        raise InvalidInputError(f"seed is {seed}; it must lie between 0 and {_MAX_SEED}")
    if num_train * _DRAWS_PER_ROW > _SEED_STRIDE or num_train < 1 or num_held_out < 1:
        raise InvalidInputError(
            f"num_train is {num_train} and num_held_out {num_held_out}; "
            f"they must be at least 1, num_train at most {_SEED_STRIDE // _DRAWS_PER_ROW}"
        )
    held_out = _held_out(chosen, num_held_out)
    questions = {_folded(entry) for entry in held_out}
    train, num_overlapping = _train(chosen, seed, num_train, excluded=questions)
    out_dir.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(
        task=chosen,
        train=out_dir / "train.jsonl",
        held_out=out_dir / "held_out.jsonl",
        num_train=len(train),
        num_held_out=len(held_out),
        num_overlapping=num_overlapping,
    )
    for path, entries in ((files.held_out, held_out), (files.train, train)):
        _write_atomically(path, (_line(entry, chosen.instruction) for entry in entries))
    return files


def _draws(task: GymTask, seed: int, count: int) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task.dataset, seed=seed, size=count, **task.settings)
    return (dataset[index] for index in range(count))


def _held_out(task: GymTask, count: int) -> list[dict[str, Any]]:
    kept: dict[str, dict[str, Any]] = {}
    for entry in _draws(task, _HELD_OUT_SEED, _DRAWS_PER_ROW * count):
        kept.setdefault(_folded(entry), entry)
        if len(kept) == count:
            return list(kept.values())
    raise InvalidInputError(
        f"task {task.name!r} has only about {len(kept)} questions; ask for fewer held-out rows"
    )


def _train(task: GymTask, seed: int, count: int, *, excluded: set[str]) -> tuple[list[dict[str, Any]], int]:
    kept: list[dict[str, Any]] = []
    num_overlapping = 0
    for entry in _draws(task, _TRAIN_SEED + _SEED_STRIDE * seed, _DRAWS_PER_ROW * count):
        if _folded(entry) in excluded:
            num_overlapping += 1
            continue
        kept.append(entry)
        if len(kept) == count:
            return kept, num_overlapping
    raise InvalidInputError(f"nearly all questions of task {task.name!r} are held out; hold out fewer")


def _folded(entry: Mapping[str, Any]) -> str:
    return str(entry["question"]).casefold()


def _line(entry: Mapping[str, Any], instruction: str) -> str:
    question = entry["question"].strip()
    prompt = [{"role": "user", "content": f"{question}\n{instruction}"}] if instruction else question + "\n"
    row = {"prompt": prompt, "label": entry["answer"], "metadata": entry}
    # Some datasets keep fractions among the values they drew; no verifier reads those.
    return json.dumps(row, allow_nan=False, default=str) + "\n"


def _write_atomically(path: Path, lines: Iterable[str]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
