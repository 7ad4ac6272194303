"""A debug switch: compares the arguments of all ranks of a group, and names a rank that differs.

Ranks that disagree on the number of tokens wait for each other until a timeout. Ranks that disagree
on values train on nonsense. The switch is off by default: the host waits for the device in the
comparison.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cce_dist.frontend.inputs import Inputs
from cce_dist.options import LossOptions
from cce_dist.ranks.gather import gather_numbers
from cce_dist.ranks.transport import group_rank, group_size

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group

SWITCH = "CCE_DIST_CHECK_RANKS"
# Options that may differ between ranks. The workspace may differ, too, except with in_forward: it
# then decides the number of chunks of tokens, and so the number of collectives.
_FREE_OPTIONS = ("check_ranks", "keep_logits")
_CHUNK = 2**20
_VALUES = "values of "


def is_wanted(options: LossOptions) -> bool:
    """Tells whether the option or the environment asks for the comparison.

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
    """
    switch = os.environ.get(SWITCH, "0") or "0"
    if switch not in ("0", "1"):
        raise ValueError(f"environment variable {SWITCH} must be 0 or 1, got {switch!r}")
    return options.check_ranks or switch == "1"


def check_ranks(group: Group | None, inputs: Inputs, options: LossOptions) -> None:
    """Checks that all ranks have the same arguments, to the last bit, and different weight rows.

    Raises:
        ValueError: on every rank; names the arguments that differ, or the ranks with equal rows.
    Collectives: one all-gather of about 30 int64 over `group`; none for one rank.
    """
    if group_size(group) == 1:
        return
    mine = _describe(inputs, options)
    shared: dict[str, Tensor | None] = {
        "targets": inputs.targets,
        "token_weight": inputs.token_weight,
        "class_weight": inputs.class_weight,
        "temperature": inputs.temperature,
        # Under sequence parallel each rank has different tokens.
        "hidden": None if options.sequence_parallel else inputs.hidden,
    }
    mine |= {name: _outline(tensor) for name, tensor in shared.items() if name != "hidden"}
    # The count of numbers must not depend on the arguments: all ranks must gather as many.
    numbers = {name: _hash_of(text) for name, text in mine.items()}
    numbers |= {_VALUES + name: _hash_of_values(tensor) for name, tensor in shared.items()}
    numbers["rows of weight"] = _hash_of_rows(inputs.weight)
    columns = zip(*gather_numbers(list(numbers.values()), group), strict=True)
    by_name = dict(zip(numbers, columns, strict=True))
    row_hashes = by_name.pop("rows of weight")
    differ = [name for name, row in by_name.items() if len(set(row)) > 1]
    # Tensors of different shapes have different values, too: the error names the shape alone.
    differ = [name for name in differ if name.removeprefix(_VALUES) not in differ or name in mine]
    if not differ:
        return _require_distinct_rows(row_hashes)
    has = [f"{name} {mine[name]}" for name in differ if name in mine]
    raise ValueError(
        "every rank of the group must be called alike, got different "
        + "; ".join(f"{name} by rank: {_grouped(by_name[name])}" for name in differ)
        + f". This is rank {group_rank(group)}"
        + ("" if not has else ", with " + ", ".join(has))
    )


def _describe(inputs: Inputs, options: LossOptions) -> dict[str, str]:
    hidden, weight, bias = inputs.hidden, inputs.weight, inputs.bias
    texts = {field.name: _text_of(getattr(options, field.name)) for field in fields(options)}
    for name in _FREE_OPTIONS:
        del texts[name]
    if options.gradient != "in_forward":
        texts["workspace_bytes"] = "any"
    texts["hidden"] = _outline(hidden)
    texts["weight's dtype"] = str(getattr(weight, "dtype", type(weight)))
    texts["bias"] = "None" if bias is None else "given"
    # The grad mode and requires_grad decide whether there is a backward, and its collectives.
    texts["grad mode"] = str(torch.is_grad_enabled())
    for name, value in {"hidden": hidden, "temperature": inputs.temperature}.items():
        texts[f"{name}.requires_grad"] = str(getattr(value, "requires_grad", None))
    needing = [getattr(x, "requires_grad", False) for x in (hidden, weight, bias)]
    texts["whether any input requires grad"] = str(any(needing))
    return texts


def _text_of(value: object) -> str:
    """Returns an option's text, the same for 30 and 30.0."""
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(float(value))
    return repr(value)


def _outline(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {list(value.shape)}"


def _hash_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _hash_of_values(tensor: Tensor | None) -> int:
    """Hashes a tensor's bits and their places; the sum wraps, so its order does not matter."""
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return 0
    bits, total = _bits_of(tensor), 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        place = torch.arange(start, start + part.numel(), device=part.device)
        total += int(_mixed(part + _mixed(place)).sum())
    return (total + 2**63) % 2**64 - 2**63


def _bits_of(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements as integers, [numel]."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(sizes[tensor.element_size()])


def _hash_of_rows(weight: Tensor) -> int:
    """Hashes a weight's rows; returns 0 if all rows are equal.

    Ranks may hold the same rows in that case, as in a head that begins at 0.
    """
    if not isinstance(weight, Tensor) or weight.numel() == 0 or weight.dim() != 2:
        return 0
    bits = _bits_of(weight).view(weight.shape)
    return 0 if bool((bits == bits[:1]).all()) else _hash_of_values(weight)


def _require_distinct_rows(row: Sequence[int]) -> None:
    size = len(row)
    if len(set(row) - {0}) == sum(number != 0 for number in row):
        return
    same = [ranks for number, ranks in _by_number(row).items() if number and len(ranks) > 1]
    raise ValueError(
        "every rank of the group must have rows of weight of its own, got the same values on ranks "
        + " and on ranks ".join(map(str, same))
        + f": equal rows on several ranks count several times. Pass weight.chunk({size})[rank] "
        f"with vocab_shard=VocabShard.chunked(V, rank, {size}), or group=None if each rank has a "
        "whole head; and seed each rank differently when the head is initialised"
    )


def _mixed(x: Tensor) -> Tensor:
    """Mixes the bits of wrapping int64 as the finaliser of splitmix64 does; its factors fit int64.

    Source: Steele, Lea and Flood, OOPSLA 2014.
    """
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB), (31, 1)):
        # The mask removes copies of the sign bit, which makes the shift a logical one.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def _grouped(row: Sequence[int]) -> str:
    """Lists ranks with the same number together, the largest list first."""
    return " | ".join(map(str, sorted(_by_number(row).values(), key=len, reverse=True)))


def _by_number(row: Sequence[int]) -> dict[int, list[int]]:
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, number in enumerate(row):
        ranks[number].append(rank)
    return ranks
