"""Checkpoints that do not depend on tp, pp or FSDP; the last checkpoint is always complete."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from cce_dist.core.phases import in_phase
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.model.decoder import Decoder, count_parameters
from cce_dist.train.model.fsdp import local_shard

from .checkpoint_files import read_state, read_tensors, write_state
from .collectives import wait_for_all
from .disk import GO_ON, writing
from .errors import ConfigError
from .progress import format_bytes
from .ranks import Ranks

# Keys and sections that may differ between a checkpoint and the run that resumes it: they change
# neither the loss nor the text. All others must agree. `batch` times dp has a check of its own.
# "log" is log_every, too.
FREE = (
    *("run.name", "run.out", "data.cache", "parallel.", "checkpoint.", "log", "batch"),
    *("loss.workspace_mib", "loss.backend"),
)
INFO_FILE = "run.json"
# The weight and AdamW's two moments, all in fp32.
BYTES_A_PARAMETER = 12


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Args:
        dp: number of data-parallel ranks that wrote it.
        data_key: the key of `TokenCache`.
        cache: absolute path of the run's data.cache; None: an old checkpoint does not have it.
        config: the run's configuration, as JSON values.
    """

    folder: Path
    step: int
    dp: int
    data_key: str
    cache: Path | None
    config: dict[str, Any]


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Returns the checkpoint with the highest step; unfinished checkpoints have other names.

    Raises:
        ConfigError: a file of the checkpoint is missing or has another size than when written.
    """
    checkpoints = _checkpoints(folder)
    return _open_checkpoint(checkpoints[max(checkpoints)]) if checkpoints else None


def find_checkpoint(folder: Path, step: int | None) -> Checkpoint:
    """Returns the checkpoint of a step, or the newest for `step=None`.

    Raises:
        ConfigError: there is no such checkpoint, or a file of the checkpoint is missing or has
            another size than when written.
    """
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        raise ConfigError(f"{folder} must hold a checkpoint of cce-dist train, got none")
    step = max(checkpoints) if step is None else step
    if step not in checkpoints:
        steps = ", ".join(map(str, sorted(checkpoints)))
        raise ConfigError(
            f"{folder} must hold a checkpoint of step {step}, got checkpoints of steps {steps}"
        )
    return _open_checkpoint(checkpoints[step])


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints by step; one that somebody keeps under another name is left alone."""
    paths = (path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name))
    return {int(path.name.removeprefix("step_")): path for path in paths if path.is_dir()}


def _open_checkpoint(folder: Path) -> Checkpoint:
    try:
        info = json.loads((folder / INFO_FILE).read_text())
        cache = Path(info["cache"]) if "cache" in info else None
        checkpoint = Checkpoint(
            folder, info["step"], info["dp"], info["data_key"], cache, info["config"]
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"checkpoint {folder} must have a {INFO_FILE} as it was written, got "
            f"{type(error).__name__}: {error}; restore the file, or remove the checkpoint's folder "
            "to go on from the one before"
        ) from None
    for name, size in info.get("files", {}).items():
        path = folder / name
        got = path.stat().st_size if path.exists() else None
        if got != size:
            raise ConfigError(
                f"checkpoint {folder} must have the file {name} of {size} bytes, got "
                f"{'none' if got is None else f'{got} bytes'}: restore the file, or remove the "
                "checkpoint's folder to go on from the one before"
            )
    return checkpoint


@in_phase("checkpoint")
def save_checkpoint(
    folder: Path,
    step: int,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    data_key: str,
) -> None:
    """Writes all state that a resumed run needs, then makes it visible in one rename.

    Raises:
        JobError: a file cannot be written, on any rank; earlier checkpoints are as they were.
    Collectives: those of torch.distributed.checkpoint.save, and one small all-reduce.
    """
    config = model.config
    final, partial = folder / f"step_{step:08d}", folder / f"partial_{step:08d}"
    info = {
        "step": step,
        "dp": ranks.dp,
        "data_key": data_key,
        # An absolute path: data.cache may be relative to a folder that is not known later.
        "cache": str(config.data.cache.absolute()),
        "config": config.model_dump(mode="json"),
    }
    size = format_bytes(checkpoint_bytes(config))
    remedy = f"{GO_ON}; checkpoint.keep={config.checkpoint.keep} of them stay on the disk"
    name = f"the checkpoint of step {step}, about {size},"
    # If a rank fails, no rank writes any more.
    with writing(name, folder, remedy, scrap=partial if ranks.is_main else None):
        if ranks.is_main:
            remove_partial(folder)
            partial.mkdir(parents=True)
        wait_for_all(ranks.device)
        write_state(_state(model, optimizer, ranks), partial)
        if ranks.is_main:
            _publish(partial, final, info)
            _prune(folder, config.checkpoint.keep)


def checkpoint_bytes(config: TrainConfig) -> int:
    """Returns the bytes of all tensors, over all ranks; torch adds about 1 KiB to each."""
    return BYTES_A_PARAMETER * count_parameters(config).total


