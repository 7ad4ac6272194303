"""Which tokens count: by kernels as by torch."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch

from cce_dist import VocabShard
from cce_dist.backends.torch.pick import pick_on_device
from cce_dist.frontend.prepare import local_targets_of
from cce_dist.frontend.reduction import PickedTokens, pick_tokens
from cce_dist.options import LossOptions

pytest.importorskip("triton")
from cce_dist.backends.triton.tokens import pick as tokens_pick

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SHARD = VocabShard.chunked(100, 1, 3)


def targets_of(size: int, ignored: float, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    targets = torch.randint(0, 100, (size,), generator=generator)
    left_out = torch.rand(size, generator=generator) < ignored
    return targets.masked_fill(left_out, -100).to(device)


def by_kernels(targets: torch.Tensor, options: LossOptions) -> PickedTokens:
    return pick_tokens(targets, options, partial(tokens_pick.pick_on_device, shard=SHARD))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "block"), [(1, 1024), (50, 4), (1030, 1024)])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
def test_kernels_pick_what_torch_picks(
    ignored: float, size: int, block: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With 4 of them a program adds up the counts of more programs than it has lanes.
    monkeypatch.setattr(tokens_pick, "BLOCK", block)
    targets, options = targets_of(size, ignored, device), LossOptions()
    right = pick_tokens(targets, options, pick_on_device)
    got = by_kernels(targets, options)
    for name in ("targets", "rows", "count", "counts"):
        value, wanted = getattr(got, name), getattr(right, name)
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name
    local = local_targets_of(right, SHARD)
    assert got.local_targets is not None and got.local_targets.dtype == torch.int32
    assert torch.equal(got.local_targets.long(), local)
    assert got.in_range is not None and int(got.in_range) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", [-1, 100, 2**40, -(2**40)])
def test_a_target_that_is_no_class_is_seen_wherever_it_stands(wrong: int, device: str) -> None:
    targets = targets_of(1500, 0.3, device)
    for at in (0, 1023, 1499):
        spoiled = targets.clone()
        spoiled[at] = wrong
        got = tokens_pick.pick_unchecked(spoiled, -100, SHARD)
        assert got.in_range is not None and int(got.in_range) == 0
    # An ignored one may be anything.
    got = by_kernels(spoiled.masked_fill(spoiled == -100, wrong), LossOptions(ignore_index=wrong))
    assert got.in_range is not None and int(got.in_range) == 1


# In a process of its own: the GPU is of no use to it afterwards. Prepared, recorded and played.
@pytest.mark.gpu
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_target_that_is_no_class_ends_the_program(calls: int) -> None:
    code = f"""
import torch
from cce_dist import linear_cross_entropy
hidden, weight = (torch.randn(n, 64, device="cuda").bfloat16() for n in (300, 500))
targets = torch.randint(500, (300,), device="cuda")
for _ in range({calls}):
    linear_cross_entropy(hidden, weight, targets)
torch.cuda.synchronize()
print("right so far", flush=True)
targets[7] = 500
linear_cross_entropy(hidden, weight, targets)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and done.stdout == "right so far\n"
    assert "targets must lie in [0, vocab_size) or equal ignore_index" in done.stderr
    assert "device-side assert" in done.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_a_shift_comes_before(device: str) -> None:
    targets, options = targets_of(60, 0.3, device).view(3, 20), LossOptions(shift=2)
    right = pick_tokens(targets, options, pick_on_device)
    got = by_kernels(targets, options)
    assert torch.equal(got.targets, right.targets) and torch.equal(got.rows, right.rows)
