"""Where a run's actors live: a Ray namespace for each folder, run in it, and settings that they are built from."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from verl_omni_core.cluster import ray_head
from verl_omni_core.errors import DeadlineError, StageLost
from verl_omni_core.identity import digest
from verl_omni_core.settings.run import ClusterSettings, RunConfig
from verl_omni_core.store.runs import RunFolder

_OF_THE_DRIVER: dict[str, Any] = {
    "run": {"id", "store", "steps", "validate_every", "validate_before", "checkpoint_every", "images_every"}
    | {"resume", "end_by", "end_margin_s"},
    "rollout": {"failure", "refill_rounds", "max_failed_fraction"},
    **dict.fromkeys(("data", "weights", "durability", "tracking", "cluster"), True),
}
"""Settings that no actor is built from: living ones serve a run that goes on with others."""
_END_S = 30.0


def namespace_of(config: RunConfig, run: RunFolder) -> str:
    """Return the Ray namespace of a run's actors: one for each folder, run in it, and settings that they have."""
    settings = config.model_dump(mode="json", exclude=_OF_THE_DRIVER)
    return f"{_place(run.root)}{digest([run.uuid, settings])[:12]}"


def connect(settings: ClusterSettings) -> None:
    """Connect this process to the cluster that is given, or to the local head, which is started if it does not run."""
    address = ray_head.given(settings) or ray_head.wait(ray_head.launch(settings))
    ray_head.connect(address, "verl-omni")


def named(namespace: str, name: str) -> ActorHandle:
    """Return a living actor.

    Raises:
        StageLost: it does not live.
    """
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        raise StageLost(f"actor {name} of {namespace} does not live; start the run again to rebuild it") from None


def end_actors(settings: ClusterSettings, root: Path, *, but: str | None = None) -> int:
    """End whatever lives of the run in ``root``, or of one that was there; return how many actors did.

    Where no cluster runs there are none, and none is started.

    Args:
        but: namespace that is spared.
    """
    if ray_head.existing(settings) is None:
        return 0
    connect(settings)
    ended, place = 0, _place(root)
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"].startswith(place) and actor["namespace"] != but:
            with suppress(ValueError):  # it ended by itself meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
                ended += 1
    return ended


def wait_for_end(namespace: str, name: str) -> None:
    """Wait until a killed actor's name is free.

    Raises:
        DeadlineError: it is not after half a minute.
    """
    deadline = time.monotonic() + _END_S
    while True:
        try:
            ray.get_actor(name, namespace=namespace)
        except ValueError:
            return
        if time.monotonic() > deadline:
            raise DeadlineError(f"actor {name} of {namespace} did not end within {_END_S:.0f} s; end its process")
        time.sleep(0.1)


def _place(root: Path) -> str:
    # the actors write into the folder, so all hosts of the cluster know it by this path
    return f"verl-omni-{root.name}-{digest(os.path.realpath(root))[:12]}-"
