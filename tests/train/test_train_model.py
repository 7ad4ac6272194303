"""The decoder: tp changes no initial weight, and rotary positions are relative."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from cce_dist import VocabShard
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.model.decoder import (
    Decoder,
    ModelSize,
    count_parameters,
    initialize,
    rotary_table,
    rotate,
)
from cce_dist.train.optimizer import learning_rate

CONFIG = TrainConfig.model_validate(
    {
        # Several blocks of INIT_BLOCK_ROWS rows, of which the last is not full.
        "data": {"vocab_size": 2500, "sequence_length": 8},
        "model": {"dim": 16, "layers": 2, "heads": 2},
    }
)


@dataclasses.dataclass
class FakeRanks:
    tp: int
    tp_rank: int
    pp: int = 1
    pp_rank: int = 0
    tp_group: Any = None


def initial_model(tp: int, tp_rank: int, seed: int = 0) -> Decoder:
    model = Decoder(CONFIG, FakeRanks(tp, tp_rank))  # type: ignore[arg-type]
    initialize(model, seed)
    return model


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_initialize_does_not_depend_on_tp(tp: int) -> None:
    whole = initial_model(1, 0)
    shards = [initial_model(tp, rank) for rank in range(tp)]
    for name, parameter in whole.sharded_parameters().items():
        joined = torch.cat([shard.sharded_parameters()[name] for shard in shards])
        assert torch.equal(joined, parameter)
    for shard in shards:
        for name, parameter in shard.body_parameters().items():
            assert torch.equal(parameter, whole.body_parameters()[name])


def test_initialize_draws_every_weight_anew() -> None:
    model, other = initial_model(1, 0), initial_model(1, 0, seed=1)
    assert not torch.equal(model.embedding, model.head)
    assert not torch.equal(model.embedding[:1024], model.embedding[1024:2048])
    assert not torch.equal(model.embedding, other.embedding)
    for parameter in model.parameters():
        assert parameter.isfinite().all()
    # dim 16, untied: rows of norm 1, scaled up in the forward; the head stays small.
    assert math.isclose(model.embedding.std().item(), 1 / math.sqrt(16), rel_tol=0.05)
    assert math.isclose(model.head.std().item(), 0.02, rel_tol=0.05)


def test_initialize_empty_shard() -> None:
    # ceil(5 / 4) = 2 rows a rank leave nothing for the last one.
    assert VocabShard.chunked(5, 3, 4).num_rows == 0
    config = CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update={"vocab_size": 5})})
    model = Decoder(config, FakeRanks(4, 3))  # type: ignore[arg-type]
    initialize(model, 0)
    assert model.embedding.shape == (0, 16)


def test_count_parameters_counts_the_whole_model() -> None:
    whole = sum(parameter.numel() for parameter in initial_model(1, 0).parameters())
    assert count_parameters(CONFIG) == ModelSize(whole, 2 * 2500 * 16)


def test_rotate_depends_on_distance_only() -> None:
    table = rotary_table(8, 4)
    q, k = torch.randn(2, 4)
    rows_q, rows_k = (rotate(x.expand(1, 1, 8, 4), table)[0, 0] for x in (q, k))
    scores = rows_q @ rows_k.T
    for distance in range(-7, 8):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal))


def test_learning_rate_warms_up_and_decays() -> None:
    config = TrainConfig.model_validate({"steps": 10, "optimizer": {"lr": 1.0, "warmup": 4}})
    rates = [learning_rate(step, config) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert math.isclose(rates[-1], 0.1)
    constant = TrainConfig.model_validate(
        {"optimizer": {"lr": 1.0, "warmup": 0, "schedule": "constant"}}
    )
    assert learning_rate(10**6, constant) == 1.0
