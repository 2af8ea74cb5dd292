"""Write the trainer's whole state, and only call it a checkpoint once it reads back."""

from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.session import RunRef, session_of
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "checkpoint"


@stage(STAGE)
def checkpoint(run: RunRef, step: int) -> ArtifactRef:
    """Commit the policy, its average, optimizer, schedule and random states after ``step``."""
    session = session_of(run)
    key = stage_key(STAGE, step, [], training=session.config.training.model_dump(mode="json"))
    done = session.store.committed(step, STAGE, key)
    if done is not None:
        return done
    attempt = session.store.attempt(step, STAGE, key, weights_version=step)
    names = session.actors.trainer.save_checkpoint(str(attempt.folder))
    files = [attempt.add_file(name) for name in names]
    return attempt.commit(files, rows=len(files), parents=[], producer=session.producer(weights_version=step))
