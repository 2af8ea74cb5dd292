"""Write the trainer's whole state, and only call it a checkpoint once it reads back."""

from verl_omni_core.errors import ContractError
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.session import RunRef, session_of
from verl_omni_core.stages.update import STAGE as UPDATE
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "checkpoint"


@stage(STAGE)
def checkpoint(run: RunRef, step: int) -> ArtifactRef:
    """Commit the policy, its average, optimizer, schedule and random states after ``step``."""
    session = session_of(run)
    update = session.store.find(step, UPDATE)
    if update is None:
        raise ContractError(f"step {step} has no committed update; a checkpoint follows one")
    training = session.config.training.model_dump(mode="json", exclude={"step_timeout_s"})
    key = stage_key(STAGE, step, [update], training=training)
    done = session.store.committed(step, STAGE, key)
    if done is not None:
        return done
    attempt = session.store.attempt(step, STAGE, key, parents=[update], weights_version=step)
    names = session.actors.trainer.save_checkpoint(str(attempt.folder))
    files = [attempt.add_file(name) for name in names]
    return attempt.commit(files, rows=len(files), parents=[update], producer=session.producer(weights_version=step))
