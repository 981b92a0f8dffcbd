"""What is shipped: imports, names, sources and the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, cwd: Path, **env: str) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_loads_nothing_heavy(tmp_path):
    heavy = "'triton', 'numba', 'zmq', 'torch', 'tokenizers', 'transformers'"
    code = f"import gpupack, sys; print([name for name in ({heavy}) if name in sys.modules])"
    assert python(code, tmp_path).strip() == "[]"


def test_every_public_name_can_be_had():
    import gpupack

    assert sorted(gpupack.__all__) == gpupack.__all__
    for name in gpupack.__all__:
        assert getattr(gpupack, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gpupack.nothing  # noqa: B018


# The plugin writes its engine's own wire, whose other end reads pickle; for a comparison it reads back what it wrote.
WRITES_PICKLE = ROOT / "gpupack/sglang/message_pickle.py"


@pytest.mark.parametrize("folder", ["gpupack", "kernels"])
def test_sources_never_unpickle(folder):
    word = re.compile(r"\b(c?pickle|dill|cloudpickle|marshal|shelve|recv_pyobj|send_pyobj)\b")
    sources = sorted(set((ROOT / folder).rglob("*.py")) - {WRITES_PICKLE})
    assert sources
    found = [
        f"{path}:{n}"
        for path in sources
        for n, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if word.search(line)
    ]
    assert found == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(ROOT)], check=True, timeout=240, cwd=folder)
    (path,) = folder.glob("gpupack-*.whl")
    return path


def test_the_wheel_has_the_kernels_inside_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "gpupack/kernels/pack.py" in names
    assert "gpupack/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gpupack"}
    shipped = {name for name in names if name.startswith("gpupack/") and name.endswith(".py")}
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "gpupack").rglob("*.py")}
    assert own <= shipped


def test_the_installed_wheel_works_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*command, str(wheel)], check=True, timeout=240)
    code = "import gpupack, gpupack.kernels as k; print(gpupack.__file__, k.__file__); import gpupack.packer.packer"
    out = python(code, tmp_path, PYTHONPATH=str(site)).split()
    assert all(Path(path).is_relative_to(site) for path in out)
    assert python(
        "import importlib.util as u; print(u.find_spec('kernels'))", tmp_path, PYTHONPATH=str(site)
    ).strip() == ("None")


def test_the_layout_tables_of_cuda_md_are_fresh():
    spec = spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.page_with_tables(page) == page


def test_the_example_of_the_readme_prints_what_it_says(tmp_path):
    code, output = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
    ).groups()
    assert python(code.replace("/tmp/gpupack-example", f"{tmp_path}/example"), tmp_path) == output
