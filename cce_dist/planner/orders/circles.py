"""A check that ranks never wait for one another in a circle, if collectives wait for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from .vocab_1f1b import Pass


def asked_at(index: int, count: int, ahead: int | None) -> range:
    """Returns the microbatches, of `count`, whose tokens E of microbatch `index` asks for.

    Args:
        ahead: as in `require_no_circle`.
    """
    ahead = count if ahead is None else ahead
    return range(0 if index == 0 else min(index + ahead, count), min(index + ahead + 1, count))


class _Step(NamedTuple):
    """A step of a rank's stream for a pass: it starts a collective, or waits for it."""

    action: Literal["start", "wait"]
    name: str
    microbatch: int


def require_no_circle(
    orders: Sequence[Sequence[Pass]], *, ahead: int | None = None, unawaited: int | None = None
) -> None:
    """Checks that an order can run if no collective ends before all of its ranks have started it.

    NCCL's collectives may wait so. Each kind of collective follows the order of microbatches.

    Args:
        ahead: E of a microbatch asks for the tokens of the microbatch so many later; None: the
            first E asks for all of them.
        unawaited: the most unfinished sends to a neighbour that a rank may have; None: any number.
    Raises:
        ValueError: ranks would wait for one another; the message names them.
    """
    ranks = len(orders)
    count = 1 + max(each.microbatch for each in orders[0])
    rules = _Rules(
        last=ranks - 1,
        embeds=any(each.kind == "E" for order in orders for each in order),
        weighs=any(each.kind == "U" for each in orders[-1]),
        asks=[asked_at(index, count, ahead) for index in range(count)],
        unawaited=count if unawaited is None else unawaited,
    )
    steps = [
        [step for each in order for step in _steps(each, rank, rules)]
        for rank, order in enumerate(orders)
    ]
    started: dict[tuple[str, int], int] = {}
    at, moved = [0] * ranks, True
    while moved:
        moved = False
        for rank, todo in enumerate(steps):
            while at[rank] < len(todo):
                action, name, index = todo[at[rank]]
                if action == "start":
                    started[name, index] = started.get((name, index), 0) + 1
                elif started.get((name, index), 0) < (2 if ":" in name else ranks):
                    break
                at[rank] += 1
                moved = True
    stuck = {rank: todo[at[rank]][1:] for rank, todo in enumerate(steps) if at[rank] < len(todo)}
    if stuck:
        raise ValueError(
            "times must give an order in which no ranks wait for one another, got ranks that wait "
            f"for {stuck}"
        )


class _Rules(NamedTuple):
    """The rules of an order; `asks` are the microbatches that each E asks for."""

    last: int
    embeds: bool
    weighs: bool
    asks: list[range]
    unawaited: int


def _steps(each: Pass, rank: int, rules: _Rules) -> Iterator[_Step]:
    """Yields a pass's steps.

    The name of a message has both ranks, as "F0:1". Its receiver starts it and waits at once; its
    sender does not wait.
    """
    kind, index, last = each.kind, each.microbatch, rules.last

    def start(name: str) -> _Step:
        return _Step("start", name, index)

    def wait(name: str, at: int = index) -> _Step:
        return _Step("wait", name, at)

    if kind in "FB":
        source, target = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
        if 0 <= source <= last:
            message = f"{kind}{source}:{rank}"
            yield from (start(message), wait(message))
        elif kind == "B":
            yield wait("sum")
        elif rules.embeds:
            yield wait("rows")
        if 0 <= target <= last:
            message = f"{kind}{rank}:{target}"
            if index >= rules.unawaited:
                yield wait(message, index - rules.unawaited)
            yield start(message)
        elif kind == "F":
            yield start("post")
    elif kind == "S":
        if rank < last:
            yield start("post")
        yield from (wait("post"), start("merge"))
        if rules.weighs and rank < last:
            yield start("upstream")
    elif kind == "U":
        yield from (wait("merge"), start("upstream"))
    elif kind == "T":
        yield wait("merge")
        if rules.weighs and rank < last:
            yield wait("upstream")
        yield start("sum")
        if rank < last and index >= 2:
            yield wait("sum", index - 2)
    elif kind == "E":
        yield from (_Step("start", "ask", asked) for asked in rules.asks[index])
        yield from (wait("ask"), start("rows"))
    else:
        yield from (wait("rows"), start("give"))
        if index:
            yield wait("give", index - 1)
