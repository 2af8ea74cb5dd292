"""Pictures of a run on their way: in its folder, in TensorBoard, in its report."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.metrics.validation import paired_bootstrap
from verl_omni_core.stages.preview import TAG

pytestmark = pytest.mark.engine


def test_image_grids_stand_in_the_folder_and_in_tensorboard(flow: Ran) -> None:
    every = flow.config.run.images_every
    steps = list(range(every, flow.config.run.steps + 1, every))
    files = {step: flow.root / "images" / f"step-{step:06d}.png" for step in steps}
    events = EventAccumulator(str(flow.root / "tensorboard"), size_guidance={"images": 0}).Reload()
    assert steps and [event.step for event in events.Images(TAG)] == steps
    assert [event.encoded_image_string for event in events.Images(TAG)] == [files[step].read_bytes() for step in steps]


def test_the_report_shows_the_engine_with_its_whole_count_of_requests(flow: Ran) -> None:
    page = (flow.root / "report.html").read_text()
    assert f"<tr><th>requests</th><td>{sum(flow.requests())}</td></tr>" in page
    assert page.count("data:image/png;base64,") == 2 * flow.config.tracking.grid_prompts
    assert "run.seed" in page


def test_the_summary_has_the_committed_numbers_and_paths_that_exist(flow: Ran) -> None:
    rewards = [flow.recorded.rewards(step, "validate") for step in (0, small.STEPS)]
    before, after = (values.reshape(small.HELD_OUT, small.HELD_OUT_SAMPLES) for values in rewards)
    gain = paired_bootstrap(before, after)
    assert f"{before.mean():.3f} before, {after.mean():.3f} after training" in flow.summary
    assert f"({small.HELD_OUT} prompts, {small.HELD_OUT_SAMPLES} fixed seeds each)" in flow.summary
    assert f"{gain.mean:+.3f}, paired bootstrap 95 % interval {gain.low:+.3f} to {gain.high:+.3f}" in flow.summary
    for label, suffix in (("Before and after", ".png"), ("Report", ".html")):
        found = re.search(rf"^{label}: +(\S+)$", flow.summary, re.MULTILINE)
        assert found is not None and found[1].endswith(suffix) and Path(found[1]).is_file()
