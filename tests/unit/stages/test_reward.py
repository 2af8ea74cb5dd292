"""Scores of a step: those that could be had while sampling, and those that are tried again."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from tests.unit.agent_loop.fake_client import Client, config
from tests.workers.test_rollout_worker import GROUP, PROMPTS, planned
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.rewards._tables import scores_of
from verl_omni_core.stages.reward import score_samples
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.workers.rollout_worker import RolloutWorker, packs_of

SCORERS = [{"name": "ocr"}, {"name": "jpeg_size"}]
SETTINGS = config(reward={"scorers": SCORERS})


class Dying:
    """A reward worker whose process ends after some samples."""

    def __init__(self, lives_for: int) -> None:
        self.left = lives_for

    async def versions(self) -> dict[str, str]:
        return {"ocr": "1", "jpeg_size": "1"}

    async def score(self, items: Sequence[ScoringItem]) -> list[dict[str, Score]]:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the actor died")
        # of each sample only one scorer has answered by itself
        return [{"ocr": Score(0.25), "jpeg_size": Score(None, "out of memory")} for _ in items]


class Rebuilt:
    """Reward workers that live again; keeps what it was asked for."""

    def __init__(self) -> None:
        self.items: list[str] = []

    def score(self, items: Sequence[ScoringItem]) -> list[dict[str, Score]]:
        self.items += [item.sample_id for item in items]
        return [{"ocr": Score(0.5), "jpeg_size": Score(0.75)} for _ in items]

    def scorer_versions(self) -> dict[str, str]:
        return {"ocr": "1", "jpeg_size": "1"}


def test_scores_that_were_lost_while_sampling_are_tried_once_more_and_others_kept(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    store, count = RunStore(tmp_path / "run"), PROMPTS * GROUP
    attempt = store.attempt(1, "rollout", "key")
    prompts, requests = planned()
    (pack,) = packs_of(prompts, requests, attempt, pack_size=count, weights_version=0, score=True)
    drawn = asyncio.run(RolloutWorker(SETTINGS, Client(), [Dying(5)]).run_pack(pack))
    samples = attempt.commit(drawn.files, rows=count, parents=[], producer={})
    committed = scores_of(store.table(samples, "scores"))
    assert sum(row["ocr"].value == 0.25 for row in committed.values()) == 5
    assert sum("all reward workers are lost" in str(row["ocr"].error) for row in committed.values()) == count - 5

    actors = Rebuilt()
    session = SimpleNamespace(config=SETTINGS, store=store, actors=actors)
    rewards, summary = score_samples(session, samples, prompts)  # type: ignore[arg-type]
    assert actors.items == requests["sample_id"].to_pylist()
    assert summary["valid"].to_pylist() == [True] * count
    values = scores_of(rewards).values()
    assert [row["jpeg_size"].value for row in values] == [0.75] * count
    assert sorted(row["ocr"].value for row in values) == [0.25] * 5 + [0.5] * (count - 5)