def remove_partial(folder: Path) -> None:
    """Removes unfinished checkpoints that a killed job has left."""
    for left in folder.glob("partial_*"):
        shutil.rmtree(left)


def _publish(partial: Path, final: Path, info: dict[str, Any]) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    (partial / INFO_FILE).write_text(json.dumps({**info, "files": sizes}, indent=1))
    # The other files are on the disk; now the names must follow, in this order.
    _flush(partial / INFO_FILE, partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _flush(final.parent)


def load_checkpoint(
    checkpoint: Checkpoint, model: Decoder, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> None:
    """Fills model, optimizer and random state in place; each rank reads its own rows.

    Raises:
        JobError: a file cannot be read, on any rank.
    """
    state = _state(model, optimizer, ranks)
    read_state(state, checkpoint.folder)
    torch.set_rng_state(state["rng"])


def load_weights(checkpoint: Checkpoint, model: Decoder, ranks: Ranks) -> None:
    """Fills the model alone, in place, whatever layout it was trained in.

    Raises:
        ConfigError: the checkpoint lacks such weights, or has them in other shapes.
        JobError: a file cannot be read, on any rank.
    """
    weights = _weights(model, ranks)
    saved = read_tensors(checkpoint.folder)
    wrong = []
    for name, weight in weights.items():
        shape = getattr(saved.get(f"model.{name}"), "size", None)
        if shape != weight.shape:
            got = "none" if shape is None else list(shape)
            wrong.append(f"  {name} of shape {list(weight.shape)}, got {got}")
    if wrong:
        rule = f"checkpoint {checkpoint.folder} must have the weights of its configuration:"
        raise ConfigError("\n".join([rule, *wrong]))
    read_state({"model": weights}, checkpoint.folder)


def check_resumable(checkpoint: Checkpoint, config: TrainConfig, dp: int) -> None:
    """Refuses to resume a run with another run's configuration.

    Raises:
        ConfigError: names each key that changed, with both values.
    """
    # Keys that are newer than the checkpoint had their defaults.
    saved = _flatten(TrainConfig().model_dump(mode="json")) | _flatten(checkpoint.config)
    now = _flatten(config.model_dump(mode="json"))
    # Only the cosine schedule depends on the number of steps.
    free = (*FREE, "steps") if now["optimizer.schedule"] == "constant" else FREE
    changed = [
        f"  {key} was {saved.get(key)!r}, got {now.get(key)!r}"
        for key in sorted(saved.keys() | now.keys())
        if not key.startswith(free) and saved.get(key) != now.get(key)
    ]
    sequences = saved["batch"] * checkpoint.dp
    if sequences != config.batch * dp:
        changed.append(f"  batch x data-parallel ranks was {sequences}, got {config.batch} x {dp}")
    if changed:
        rule = f"--resume must keep what the loss depends on ({checkpoint.folder}):"
        advice = "  change it back, or start a new run with another run.name"
        raise ConfigError("\n".join([rule, *changed, advice]))


def _state(model: Decoder, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any]:
    """Returns tensors that share storage with the live ones: loading fills the live ones."""
    moments = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            moments[f"{name}.{key}"] = _as_saved(name, value, model, ranks)
    weights = _weights(model, ranks)
    return {"model": weights, "optimizer": moments, "rng": torch.get_rng_state()}


def _weights(model: Decoder, ranks: Ranks) -> dict[str, Tensor]:
    return {
        name: _as_saved(name, parameter.detach(), model, ranks)
        for name, parameter in model.named_parameters()
    }


def _as_saved(name: str, tensor: Tensor, model: Decoder, ranks: Ranks) -> Tensor:
    """Returns the parameter of this name, or a moment of it, in its saved form."""
    mesh = ranks.vocab_mesh if model.is_over_pipeline(name) else ranks.mesh
    vocab_size = model.config.data.vocab_size if name in model.shards else None
    over_dp = isinstance(tensor, DTensor)
    # AdamW counts its steps in a scalar.
    if tensor.dim() == 0 or (vocab_size is None and not over_dp):
        return tensor
    num_rows = tensor.shape[0] if vocab_size is None else vocab_size
    shape = torch.Size((num_rows, *tensor.shape[1:]))
    return DTensor.from_local(
        local_shard(tensor),
        mesh,
        [Replicate() if vocab_size is None else Shard(0), Shard(0) if over_dp else Replicate()],
        run_check=False,
        shape=shape,
        stride=(*shape[1:], 1),
    )


def _prune(folder: Path, keep: int) -> None:
    checkpoints = _checkpoints(folder)
    for step in sorted(checkpoints)[:-keep]:
        path = checkpoints[step]
        # If the job is killed here, no part of the checkpoint must keep the checkpoint's name.
        doomed = path.rename(folder / path.name.replace("step_", "partial_"))
        shutil.rmtree(doomed, ignore_errors=True)


def _flush(*paths: Path) -> None:
    """Flushes files, and the names in folders, to the disk, in case the host loses power."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
