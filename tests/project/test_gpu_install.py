"""The GPU install commands of the README resolve, without installing anything."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNREACHABLE = re.compile(
    r"error sending request|failed to fetch|dns error|timed out|connection (refused|reset)|network is unreach",
    re.IGNORECASE,
)
LIMIT_S = 240


def commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^ +(uv pip install .*\[gpu\].*)$", text, re.MULTILINE)


def overrides() -> list[str]:
    """Return what the README writes into its overrides file."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r'^ +echo "(.*)" > overrides.txt$', text, re.MULTILINE)


def resolve(command: str, folder: Path) -> dict[str, str]:
    """Run a `uv pip install` command as `uv pip compile` for Python 3.12 on Linux; return name to version."""
    uv = pytest.importorskip("uv", reason="uv is not installed here; `make setup` installs it").find_uv_bin()
    words = shlex.split(command)[3:]
    target = words[-1]
    assert target == ".[gpu]"
    options = [str(folder / word) if word == "overrides.txt" else word for word in words[:-1]]
    arguments = ["pip", "compile", "--extra", "gpu", "--python-version", "3.12"]
    platform = ["--python-platform", "x86_64-unknown-linux-gnu"]
    try:
        done = subprocess.run(
            [uv, *arguments, *platform, *options, "pyproject.toml"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package registry did not answer within {LIMIT_S} s")
    if done.returncode and UNREACHABLE.search(done.stderr) and "No solution found" not in done.stderr:
        pytest.skip(f"the package registry cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", done.stdout, re.MULTILINE))


def test_readme_names_the_install_and_the_override():
    assert commands() == ['uv pip install ".[gpu]"', 'uv pip install --override overrides.txt ".[gpu]"']
    assert overrides() == ["fastapi>=0.139,<0.151"]


@pytest.mark.timeout(LIMIT_S + 30)
def test_gpu_install_resolves(tmp_path):
    versions = resolve(commands()[0], tmp_path)
    assert versions["vllm"] == versions["vllm-omni"] == "0.30.0"
    assert versions["prefect"] == "3.7.7"


@pytest.mark.timeout(LIMIT_S + 30)
def test_gpu_install_with_a_newer_prefect_resolves(tmp_path):
    (tmp_path / "overrides.txt").write_text("\n".join(overrides()))
    versions = resolve(commands()[1], tmp_path)
    assert versions["vllm"] == versions["vllm-omni"] == "0.30.0"
    assert versions["prefect"] == "3.9.1"


def test_a_conflict_is_a_failure_and_no_skip(tmp_path):
    pytest.importorskip("uv")
    conflicting = "vllm==0.30.0\nvllm==0.28.0\n"
    (tmp_path / "in.txt").write_text(conflicting)
    import uv

    done = subprocess.run(
        [uv.find_uv_bin(), "pip", "compile", "--offline", str(tmp_path / "in.txt")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "No solution found" in done.stderr or "conflicting" in done.stderr


def test_metadata_admits_the_versions_that_are_tested():
    """Floors admit both test environments: the pinned CPU one, and vLLM 0.26's on a GPU machine."""
    import tomllib

    from packaging.requirements import Requirement

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    requirements = {(r := Requirement(line)).name.lower(): r.specifier for line in declared}
    older = {
        "prefect": "3.7.7",
        "torch": "2.11.0",
        "diffusers": "0.38.0",
        "transformers": "5.14.1",
        "pyarrow": "25.0.1",
    }
    for name, version in older.items():
        assert requirements[name].contains(version), f"{name} {version} is shut out by {requirements[name]}"
    pins = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE))
    pins = {name.lower(): version for name, version in pins.items()}
    for name, specifier in requirements.items():
        assert specifier.contains(pins[name]), f"requirements/cpu.txt pins {name} {pins[name]}, outside {specifier}"
