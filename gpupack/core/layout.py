"""The one table of fields: what each word is, where it lies, how wide it is.

NumPy views, the CPU loop, the kernel's constants, the wire and the tables in CUDA.md are all made
from this file. Everything on the hot path is 32 bits wide, so one int32 arena carries it all and a
float32 logprob travels as its own bit pattern.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

WORD = 4  # bytes in a field
ALIGN_WORDS = 2  # sections start at multiples of 8 bytes

# --- State: one row of 16 words a slot, hot fields together in a 32-byte sector -------------------

STATE_FIELDS = {
    "generation": "generation of the handle that owns the slot",
    "flags": "STATE_* bits, number of stop ids, finish code",
    "output_len": "tokens committed, overshoot included",
    "finished_len": "where a finished output ends; -1 while running",
    "token_cursor": "tokens sent",
    "logprob_cursor": "logprobs sent",
    "interval": "stream interval, or the force interval of a request that does not stream",
    "max_new_tokens": "length cap",
    "match": "what ended it: token id, invalid id or cap",
    "widths": "top logprobs a position, and in the upper half token-ids logprobs a position",
    "stop_0": "stop ids: end-of-sequence and the request's own",
    "stop_1": "",
    "stop_2": "",
    "stop_3": "",
    "stop_4": "",
    "stop_5": "",
}
(
    GENERATION,
    FLAGS,
    OUTPUT_LEN,
    FINISHED_LEN,
    TOKEN_CURSOR,
    LOGPROB_CURSOR,
    INTERVAL,
    MAX_NEW_TOKENS,
    MATCH,
    WIDTHS,
    STOP_0,
) = range(11)
STATE_WIDTH = len(STATE_FIELDS)
MAX_STOP_IDS = STATE_WIDTH - STOP_0
TOP_WIDTH_MASK, IDS_WIDTH_SHIFT = 0xFFFF, 16  # in the widths

STATE_FLAGS = {
    "live": "the slot belongs to a handle",
    "stream": "sends by its stream interval, else by the force interval",
    "judged": "the loop looks for the finish",
    "conveyed": "host-judged: every accepted run is passed on as it is",
    "logprobs": "asked for logprobs of the sampled tokens",
    "finished": "the finish is known",
    "final_sent": "the final row has gone out",
}
STATE_LIVE, STATE_STREAM, STATE_JUDGED, STATE_CONVEYED, STATE_LOGPROBS, STATE_FINISHED, STATE_FINAL_SENT = (
    1 << i for i in range(7)
)
STOP_COUNT_SHIFT, STOP_COUNT_MASK = 8, 0xF
CODE_SHIFT, CODE_MASK = 16, 0xFF

# Beside the state: what speculative decoding counts, one row of `spec_width(max_accept)` words a slot.
SPEC_FIELDS = {
    "verify_ct": "verify steps",
    "num_correct_drafts": "accepted tokens without the one of the target model",
    "num_block_accept_tokens": "sum of block_accept_lens",
    "num_cap_tokens": "sum of cap_lens",
}
SPEC_VERIFY_CT, SPEC_CORRECT_DRAFTS, SPEC_BLOCK_ACCEPT, SPEC_CAP_TOKENS, SPEC_HISTOGRAMS = range(5)


def spec_buckets(max_accept: int) -> int:
    """Buckets of a histogram over 0 to max_accept; two of them follow SPEC_FIELDS: correct drafts, cap lens."""
    return max_accept + 1


def spec_width(max_accept: int) -> int:
    """Words of a slot's speculative counters."""
    return SPEC_HISTOGRAMS + 2 * spec_buckets(max_accept)


# --- Channels: the kinds of per-token data that a slot keeps until it is sent ---------------------

CHANNEL_TOKENS, CHANNEL_LOGPROBS, CHANNEL_FAMILIES = range(3)

# --- Finish codes: in the state, in packed rows, on the wire --------------------------------------

FINISH_CODES = {
    "none": "running",
    "stop_token": "end-of-sequence or stop id; match is the id",
    "length": "max_new_tokens reached; match is the cap",
    "invalid_token": "a sampled id outside [0, vocab_size); match is the id",
    "stop_string": "decided on the host; the string travels in the side record",
    "host": "decided on the host: abort, grammar, regex; the reason travels in the side record",
}
FINISH_NONE, FINISH_STOP_TOKEN, FINISH_LENGTH, FINISH_INVALID_TOKEN, FINISH_STOP_STRING, FINISH_HOST = range(6)

