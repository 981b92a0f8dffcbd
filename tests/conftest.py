"""Hypothesis profiles (the markers are in pyproject.toml). CI=1 chooses the derandomised profile."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# Lives are long values by nature, and the first example may load Numba's cache: neither is a fault.
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

settings.register_profile("default", deadline=None, suppress_health_check=SLOW)
settings.register_profile("ci", deadline=None, suppress_health_check=SLOW, derandomize=True, print_blob=True)
# For a first look: shrinking a life of the interpreted kernel takes minutes.
UNSHRUNK = [Phase.explicit, Phase.reuse, Phase.generate]
settings.register_profile("unshrunk", deadline=None, suppress_health_check=SLOW, phases=UNSHRUNK)
settings.load_profile("ci" if os.environ.get("CI", "") not in ("", "0", "false") else "default")
