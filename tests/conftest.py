"""Hypothesis profiles (the markers are in pyproject.toml). CI=1 chooses the derandomised profile."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

# Numba looks at the time of the file that a compiled loop is in, not at those of its helpers: while the code
# changes, only a cache of its own for every state of the sources is never stale.
FOLDER = Path(__file__).parent.parent / "gpupack"
SOURCES = [FOLDER / "sglang/cursors.py", FOLDER / "sglang/device_loops.py"]
SOURCES += [FOLDER / name for name in ("layout.py", "rule.py", "compiled.py")]
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir(), f"gpupack-numba-{os.getuid()}", STATE)))

# Lives are long values by nature, and the first example may load Numba's cache: neither is a fault.
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

settings.register_profile("default", deadline=None, suppress_health_check=SLOW)
settings.register_profile("ci", deadline=None, suppress_health_check=SLOW, derandomize=True, print_blob=True)
# For a first look: shrinking a life of the interpreted kernel takes minutes.
UNSHRUNK = [Phase.explicit, Phase.reuse, Phase.generate]
settings.register_profile("unshrunk", deadline=None, suppress_health_check=SLOW, phases=UNSHRUNK)
settings.load_profile("ci" if os.environ.get("CI", "") not in ("", "0", "false") else "default")