# --- Control: what the host asks of a row, [CONTROL_WIDTH, B] -------------------------------------

CONTROL_FIELDS = {
    "flags": "CONTROL_* bits",
    "visible_len": "show the output up to here only; -1: all of it",
    "finished_len": "with FINISH: where the output ends; -1: at its last token",
    "finish_code": "with FINISH: a finish code",
    "match": "with FINISH: token id or cap",
}
CONTROL_FLAGS_ROW, CONTROL_VISIBLE_LEN, CONTROL_FINISHED_LEN, CONTROL_FINISH_CODE, CONTROL_MATCH = range(5)
CONTROL_WIDTH = len(CONTROL_FIELDS)

CONTROL_SKIP = 1  # neither append nor row
CONTROL_HOLD = 2  # do not send though due (not looked at when finished)
CONTROL_FLUSH = 4  # send what is unsent, due or not
CONTROL_FINISH = 8  # the host ends the request here
CONTROL_RETRACTED = 16  # the request is being retracted (POLICY_RETRACTED_LOGPROBS)

# --- What one call does ---------------------------------------------------------------------------

MODE_APPEND = 1  # take in the accepted run
MODE_PACK = 2  # decide who sends
MODE_LOGPROBS = 4  # the batch returns logprobs
MODE_VERIFY = 8  # a verify step of speculative decoding: its counters go up
MODE_CAP_LENS = 16  # with MODE_VERIFY: there are cap_lens

POLICY_STREAM_UNSENT = 1  # stream rule "unsent", else "modulo"
POLICY_FORCE_UNSENT = 2  # force rule "unsent", else "modulo"
POLICY_HOLD_FORCED = 4  # forced sends respect the hold
POLICY_SKIP_EMPTY = 8  # nothing unsent and no finish: no row
POLICY_FIRST_TOKEN_FLUSH = 16  # the first token of a request that does not stream goes at once
POLICY_LOGPROB_EXISTING = 32  # a logprob is not counted as sent before it exists
POLICY_RETRACTED_LOGPROBS = 64  # a retracted request's logprobs end at the visible length, also at 0

# --- Packed step: header, row columns, items ------------------------------------------------------

HEADER_FIELDS = {
    "launch": "number of this launch, from 1",
    "batch": "rows of the batch that was looked at",
    "rows": "rows packed, conveyed ones included",
    "conveyed": "rows that only pass an accepted run to the host",
    "tokens": "items in the token section",
    "logprobs": "items in the logprob section",
    "stale": "rows of the batch whose handle had ended",
    "late": "rows of the batch that came after their final row, with tokens that were dropped",
    "early": "rows sent because a backlog would have passed its window",
    "held": "rows that were due and held",
    "finished": "final rows",
    "error": "0, or what was wrong with an input",
    "families": "words in the family section",
}
(
    H_LAUNCH,
    H_BATCH,
    H_ROWS,
    H_CONVEYED,
    H_TOKENS,
    H_LOGPROBS,
    H_STALE,
    H_LATE,
    H_EARLY,
    H_HELD,
    H_FINISHED,
    H_ERROR,
    H_FAMILIES,
) = range(13)
HEADER_WORDS = 16

ROW_FIELDS = {
    "batch_index": "place of the request in the batch",
    "slot": "low word of the handle",
    "generation": "high word of the handle",
    "flags": "ROW_* bits, finish code",
    "visible_len": "output tokens up to and including this row (completion_tokens)",
    "match": "what ended it: token id, invalid id or cap",
    "token_start": "token cursor before this row: the delta is output[token_start : visible_len]",
    "logprob_start": "logprob cursor before this row",
    "token_indptr": "items of row i: [indptr[i], indptr[i + 1]); one entry more than rows",
    "logprob_indptr": "the same for logprobs",
    "families_indptr": "the same for words of the family section",
}
(
    R_BATCH_INDEX,
    R_SLOT,
    R_GENERATION,
    R_FLAGS,
    R_VISIBLE_LEN,
    R_MATCH,
    R_TOKEN_START,
    R_LOGPROB_START,
    R_TOKEN_INDPTR,
    R_LOGPROB_INDPTR,
    R_FAMILIES_INDPTR,
) = range(11)
ROW_WIDTH = len(ROW_FIELDS)

