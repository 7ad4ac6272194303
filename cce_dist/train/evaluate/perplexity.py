"""`cce-dist eval`, from its arguments to its findings: perplexity of texts by a checkpoint."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cce_dist.core.phases import in_phase
from cce_dist.distributed import split_ranks
from cce_dist.train.checkpoint import Checkpoint, find_checkpoint, load_weights
from cce_dist.train.collectives import sum_over_world
from cce_dist.train.config.load import make_config
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.data.tokens import TokenCache, encode_texts, is_cached, open_tokens
from cce_dist.train.disk import read_text
from cce_dist.train.errors import ConfigError, JobError
from cce_dist.train.model.decoder import Decoder
from cce_dist.train.model.fsdp import place
from cce_dist.train.model.head import head_layout, make_token_nll
from cce_dist.train.ranks import Ranks, num_ranks
from cce_dist.train.stop import StopRequest
from cce_dist.train.watch.heartbeat import Heartbeat
from cce_dist.train.watch.watch import run_watched, wait_for_main

from .scores import NUM_GROUPS, Score, count_ids, frequency_groups, score, score_groups
from .windows import Windows, cut_windows


@dataclass(frozen=True)
class Request:
    """The arguments of an evaluation.

    Args:
        run_dir: the run's folder, which has `checkpoints`.
        checkpoint: a step; None: the newest.
        tp: number of ranks that share the vocabulary; None: all ranks.
        batch, sequence_length, cache: None: the values of training.
        stride: None: sequence_length, windows without overlap.
    """

    run_dir: Path
    texts: tuple[Path, ...]
    checkpoint: int | None = None
    tp: int | None = None
    batch: int | None = None
    sequence_length: int | None = None
    stride: int | None = None
    cache: Path | None = None


def run_evaluation(request: Request, hand_over: Callable[[Score], None]) -> int:
    """Evaluates, gives the main rank's findings to `hand_over`, and returns the exit code."""

    def work(config: TrainConfig, ranks: Ranks, heartbeat: Heartbeat, stop: StopRequest) -> None:
        findings = evaluate_texts(request, config, ranks, heartbeat)
        if ranks.is_main:
            hand_over(findings)

    # Data-parallel ranks may have different numbers of batches.
    load = partial(load_request, request)
    return run_watched(lambda: load(num_ranks()), work, lambda config, ranks: ranks.dp_rank)


