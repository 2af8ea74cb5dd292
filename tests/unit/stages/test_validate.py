"""Validation's numbers, from scored samples to the tracker and whoever watches."""

import pyarrow as pa
import pytest

from tests.unit.stages import owned_run
from verl_omni_core.batches import columns
from verl_omni_core.metrics.names import metric_of
from verl_omni_core.rewards._contract import Score
from verl_omni_core.stages.metric_table import metrics_of
from verl_omni_core.stages.observe import Silent, observe_with
from verl_omni_core.stages.session import let_go
from verl_omni_core.stages.validate import held_out, rewards_by_prompt, score_held_out

SCORES = [Score(value, extra={"acc": float(value == 1), "text": "read"}) for value in (1.0, 0.5, 0.25, 1.0)]


@pytest.fixture
def session(tmp_path):
    session = owned_run.take(owned_run.make(tmp_path))
    yield session
    let_go(session.ref.root)


def validated(session, scores, step=0):
    prompts, _ = held_out(session, 2, version=step)
    place = prompts.column_names.index(columns.UID)
    prompts = prompts.set_column(place, prompts.schema.field(place), pa.array(["u0", "u1"]))
    return score_held_out(session, step, owned_run.commit_held_out(session, step, scores), prompts)


def test_accuracy_is_the_main_variable_beside_the_reward_and_each_score(session):
    done = validated(session, SCORES)
    found = metrics_of(session.store.table(done, "metrics"))
    assert found["val-core/unknown/acc/mean@2"] == 0.5
    assert found["val-aux/unknown/reward/mean@2"] == found["val-aux/unknown/reward/ocr/mean@2"] == 0.6875
    assert {name.rsplit("/", 1)[0] for name in found if name.startswith("val-core")} == {
        "val-core/unknown/acc",
        "val-core/unknown/acc/best@2",
    }
    assert rewards_by_prompt(session, done).tolist() == [[1.0, 0.5], [0.25, 1.0]]


def test_the_reward_is_the_main_variable_where_no_scorer_says_an_accuracy(session):
    found = metrics_of(session.store.table(validated(session, [Score(0.5)] * 4), "metrics"))
    assert found["val-core/unknown/reward/mean@2"] == 0.5
    assert not any("/acc/" in name for name in found)


def test_every_name_is_listed_also_of_prompts_that_name_no_source(session):
    found = metrics_of(session.store.table(validated(session, SCORES), "metrics"))
    assert [name for name in found if metric_of(name) is None or "//" in name] == []


def test_missing_scores_enter_nothing_but_their_share(session):
    scores = [Score(None, "unreadable"), *SCORES[1:]]
    settings = session.config.reward.model_copy(update={"max_invalid_fraction": 0.5})
    session.config = session.config.model_copy(update={"reward": settings})
    tried = []
    session.actors.score = lambda items: tried.extend(items) or [{"ocr": Score(None, "unreadable")} for _ in items]
    found = metrics_of(session.store.table(validated(session, scores), "metrics"))
    assert found["val-aux/unknown/reward/invalid_fraction"] == found["val-aux/unknown/acc/invalid_fraction"] == 0.25
    assert found["val-aux/unknown/reward/mean@2"] == (0.5 + 0.625) / 2
    assert [item.sample_id for item in tried] == ["s0"]


def test_the_tracker_and_the_display_get_them_also_when_they_were_committed_before(session):
    class Display(Silent):
        seen = []

        def validated(self, step, metrics):
            self.seen.append((step, dict(metrics)))

    prompts, _ = held_out(session, 2, version=0)
    samples = owned_run.commit_held_out(session, 0, SCORES)
    remove = observe_with(Display())
    try:
        first, again = (score_held_out(session, 0, samples, prompts) for _ in range(2))
    finally:
        remove()
    assert first == again
    metrics = metrics_of(session.store.table(first, "metrics"))
    assert session.tracker.scalars_of == Display.seen == [(0, metrics)] * 2
