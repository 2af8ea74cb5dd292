"""Which replica draws a sample."""

import asyncio
import hashlib
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from verl_omni_core.errors import DeadlineError, EngineError, StageLost, VerlOmniError
from verl_omni_core.rollout._contract import DiffusionOutput, SampleRequest


class ReplicaRouter:
    """Sends requests to the replicas of a pool; the client that agent loops are given.

    Without determinism the living replica with the fewest requests in flight *from this router* draws; with it, the
    hash of the route key over the full pool, so a sample's replica does not depend on load or on what died. It never
    retries: the caller does, with the same seed, and says so with ``attempt``. A replica that was found dead stays so
    for this router; whoever rebuilds one makes a new router.
    """

    def __init__(
        self, handles: Sequence[ActorHandle], deterministic: bool = False, *, request_timeout_s: float = 300.0
    ) -> None:
        if not handles:
            raise EngineError("the pool has no replica; rollout.replicas must be at least 1")
        self._handles = list(handles)
        self._deterministic = deterministic
        self._request_timeout_s = request_timeout_s
        self._in_flight = [0] * len(handles)
        self._dead: set[int] = set()
        self.finished = 0
        """Requests that ended, failed ones included: a pool that hangs stands still."""

    async def generate(self, request: SampleRequest, route_key: str = "", *, attempt: int = 0) -> DiffusionOutput:
        """Draw one sample.

        Args:
            route_key: the pack's id; decides the replica in deterministic mode.
            attempt: 0-based; a higher one goes to the next replica of the pool.

        Raises:
            StageLost: the replica is dead, or no living one is left. DeadlineError: no answer in time. Else what the
            engine raised, in the engine's own class.
        """
        index = self.choose(route_key, attempt)
        if index in self._dead:
            raise StageLost(f"replica {index} is dead; try the next one (attempt {attempt + 1})")
        self._in_flight[index] += 1
        try:
            return await self._ask(index, request)
        finally:
            self._in_flight[index] -= 1
            self.finished += 1

    def choose(self, route_key: str, attempt: int = 0) -> int:
        """Return the index of the replica that draws.

        Raises:
            StageLost: every replica is dead.
        """
        count = len(self._handles)
        if len(self._dead) == count:
            raise StageLost(f"all {count} replicas are dead; rebuild the pool")
        if self._deterministic:
            digest = hashlib.sha256(route_key.encode()).digest()
            return (int.from_bytes(digest[:8], "big") + attempt) % count
        living = [index for index in range(count) if index not in self._dead]
        # a retry prefers another replica than the one that a first attempt, at equal load, would take
        return min(living, key=lambda index: (self._in_flight[index], (index - attempt) % count))

    @property
    def dead(self) -> frozenset[int]:
        """Indices of replicas that were found dead."""
        return frozenset(self._dead)

    async def _ask(self, index: int, request: SampleRequest) -> DiffusionOutput:
        reference = self._handles[index].generate.remote(request)
        try:
            return await asyncio.wait_for(_resolved(reference), self._request_timeout_s)
        except TimeoutError:
            ray.cancel(reference)
            raise DeadlineError(
                f"replica {index} did not answer request {request.request_id} within {self._request_timeout_s} s; "
                "raise rollout.request_timeout_s or look at the replica's log"
            ) from None
        except RayActorError as error:
            self._dead.add(index)
            raise StageLost(f"replica {index} died while it drew request {request.request_id}: {error}") from error
        except RayTaskError as error:
            if isinstance(error.cause, VerlOmniError):
                raise error.cause from None
            raise EngineError(f"replica {index} failed on request {request.request_id}: {error.cause!r}") from error
        except RayError as error:
            raise EngineError(f"replica {index} could not answer request {request.request_id}: {error!r}") from error


async def _resolved(reference: ray.ObjectRef) -> DiffusionOutput:
    return await reference
