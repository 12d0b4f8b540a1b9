"""A real Ray of several nodes on this machine, for tests: a head, and nodes that come and go."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NODES = 2
TRIES = 3
ROOT = Path(__file__).resolve().parents[1]


def why_not() -> str | None:
    """Why no lab can be had here, or None."""
    here = importlib.util.find_spec("ray") is not None
    return None if here else "ray is not installed: make setup-clusters, or pip install -e '.[ray]'"


class RayLab:
    """Context manager: a running cluster of a head without cores, and nodes of one core each."""

    def __enter__(self) -> RayLab:
        from ray.cluster_utils import Cluster

        with _environment():
            head = {"num_cpus": 0, "include_dashboard": False}
            self.cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.nodes: list[Any] = []
        self.mend()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.shutdown()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def mend(self) -> None:
        """All nodes are there again."""
        for node in [node for node in self.nodes if not is_whole(node)]:
            self.nodes.remove(node)
            if node in self.cluster.worker_nodes:
                self.remove(node, gracefully=False)
        with _environment():
            while len(self.nodes) < NODES:
                self.nodes.append(patiently(lambda: self.cluster.add_node(num_cpus=1)))

    def remove(self, node: Any, gracefully: bool) -> None:
        """Its daemons end, told to or killed, as when a machine leaves the cluster."""
        self.cluster.remove_node(node, allow_graceful=gracefully)


def patiently(start: Callable[[], Any]) -> Any:
    """Ray gives a node half a minute to come up, which is too little on a machine with much else to do."""
    for _ in range(TRIES - 1):
        try:
            return start()
        except Exception as error:  # just that
            if "timed out during startup" not in str(error):
                raise
    return start()


def is_whole(node: Any) -> bool:
    return bool(node.all_processes) and not node.dead_processes()


def raylet(node: Any) -> int:
    """The process id of a node's daemon."""
    return int(node.all_processes["raylet"][0].process.pid)


@contextmanager
def _environment() -> Iterator[None]:
    """What workers have: this checkout, the tests' own targets, one thread, and the rank of other processes
    (Ray's own choice would starve them on a machine that is busy).
    """
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAY_worker_niceness"] = "0"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
