"""torchrun's agents without torchrun's start: nodes of an elastic job that come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cce_dist.testing.forks import fork_context

from .nodes import free_port
from .torchrun import children, kill, run_agent


@dataclass
class ElasticJob:
    """`torchrun --nnodes 1:N --max-restarts 3 -m cce_dist ARGUMENTS`, an agent a node.

    The agents are torchrun's own, and agree among themselves as always; they and their ranks are
    forked, which takes a tenth of the time. A node that is gone is noticed after 6 s, not 15; with
    much less, a busy machine makes nodes that live look dead, and each goes on by itself.

    Args:
        share_store: torch's default, of which docs/guide/ranks.md says when it will not do.
    """

    arguments: Sequence[str]
    output: Path
    num_nodes: int = 2
    ranks_per_node: int = 2
    share_store: bool = False
    agents: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = free_port()
        self.output.touch()

    def add_node(self) -> int:
        """Adds a node and returns its number; the first hosts the rendezvous, and must not be
        lost."""
        number = len(self.agents)
        settings = {
            "min_nodes": 1,
            "max_nodes": self.num_nodes,
            "nproc_per_node": self.ranks_per_node,
            "run_id": "elastic",
            "rdzv_endpoint": f"127.0.0.1:{self.port}",
            "rdzv_configs": {
                "is_host": number == 0,
                # Of the second node to come; a waiting agent looks once a second, or later.
                "last_call_timeout": 3,
                "keep_alive_interval": 1,
                "keep_alive_max_attempt": 6,
            },
            "max_restarts": 3,
        }
        sharing = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not self.share_store))}
        agent = fork_context().Process(
            target=run_agent,
            args=(settings, tuple(self.arguments), self.output),
            kwargs={"environment": sharing},
        )
        agent.start()
        self.agents.append(agent)
        return number

    def lose_node(self, number: int) -> None:
        """Sends SIGKILL to the agent and its ranks, as when a host's power fails."""
        agent = self.agents[number]
        # So that none of its ranks can be started in between.
        os.kill(agent.pid, signal.SIGSTOP)
        for pid in (*children(agent.pid), agent.pid):
            kill(pid)
        agent.join()

    def rank_pids(self, number: int) -> list[int]:
        return children(self.agents[number].pid)


@contextmanager
def elastic_job(
    arguments: Sequence[str], output: Path, *, num_nodes: int = 2, share_store: bool = False
) -> Iterator[ElasticJob]:
    """Yields an ElasticJob whose processes all end with the context."""
    job = ElasticJob(arguments, output, num_nodes=num_nodes, share_store=share_store)
    try:
        yield job
    finally:
        for number, agent in enumerate(job.agents):
            if agent.is_alive():
                job.lose_node(number)
