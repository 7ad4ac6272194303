"""After the forward's products: the guard's sums, the marks, and what the caller is given."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Screen
from cce_dist.backends.protocol import ColumnFilter, ForwardRequest, Room
from cce_dist.core import streams
from cce_dist.core.types import Head, Tokens, Wanted
from cce_dist.testing import TRITON_PLACES, Place, grid
from tests.backends.triton.test_shares import launches_of
from tests.support.loss_cases import generator

pytest.importorskip("triton")

from cce_dist.backends.triton import stats as triton_stats
from cce_dist.backends.triton.filter.marks import Marks, MassFactors, marks_of
from cce_dist.backends.triton.forward import targets as forward_targets
from cce_dist.backends.triton.forward.operands import Finished, ForwardBuffers, ForwardLaunch
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.screened.steps import guard

BLOCK = 128


def problem(place: Place, num_tokens: int, num_classes: int, count: int) -> tuple[Tokens, Head]:
    """Targets of which some repeat and some lie on another rank; the last tokens don't count."""
    made, dtype = generator(), torch.float16
    hidden = torch.randn(num_tokens, 16, generator=made).to(dtype)
    weight = torch.randn(num_classes, 16, generator=made).to(dtype)
    targets = torch.randint(0, num_classes, (num_tokens,), generator=made, dtype=torch.int32)
    targets[::7], targets[3::11], targets[count:] = 5, -1, -1
    rows = torch.randperm(num_tokens, generator=made)
    counts = torch.tensor([count], dtype=torch.int32)
    tokens = Tokens(*(x.to(place.device) for x in (hidden, rows, targets, counts)))
    return tokens, Head(weight.to(place.device), None, None, num_classes, None, 1.0)


def stats_of(tokens: Tokens, head: Head, screen: Screen | None = None) -> tuple[Any, Marks | None]:
    rule = ColumnFilter(0.1, by_largest=False, tail=True, draws=True)
    request = ForwardRequest(Wanted(screened=True), rule, screen, None, None, Room(2**24))
    return triton_stats.forward(tokens, head, request)


def bits_of(words: Tensor, num_blocks: int) -> Tensor:
    """[V, words] int64 -> [num_blocks, V] bool"""
    lanes = torch.arange(64, device=words.device)
    bits = (words[..., None] >> lanes) & 1
    return bits.flatten(1)[:, :num_blocks].T.bool()


