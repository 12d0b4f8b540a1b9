"""How many trials an executor runs at once, as far as the settings say, and where they run."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.config import available_cores
from sweeps.executor_config import ExecutorConfig, RayConfig, SlurmConfig
from sweeps.study import Study


@dataclass(frozen=True)
class Capacity:
    """What a plan reckons with."""

    executor: str
    workers: int  # trials at once; of a cluster, at most
    here: bool  # trials run on the machine that plans
    note: str | None  # what a plan cannot know

    @property
    def side_by_side(self) -> int:
        """Trials that share one machine's cores and memory: a job of a cluster has its own."""
        return self.workers if self.here else 1


def capacity(study: Study) -> Capacity:
    settings = study.config.executor
    workers, here = _workers(study, settings)
    note = None
    if not here:
        note = (
            f"executor={settings.name}: times and memory are of this machine, and the cluster's nodes may "
            f"differ; {workers} at once if its queue has room for them"
        )
    return Capacity(settings.name, workers, here, note)


def _workers(study: Study, settings: ExecutorConfig) -> tuple[int, bool]:
    """Trials at once, and whether on this machine."""
    asked = study.config.launch.workers
    everything = min(len(study.trials), asked or len(study.trials))
    if isinstance(settings, SlurmConfig):
        return min(everything, settings.at_once or everything), False
    if isinstance(settings, RayConfig):
        if settings.address is not None:
            return everything, False
        cpus = settings.cpus if settings.cpus is not None else study.cores
        return min(everything, max(1, int(available_cores() / cpus))), True
    return study.workers, True
