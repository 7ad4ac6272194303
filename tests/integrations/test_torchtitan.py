"""torchtitan's own Trainer on a tiny Llama, or experts: with the converter "cce" as without it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from cce_dist.testing import RankPool
from tests.integrations import titan_jobs

pytestmark = [
    # Found, not imported, which takes seconds: the ranks import it.
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs the extra `torchtitan`"),
    pytest.mark.timeout(240),
]
COMPILED = "--compile.enable --compile.backend eager --compile.components loss"
HELD_OUT = "--validation.enable --validation.freq 2 --validation.steps 1"


@pytest.fixture(scope="module")
def titan_pools() -> Iterator[dict[int, RankPool]]:
    """Ranks that have imported torchtitan; a job takes a whole pool, as torchtitan's jobs do."""
    prepare = titan_jobs.import_torchtitan
    pools = {size: RankPool(size, prepare=prepare, timeout=200) for size in (1, 2)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        # Two microbatches a step.
        pytest.param(
            1,
            f"--training.steps 4 --training.global_batch_size 8 {HELD_OUT} "
            "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op",
            id="one process",
        ),
        pytest.param(1, "--training.steps 4 --model.name experts", id="experts"),
        # The unit of norm and head is told to free its weights.
        pytest.param(
            2,
            "--training.steps 4 --parallelism.data_parallel_shard_degree 2 "
            "--parallelism.fsdp_reshard_after_forward always",
            id="FSDP2",
        ),
        # Logits of each rank's own rows without the converter, in evaluation with it too.
        pytest.param(
            2,
            f"--training.steps 4 --parallelism.tensor_parallel_degree 2 {HELD_OUT}",
            id="TP, loss parallel",
        ),
        pytest.param(
            2,
            "--training.steps 2 --parallelism.tensor_parallel_degree 2 "
            "--parallelism.disable_loss_parallel",
            id="TP, gathered logits, our loss compiled",
        ),
        pytest.param(
            2,
            "--training.steps 4 --model.flavor two_layers "
            "--parallelism.pipeline_parallel_degree 2 "
            "--parallelism.pipeline_parallel_schedule 1F1B",
            id="PP",
        ),
    ],
)
def test_curves(titan_pools: dict[int, RankPool], size: int, arguments: str) -> None:
    compiled = COMPILED if "disable_loss_parallel" in arguments else ""
    for dense, ours in titan_pools[size].run(size, titan_jobs.both, arguments, compiled):
        assert ours["losses"] == pytest.approx(dense["losses"], abs=1e-5)
        assert ours["norms"] == pytest.approx(dense["norms"], rel=1e-4)
        assert ours["validation"] == pytest.approx(dense["validation"], abs=1e-5)
        assert len(ours["losses"]) in (2, 4)
        assert len(ours["validation"]) == (3 if HELD_OUT in arguments else 0)
        (line,) = ours["lines"]
        assert "linear_cross_entropy with gradient=filtered" in line
        assert "out of model.converters to switch it off" in line
        assert dense["lines"] == []


def test_refusals(titan_pools: dict[int, RankPool]) -> None:
    (messages,) = titan_pools[1].run(1, titan_jobs.refusals)
    order, loss, head, output, shape, options = messages
    assert "PatchError: 'cce' must be the last of model.converters" in order
    assert "PatchError: the TrainSpec 'other' must build torchtitan's cross-entropy" in loss
    assert "PatchError: Transformer.output must be a torch.nn.Linear" in head
    assert "PatchError: the loss must get the model's output" in output
    assert "PatchError: the output layer's result must have shape [2, 8, 32]" in shape
    assert "ValueError: logits=" in options


def test_a_model_in_eval_has_logits_and_options_come_from_the_command_line(
    titan_pools: dict[int, RankPool],
) -> None:
    (shapes,) = titan_pools[1].run(1, titan_jobs.shapes_and_options)
    assert shapes == {"train": (2, 8, 32), "eval": (2, 8, 300), "gradient": "exact"}
