"""Pictures of a run on their way: in its folder, in TensorBoard, in its report."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.flows.conftest import Ran
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
