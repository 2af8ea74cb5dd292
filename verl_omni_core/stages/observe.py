"""Who watches a run from inside its process, and how long each stage took.

Stages are plain functions; :func:`stage` gives each a span: the session keeps its seconds for the step's log, and the
display of the command line, if there is one, hears of it.
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from verl_omni_core.errors import StageLost
from verl_omni_core.stages.session import RunRef, session_of

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Observer(Protocol):
    """A live display. It only looks: what it raises is a fault in it, and ends the run like any other fault."""

    def stage(self, step: int, name: str) -> None: ...

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def validated(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Silent:
    """The observer of runs that nobody watches."""

    def stage(self, step: int, name: str) -> None:
        return None

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        return None


_current: list[Observer] = [Silent()]


def observer() -> Observer:
    """Return the observer of this process."""
    return _current[-1]


def observe_with(display: Observer) -> Callable[[], None]:
    """Make ``display`` the observer of this process; returns the function that takes it away again."""
    _current.append(display)
    return lambda: _current.remove(display)


def stage(
    name: str,
) -> Callable[[Callable[Concatenate[RunRef, int, P], R]], Callable[Concatenate[RunRef, int, P], R]]:
    """Give a stage function ``(run, step, ...)`` its span under ``name``, and a second try if it lost an actor.

    Before the second try the replicas and workers that died are rebuilt. It is a try like any later one: what is
    committed and the finished shards of the first one stay.
    """

    def decorate(function: Callable[Concatenate[RunRef, int, P], R]) -> Callable[Concatenate[RunRef, int, P], R]:
        @functools.wraps(function)
        def spanned(run: RunRef, step: int, *args: P.args, **kwargs: P.kwargs) -> R:
            begins = session_of(run).begins.setdefault(step, {})
            begins.setdefault(name, time.perf_counter())  # a retry does not begin it anew
            observer().stage(step, name)
            started = time.perf_counter()
            try:
                result = function(run, step, *args, **kwargs)
            except StageLost as lost:
                if not session_of(run).actors.repair():
                    raise
                logger.warning("step %d: %s is done again, with new actors for those that died: %s", step, name, lost)
                result = function(run, step, *args, **kwargs)
            session_of(run).spans.setdefault(step, {})[name] = time.perf_counter() - started
            return result

        return spanned

    return decorate
