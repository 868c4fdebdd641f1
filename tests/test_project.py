"""The house keeps its shape: who may import whom, what the wheel installs, what no code here may call."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.node.config_file import tomllib

ROOT = Path(__file__).parents[1]
# Each may import those before it.
ORDER = ("protocol", "aggregation", "node", "sim")
WITHOUT_TORCH = ("protocol", "aggregation", "node/swarm", "node/store", "node/observe")
HEAVY = {"torch", "transformers", "peft"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}

SOURCES = sorted(p for folder in ORDER for p in (ROOT / folder).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in SOURCES}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module seen from the root, relative?) of every import, wherever it stands in the file."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield node.lineno, node.module or "", False
                continue
            base = package[: len(package) - node.level + 1]
            assert len(package) >= node.level - 1, f"{name(path)}:{node.lineno} climbs out of the packages"
            inside = [*base, *((node.module or "").split(".") if node.module else [])]
            for target in [inside] if node.module else [[*inside, alias.name] for alias in node.names]:
                yield node.lineno, ".".join(target), True


def test_there_are_sources():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(ORDER)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_point_one_way(path):
    own = ORDER.index(path.relative_to(ROOT).parts[0])
    for line, module, relative in imports(path):
        top = module.split(".")[0]
        where = f"{name(path)}:{line} imports {module}"
        assert top != "shoal", f"{where}; inside the packages imports are relative"
        if not relative:
            assert top not in ORDER, f"{where}; inside the packages imports are relative"
        else:
            assert top in ORDER, f"{where}; there is no such package"
            assert ORDER.index(top) <= own, f"{where}; imports point {' <- '.join(ORDER)}"


@pytest.mark.parametrize("folder", WITHOUT_TORCH)
def test_no_torch_where_none_belongs(folder):
    for path in SOURCES:
        if path.is_relative_to(ROOT / folder):
            for line, module, _ in imports(path):
                assert module.split(".")[0] not in HEAVY, f"{name(path)}:{line} imports {module}"


def test_the_swarm_knows_training_only_through_the_learner():
    for path in SOURCES:
        if path.is_relative_to(ROOT / "node" / "swarm"):
            for line, module, _ in imports(path):
                assert not module.startswith("node.rl"), f"{name(path)}:{line} imports {module}"


def test_the_light_parts_start_without_torch():
    """The command line, the configuration and the swarm: what `--help` and the quadratic learner load."""
    light = "shoal.node.cli, shoal.node.config_file, shoal.node.daemon, shoal.node.quadratic, shoal.node.demo"
    program = f"import sys, {light}; print(sorted({sorted(HEAVY)!r} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert literal(found.stdout) == []


def literal(text: str) -> list[str]:
    return list(ast.literal_eval(text.strip()))


def test_help_needs_nothing_heavy():
    program = (
        "import sys; from shoal.node.cli import shoal; shoal.main(['--help'], standalone_mode=False);"
        "print(sorted({'torch', 'transformers', 'grpc', 'numpy', 'pydantic'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert literal(found.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_nothing_here_can_run_what_a_peer_or_a_file_sends(path):
    for line, module, _ in imports(path):
        assert module.split(".")[0] not in FORBIDDEN_MODULES, f"{name(path)}:{line} imports {module}"
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.Call):
            continue
        where = f"{name(path)}:{node.lineno}"
        function = node.func
        if isinstance(function, ast.Name):
            assert function.id not in FORBIDDEN_CALLS, f"{where} calls {function.id}"
        elif isinstance(function, ast.Attribute):
            assert ast.unparse(function) not in ("torch.load", "os.system"), f"{where} calls {ast.unparse(function)}"
        for keyword in node.keywords:
            allowed = not isinstance(keyword.value, ast.Constant) or keyword.value.value is not True
            risky = keyword.arg in ("allow_pickle", "trust_remote_code", "shell")
            assert allowed or not risky, f"{where} sets {keyword.arg}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_module_says_what_it_does(path):
    if not path.name.endswith("_pb2.py"):
        assert ast.get_docstring(TREES[path]), f"{name(path)} has no docstring"


def test_every_package_folder_is_listed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent.relative_to(ROOT) for p in SOURCES if p.name == "__init__.py"}
    assert folders == {p.parent.relative_to(ROOT) for p in SOURCES}, "a folder with modules has no __init__.py"
    assert set(settings["packages"]) == {"shoal." + ".".join(f.parts) for f in folders}
    assert settings["package-dir"] == {f"shoal.{f}": f for f in ORDER}
    for folder in ORDER:
        assert (ROOT / folder / "py.typed").exists()


def test_the_pins_fit_the_ranges():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            assert re.fullmatch(r"==[^+*,]+", str(pin.specifier)), f"{line}: exact, and without a local version"
            pins[pin.name.lower().replace("_", "-")] = str(pin.specifier)[2:]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            pinned = pins.get(requirement.name.lower().replace("_", "-"))
            assert pinned, f"{text} is not pinned in constraints.txt"
            assert requirement.specifier.contains(pinned), f"{text} does not allow its pin {pinned}"


def test_generated_code_is_as_old_as_it_must_be():
    generated = (ROOT / "protocol" / "wire_pb2.py").read_text()
    assert re.search(r"# Protobuf Python Version: 5\.29\.", generated), "generate with protoc 29.x: make proto"
    assert "shoal/protocol/wire.proto" in generated
    assert (ROOT / "protocol" / "wire_pb2.pyi").exists()


def test_the_wheel_installs_shoal_and_nothing_else(tmp_path):
    # From a copy, so that no build folder of an earlier build slips in and none is left behind.
    source = tmp_path / "source"
    for folder in (*ORDER, "tests", "docs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = tmp_path.glob("shoal-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        entry_points = archive.read(next(f for f in files if f.endswith("entry_points.txt"))).decode()
    tops = {file.split("/")[0] for file in files}
    assert tops == {"shoal", next(t for t in tops if t.endswith(".dist-info"))}
    assert "shoal = shoal.node.main:main" in entry_points
    assert {f"shoal/{folder}/py.typed" for folder in ORDER} | {"shoal/protocol/wire.proto"} <= files
    assert "shoal/__init__.py" not in files, "shoal is a namespace"
    assert not [f for f in files if "test" in Path(f).name.lower() or "/tests/" in f]
    assert {file for file in files if file.endswith(".py")} == {f"shoal/{name(path)}" for path in SOURCES}
