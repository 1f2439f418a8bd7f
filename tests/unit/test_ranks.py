"""What ranks tell each other, what of a model they cannot share, and whole tensors of their parts."""

from __future__ import annotations

import pytest
import torch

from strawflow.config_parallel import ParallelSection
from strawflow.errors import ConfigError, InvalidInputError
from strawflow_workers.trainer.configurations import _check_shapes
from strawflow_workers.trainer.ranks import MAX_MESSAGE_BYTES, _bytes, _decoded, _encoded
from strawflow_workers.trainer.sharding import joined, padded_vocabulary, with_padding


def test_a_message_comes_back_as_it_was_told() -> None:
    told = {"verb": "train", "step": 7, "digest": "a\u00e9"}
    assert _decoded(_bytes(_encoded(told), len(_encoded(told)))) == told


def test_a_message_with_payload_is_refused() -> None:
    room = MAX_MESSAGE_BYTES - len(_encoded({"tokens": ""}))
    assert len(_encoded({"tokens": "x" * room})) == MAX_MESSAGE_BYTES
    with pytest.raises(InvalidInputError, match=r"65537 bytes.*never payload"):
        _encoded({"tokens": "x" * (room + 1)})


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        ({"tensor": 3}, "parallel.tensor 3: the model has num_attention_heads 4"),
        ({"tensor": 4}, "parallel.tensor 4: the model has num_query_groups 2"),
        ({"pipeline": 4}, "parallel.pipeline 4: the model has num_layers 6"),
    ],
)
def test_a_model_that_so_many_ranks_cannot_share_is_refused_by_its_field(
    parallel: dict[str, int], told: str
) -> None:
    shapes = {"num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48, "num_layers": 6}
    with pytest.raises(ConfigError, match=told):
        _check_shapes(shapes, ParallelSection.model_validate(parallel))
    _check_shapes(shapes, ParallelSection(tensor=2, pipeline=3))


def test_gate_and_up_projection_of_two_ranks_are_joined_one_above_the_other() -> None:
    gate, up = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
    shards = [torch.cat([gate[:2], up[:2]]), torch.cat([gate[2:], up[2:]])]
    parameter = torch.nn.Parameter(torch.empty(4, 2))
    parameter.partition_dim, parameter.partition_stride = 0, 2
    assert torch.equal(joined(shards, parameter), torch.cat([gate, up]))
    parameter.partition_dim, parameter.partition_stride = 1, 1
    assert torch.equal(joined([gate, up], parameter), torch.cat([gate, up], 1))


def test_a_vocabulary_is_padded_with_zero_rows_to_what_ranks_share() -> None:
    assert [padded_vocabulary(97, ranks) for ranks in (1, 2, 4)] == [97, 98, 100]
    padded = with_padding(torch.ones(3, 2), 4)
    assert padded.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
