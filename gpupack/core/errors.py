"""One class per cause. Each message names the thing, what was expected and what came."""

from __future__ import annotations

from typing import Any


class GpupackError(Exception):
    """Base of all errors of this package."""


class ConfigError(GpupackError, ValueError):
    """A configuration value is out of range, or asks for memory that is not there."""


class InputError(GpupackError, ValueError):
    """An argument of a call is wrong; nothing was changed."""


class CapacityError(GpupackError):
    """No free slot for an admission; nothing was changed."""


class HandleError(GpupackError, KeyError):
    """A handle names no live request: it has ended or was never given."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class BufferBusyError(GpupackError):
    """All packed-step buffers are in use; release an earlier step first."""


class ReleasedError(GpupackError):
    """A view of a packed step was used after its buffer was given back."""


class StepFailedError(GpupackError):
    """A launched step went wrong on the device; the packer is closed."""


class CrashRequestedError(GpupackError, RuntimeError):
    """SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS asked for it; everything was sent."""


class ClosedError(GpupackError):
    """The object was closed."""


class DetokenizerError(GpupackError):
    """A delta cannot be turned into text: unknown request, or more tokens after the finish."""


# --- Bytes from a socket --------------------------------------------------------------------------


class WireError(GpupackError):
    """Base of everything that can be wrong with received bytes."""


class FrameTruncatedError(WireError):
    """The frame is shorter or longer than it says, or than a header."""


class FrameMagicError(WireError):
    """The bytes do not begin like a frame."""


class FrameVersionError(WireError):
    """The frame is of a version this reader does not know."""


class FrameTooLargeError(WireError):
    """The frame is over the maximum frame size."""


class FrameSectionError(WireError):
    """A section is unknown, doubled, missing, misaligned, of the wrong type or outside the frame."""


class FrameValueError(WireError):
    """A value inside a section breaks a rule: offsets that fall, a count that does not match, an unknown flag."""


class SideRecordError(WireError):
    """The side record is no valid msgpack of the expected shape, or names rows that are not there."""


class FrameGapError(WireError):
    """A frame number is missing: the stream cannot be continued."""


class UnknownHandleError(WireError):
    """A row's handle has no opening record: the stream cannot be continued."""


class StreamBrokenError(WireError):
    """A frame of a stream that was given up after an earlier gap or unknown handle."""


# --- Sending --------------------------------------------------------------------------------------


class SendError(GpupackError):
    """A step was taken in and could not be sent as it should.

    `report`, if not None, is the SendReport of the step: its finished handles are finished all the same.
    """

    report: Any = None


class BackpressureError(SendError):
    """The receiver is too slow: `max_pending_bytes` wait and the send timed out; all of it is kept."""


class PeerLostError(SendError):
    """The receiver went away; frames handed to it may be lost. `OutputStreamer.reopen()` starts anew."""
