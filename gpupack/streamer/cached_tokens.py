"""Where the cached tokens of a request came from, as its rows tell it."""

from __future__ import annotations

from gpupack.wire.metadata import CachedTokensDetails


def cached_tokens_details(
    total: int, device: int = 0, host: int = 0, storage: int = 0, *, storage_backend: str | None = None
) -> CachedTokensDetails | None:
    """Where the cached tokens of a request came from, as SPEC.md section 3 has it; None without any.

    `storage_backend` is the class name of the storage tier's backend, "none" if the tier is on without
    one; None: the tier is off.
    """
    if not (device > 0 or host > 0 or storage > 0):
        return {"device": total, "host": 0} if total > 0 else None
    details: CachedTokensDetails = {"device": device, "host": host}
    if storage > 0 or storage_backend is not None:
        details["storage"] = storage
    if storage_backend is not None:
        details["storage_backend"] = storage_backend
    return details
