"""A flow run whose machine's time ends after its first step: ``python -m tests.flows.stopped STORE``; prints JSON.

A program of its own, because Prefect keeps what it knows of a server for as long as its process lives.
"""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prefect.testing.utilities import prefect_test_harness

from flows import online as module
from tests.flows.test_resume import quick_settings
from verl_omni_core.stages import time_limit
from verl_omni_core.stages.session import RunRef


def main() -> None:
    config = quick_settings(Path(sys.argv[1]), run__steps=2)
    ends = {"end_by": datetime.now(UTC) + timedelta(hours=1)}
    config = config.model_copy(update={"run": config.run.model_copy(update=ends)})

    def as_if_later(run: RunRef, step: int) -> bool:
        return time_limit.has_time(run, step, datetime.now(UTC) + timedelta(hours=1 if step > 1 else 0))

    module.has_time = as_if_later  # type: ignore[attr-defined]
    with prefect_test_harness(server_startup_timeout=120):
        state = module.online(config, return_state=True)
        told = {"name": state.name, "completed": state.is_completed(), "result": state.result()}
        print(json.dumps({**told, "stopped_early": time_limit.stopped_early(config)}))


if __name__ == "__main__":
    main()
