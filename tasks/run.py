"""Open, start and finish a run."""

from prefect import task

from tasks.settings import STAGE
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages import ending, finish, opening
from verl_omni_core.stages.session import RunRef


@task(name="open", **STAGE)
def open_run(config: RunConfig, origins: dict[str, str] | None = None) -> RunRef:
    """Check the settings, take ownership of the run and start or find its actors."""
    return opening.open_run(config, origins)


@task(name="finish", **STAGE)
def finish_run(run: RunRef) -> str:
    """Write the report and the summary; return the summary's text."""
    return finish.finish(run)


@task(name="teardown", **STAGE)
def end_run(run_id: str, store: str) -> int:
    """End the actors of a run; return how many lived."""
    return ending.end_run(run_id, store)
