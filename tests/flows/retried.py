"""A flow run that breaks off in its first step and is retried: ``python -m tests.flows.retried STORE``; prints JSON.

A program of its own, because Prefect keeps what it knows of a server for as long as its process lives.
"""

import json
import sys
from pathlib import Path

from prefect.testing.utilities import prefect_test_harness

from flows.online import online
from tests.flows import small
from tests.flows.conftest import Ran
from tests.flows.test_resume import quick_settings
from verl_omni_core.store.runs import list_runs


def main() -> None:
    runs = Path(sys.argv[1])
    config = quick_settings(runs)
    config = config.model_copy(update={"run": config.run.model_copy(update={"id": None})})
    trainers: list[int] = []

    def fail_once() -> None:
        (made,) = list_runs(runs)
        named = config.model_copy(update={"run": config.run.model_copy(update={"id": made.run_id})})
        trainers.append(Ran(named, "").actors().trainer.states()[0].pid)
        if len(trainers) == 1:
            small.stop()

    with prefect_test_harness(server_startup_timeout=120), small.before(1, "update", fail_once):
        state = online.with_options(retries=1, retry_delay_seconds=0)(config, return_state=True)
        print(json.dumps({"completed": state.is_completed(), "trainers": trainers}))


if __name__ == "__main__":
    main()
