"""Make the project's virtual environment, or do nothing if it is up to date. Standard library only.

Two pip installs, because the engine's metadata asks for CUDA builds that a CPU never runs: ``requirements/cpu.txt``
with dependencies, then ``requirements/cpu-nodeps.txt`` without. A stamp with a digest of everything that decides the
environment is written last, so an interrupted run starts over where pip left off and a second run returns at once.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = "pip==25.3"  # older ones download a whole wheel only to tell its version
NEEDED_GB = 4.0
STAMP = "verl-omni-set-up.json"
LOG = "set-up.log"
CHECK = "import torch; assert torch.version.cuda is None, torch.__version__; import diffusers, peft, verl_omni_core"
NO_CPU_TORCH = """\
torch {version} can only be had here as a CUDA build ({seen}), which takes about 5 GB and does not go with the engine's
CPU build. What to do, any one of:
  - let pip see PyTorch's own package index for CPU builds: PIP_EXTRA_INDEX_URL=<its address> make setup
    (the address stands in the install command that PyTorch's web site shows for Linux, Pip, CPU);
  - put a CPU wheel of torch {version} into a folder: PIP_FIND_LINKS=<folder> make setup."""


class SetUpError(Exception):
    """What stopped the set-up, and what to do about it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    venv = parser.parse_args().venv.absolute()
    try:
        with Lock(venv.with_name(venv.name + ".lock")):
            set_up(venv)
    except SetUpError as error:
        print(f"\nSet-up failed: {error}", file=sys.stderr)
        return 1
    return 0


def set_up(venv: Path) -> None:
    """Bring ``venv`` up to date; see the module's text."""
    wanted = digests()
    done = read_stamp(venv)
    if done == wanted:
        return
    venv.mkdir(parents=True, exist_ok=True)
    if done.get("requirements") == wanted["requirements"]:
        print(f"Installing the changed project into {venv.name}", flush=True)
        step("project", venv, install_project)
    else:
        check_host(venv)
        print(f"Setting up {venv.name} with {sys.executable}: about 3 minutes and 3 GB, once", flush=True)
        (venv / STAMP).unlink(missing_ok=True)
        step("virtual environment", venv, make_venv)
        step("torch, CPU build", venv, install_torch)
        step("libraries and tools", venv, lambda folder: pip(folder, "install", "-r", "requirements/cpu.txt"))
        step("engine", venv, lambda folder: pip(folder, "install", "--no-deps", "-r", "requirements/cpu-nodeps.txt"))
        step("project", venv, install_project)
    step("check", venv, lambda folder: run(folder, [python_of(folder), "-c", CHECK]))
    temporary = venv / (STAMP + ".tmp")
    temporary.write_text(json.dumps(wanted))
    temporary.replace(venv / STAMP)


def digests() -> dict[str, str]:
    """Return digests of what decides the environment: the requirement files, and the project's metadata."""
    requirements = hashlib.sha256(f"{sys.version_info[:2]} {PIP}".encode())
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        requirements.update(path.read_bytes())
    project = hashlib.sha256(str(ROOT).encode() + (ROOT / "pyproject.toml").read_bytes())
    return {"requirements": requirements.hexdigest(), "project": project.hexdigest()}


def read_stamp(venv: Path) -> dict[str, str]:
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return stamp if is_usable(venv) else {}


def is_usable(venv: Path) -> bool:
    """Tell whether the environment's Python runs; a moved interpreter or a torn environment does not."""
    try:
        command = [python_of(venv), "-c", "import pip, sys; print(*sys.version_info[:2])"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, PermissionError):
        return False
    return said.returncode == 0 and said.stdout.split() == [str(part) for part in sys.version_info[:2]]


def check_host(venv: Path) -> None:
    if sys.platform != "linux":
        raise SetUpError(f"the engine's CPU build exists for Linux; this is {platform.system()}. Use a Linux container")
    free_gb = shutil.disk_usage(venv).free / 1e9
    if free_gb < NEEDED_GB and not is_usable(venv):
        raise SetUpError(f"{venv} has {free_gb:.1f} GB free, but the environment takes {NEEDED_GB:.0f} GB")


def make_venv(venv: Path) -> None:
    if not is_usable(venv):
        run(venv, [sys.executable, "-m", "venv", "--clear", str(venv)])
    pip(venv, "install", PIP)


def install_torch(venv: Path) -> None:
    """Install a CPU build of the pinned torch: pip's if it offers one, else through uv, which knows where they are."""
    version = pinned("torch")
    installed = run(venv, [python_of(venv), "-m", "pip", "list", "--format", "json"])
    present = {entry["name"]: entry["version"] for entry in json.loads(installed)}.get("torch", "")
    if present.split("+")[0] == version and is_cpu_build(present):
        return
    offered = offered_torch(venv, version)
    if is_cpu_build(offered):
        pip(venv, "install", f"torch=={version}")
        return
    pip(venv, "install", f"uv=={pinned('uv')}")
    command = [str(venv / "bin" / "uv"), "pip", "install", "--python", python_of(venv)]
    try:
        run(venv, [*command, "--torch-backend", "cpu", f"torch=={version}"])
    except SetUpError as error:
        raise SetUpError(NO_CPU_TORCH.format(version=version, seen=offered or "no build at all")) from error


def offered_torch(venv: Path, version: str) -> str:
    """Return the version that pip would install, with its local part; empty if there is none."""
    report = venv / "torch-offer.json"
    report.unlink(missing_ok=True)
    arguments = ["--dry-run", "--no-deps", "--ignore-installed", "--report", str(report), f"torch=={version}"]
    try:
        pip(venv, "install", *arguments)
    except SetUpError:
        return ""  # the caller tries uv and then says what to do
    return str(json.loads(report.read_text())["install"][0]["metadata"]["version"])


def is_cpu_build(version: str) -> bool:
    """Tell a CPU build by its version: plain ones are CUDA builds on x86-64 Linux and CPU builds elsewhere."""
    local = version.partition("+")[2]
    return bool(version) and (local == "cpu" or (not local and platform.machine() != "x86_64"))


def install_project(venv: Path) -> None:
    pip(venv, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def pinned(name: str) -> str:
    """Return the version that ``requirements/cpu.txt`` pins."""
    match = re.search(rf"^{re.escape(name)}==(\S+)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    if match is None:
        raise SetUpError(f"requirements/cpu.txt does not pin {name}")
    return match.group(1)


def python_of(venv: Path) -> str:
    return str(venv / "bin" / "python")


def pip(venv: Path, *arguments: str) -> str:
    return run(venv, [python_of(venv), "-m", "pip", *arguments, "--disable-pip-version-check"])


def run(venv: Path, command: list[str]) -> str:
    """Run a command with its output in the log, and return what it printed.

    Raises:
        SetUpError: it failed; the message ends with its last lines.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if venv.exists():
        with (venv / LOG).open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise SetUpError(f"{' '.join(command)} ended with {done.returncode}:\n{tail}\nThe whole log: {venv / LOG}")
    return done.stdout


def step(name: str, venv: Path, work: Callable[[Path], object]) -> None:
    began = time.monotonic()
    print(f"  {name} ...", end="", flush=True)
    work(venv)
    print(f" {time.monotonic() - began:.0f} s", flush=True)


class Lock:
    """Hold a lock file, so that two commands started together do not install into each other."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        self.file = self.path.open("w")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another set-up to finish", flush=True)
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()


if __name__ == "__main__":
    sys.exit(main())
