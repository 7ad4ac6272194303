"""A plan as plain values, for `--json` and the table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cce_dist.planner.cost.head import phase_bytes, rows_of_rank

from .flags import megatron_flags, patch_flags, torch_stages
from .plan import Plan, RankPlan
from .search import Pays, verdict_on


def describe(
    plan: Plan,
    pays: Pays | None = None,
    *,
    largest: int = 0,
    largest_of_layout: int | None = None,
    notes: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Describes a plan in seconds, bytes and FLOPs of one rank of each tensor-parallel group.

    Args:
        pays: the comparison of the head's places, if there is one.
        largest: sequences of the largest microbatch that fits, with any layout.
        largest_of_layout: the same with the plan's layout; None: `largest`.
        notes: sentences about the model; others are added.
    """
    job, model = plan.job, plan.model
    try:
        flags = megatron_flags(model, job, plan.layout)
    except ValueError as error:
        flags, notes = None, (*notes, str(error))
    if job.is_over_ranks and job.pp == 1:
        notes = (*notes, f"vocab_over {job.vocab_over}: there is only one pipeline rank")
    report: dict[str, Any] = {
        "model": asdict(model) | {"parameters": model.parameters},
        "job": asdict(job) | {"gpus": job.gpus, "schedule": job.schedule_name},
        "hardware": asdict(plan.hardware),
        "head_rows": {
            "model": model.num_rows,
            "padded": job.padded_rows(model.num_rows),
            "of_rank": rows_of_rank(model, job),
        },
        "layout": list(plan.layout),
        "step_seconds": plan.seconds,
        "schedule_seconds": plan.prediction.seconds,
        "closed_form_seconds": plan.prediction.closed_form,
        "optimizer_seconds": plan.optimizer_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "model_flops_utilization": plan.utilization,
        "bubble": plan.prediction.bubble,
        "binds": plan.binds,
        "fits": plan.fits,
        "peak_bytes": plan.peak,
        "usable_bytes": plan.hardware.room,
        "largest_microbatch": largest,
        "largest_microbatch_of_layout": largest if largest_of_layout is None else largest_of_layout,
        "ranks": [describe_rank(rank) for rank in plan.ranks],
        "megatron_flags": flags,
        "megatron_patch": None if flags is None else patch_flags(job),
        "torch_stages": torch_stages(plan.layout, has_head=not job.is_over_ranks),
        "notes": list(notes),
    }
    if job.is_over_ranks:
        report["phase_bytes"] = phase_bytes(model, job)
    if pays is not None:
        report["vocab_over_pipeline"] = {
            "verdict": pays.verdict,
            "speedup": pays.speedup,
            "verdict_on_our_loss": verdict_on(pays.last, plan),
            "last_stage": _brief(pays.last),
            "over_pipeline": _brief(pays.over),
        }
        if pays.planned is not None:
            report["planned_order_instead"] = _brief(pays.planned) | {
                "verdict": verdict_on(pays.planned, plan)
            }
    return report


def describe_rank(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        # A head over all ranks: each stage has a share of its parameters, no stage has its time.
        "stages": [
            {
                "first_layer": stage.first_layer,
                "layers": stage.layers,
                "parameters": stage.parameters,
                "flops": stage.flops,
                "forward_seconds": stage.forward,
                "backward_seconds": stage.backward,
                "head_seconds": stage.head_seconds,
                "kept_bytes": stage.kept + stage.head_kept,
            }
            for stage in rank.stages
        ],
        "parameters": rank.parameters,
        "flops": rank.flops,
        "forward_seconds": rank.forward,
        "backward_seconds": rank.backward,
        "head_seconds": rank.head_seconds,
        "busy_seconds": rank.busy,
        "in_flight": rank.in_flight,
        "memory_bytes": vars(rank.memory) | {"total": rank.memory.total},
    }


def _brief(plan: Plan) -> dict[str, Any]:
    return {
        "loss": plan.job.loss,
        "layout": list(plan.layout),
        "step_seconds": plan.seconds,
        "peak_bytes": plan.peak,
        "fits": plan.fits,
        "bubble": plan.prediction.bubble,
    }
