"""What `data.prompts` may say, and what of it is refused."""

from __future__ import annotations

import json

import pytest

from strawflow.config import from_json, load_config, to_json
from strawflow.errors import ConfigError
from strawflow.prompt_sets import PromptSet


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("", []),
        ("päth@[1:]", [("prompts", "päth@[1:]", 1.0)]),
        ("s3://bucket/a.jsonl", [("prompts", "s3://bucket/a.jsonl", 1.0)]),
        ("sums.jsonl.gz:2", [("sums", "sums.jsonl.gz", 2.0)]),
        (
            "sums.jsonl:0.7, puzzles=in/words.jsonl@[:500]:0.3",
            [("sums", "sums.jsonl", 0.7), ("puzzles", "in/words.jsonl@[:500]", 0.3)],
        ),
        ('[{"name": "sums", "path": "a, b.jsonl", "weight": 2}]', [("sums", "a, b.jsonl", 2.0)]),
    ],
)
def test_prompt_sets_are_told_as_text_or_tables(text: str, sets: list[tuple[str, str, float]]) -> None:
    config = load_config(flags={"data.prompts": text})
    assert config.data.prompts == tuple(PromptSet(name=n, path=p, weight=w) for n, p, w in sets)
    assert from_json(to_json(config), path="config.json") == config
    assert config.prompt_sets() == (config.data.prompts or (PromptSet(name="prompts"),))


def test_a_configuration_stored_with_one_file_as_text_is_read() -> None:
    assert from_json('{"data": {"prompts": "a.jsonl"}}', path="config.json").data.prompts[0].path == "a.jsonl"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("a.jsonl,b.jsonl:1", r"'a.jsonl' is no \[NAME=\]FILE:WEIGHT"),
        ("a.jsonl:0,b.jsonl:0", r"the weights are 0 \(a\) \+ 0 \(b\) = 0: nothing could be drawn"),
        ("a.jsonl:1,in/a.jsonl:1", r"set 2 \(a\): another set is called so"),
        ("held_out=a.jsonl:1", "is not for training"),
        ("words=a.jsonl:1", "the dataset 'words' of this run is not for training"),
        ("A B.jsonl:1", r"set 1 \(A B\): name: use up to 40"),
        ('[{"path": "a.jsonl", "source": "mine:make"}]', "from a file or from a data source"),
        ('[{"path": "a.jsonl", "weight": -1}]', "data.prompts.0.weight"),
        ('[{"path": "a.jsonl", "size": 1}]', "data.prompts.0.size"),
    ],
)
def test_what_could_never_be_drawn_from_is_refused(given: str, told: str) -> None:
    flags = {"data.prompts": given, "eval.datasets": json.dumps([{"name": "words"}])}
    with pytest.raises(ConfigError, match=told):
        load_config(flags=flags)