ROW_FINAL = 1  # the last row of its request
ROW_EARLY = 2  # sent before it was due: its backlog would have passed the window
ROW_CONVEYED = 4  # an accepted run for the host to judge; never on the wire
ROW_OPENING = 8  # wire: the side record has this row's opening record
ROW_RESTARTED = 16  # wire: the receiver discards what it holds of this request
ROW_HIDDEN_TOKEN = 32  # the row's one token is not output: it is that of its logprob (max_new_tokens=0)
ROW_CODE_SHIFT = 8  # finish code in the bits above


class PackedShape(NamedTuple):
    """What the places of a packed step follow from, the batch aside; `PackerConfig.packed_shape`.

    `max_items` tokens or logprobs a row at most, `family_words` words of families, `spec_width` counters.
    """

    max_items: int
    logprobs: bool = True
    family_words: int = 0
    spec_width: int = 0


class PackedLayout(NamedTuple):
    """Where the sections of a packed step lie, in int32 words; known before the launch.

    Column `c` of the row table starts at `HEADER_WORDS + c * row_stride`; the speculative counters follow as
    further columns. Then token ids, logprobs, families; `size` is the whole step.
    """

    row_stride: int
    tokens: int
    logprobs: int
    families: int
    size: int

    def column(self, field: int) -> int:
        """First word of row column `field`."""
        return HEADER_WORDS + field * self.row_stride


def align(words: int) -> int:
    """`words` rounded up to the section alignment of 8 bytes."""
    return (words + ALIGN_WORDS - 1) // ALIGN_WORDS * ALIGN_WORDS


@lru_cache(maxsize=1024)
def packed_layout(batch: int, shape: PackedShape) -> PackedLayout:
    """Layout of a packed step of `batch` rows."""
    row_stride = align(batch + 1)
    tokens = HEADER_WORDS + (ROW_WIDTH + shape.spec_width) * row_stride
    logprobs = tokens + align(batch * shape.max_items)
    families = logprobs + (align(batch * shape.max_items) if shape.logprobs else 0)
    size = families + align(batch * shape.family_words)
    return PackedLayout(row_stride, tokens, logprobs, families, size)


# --- Launch: what the host says of one launch, in front of the control rows; and the words between blocks ---

LAUNCH_FIELDS = {
    "batch": "rows of the batch",
    "mode": "MODE_* bits",
    "controlled": "1: control rows follow",
    "max_accept": "most tokens that a row may accept: the configuration's, or the inputs' width",
    "has_logprobs": "1: there are logprobs",
    "top_width": "top logprobs a position in the inputs; 0: there are none",
    "ids_width": "token-ids logprobs a position in the inputs; 0: there are none",
    "token_step": "words of a token id: 1 or 2",
    "idx_step": "words of a top logprob's id: 1 or 2",
    "token_stride": "token ids from one row of the batch to the next",
    "logprob_stride": "the same for logprobs",
    "top_stride": "the same for top logprobs",
    "top_idx_stride": "the same for their ids",
    "ids_stride": "the same for token-ids logprobs",
    "number": "the launch that this was written for; -1: any",
}
(
    LAUNCH_BATCH,
    LAUNCH_MODE,
    LAUNCH_CONTROLLED,
    LAUNCH_MAX_ACCEPT,
    LAUNCH_HAS_LOGPROBS,
    LAUNCH_TOP_WIDTH,
    LAUNCH_IDS_WIDTH,
    LAUNCH_TOKEN_STEP,
    LAUNCH_IDX_STEP,
    LAUNCH_TOKEN_STRIDE,
    LAUNCH_LOGPROB_STRIDE,
    LAUNCH_TOP_STRIDE,
    LAUNCH_TOP_IDX_STRIDE,
    LAUNCH_IDS_STRIDE,
    LAUNCH_NUMBER,
) = range(15)

