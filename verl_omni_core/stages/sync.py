"""Bring every replica to a policy version: the trainer writes it once, each replica reads, binds and reports it."""

from verl_omni_core.agent_loop.sampling import validation_sampling
from verl_omni_core.batches import columns
from verl_omni_core.errors import ContractError
from verl_omni_core.identity import sample_seed
from verl_omni_core.rollout._contract import SampleRequest
from verl_omni_core.settings.resolve import adapter
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.stages.update import STAGE as UPDATE
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.workers.commands import ProbeCommand

STAGE = "sync"
POLICY, AVERAGE = "policy", "average"


@stage(STAGE)
def sync(run: RunRef, step: int) -> ArtifactRef:
    """Commit the weights of ``step`` and load them into every replica; committed ones are loaded again where they lack.

    Raises:
        ContractError: a replica bound too few modules, or holds other numbers than the trainer.
    """
    session = session_of(run)
    artifact = weights_artifact(session, step, POLICY)
    load_into_replicas(session, artifact)
    if session.config.weights.probe:
        probe(session, step)
    return artifact


def probe(session: Session, step: int) -> float:
    """Draw one held-out sample on every replica and with the trainer's own network; return the largest difference.

    Raises:
        ContractError: final latents differ by more than ``weights.probe_tolerance``.
    """
    prompts = session.validation_prompts
    sampling = validation_sampling(session.config)
    request = SampleRequest(
        request_id=f"probe-{step}",
        prompt=prompts.column(columns.PROMPT)[0].as_py(),
        negative_prompt=None,
        seed=sample_seed(session.config.run.seed, step + 1, 0),
        sampling=sampling,
    )
    facts = adapter(session.config).facts
    names = (*facts.conditioning, *facts.negative_conditioning)
    limit, largest = session.config.weights.probe_tolerance, 0.0
    own = None
    for index, drawn in enumerate(session.actors.draw_on_every_replica(request)):
        told = {name: drawn.extra_fields[name] for name in names if name in drawn.extra_fields}
        if own is None:
            own = session.actors.trainer.sample(ProbeCommand(request.seed, sampling, told))
        difference = float((drawn.extra_fields["latents_clean"] - own).abs().max())
        largest = max(largest, difference)
        if not difference <= limit:
            raise ContractError(
                f"after the sync of version {step} the probe sample of replica {index} is {difference:.3g} away from "
                f"the trainer's own, weights.probe_tolerance allows {limit:g}; the replica holds other weights, or "
                "computes in another dtype"
            )
    return largest


def weights_artifact(session: Session, step: int, network: str) -> ArtifactRef:
    """Commit the trainer's weights of ``step`` as an artifact.

    Args:
        network: ``policy``, or ``average`` for its moving average.
    """
    name = STAGE if network == POLICY else f"{STAGE}-{network}"
    update = session.store.find(step, UPDATE)
    parents = [] if update is None else [update]
    key = stage_key(
        name,
        step,
        parents,
        model=session.config.model.model_dump(mode="json"),
        training=session.config.training.model_dump(mode="json", exclude={"step_timeout_s"}),
        network=network,
    )
    done = session.store.committed(step, name, key)
    if done is not None:
        return done
    attempt = session.store.attempt(step, name, key, parents=parents, weights_version=step)
    written = session.actors.trainer.update_weights(str(attempt.folder), network)
    if written.version != step:
        raise ContractError(
            f"the trainer holds version {written.version}, version {step} was asked for; start the run again, it goes "
            "on from the last checkpoint"
        )
    files = [attempt.add_file(file) for file in written.files]
    producer = session.producer(weights_version=written.version, kind=written.kind, checksum=written.checksum)
    return attempt.commit(files, rows=written.tensor_count, parents=parents, producer=producer)


def load_into_replicas(session: Session, artifact: ArtifactRef) -> None:
    """Load committed weights into every replica and compare what each of them then holds with what was written."""
    manifest = session.store.manifest(artifact)
    folder = session.store.path_of(artifact, manifest.files[0].name).parent
    expected = manifest.producer
    loaded = session.actors.load_weights(str(folder), int(expected["weights_version"]))
    for index, weights in enumerate(loaded):
        if weights.checksum != expected["checksum"]:
            raise ContractError(
                f"replica {index} holds weights with checksum {weights.checksum} after loading version "
                f"{weights.version}, the trainer wrote {expected['checksum']}; the replica's engine changed them"
            )
