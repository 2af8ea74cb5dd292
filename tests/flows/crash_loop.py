"""A flow that is started again and again although it cannot go on: ``python -m tests.flows.crash_loop STORE``.

Prints JSON: type and message of each flow run's state.
"""

import json
import sys
from pathlib import Path

from prefect.testing.utilities import prefect_test_harness

from flows.online import online
from tests.flows.test_resume import quick_settings
from verl_omni_core.errors import EngineError
from verl_omni_core.stages import opening

STARTS = 6


def no_engine(*_: object, **__: object) -> None:
    raise EngineError("the only GPU fell off the bus")


def main() -> None:
    config = quick_settings(Path(sys.argv[1]))
    opening.Actors.start_or_find = no_engine  # type: ignore[assignment]
    with prefect_test_harness(server_startup_timeout=120):
        states = [online(config, return_state=True) for _ in range(STARTS)]
        print(json.dumps([(state.type.value, state.message) for state in states]))


if __name__ == "__main__":
    main()
