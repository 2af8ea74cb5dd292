"""Bring every replica to a policy version: the trainer writes it once, each replica reads, binds and reports it."""

from verl_omni_core.agent_loop.sampling import validation_sampling
from verl_omni_core.batches import columns
from verl_omni_core.errors import ContractError
from verl_omni_core.identity import sample_seed
from verl_omni_core.rollout._contract import LoadedWeights, SampleRequest
from verl_omni_core.settings.resolve import adapter
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.stages.update import STAGE as UPDATE
from verl_omni_core.store.lineage import base_step
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.workers.commands import ProbeCommand

STAGE, PROBE = "sync", "probe"
POLICY, AVERAGE = "policy", "average"


@stage(STAGE)
def sync(run: RunRef, step: int) -> ArtifactRef:
    """Commit the weights of ``step`` and load them into every replica; committed ones are loaded again where they lack.

    Raises:
        ContractError: a replica bound too few modules, or holds or computes other numbers than the trainer.
    """
    session = session_of(run)
    artifact = weights_artifact(session, step, POLICY)
    load_into_replicas(session, artifact)
    if session.config.weights.probe:
        _commit_probe(session, artifact, probe(session, step))
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


def _commit_probe(session: Session, weights: ArtifactRef, difference: float) -> None:
    """Write down how far the replicas were from the trainer; a resumed run that probes again keeps the first record."""
    key = stage_key(PROBE, weights.step, [weights])
    if session.store.committed(weights.step, PROBE, key) is not None:
        return
    attempt = session.store.attempt(weights.step, PROBE, key, parents=[weights], weights_version=weights.step)
    facts = {"largest_difference": difference, "tolerance": session.config.weights.probe_tolerance}
    attempt.commit([], rows=session.config.rollout.replicas, parents=[weights], producer=session.producer(**facts))


def weights_artifact(session: Session, step: int, network: str) -> ArtifactRef:
    """Commit the trainer's weights of ``step`` as an artifact.

    Args:
        network: ``policy``, or ``average`` for its moving average.
    """
    name = STAGE if network == POLICY else f"{STAGE}-{network}"
    is_base = step > 0 and step == base_step(session.root)
    made_by = session.store.find(step, CHECKPOINT if is_base else UPDATE)
    parents = [] if made_by is None else [made_by]
    key = weights_key(session.config, network, step, parents)
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
    producer = session.producer(
        weights_version=written.version,
        kind=written.kind,
        checksum=written.checksum,
        bound_modules=modules_of(written.kind, written.tensor_count),
    )
    return attempt.commit(files, rows=written.tensor_count, parents=parents, producer=producer)


def weights_key(config: RunConfig, network: str, step: int, parents: list[ArtifactRef]) -> str:
    """Return the key of the weights of ``step``.

    Args:
        parents: the step's update; where a fork begins, the snapshot that it took over; none before the first step.
    """
    return stage_key(
        STAGE if network == POLICY else f"{STAGE}-{network}",
        step,
        parents,
        model=config.model.model_dump(mode="json"),
        training=config.training.model_dump(mode="json", exclude={"step_timeout_s"}),
        network=network,
    )


def modules_of(kind: str, tensor_count: int) -> int:
    """Return how many modules weights bind to: each parameter, or each pair of an adapter's matrices."""
    return tensor_count // 2 if kind == "lora" else tensor_count


def load_into_replicas(session: Session, artifact: ArtifactRef) -> None:
    """Load committed weights into every replica and compare what each of them then holds with what was written.

    Raises:
        ContractError: a replica holds another version or other numbers, or bound another number of modules.
    """
    manifest = session.store.manifest(artifact)
    folder = session.store.path_of(artifact, manifest.files[0].name).parent
    facts = manifest.producer
    version = int(facts["weights_version"])
    wanted = LoadedWeights(version, modules_of(facts["kind"], artifact.rows), facts["checksum"])
    for index, weights in enumerate(session.actors.load_weights(str(folder), version)):
        if weights != wanted:
            raise ContractError(
                f"replica {index} holds version {weights.version} in {weights.bound_modules} modules with checksum "
                f"{weights.checksum}; the trainer wrote version {wanted.version} of {wanted.bound_modules} modules "
                f"with checksum {wanted.checksum}: the replica's engine lost or changed some; start the run again"
            )
