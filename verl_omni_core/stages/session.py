"""A run as this process sees it: its settings, its store and the live actors of its namespace.

Tasks exchange a :class:`RunRef`; whoever needs more asks :func:`session_of`, which attaches to what lives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from verl_omni_core import registry
from verl_omni_core.identity import digest
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.index import open_ledger
from verl_omni_core.store.lease import Ownership
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.runs import RunFolder, open_run
from verl_omni_core.version import __version__
from verl_omni_core.workers.actors import Actors


class Tracker(Protocol):
    """Where numbers and pictures go besides the run's own tables. What it cannot write never stops a run."""

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, step: int, name: str, data: bytes) -> None: ...

    def gone_back(self, step: int) -> None: ...

    def close(self) -> None: ...


class NoTracker:
    """The tracker of runs that want none."""

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def image(self, step: int, name: str, data: bytes) -> None:
        return None

    def gone_back(self, step: int) -> None:
        return None

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class RunRef:
    """What tasks pass around instead of a run."""

    root: str
    """Folder of the run."""
    epoch: int
    """Fence epoch of the owner; older epochs' commands and commits are refused."""
    done: int = 0
    """Steps that lie behind: logged, and in the trainer's weights. A resumed run goes on after them."""


@dataclass
class Session:
    """One run's settings, store and actors."""

    ref: RunRef
    config: RunConfig
    store: RunStore
    actors: Actors
    ownership: Ownership | None = None
    spans: dict[int, dict[str, float]] = field(default_factory=dict)
    """Seconds of every stage that ran in this process, by step and stage."""
    begins: dict[int, dict[str, float]] = field(default_factory=dict)
    """When each of them began, by ``time.perf_counter``."""
    settled: dict[str, int] = field(default_factory=dict)
    """Kind of files to the last step of which this process has deleted what retention lets go."""
    snapshot: Attempt | None = None
    """Into which the trainer writes its state beside what it does next, until that is committed."""

    def producer(self, **facts: Any) -> dict[str, Any]:
        """Return who makes an artifact, for its manifest."""
        return {"code_version": __version__, "config_digest": digest(self.config.model_dump(mode="json")), **facts}

    def folder(self) -> RunFolder:
        """Return the run's folder."""
        return open_run(self.root.parent, self.root.name)

    @cached_property
    def ledger(self) -> Ledger:
        return open_ledger(self.store)

    @cached_property
    def tracker(self) -> Tracker:
        if not self.config.tracking.tensorboard:
            return NoTracker()
        from verl_omni_core.report.tensorboard import TensorBoardTracker

        return TensorBoardTracker(self.root / "tensorboard")

    @property
    def root(self) -> Path:
        return Path(self.ref.root)

    @cached_property
    def train_prompts(self) -> pa.Table:
        from verl_omni_core.data.prompts import prompts_of

        return prompts_of(self.config, "train")

    @cached_property
    def train_prompts_digest(self) -> str:
        """Of what :attr:`train_prompts` holds: a file may change under its name."""
        from verl_omni_core.data.prompts import digest_of

        return digest_of(self.train_prompts)

    @cached_property
    def validation_prompts(self) -> pa.Table:
        from verl_omni_core.data.prompts import prompts_of

        return prompts_of(self.config, "validation")

    @cached_property
    def algorithm(self) -> Any:
        return registry.component("algorithm", self.config.algorithm.name)


_sessions: dict[str, Session] = {}


def register(session: Session) -> Session:
    """Make a session known to this process's stages."""
    _sessions[session.ref.root] = session
    return session


def let_go(root: str) -> None:
    """End this process's hold on a run, if it has one: close its tracker and let others own it. Its actors live on."""
    session = _sessions.pop(root, None)
    if session is None:
        return
    try:
        if "tracker" in vars(session):  # one that was never used is not opened to be closed
            session.tracker.close()
    finally:
        if session.ownership is not None:
            session.ownership.release()


def known_session(ref: RunRef) -> Session | None:
    """Return this process's session of a run, if it has one."""
    session = _sessions.get(ref.root)
    return session if session is not None and session.ref.epoch == ref.epoch else None


def session_of(ref: RunRef) -> Session:
    """Return this process's session of a run, attaching to its actors if need be."""
    session = known_session(ref)
    if session is None:
        from verl_omni_core.stages.opening import attach

        session = register(attach(ref))
    return session
