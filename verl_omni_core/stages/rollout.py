"""Draw a step's samples with the current policy."""

from verl_omni_core.agent_loop.metrics import agent_loop_metrics
from verl_omni_core.errors import ContractError
from verl_omni_core.stages.drawing import draw
from verl_omni_core.stages.incomplete_groups import POLICY
from verl_omni_core.stages.keys import generation_inputs, stage_key
from verl_omni_core.stages.metric_table import metric_table
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.schedule import policy_version
from verl_omni_core.stages.session import RunRef, session_of
from verl_omni_core.stages.sync import STAGE as SYNC
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "rollout"


@stage(STAGE)
def rollout(run: RunRef, step: int, planned: ArtifactRef) -> ArtifactRef:
    """Commit the ``trajectories``, ``embeddings``, ``media`` and, if scored as they came, ``scores`` of a step.

    Samples that could not be drawn, and those that were drawn in place of others, are in ``trajectories_failed``.

    Args:
        planned: the plan's artifact.

    Raises:
        ContractError: the weights that are to draw were never synced. EngineError: samples could not be drawn. Nothing
            is committed.
    """
    session = session_of(run)
    version = policy_version(step, session.config.weights.sync_interval)
    weights = session.store.find(version, SYNC)
    if weights is None:
        raise ContractError(f"step {step} is to be drawn by version {version}, which was never synced; sync it first")
    parents = [planned, weights]
    key = stage_key(STAGE, step, parents, generation=generation_inputs(session.config))
    done = session.store.committed(step, STAGE, key)
    if done is not None:
        return done
    attempt = session.store.attempt(step, STAGE, key, parents=parents, weights_version=version)
    prompts = session.store.table(planned, "prompts")
    requests = session.store.table(planned, "requests")
    drawn = draw(session, attempt, prompts, requests, version=version, validate=False)
    metrics = agent_loop_metrics(drawn.timings) | {
        "training/rollout_failure/refilled_prompts": len(drawn.refilled),
        "training/rollout_failure/refill_rounds": drawn.refill_rounds,
    }
    files = [*drawn.files, attempt.write_table("metrics", 0, metric_table(step, metrics))]
    engines = session.actors.describe_engines()
    session.folder().write_engines(engines)
    facts = {POLICY: session.config.rollout.failure} if drawn.failed else {}
    producer = session.producer(weights_version=version, engines=engines, **facts)
    return attempt.commit(files, rows=len(requests), parents=parents, producer=producer, failed=drawn.failed)
