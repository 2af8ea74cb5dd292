"""Who may import whom: the contracts of pyproject.toml, and the rules that they cannot express."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_omni_core import registry

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "verl_omni_core"
TORCH_ONLY = ("algorithms", "samplers")
DIFFUSION_LIBRARIES = {"diffusers", "peft"}
WHERE_DIFFUSION_LIBRARIES_MAY_STAND = {"models", "rollout", "training", "weights", "cli", "stages"}


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file names in an import statement, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_import_contracts_hold():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("folder", TORCH_ONLY)
def test_algorithms_and_samplers_import_torch_and_the_standard_library_only(folder):
    allowed = {*sys.stdlib_module_names, "torch"}
    for path in modules(CORE / folder):
        for name in imports(path):
            own = name.startswith((f"verl_omni_core.{folder}._", "verl_omni_core.errors"))
            assert own or name.partition(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def components() -> dict[str, str]:
    """Return the dotted name of every component to its kind's package."""
    found = {}
    for package in registry.KINDS.values():
        folder = ROOT / Path(*package.split("."))
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            if is_module and not path.name.startswith("_"):
                found[f"{package}.{path.stem}"] = package
    return found


def test_no_module_imports_a_component_of_another():
    known = components()
    assert known
    for top in ("flows", "tasks", "verl_omni_core"):
        for path in modules(ROOT / top):
            for name in imports(path):
                component = next((c for c in known if name == c or name.startswith(c + ".")), None)
                inside = component is not None and (
                    dotted(path) == component or dotted(path).startswith(component + ".")
                )
                assert component is None or inside, (
                    f"{path.relative_to(ROOT)} imports the component {component}; fetch it by name from the registry"
                )


def test_diffusers_and_peft_stay_where_models_are_handled():
    for path in modules(CORE):
        folder = path.relative_to(CORE).parts[0]
        if folder not in WHERE_DIFFUSION_LIBRARIES_MAY_STAND:
            found = DIFFUSION_LIBRARIES & {name.partition(".")[0] for name in imports(path)}
            assert not found, f"{path.relative_to(ROOT)} imports {found}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import verl_omni_core", {"torch", "ray", "prefect", "vllm", "vllm_omni", "pyarrow", "pydantic"}),
        ("import verl_omni_core.settings.loader", {"torch", "ray", "prefect", "vllm", "vllm_omni", "diffusers"}),
        ("import verl_omni_core.settings.check", {"torch", "ray", "prefect", "vllm", "vllm_omni", "diffusers"}),
        ("import verl_omni_core.settings.public", {"torch", "ray", "prefect", "vllm", "vllm_omni", "diffusers"}),
        ("import verl_omni_core.cli.main", {"torch", "ray", "prefect", "vllm", "vllm_omni", "diffusers"}),
        ("import verl_omni_core.rollout.vllm_omni", {"vllm", "vllm_omni", "ray", "prefect"}),
        # what a flow that finds its actors alive has to load before its first command
        ("import flows.online", {"peft", "diffusers", "transformers", "tensordict", "accelerate", "vllm", "vllm_omni"}),
    ],
)
def test_importing_is_light(statement, absent):
    command = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert not absent & set(done.stdout.split())


def test_every_module_of_the_core_has_a_docstring():
    for path in modules(CORE):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert path.name == "__init__.py" or ast.get_docstring(tree), f"{path.relative_to(ROOT)} says not what it is"
