"""Begin to save what a step has learned, beside what comes next; :mod:`.checkpoint` commits it."""

from verl_omni_core.stages.checkpoint import begin_state, commit_state
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.schedule import durability_level, is_kept, snapshot_due
from verl_omni_core.stages.session import RunRef, session_of
from verl_omni_core.stages.sync import AVERAGE, POLICY, weights_artifact

SPAN = "begin_checkpoint"
"""Name of the time that it takes; it commits nothing under it."""


@stage(SPAN)
def begin_checkpoint(run: RunRef, step: int) -> None:
    """Let the trainer copy its state after ``step`` and begin to write it, where that is due.

    With ``durability.checkpoint_contents = weights`` a step that is kept for good has its weights committed here: they
    are what ``verl-omni export`` reads, and nothing resumes from them. Without a ledger to recover by
    (``durability.level = none``) the state is also waited for.
    """
    session = session_of(run)
    if session.config.durability.checkpoint_contents == "weights" and is_kept(session.config, step):
        weights_artifact(session, step, POLICY)
        if session.config.training.ema_decay is not None:
            weights_artifact(session, step, AVERAGE)
    if snapshot_due(session.config, step):
        begin_state(session, step)
        if durability_level(session.config) == "none":
            commit_state(session, step)
