"""Where device_check runs: a CUDA device, or Triton's interpreter on host memory where there is none."""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGES = {"gpupack": ROOT / "gpupack", "gpupack.kernels": ROOT / "kernels"}
SLEEP_CYCLES = 400_000  # 0.2 ms at 2 GHz


def make_importable() -> None:
    """Let `gpupack` be this tree's, installed or not, and the tests' modules be found.

    The root stays off the path: with it `import kernels` would find our folder.
    """
    for folder in (HERE, ROOT / "tests"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    for name, folder in PACKAGES.items():
        if name in sys.modules:
            continue
        found = find_spec(name)
        if found is not None and found.origin is not None and Path(found.origin).resolve().parent == folder:
            continue
        spec = spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None, f"{folder} is a package"
        assert spec.loader is not None
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


class Place:
    """The device that is checked. Everything on a device goes through a runtime of the package's own."""

    def __init__(self, *, cuda: bool) -> None:
        """Chooses the interpreter for the whole process if not `cuda`; before a kernel is imported."""
        if cuda:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = "1"
        from gpupack.backends.cuda.host_runtime import make_runtime

        self.cuda = cuda
        self.name = "cuda" if cuda else "interpret"
        self.runtime = make_runtime(self.name, blocking=False)
        self.numba = find_spec("numba") is not None

    def tensor(self, array: Any) -> Any:
        """A copy of a host array on the device."""
        import torch

        return torch.from_numpy(array).to(self.runtime.device)

    def stream(self) -> Any:
        """A stream to name to a packer; None without CUDA."""
        import torch

        return torch.cuda.Stream() if self.cuda else None

    def sleep(self, times: int = 1) -> None:
        """Queue a kernel that takes `times` 0.2 ms and does nothing."""
        import torch

        if self.cuda:
            torch.cuda._sleep(times * SLEEP_CYCLES)

    def synchronize(self) -> None:
        """Wait for everything."""
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def no_synchronisation(self) -> AbstractContextManager[None]:
        """Calls that synchronise, of those that torch knows, raise in here; without CUDA there are none."""
        return _raising_on_sync() if self.cuda else nullcontext()

    def chain_ns(self, enqueue: Any, launches: int) -> float:
        """Nanoseconds of the device for each of `launches` that `enqueue()` enqueues, one behind the other.

        They wait behind a long kernel until the last is queued, so the host's time is not in it.
        """
        if not self.cuda:
            began = time.perf_counter_ns()
            enqueue()
            return (time.perf_counter_ns() - began) / launches
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for times in (5, 20, 160):
            self.sleep(times)
            start.record()
            enqueue()
            end.record()
            in_time = not start.query()  # the host was done before the long kernel was
            end.synchronize()
            if in_time:
                return start.elapsed_time(end) * 1e6 / launches
        raise RuntimeError(f"{launches} launches were not queued within 32 ms: this host is too slow to time kernels")

    def about(self) -> dict[str, Any]:
        """What was checked and timed on."""
        import platform
        from importlib.metadata import version

        import torch

        gpu = torch.cuda.get_device_name() if self.cuda else "none"
        versions = {name: version(name) for name in ("torch", "triton", "numpy")}
        versions["numba"] = version("numba") if self.numba else "none"
        cuda = {"driver": driver_version(), "cuda": str(torch.version.cuda or torch.version.hip or "none")}
        return {"device": self.name, "gpu": gpu, **cuda, "python": platform.python_version(), **versions}


@contextmanager
def _raising_on_sync() -> Any:
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def driver_version() -> str:
    """Version of the NVIDIA driver, or "none"."""
    import subprocess

    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return done.stdout.strip().partition("\n")[0] or "none"