# Blocks that are no whole step, word or group of blocks; some of no token that counts.
BLOCKS = {"one": (1, 100), "nine": (9, 9 * BLOCK), "word": (64, 60 * BLOCK + 1), "two": (70, 8832)}


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, blocks=BLOCKS, draws=(True, False)))
def test_marks_of_every_block(place: Place, blocks: tuple[int, int], draws: bool) -> None:
    (num_blocks, count), num_columns = blocks, 300
    mass = torch.rand(num_blocks, num_columns, generator=generator()) - 0.3
    mass = mass.bfloat16().to(place.device)
    counting = -(-count // BLOCK)
    mass[counting:] = torch.nan
    # Two splits side by side, three times: the first launch computes the first columns.
    shape = torch.tensor([counting, 6, 1], dtype=torch.int32, device=place.device)
    factor = 0.5 + torch.rand(num_blocks, 4, generator=generator()).to(place.device)
    factor[counting:] = torch.nan
    marks = marks_of(
        mass,
        MassFactors(factor, shape, width=4, groups=2),
        torch.tensor([count], dtype=torch.int32, device=place.device),
        mass.new_empty(count, dtype=torch.float32),
        torch.zeros(1, dtype=torch.int32, device=place.device),
        torch.float32,
        threshold=1.0,
        draws=draws,
    )
    mass[counting:] = 0
    assert torch.equal(bits_of(marks.kept, num_blocks), mass < 0)
    drawn = bits_of(marks.drawn, num_blocks)
    assert bool(drawn[:counting].any()) == draws and not bool(drawn[mass <= 0].any())
    launch = launches_of(num_columns, 4, 3).to(place.device)
    assert launch.unique().tolist() == [0, 1, 2, 3]
    factor[counting:] = 0
    corrected = mass.float().clamp_min(0) * factor[:, launch]
    groups = corrected.split(marks.blocks_per_group)
    torch.testing.assert_close(marks.share, torch.stack([group.sum(0) for group in groups]))


# Programs of 16 blocks and 1024 or 4096 columns: fewer than pieces of the tokens, or more.
@pytest.mark.parametrize(
    **grid(
        places=TRITON_PLACES, num_classes=(300, 4200), refused=("by_none", "by_kept", "by_error")
    )
)
def test_guard_adds_up_what_its_programs_found(
    place: Place, num_classes: int, refused: str
) -> None:
    num_tokens, count = 18 * BLOCK, 17 * BLOCK + 5
    tokens, head = problem(place, num_tokens, num_classes, count)
    state = ForwardState.of(tokens, head, Wanted(), True, None, True)
    plain = ForwardState.of(tokens, head, Wanted(), True, None, False)
    mass = torch.rand(18, num_classes, generator=generator()) - 0.2
    state.buffers.mass.copy_(mass)
    made, fp32 = generator(), torch.float32
    lse, tail, variance = (torch.rand(num_tokens, generator=made) for _ in range(3))
    lower = lse / torch.log(torch.tensor(2.0)) + torch.randn(num_tokens, generator=made)
    state.buffers.lower.copy_(lower)
    unkept = (lse + tail.log()).to(place.device, fp32)
    finished = Finished(lse.to(place.device), unkept, unkept, None, None, unkept)
    whole = torch.maximum(lower.double() * torch.log(torch.tensor(2.0)), lse.double())
    errors = ((lse + tail.log()).double() - whole).exp().square() * variance
    error = float(errors[:count].sum().div(count).sqrt())
    share = float((mass < 0).double().mean())
    allowed = {"by_kept": share - 1e-3, "by_error": error * 0.999}
    screen = Screen(
        max_kept=allowed["by_kept"] if refused == "by_kept" else share + 1e-3,
        max_error=allowed["by_error"] if refused == "by_error" else error * 1.001,
    )
    full, found = guard(state, finished, variance.to(place.device), screen)
    wants = int(refused != "by_none")
    assert int(found.full) == wants
    assert full.shape.tolist() == [18 * wants, *plain.shape.tolist()[1:]]
    raised = (lse - variance.sqrt()) / torch.log(torch.tensor(2.0))
    expected = torch.where(torch.arange(num_tokens) < count, torch.maximum(raised, lower), lower)
    torch.testing.assert_close(state.buffers.lower.cpu(), expected)


ANY_INT8 = Screen("int8", max_kept=1, max_error=10)


@pytest.mark.parametrize(
    **grid(places=TRITON_PLACES, num_tokens=(100, 700), screen={"no": None, "int8": ANY_INT8})
)
def test_forward_in_the_callers_order(
    place: Place, num_tokens: int, screen: Screen | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrected: list[Tensor] = []

    def add_exact_columns(state: ForwardState, made: Finished, *args: Any) -> None:
        assert made.dropped is not None
        corrected.append(made.dropped)
        add(state, made, *args)

    add = triton_stats.add_exact_columns
    monkeypatch.setattr(triton_stats, "add_exact_columns", add_exact_columns)
    count = num_tokens - 60
    tokens, head = problem(place, num_tokens, 700, count)
    stats, marks = stats_of(tokens, head, screen=screen)
    assert marks is not None and tokens.rows is not None
    assert bool((stats.screened[:count] == (screen is not None)).all())
    z = tokens.hidden[tokens.rows].double() @ head.weight.double().T
    # What isn't kept is of 8 bits, and corrected by what its columns share.
    close = {"rtol": 0, "atol": 1e-4 if screen is None else 2e-2}
    lse = z.logsumexp(1)
    torch.testing.assert_close(stats.lse[:count].double(), lse[:count], **close)
    assert not stats.lse[count:].any() and not stats.target_logit[count:].any()
    targets = tokens.local_targets[:, None].long()
    logits = torch.where(targets < 0, 0, z.gather(1, targets.clamp_min(0)))[:, 0]
    torch.testing.assert_close(stats.target_logit.double(), logits, rtol=0, atol=1e-3)
    places = torch.arange(num_tokens) if marks.order is None else marks.order.long().cpu()
    assert torch.equal(places.sort().values, torch.arange(num_tokens))
    assert (marks.order is None) == (num_tokens <= BLOCK)
    # Whatever their mass the blocks keep their targets' columns.
    kept = bits_of(marks.kept, -(-num_tokens // BLOCK)).cpu()
    of_token = torch.empty(num_tokens, 700, dtype=torch.bool)
    of_token[places] = kept[torch.arange(num_tokens) // BLOCK]
    of_token = of_token.to(place.device)
    assert bool(of_token.gather(1, targets.clamp_min(0))[targets >= 0].all())
    dropped = torch.where(of_token, -torch.inf, z).logsumexp(1)[:count]
    torch.testing.assert_close(
        (marks.log_dropped[:count].double() - lse[:count]).exp(),
        (dropped - lse[:count]).exp(),
        **close,
    )
    assert bool((marks.log_dropped[count:] == -torch.inf).all())
    for dropped in corrected:
        assert torch.equal(marks.log_dropped[places][:count], dropped[:count])
    if screen is None:
        assert torch.equal(marks.seed, stats.lse[:1].view(torch.int32))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, fails=(True, False)))
def test_target_products_are_waited_for_and_freed(
    place: Place, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    products: list[weakref.ref[Tensor]] = []

    def start_on_side_stream(device: torch.device, run: Any) -> Callable[[], None]:
        products.append(weakref.ref(run.args[5]))
        wait = streams.start_on_side_stream(device, run)
        return lambda: (waited.append(True), wait())[1]

    def merge(state: ForwardState, last: ForwardLaunch) -> Finished:
        assert products and not waited
        if fails:
            raise MemoryError("no room for it")
        return merged(state, last)

    def marks_of(*args: Any, **options: Any) -> Marks:
        assert waited == [True] and products[0]() is None
        return made(*args, **options)

    merged, made = ForwardState.merge, triton_stats.marks_of
    monkeypatch.setattr(forward_targets, "start_on_side_stream", start_on_side_stream)
    monkeypatch.setattr(ForwardState, "merge", merge)
    monkeypatch.setattr(triton_stats, "marks_of", marks_of)
    tokens, head = problem(place, 140, 300, 140)
    if fails:
        with pytest.raises(MemoryError, match="no room"):
            stats_of(tokens, head)
    else:
        stats_of(tokens, head)
    assert waited == [True]


def test_more_sums_than_kernels_count_are_refused() -> None:
    def buffers(size: int) -> ForwardBuffers:
        lower, states = (torch.empty(*shape, device="meta") for shape in ((1000,), (5, 4, size)))
        return ForwardBuffers(lower, states, None, None, None)

    assert buffers((2**31 - 1) // 20).size == (2**31 - 1) // 20
    with pytest.raises(ValueError, match=r"hidden must have fewer tokens.* of 1000 tokens"):
        buffers(2**31 // 20 + 1)
