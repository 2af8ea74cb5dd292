"""The wheel holds all that a run needs, and trains where the repository is not."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.collected import ROOT

LIMIT_S = 400


def _do(command: list[str | Path], folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | variables
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from the tracked files alone, so that nothing else of the working tree gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = _do(["git", "ls-files", "-z"], ROOT).split("\0")[:-1]
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    _do([sys.executable, "-c", build, folder], source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as an installer does, in a folder of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_holds_packages_profiles_the_embedded_model_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"flows", "tasks", "verl_omni_core", "profiles"}
    for name in (
        "profiles/glyph-flow_grpo-ocr-cpu.toml",
        "flows/online.py",
        "verl_omni_core/glyph/pipeline/transformer/diffusion_pytorch_model.safetensors",
        "verl_omni_core/glyph/prompts/validation.parquet",
    ):
        assert name in names
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "verl_omni_core").rglob("*.py")}
    assert shipped <= names


def _run(elsewhere: Path, home: Path, *arguments: str) -> str:
    where = "import verl_omni_core, sys; assert verl_omni_core.__file__.startswith(sys.argv.pop(1)); "
    start = "from verl_omni_core.cli.main import app; app()"
    variables = {"PYTHONPATH": str(elsewhere), "VERL_OMNI_HOME": str(home)}
    return _do([sys.executable, "-c", where + start, elsewhere, *arguments], home, **variables)


def test_wheel_answers_from_another_folder(elsewhere: Path, tmp_path: Path) -> None:
    assert 'name = "sd3"' in _run(elsewhere, tmp_path, "config", "glyph-flow_grpo-ocr-cpu").replace("'", '"')


@pytest.fixture
def own_home(elsewhere: Path, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    _run(elsewhere, tmp_path, "down")


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_wheel_trains_from_another_folder(elsewhere: Path, own_home: Path) -> None:
    changes = ["run.steps=1", "rollout.threads=1", "training.threads=1", "cluster.object_store_mb=100"]
    changes += ["durability.min_free_gb=0.1"]
    arguments = [part for change in changes for part in ("--set", change)]
    out = _run(elsewhere, own_home, "train", "glyph-flow_grpo-jpeg-cpu", "--no-prefect", "--run-id", "w", *arguments)
    assert "report" in out
    assert (own_home / "runs" / "w" / "steps" / "000001" / "update" / "COMMIT").is_file()
