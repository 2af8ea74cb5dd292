"""Resolving a run: precedence, origins, typed values, and what is said about wrong ones."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_omni_core.errors import ConfigError, UnknownNameError
from verl_omni_core.settings import loader, tree
from verl_omni_core.settings.loader import apply_overrides, load
from verl_omni_core.settings.run import RunConfig

PROFILE = """
[run]
steps = 5
seed = 5
deterministic = true
store = "five"
[algorithm.options]
std_ddof = 0
"""


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "five.toml"
    path.write_text(PROFILE)
    return path


def test_explicit_beats_set_beats_environment_beats_profile_beats_default(profile):
    environ = {"VERL_OMNI_RUN__STEPS": "4", "VERL_OMNI_RUN__SEED": "4", "VERL_OMNI_RUN__STORE": "four"}
    overrides = ["run.steps=3", "run.seed=3"]
    resolved = load(profile, overrides=overrides, environ=environ, explicit={"run.steps": 2})
    run = resolved.config.run
    assert (run.steps, run.seed, run.store, run.deterministic, run.validate_every) == (2, 3, "four", True, 10)
    assert resolved.origins["run.steps"] == "argument"
    assert resolved.origins["run.seed"] == "--set run.seed=3"
    assert resolved.origins["run.store"] == "environment VERL_OMNI_RUN__STORE"
    assert resolved.origins["run.deterministic"] == f"profile {profile}"
    assert resolved.origins["run.validate_every"] == "default"


def test_every_setting_has_an_origin(profile):
    assert set(tree.fields()) <= set(load(profile, environ={}).origins)


def test_entries_of_a_free_table_have_their_own_origins(profile):
    resolved = load(profile, overrides=["algorithm.options.other=1"], environ={})
    assert resolved.config.algorithm.options == {"std_ddof": 0, "other": 1}
    assert resolved.origins["algorithm.options.std_ddof"] == f"profile {profile}"
    assert resolved.origins["algorithm.options.other"] == "--set algorithm.options.other=1"


def test_later_overrides_of_one_name_win():
    assert load(overrides=["run.steps=3", "run.steps=4"], environ={}).config.run.steps == 4


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("run.steps=7", "run.steps", 7),
        ("training.learning_rate=1e-3", "training.learning_rate", 1e-3),
        ("run.deterministic=true", "run.deterministic", True),
        ("data.train=123", "data.train", "123"),
        ("data.train='a b'", "data.train", "a b"),
        ("data.train=a=b", "data.train", "a=b"),
        ("run.id=none", "run.id", None),
        ("training.ema_decay=none", "training.ema_decay", None),
        ("sampler.sde_window_range=[1, 3]", "sampler.sde_window_range", (1, 3)),
        ('model.lora.targets=["a", "b"]', "model.lora.targets", ["a", "b"]),
        ("reward.failure=fail", "reward.failure", "fail"),
    ],
)
def test_text_becomes_a_value_of_the_settings_type(text, name, value):
    for config in (
        load(overrides=[text], environ={}).config,
        load(environ={"VERL_OMNI_" + name.replace(".", "__").upper(): text.partition("=")[2]}).config,
        apply_overrides(RunConfig(), [text]),
    ):
        found = config
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value and type(found) is type(value)


def test_a_list_of_scorers_is_given_whole():
    config = load(overrides=['reward.scorers=[{name="jpeg_size", weight=2}]'], environ={}).config
    assert [(scorer.name, scorer.weight) for scorer in config.reward.scorers] == [("jpeg_size", 2.0)]


@given(steps=st.integers(0, 10**6), rate=st.floats(0, 1e3), flag=st.booleans(), name=st.text("abc/. _-1", max_size=9))
def test_what_set_writes_set_reads(steps, rate, flag, name):
    texts = [f"run.steps={steps}", f"training.learning_rate={rate!r}", f"run.deterministic={str(flag).lower()}"]
    config = apply_overrides(RunConfig(), [*texts, f"data.train={name}"])
    assert (config.run.steps, config.training.learning_rate) == (steps, rate)
    assert (config.run.deterministic, config.data.train) == (flag, name.strip())


def test_overrides_leave_everything_else_as_it_was(profile):
    config = load(profile, environ={}).config
    changed = apply_overrides(config, ["run.steps=1"])
    assert changed.model_copy(update={"run": config.run}) == config
    assert apply_overrides(config, []) is config


def test_a_resolved_config_survives_json_and_pickle(profile):
    import pickle

    config = load(profile, overrides=["sampler.sde_window_range=[0, 3]"], environ={}).config
    assert type(config) is RunConfig
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_config_alone_reads_no_environment(monkeypatch):
    monkeypatch.setenv("VERL_OMNI_RUN__STEPS", "3")
    assert RunConfig().run.steps == 30
    assert load().config.run.steps == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run.stps=3", "did you mean 'run.steps'"),
        ("rollout.group_sze=3", "did you mean 'rollout.group_size'"),
        ("rolout.group_size=3", "did you mean 'rollout.group_size'"),
        ("group_size=3", "did you mean 'rollout.group_size'"),
        ("training.group_size=3", "did you mean 'rollout.group_size'"),
        ("nothing.like_it=3", "known: run, model, data, sampler"),
        ("weights.zzz=3", "known: weights.sync_interval, weights.timeout_s"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(text, expected):
    with pytest.raises(UnknownNameError) as refusal:
        load(overrides=[text], environ={})
    assert f"unknown setting {text.partition('=')[0]!r} (--set {text})" in str(refusal.value)
    assert expected in str(refusal.value)


def test_unknown_names_are_refused_wherever_they_come_from(tmp_path):
    profile = tmp_path / "p.toml"
    profile.write_text("[rollout]\ngroup_sise = 4\n")
    for arguments in (
        {"profile": profile},
        {"overrides": ["rollout.group_sise=4"]},
        {"explicit": {"rollout.group_sise": 4}},
        {"environ": {"VERL_OMNI_ROLLOUT__GROUP_SISE": "4"}},
        {"explicit": {"reward.scorers": [{"name": "ocr", "wieght": 4}]}},
    ):
        with pytest.raises(UnknownNameError, match=r"did you mean '(rollout\.group_size|weight)'"):
            load(**{"environ": {}, **arguments})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run.steps=many", "run.steps is 'many' (--set run.steps=many): expected a whole number of at least 0"),
        ("run.steps=1.5", "expected a whole number of at least 0"),
        ("run.steps=true", "expected a whole number of at least 0"),
        ("run.deterministic=1.0", "expected true or false"),
        ("training.learning_rate=-1", "training.learning_rate is -1"),
        ("training.learning_rate=nan", "expected a number of at least 0"),
        ("training.learning_rate=inf", "expected a number of at least 0"),
        ("training.ema_decay=1", "expected a number of at least 0 and less than 1, or none"),
        ("rollout.group_size=0", "expected a whole number of at least 1"),
        ("reward.failure=zero", "expected one of 'mask', 'drop', 'fail'"),
        ("sampler.sde_window_range=[1]", "sampler.sde_window_range"),
        ("sampler.sde_window_range=3", "expected a list of 2 numbers, or none"),
        ("run=3", "run is 3 (--set run=3): expected a table of settings"),
        ("run.id=a/b", "expected text that matches"),
        ("reward.scorers=[]", "with at least 1 item"),
        ("reward.scorers=[{weight=2}]", "reward.scorers.0.name is missing"),
        ('reward.scorers=[{name="ocr", weight="x"}]', "reward.scorers.0.weight is 'x'"),
        ("training.prompts_per_update=5", "does not divide data.prompts_per_step 12; use one of [1, 2, 3, 4, 6, 12]"),
        ("run.steps", "expected name=value"),
        ("=3", "expected name=value"),
        ("run..steps=3", "names are words joined by dots"),
    ],
)
def test_a_wrong_value_names_key_seen_and_allowed(text, message):
    with pytest.raises(ConfigError) as refusal:
        load(overrides=[text], environ={})
    assert message in str(refusal.value)


def test_all_faults_come_in_one_message():
    with pytest.raises(ConfigError) as refusal:
        load(overrides=["run.steps=x", "reward.failure=y"], environ={"VERL_OMNI_RUN__SEED": "-1"})
    lines = str(refusal.value).splitlines()
    assert len(lines) == 3 and "environment VERL_OMNI_RUN__SEED" in str(refusal.value)


def test_a_single_underscore_between_groups_is_told():
    with pytest.raises(ConfigError, match="use VERL_OMNI_RUN__STEPS"):
        load(environ={"VERL_OMNI_RUN_STEPS": "3"})


def test_other_variables_of_the_prefix_are_no_settings():
    assert load(environ={"VERL_OMNI_HOME": "somewhere"}).config == RunConfig()


def test_a_missing_profile_is_told_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'glyph-flow_grpo-ocr-cpu'"):
        load("glyph-flow_grpo-ocr-gpu", environ={})
    with pytest.raises(UnknownNameError, match=r"'here/there.toml' does not exist; give an existing TOML file"):
        load("here/there.toml", environ={})


def test_a_profile_that_is_no_toml_is_told_with_the_line(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[run]\nsteps = \n")
    with pytest.raises(ConfigError, match="line 2"):
        load(path, environ={})


def test_parse_value_takes_unknown_fields_as_toml():
    assert loader.parse_value("3", None) == 3
    assert loader.parse_value("none", None) is None
    assert loader.parse_value("a word", None) == "a word"


def test_a_schedulers_end_of_the_job_counts_where_nothing_else_is_said(tmp_path):
    environ = {"SLURM_JOB_END_TIME": "1790000000"}
    resolved = load(environ=environ)
    assert resolved.config.run.end_by == datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)
    assert resolved.origins["run.end_by"] == "environment SLURM_JOB_END_TIME"
    mine = load(overrides=["run.end_by=2026-09-21T12:00:00Z"], environ=environ)
    assert mine.config.run.end_by == datetime(2026, 9, 21, 12, tzinfo=UTC)
    assert load(overrides=["run.end_by=none"], environ=environ).config.run.end_by is None
    profile = tmp_path / "mine.toml"
    profile.write_text("[run]\nend_by = 2026-09-21T13:00:00+02:00\n")
    assert load(profile, environ=environ).config.run.end_by == datetime(2026, 9, 21, 11, tzinfo=UTC)
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME is 'soon', expected seconds since 1970"):
        load(environ={"SLURM_JOB_END_TIME": "soon"})


@pytest.mark.parametrize("value", ["auto", "disable", 0, 7])
def test_resuming_is_automatic_disabled_or_a_step(value):
    assert load(overrides=[f"run.resume={value}"], environ={}).config.run.resume == value


@pytest.mark.parametrize(("value", "seen"), [("-1", "-1"), ("true", "True"), ("never", "'never'"), ('"7"', "'7'")])
def test_another_way_of_resuming_is_refused_with_what_there_is(value, seen):
    with pytest.raises(ConfigError) as refusal:
        load(overrides=[f"run.resume={value}"], environ={})
    assert str(refusal.value) == (
        f"run.resume is {seen} (--set run.resume={value}): expected one of 'auto', 'disable' or a whole number of at "
        "least 0"
    )
