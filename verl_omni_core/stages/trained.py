"""Trained weights of a run, found in its store: neither its flow nor its actors need be alive."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.rollout._contract import WeightUpdate
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.collected import is_collected
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.runs import RunFolder, open_run
from verl_omni_core.weights.checksum import checksum
from verl_omni_core.weights.filesystem import read_update

Network = Literal["policy", "average"]
STAGES: dict[Network, str] = {"policy": "sync", "average": "sync-average"}
"""Network to the stage that commits its weights."""


@dataclass(frozen=True)
class TrainedWeights:
    """Committed weights of one step of a run, every file checked against its digest."""

    run_id: str
    config: RunConfig
    """Settings of the run that trained them."""
    step: int
    network: Network
    ref: ArtifactRef
    folder: Path
    """As ``weights.filesystem`` reads it."""
    kind: str
    """``lora`` or ``full``."""
    checksum: str
    """That the trainer took of the tensors."""

    def read(self) -> WeightUpdate:
        """Return the tensors.

        Raises:
            StoreError: they are not those whose checksum the trainer took.
        """
        update = read_update(self.folder, self.step)
        seen = checksum(update.tensors)
        if seen != self.checksum:
            raise StoreError(
                f"weights of step {self.step} of run {self.run_id!r} have checksum {seen[:12]}, the trainer wrote "
                f"{self.checksum[:12]}; restore {self.folder} from a copy"
            )
        return update


def find_weights(
    store: str | Path, run_id: str, *, step: int | None = None, network: Network | None = None
) -> TrainedWeights:
    """Return the committed weights of a run.

    Args:
        store: folder that holds the runs.
        step: whose weights; none: the newest that has them.
        network: ``policy``, or ``average`` for its moving average; none: the average where the run keeps one.
    Raises:
        StoreError: there is no such run, or its files are damaged. ConfigError: there are no such weights in it; says
            which there are.
    """
    run = open_run(store, run_id)
    config = config_of(run)
    if network is None:
        network = "policy" if config.training.ema_decay is None else "average"
    artifacts = RunStore(run.root)
    ref = _newest(artifacts, network) if step is None else artifacts.find(step, STAGES[network])
    if ref is None:
        wanted = f"of the {network}" + ("" if step is None else f" after step {step}")
        raise ConfigError(f"run {run_id!r} has no weights {wanted}; {_known(artifacts, config)}")
    manifest = artifacts.manifest(ref)
    paths = [artifacts.path_of(ref, file.name) for file in manifest.files]
    facts = manifest.producer
    return TrainedWeights(
        run_id, config, ref.step, network, ref, paths[0].parent, str(facts["kind"]), str(facts["checksum"])
    )


def config_of(run: RunFolder) -> RunConfig:
    """Return a run's settings.

    Raises:
        ConfigError: they are of a version whose settings this one does not read.
    """
    try:
        return RunConfig.model_validate(run.config)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"run {run.run_id!r} was made by version {run.code_version}, and this version does not read its settings: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}; use that version"
        ) from None


def _newest(store: RunStore, network: Network) -> ArtifactRef | None:
    found = (store.find(step, STAGES[network]) for step in reversed(store.steps()))
    return next((ref for ref in found if ref is not None and not is_collected(Path(store.root), ref)), None)


def _known(store: RunStore, config: RunConfig) -> str:
    parts = []
    for network, stage in STAGES.items():
        found = {step: store.find(step, stage) for step in store.steps()}
        steps = [step for step, ref in found.items() if ref is not None and not is_collected(Path(store.root), ref)]
        if steps:
            parts.append(f"{network}: step {spans(steps)}")
    if not parts:
        return "no step of it has any yet; let it finish its first one"
    average = "" if config.training.ema_decay is not None else " (training.ema_decay is none, so it keeps no average)"
    return f"it has {'; '.join(parts)}{average}"


def spans(steps: list[int]) -> str:
    """Return sorted numbers for people: ``0, 5-8``."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
