"""Who is alive, where no lock reaches: an owner renews an object, and one that is not renewed expires.

Ages are told by the store's clock alone, so that those of the machines need not agree. The owner counts its own time
from before each renewal, with sleep of the machine included: it stops before anybody else may take the run.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_omni_core.errors import FencedError, StoreError
from verl_omni_core.store.mirror import Informing, let_go
from verl_omni_core.store.places import EPOCHS
from verl_omni_core.store.remote import Remote

logger = logging.getLogger(__name__)

LEASE_S = 90.0
"""Seconds without a renewal after which another machine may take the run."""
RENEW_S = 15.0
MARGIN_S = 5.0
"""By which others wait longer than the owner works: a store tells times in whole seconds."""
_PUSH_S = 10.0
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps


def newest(remote: Remote) -> int:
    """Return the newest epoch among the objects; 0 if nobody ever owned the run."""
    stems = [name.removesuffix(".json") for name in remote.names(EPOCHS)]
    return max((int(stem) for stem in stems if stem.isdigit()), default=0)


def live_owner(remote: Remote, machine: str | None) -> dict[str, Any] | None:
    """Return the record of an owner whose lease is fresh, or none.

    Args:
        machine: whose owners are not told: on this machine its lock says who lives, at once.
    """
    epoch = newest(remote)
    taken = remote.read_with_age(f"{EPOCHS}/{epoch}.json") if epoch else None
    if taken is None:
        return None
    owner, age = json.loads(taken[0]), taken[1]
    renewed = remote.read_with_age(_name(epoch))
    if renewed is not None:
        age = min(age, renewed[1])
        if json.loads(renewed[0])["released"]:
            return None
    if age >= owner["lease_s"] + MARGIN_S or (machine is not None and owner.get("machine") == machine):
        return None
    return owner


class Heartbeat:
    """The lease of a run that this process owns, renewed by a thread until :meth:`stop`."""

    def __init__(self, root: Path, remote: Remote, owner: Mapping[str, Any], began: float) -> None:
        """Begin to renew.

        Args:
            owner: the record of the epoch, with ``epoch`` and ``lease_s``.
            began: :func:`now` before that record was created.
        """
        self._root, self._run, self._remote = root, root.name, remote.impatient(RENEW_S)
        self._epoch, self._seconds = owner["epoch"], owner["lease_s"]
        self._renewed, self._taken = began, False
        self._stop = threading.Event()
        self._informing = Informing(root, remote)
        self._thread = threading.Thread(target=self._beat, name=f"lease of {root.name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise FencedError if the lease ran out, so that another machine may own the run by now."""
        age = now() - self._renewed
        if age > self._seconds or self._taken:
            raise FencedError(
                f"the lease of run {self._run} in {self._remote.uri} was last renewed {age:.0f} s ago, and after "
                f"{self._seconds:.0f} s another machine may own the run; this process must stop. Start the run again "
                "once the store answers"
            )

    def stop(self) -> None:
        """Copy what only informs and let others take the run at once; if the store does not answer, once it expires."""
        self._stop.set()
        self._thread.join(RENEW_S + _PUSH_S)
        self._informing.push(_PUSH_S)
        try:
            self._say(released=True)
        except StoreError as error:
            logger.warning("others can take run %s in %.0f s, not at once: %s", self._run, self._seconds, error)

    def renew(self) -> None:
        """Renew the lease now; a lease that ran out stays so.

        Raises:
            StoreError: the store does not answer. FencedError: the lease ran out, or somebody took the run.
        """
        self.check()
        began = now()
        self._taken = self._remote.read(f"{EPOCHS}/{self._epoch + 1}.json") is not None
        self.check()
        self._say(released=False)
        self._renewed = began

    def _beat(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                self.renew()
                self._informing.push(_PUSH_S)
            except FencedError as error:
                let_go(self._root, self._epoch)
                logger.error("%s", error)
                return
            except Exception as error:  # noqa: BLE001 - the thread must go on while the lease lasts
                logger.warning("the lease of run %s was not renewed: %s", self._run, error)

    def _say(self, *, released: bool) -> None:
        self._remote.put(_name(self._epoch), json.dumps({"epoch": self._epoch, "released": released}).encode())


def now() -> float:
    """Return seconds of a clock that also counts while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def _name(epoch: int) -> str:
    return f"lease/{epoch}.json"