def load_request(request: Request, num_ranks: int) -> TrainConfig:
    """Returns the configuration of the checkpoint's training, changed by the request.

    Raises:
        ConfigError: an option is out of its bounds, or there is no such checkpoint.
    """
    for name, least in (("tp", 1), ("batch", 1), ("sequence_length", 2), ("stride", 1)):
        value = getattr(request, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= {least}, got {value}")
    try:
        _, tp = split_ranks(num_ranks, tp=request.tp or "all", prefix="--")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    checkpoint = find_checkpoint(request.run_dir / "checkpoints", request.checkpoint)
    values = copy.deepcopy(checkpoint.config)
    values["parallel"] = {"tp": tp, "timeout_s": values["parallel"]["timeout_s"]}
    data = values["data"]
    for section, name in ((values, "batch"), (data, "sequence_length"), (data, "cache")):
        section[name] = getattr(request, name) or section[name]
    config = make_config(values, str(checkpoint.folder))
    length = config.data.sequence_length
    if request.stride is not None and request.stride > length:
        raise ConfigError(
            f"--stride must be at most the {length} tokens of a window, or tokens would be left "
            f"out, got {request.stride}"
        )
    return config


def evaluate_texts(
    request: Request, config: TrainConfig, ranks: Ranks, heartbeat: Heartbeat
) -> Score:
    """Scores the request's texts, each alone and all together, and their tokens by frequency.

    All ranks return the same, but for `seconds`, the time of the windows.

    Raises:
        ConfigError: a text or the tokenizer cannot be used, or the checkpoint has another model.
        JobError: the model's losses are not finite.
    Collectives: a broadcast of the token ids, those of loading, and one sum at the end.
    """
    heartbeat.place.phase = "preparing the text"
    stride = request.stride or config.data.sequence_length
    step, num_bytes, texts = _share_texts(request, config, ranks)
    windows = cut_windows(texts, request.texts, config.data.sequence_length, stride)
    heartbeat.place.phase = "loading a checkpoint"
    checkpoint = find_checkpoint(request.run_dir / "checkpoints", step)
    model = Decoder(config, ranks)
    place(model, config, ranks)
    load_weights(checkpoint, model, ranks)
    heartbeat.place.phase = "evaluating"
    counts = count_ids(texts, config.data.vocab_size)
    groups = frequency_groups(counts)
    started = time.perf_counter()
    nats = sum_nll(model, windows, groups, config, ranks, heartbeat).reshape(len(texts), NUM_GROUPS)
    seconds = time.perf_counter() - started
    if not np.isfinite(nats).all():
        raise JobError(f"{checkpoint.folder} must give finite losses, got {nats.sum()} nats")
    num_tokens = [len(ids) - 1 for ids in texts]
    of_texts = zip(num_tokens, nats.sum(1).tolist(), num_bytes, strict=True)
    return {
        "checkpoint": str(checkpoint.folder),
        "step": checkpoint.step,
        "dtype": config.dtype,
        "vocab_size": config.data.vocab_size,
        "sequence_length": config.data.sequence_length,
        "stride": stride,
        "batch": config.batch,
        "dp": ranks.dp,
        "tp": ranks.tp,
        "device": ranks.device.type,
        "seconds": seconds,
        **score(sum(num_tokens), float(nats.sum()), sum(num_bytes)),
        "texts": [
            {"path": str(path), **score(*each)}
            for path, each in zip(request.texts, of_texts, strict=True)
        ],
        "frequency": score_groups(counts, groups, nats.sum(0)),
    }


@torch.no_grad()
def sum_nll(
    model: Decoder,
    windows: Windows,
    groups: np.ndarray,  # [V] int64
    config: TrainConfig,
    ranks: Ranks,
    heartbeat: Heartbeat,
) -> np.ndarray:
    """Sums the nats of each text's tokens by the group of their ids: [texts x NUM_GROUPS] float64.

    Data-parallel ranks take the windows in turn. Collectives: in each batch those of the embedding
    and of the loss over tp, and one sum at the end.
    """
    token_nll = make_token_nll(config, head_layout(config, ranks))
    group_of = torch.from_numpy(groups).to(ranks.device)
    num_texts = int(windows.text[-1]) + 1
    sums = torch.zeros(num_texts * NUM_GROUPS, dtype=torch.float64, device=ranks.device)
    mine = np.arange(ranks.dp_rank, len(windows), ranks.dp)
    for number, first in enumerate(range(0, len(mine), config.batch), 1):
        heartbeat.place.step = number
        batch = windows.batch(mine[first : first + config.batch])
        ids, targets, text = (x.to(ranks.device) for x in batch)
        with in_phase("forward"):
            hidden = model(ids)
            nll = token_nll(hidden, model.head_weight, targets.flatten(), ()).loss
        # An ignored target has 0 nats.
        where = text[:, None] * NUM_GROUPS + group_of[targets.clamp_min(0)]
        sums.index_add_(0, where.flatten(), nll.double())
    # All tp ranks have the same sums.
    return np.array(sum_over_world([sums / ranks.tp], ranks.device))


def read_texts(request: Request, config: TrainConfig) -> tuple[int, list[int], list[np.ndarray]]:
    """Returns the checkpoint's step, each text's bytes, and each text's ids behind END_OF_TEXT.

    Raises:
        ConfigError: a text or the tokenizer cannot be used.
    """
    checkpoint = find_checkpoint(request.run_dir / "checkpoints", request.checkpoint)
    texts = [read_text(path, "TEXT") for path in request.texts]
    tokens = encode_texts(_open_tokenizer(request, checkpoint, config), texts)
    return checkpoint.step, [len(text.encode()) for text in texts], tokens


def _share_texts(
    request: Request, config: TrainConfig, ranks: Ranks
) -> tuple[int, list[int], list[np.ndarray]]:
    """Shares the main rank's texts and step: ranks could find different newest checkpoints."""
    box: list[Any] = [None]
    if ranks.is_main:
        box = [read_texts(request, config)]
        ranks.store.set("texts", "")
    else:
        wait_for_main(ranks, "texts")
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def _open_tokenizer(request: Request, checkpoint: Checkpoint, config: TrainConfig) -> TokenCache:
    caches, key = _caches(request, checkpoint, config), checkpoint.data_key
    cache_dir = next((cache for cache in caches if is_cached(cache, key)), None)
    if cache_dir is None:
        raise ConfigError(
            f"the tokenizer of {checkpoint.folder} must be in the run's data.cache, got no {key} "
            f"in {caches[0]}, nor where the run was trained or is now: name the folder by --cache"
        )
    tokens = open_tokens(cache_dir, key)
    if tokens.num_merged > config.data.vocab_size:
        raise ConfigError(
            f"the tokenizer in {tokens.folder} must have at most the {config.data.vocab_size} ids "
            f"of {checkpoint.folder}, got {tokens.num_merged}"
        )
    return tokens


def _caches(request: Request, checkpoint: Checkpoint, config: TrainConfig) -> list[Path]:
    """Lists the folders in which the run's data.cache may be; its key names the tokenizer."""
    cache = config.data.cache
    if request.cache is not None:
        return [cache]
    # A relative cache is looked up from this folder, as in training, and beside the run, which may
    # have been moved with its cache.
    places = [cache, checkpoint.cache or cache]
    places += [above / cache for above in request.run_dir.absolute().parents]
    return list(dict.fromkeys(places))
