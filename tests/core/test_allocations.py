"""What `track_allocations` counts: new storage, at its peak, forward and backward."""

from __future__ import annotations

import torch

from cce_dist.core.allocations import track_allocations


def test_track_allocations_counts_storage_once() -> None:
    existing = torch.ones(100, 10)
    with track_allocations() as found:
        made = existing + 1  # 4,000 bytes
        made.view(10, 100).add_(1)  # no storage of its own
        existing.add_(1)
        assert found.live_bytes == 4000
        del made
        assert found.live_bytes == 0
        assert found.peak_bytes == 4000
    assert found.largest_numel == 1000


def test_track_allocations_sees_the_backward() -> None:
    weight = torch.ones(30, 20, requires_grad=True)
    with track_allocations() as found:
        loss = (weight * 2).sum()
        before = found.peak_bytes
        loss.backward()
    assert found.peak_bytes > before
    assert found.largest_numel == 600


def test_track_allocations_counts_storage_at_a_freed_address() -> None:
    weight = torch.ones(300, 200, requires_grad=True)
    (weight * 2).sum().backward()
    with track_allocations() as found:
        assert weight.grad is not None
        weight.grad.add_(1)  # seen, and not counted
        weight.grad = None
        (weight * 2).sum().backward()
    assert found.live_bytes >= weight.nbytes


def test_track_allocations_of_freed_storage_does_not_grow() -> None:
    with track_allocations() as found:
        for _ in range(50):
            torch.empty(1000).fill_(1)
    assert found.peak_bytes <= 8000
