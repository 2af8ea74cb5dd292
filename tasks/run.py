"""Open, start and finish a run."""

from prefect import task
from prefect.runtime import flow_run
from prefect.states import Completed, State

from tasks.settings import STAGE
from verl_omni_core.settings.loader import apply_overrides
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages import ending, finish, opening, time_limit
from verl_omni_core.stages.session import RunRef


def named_run(config: RunConfig, overrides: list[str] | None) -> RunConfig:
    """Return a run's settings; one without a name is called after its flow run, so that a retry of that resumes it."""
    config = apply_overrides(config, overrides or [])
    if config.run.id is None and flow_run.id is not None:
        config = apply_overrides(config, [f"run.id=online-{flow_run.id[:13]}"])
    return config


def run_name() -> str:
    """Return the name of the run that the current flow run makes or resumes."""
    return str(named_run(flow_run.parameters["config"], flow_run.parameters.get("overrides")).run.id)


def finished_run(config: RunConfig) -> str | None:
    """Return what to say of a run of which nothing is left to do; none if something is."""
    return opening.finished(config, request=flow_run.id)


@task(name="open", **STAGE)
def open_run(config: RunConfig, origins: dict[str, str] | None = None) -> RunRef:
    """Check the settings, take ownership of the run and start or find its actors."""
    return opening.open_run(config, origins, request=flow_run.id)


@task(name="finish", **STAGE)
def finish_run(run: RunRef) -> str:
    """Write the report and the summary; return the summary's text."""
    return finish.finish(run)


@task(name="stop", **STAGE)
def stop_run(run: RunRef, step: int) -> str:
    """Save the state after a step and end the run before its machine's time does; return what to do next."""
    return time_limit.stop_early(run, step)


def stopped(message: str) -> State[str]:
    """Return the state of a flow run that stopped early: nothing failed, and there is more to do."""
    return Completed(name="Stopped", message=message, data=message)


@task(name="teardown", **STAGE)
def end_run(run_id: str, store: str) -> int:
    """End the actors of a run; return how many lived."""
    return ending.end_run(run_id, store)
