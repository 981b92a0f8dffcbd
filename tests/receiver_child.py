"""A receiving process for the transport tests; one JSON object a line on stdout.

Prints `{"endpoint"}` once bound, `{"frames"}` after the first frame and after every 100th, and at the end
(all `--requests` finished, 60 seconds without an end, or the parent gone) the tokens and errors it got.
"""

from __future__ import annotations

import argparse
import json
import os
import time

from gpupack.core.errors import WireError
from gpupack.transport.receiver import OutputReceiver


def main() -> None:
    """Receive until all requests have ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--delay-ms", type=float, default=0)
    options = parser.parse_args()
    parent, deadline = os.getppid(), time.monotonic() + 60
    tokens: dict[str, list[int]] = {}
    errors: list[str] = []
    finished = frames = 0
    with OutputReceiver(options.endpoint, high_water_mark=8) as receiver:
        print(json.dumps({"endpoint": receiver.endpoint}), flush=True)
        while finished < options.requests and time.monotonic() < deadline and os.getppid() == parent:
            try:
                step = receiver.recv(200)
            except WireError as error:
                errors.append(type(error).__name__)
                continue
            if step is None:
                continue
            frames += 1
            for delta in step.deltas():
                tokens.setdefault(delta.rid, []).extend(delta.token_ids)
                finished += delta.finish_reason is not None
            if frames % 100 == 1:
                print(json.dumps({"frames": frames}), flush=True)
            time.sleep(options.delay_ms / 1000)
    print(json.dumps({"tokens": tokens, "errors": errors, "frames": frames, "finished": finished}), flush=True)


if __name__ == "__main__":
    main()
