"""What Numba keeps of compiled loops goes by the content of all that they follow from."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import gpupack
from gpupack.backends.cpu.pack_loop import step_batch
from gpupack.core.jit import SOURCES, STATE

FOLDER = Path(gpupack.__file__).parent


def imported(path: Path) -> set[Path]:
    """Files of gpupack that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gpupack":
            base = FOLDER.joinpath(*node.module.split(".")[1:])
            names = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
            found |= {name for name in names if name.exists()}
    return found


def test_sources_are_all_that_compiled_loops_follow_from():
    sources = {path for pattern in SOURCES for path in FOLDER.glob(pattern)}
    compiling = {path for path in FOLDER.glob("**/*.py") if "gpupack.core.jit import" in path.read_text()}
    assert compiling <= sources
    needed = {file for path in compiling for file in imported(path)}
    # Errors are raised by what calls the loops, and control words are made there.
    assert {path.name for path in needed - sources} <= {"array_checks.py", "errors.py"}


def test_the_cache_tells_states_apart(tmp_path):
    assert STATE in step_batch.py_func.__qualname__
    copy = tmp_path / "gpupack"
    for pattern in (*SOURCES, "core/*.py", "packer/*.py", "backends/*.py", "__init__.py", "**/__init__.py"):
        for path in FOLDER.glob(pattern):
            target = copy / path.relative_to(FOLDER)
            target.parent.mkdir(exist_ok=True, parents=True)
            target.write_bytes(path.read_bytes())
    before = state_of(tmp_path)
    rule = copy / "backends/cpu/emit_rule.py"
    rule.write_text(rule.read_text() + "\n# another\n")
    assert state_of(tmp_path) != before


def state_of(folder: Path) -> bytes:
    """What a copy of the package in a folder says."""
    code = "from gpupack.core.jit import STATE; print(STATE)"
    return subprocess.check_output([sys.executable, "-c", code], cwd=folder, env={"PYTHONPATH": str(folder)})