# Behind them the addresses of the inputs, 64 bits each: a launch has few arguments, whatever it takes in.
LAUNCH_INPUTS = {
    "handles": "int64 [batch]",
    "token_ids": "int32 or int64 [batch, T]",
    "accept_lens": "int32 [batch]",
    "logprobs": "float32 [batch, S]",
    "top_logprobs_val": "float32 [batch, S, K]",
    "top_logprobs_idx": "int32 or int64 [batch, S, K]",
    "token_ids_logprobs_val": "float32 [batch, S, M]",
    "block_accept_lens": "int32 [batch]; 0: none",
    "cap_lens": "int32 [batch]; 0: none",
}
LAUNCH_ADDRESSES = 16
(
    ADDRESS_HANDLES,
    ADDRESS_TOKEN_IDS,
    ADDRESS_ACCEPT_LENS,
    ADDRESS_LOGPROBS,
    ADDRESS_TOP_VAL,
    ADDRESS_TOP_IDX,
    ADDRESS_IDS_VAL,
    ADDRESS_BLOCK_ACCEPT,
    ADDRESS_CAP,
) = range(9)
LAUNCH_WORDS = LAUNCH_ADDRESSES + 2 * len(LAUNCH_INPUTS)

SCAN_AXES = {
    "rows": "rows of the block",
    "tokens": "their tokens",
    "logprobs": "their logprobs",
    "families": "words of their families",
    "lost": "stale, late and early rows, 10 bits each; an error bit above",
    "kinds": "held, final and conveyed rows, 10 bits each",
}
SCAN_ROWS, SCAN_TOKENS, SCAN_LOGPROBS, SCAN_FAMILIES, SCAN_LOST, SCAN_KINDS = range(6)
SCAN_SECOND, SCAN_THIRD, SCAN_ERROR = 10, 20, 30  # first bit of the counters in a word, and of the error
SCAN_COUNT_MASK = 0x3FF  # so a block has fewer than 1024 rows
SCAN_HEADER = 2  # 64-bit words before the axes: launch number, place in the ring
SCAN_LAUNCH, SCAN_RING = range(SCAN_HEADER)

# Bits of the header's error word.
ERROR_INPUT = 1  # a length out of range (accept, cap, control), or logprobs lack
ERROR_NUMBER = 2  # a launch ran that was not prepared
ERROR_BATCH = 4  # the batch has more rows than the launch was made for

# --- Frame: sections of the wire (docs/wire.md) ---------------------------------------------------


class WireSection(NamedTuple):
    """A column of a frame: its id, NumPy dtype, how many entries it has, and what it is."""

    id: int
    dtype: str
    entries: str  # "rows", "rows+1", "tokens", "logprobs", "families", "rows*spec_width" or "bytes"
    doc: str


WIRE_SECTIONS = {
    "slot": WireSection(1, "<i4", "rows", "low word of the handle"),
    "generation": WireSection(2, "<i4", "rows", "high word of the handle"),
    "flags": WireSection(3, "<i4", "rows", "ROW_* bits; finish code in bits 8 to 15"),
    "visible_len": WireSection(4, "<i4", "rows", "completion tokens after this row"),
    "match": WireSection(5, "<i4", "rows", "token id or cap; present if any row is final"),
    "token_indptr": WireSection(6, "<i4", "rows+1", "offsets into token_ids"),
    "token_ids": WireSection(7, "<i4", "tokens", "the deltas, joined"),
    "logprob_indptr": WireSection(8, "<i4", "rows+1", "offsets into logprobs; present if the batch returns logprobs"),
    "logprobs": WireSection(9, "<f4", "logprobs", "logprobs of the sampled tokens, joined"),
    "families_indptr": WireSection(10, "<i4", "rows+1", "offsets into families; present if there are any"),
    "families": WireSection(11, "<i4", "families", "per logprob k top values, k top ids, m token-ids values"),
    "spec": WireSection(12, "<i4", "rows*spec_width", "speculative counters, column by column; present if counted"),
    "side": WireSection(13, "|u1", "bytes", "msgpack side record; present if any row has one"),
}


# --- Handles --------------------------------------------------------------------------------------

SLOT_BITS = 32
PADDING_HANDLE = -1  # a row of the batch that is no request (graph padding): ignored, not counted
