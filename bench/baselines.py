"""What engines do today: a Python loop over the requests of a step, then pickle.

A per-request streamer with the columns and the bookkeeping of SPEC.md section 3 under the rule of the
0.5.23 preset, written for comparison only; the real package is benchmarked as a peer elsewhere. It
does the same kinds of work per request as the engine's loop (method calls, array slices, appends to
columns held as attributes, checks of every optional column), and nothing to make it slower. Measured
beside the real streamer on one machine it is somewhat cheaper in the loop, most so for a single request
and for thousands: the engine's request has several times as many attributes, its process a larger heap,
and its row a few columns more. Encode, decode and bytes per row come close. So without logprobs ratios
against this baseline err on the low side. With them, at thousands of requests, full collections of the
garbage come more often here than in the engine's larger heap, and medians err on the high side.
"""

from __future__ import annotations

import pickle
from typing import Any

from baseline_message import INPUT_LOGPROBS, OUTPUT_LOGPROBS, BatchMessage
from baseline_request import BaselineRequest


class RowCollector:
    """Collects the rows of one step; one `accept` for each request of the batch."""

    def __init__(self, streamer: PerRequestStreamer, return_logprob: bool, asked: tuple[bool, bool, bool]) -> None:
        self.out = BatchMessage()
        self.streamer = streamer
        self.return_logprob = return_logprob
        self.hidden_states, self.routed_experts, self.indexer_topk = asked
        self.customized_info: dict[str, list[Any]] = {}
        if return_logprob:
            for name in INPUT_LOGPROBS + OUTPUT_LOGPROBS:
                setattr(self.out, name, [])
        for name, present in zip(("output_hidden_states", "routed_experts", "indexer_topk"), asked, strict=True):
            if present:
                setattr(self.out, name, [])

    def accept(self, request: BaselineRequest) -> None:
        """Add the request's row if it is due, and move its cursors."""
        if request.beam_group is not None:
            return
        if not self._is_due(request):
            return
        out = self.out
        params = request.sampling_params
        sent = request.send_token_offset
        output = request.visible_ids
        out.rids.append(request.rid)
        out.http_worker_ipcs.append(request.http_worker_ipc)
        out.finished_reasons.append(dict(request.finished_reason) if request.finished_reason else None)
        out.output_ids.append(output[sent:])
        request.send_token_offset = len(output)
        out.decoded_texts.append(request.decoded_text)
        context, read_offset = request.detokenizer_context()
        out.decode_ids.append(context[request.send_decode_id_offset :])
        request.send_decode_id_offset = len(context)
        out.read_offsets.append(read_offset)
        out.skip_special_tokens.append(params.skip_special_tokens)
        out.spaces_between_special_tokens.append(params.spaces_between_special_tokens)
        out.no_stop_trim.append(params.no_stop_trim)
        out.prompt_tokens.append(len(request.prompt_ids))
        out.completion_tokens.append(len(output))
        out.cached_tokens.append(request.cached_tokens)
        out.cached_tokens_details.append(self.streamer.cached_details(request))
        out.reasoning_tokens.append(request.reasoning_tokens)
        out.retraction_counts.append(request.retraction_count)
        images, audio, video = request.multimodal_counts()
        out.image_tokens.append(images)
        out.audio_tokens.append(audio)
        out.video_tokens.append(video)
        out.time_stats.append(request.time_stats)
        out.beam_output.append(None if request.beam_group is None else request.beam_group.output())
        if self.streamer.speculative:
            out.spec_verify_ct.append(request.spec_verify_ct)
            out.spec_num_correct_drafts.append(request.spec_num_correct_drafts)
        if self.return_logprob:
            self._add_input_logprobs(request)
            self._add_output_logprobs(request, len(output))
        self._add_optional(request, sent, len(output))

    def message(self, dp_rank: int) -> BatchMessage | None:
        """The collected rows, or None without any."""
        out = self.out
        if not out.rids:
            return None
        out.dp_ranks = [dp_rank] * len(out.rids)
        out.customized_info = self.customized_info or None
        if not any(entry is not None for entry in out.beam_output):
            out.beam_output = None
        return out

    def _is_due(self, request: BaselineRequest) -> bool:
        if request.finished():
            request.finished_output = True
            if request.finished_len is None:
                request.finished_len = len(request.output_ids)
            return True
        if not request.stream:
            return len(request.output_ids) % self.streamer.force_interval == 0
        interval = request.sampling_params.stream_interval or self.streamer.stream_interval
        unsent = len(request.output_ids) - request.send_token_offset
        due = interval == 1 or unsent >= interval or (request.send_token_offset == 0 and unsent > 0)
        return due and not request.tail_begins_stop()

    def _add_input_logprobs(self, request: BaselineRequest) -> None:
        out = self.out
        prompt = request.logprobs.prompt
        if request.return_logprob and not request.input_logprob_sent and prompt is not None:
            for name in INPUT_LOGPROBS:
                getattr(out, name).append(prompt[name])
            request.input_logprob_sent = True
            return
        out.input_token_logprobs_val.append([])
        out.input_token_logprobs_idx.append([])
        out.input_top_logprobs_val.append([])
        out.input_top_logprobs_idx.append([])
        out.input_token_ids_logprobs_val.append([])
        out.input_token_ids_logprobs_idx.append([])

    def _add_output_logprobs(self, request: BaselineRequest, length: int) -> None:
        if not request.return_logprob:
            for name in OUTPUT_LOGPROBS:
                getattr(self.out, name).append([])
            return
        out, scores = self.out, request.logprobs
        begin = request.send_logprob_offset
        end = length if request.is_retracted else max(length, 1)
        out.output_token_logprobs_val.append(scores.token_val[begin:end])
        out.output_token_logprobs_idx.append(scores.token_idx[begin:end])
        out.output_top_logprobs_val.append(scores.top_val[begin:end])
        out.output_top_logprobs_idx.append(scores.top_idx[begin:end])
        out.output_token_ids_logprobs_val.append(scores.ids_val[begin:end])
        out.output_token_ids_logprobs_idx.append(scores.ids_idx[begin:end])
        request.send_logprob_offset = end

    def _add_optional(self, request: BaselineRequest, sent: int, length: int) -> None:
        out = self.out
        if self.hidden_states:
            out.output_hidden_states.append(request.hidden_states if request.return_hidden_states else None)
        if self.routed_experts:
            out.routed_experts.append(request.routed_experts if request.return_routed_experts else None)
        if self.indexer_topk:
            out.indexer_topk.append(request.indexer_topk if request.return_indexer_topk else None)
        rows = len(out.rids)
        if request.customized_info is not None:
            for key, values in request.customized_info.items():
                if key not in self.customized_info:
                    self.customized_info[key] = [[None] * len(ids) for ids in out.output_ids[:-1]]
                delta = [None] * (length - sent) if values is None else values[sent:length]
                self.customized_info[key].append(delta)
        for entries in self.customized_info.values():
            if len(entries) < rows:
                entries.append([None] * (length - sent))


class PerRequestStreamer:
    """The loop over the requests of a step, with the rule of the 0.5.23 preset."""

    def __init__(self, stream_interval: int = 1, force_interval: int = 50, dp_rank: int = 0) -> None:
        self.stream_interval = stream_interval
        self.force_interval = force_interval
        self.dp_rank = dp_rank
        self.speculative = False
        self.storage_tier = False
        self.log_time_stats = False

    def message(
        self, requests: list[BaselineRequest], return_logprob: bool, skip: BaselineRequest | None = None
    ) -> BatchMessage | None:
        """What the step sends, or None."""
        asked = (
            any(request.return_hidden_states for request in requests if request is not skip),
            any(request.return_routed_experts for request in requests if request is not skip),
            any(request.return_indexer_topk for request in requests if request is not skip),
        )
        collector = RowCollector(self, return_logprob, asked)
        for request in requests:
            if request is skip or (request.finished() and request.finished_output):
                continue
            collector.accept(request)
            self._log_finished(request)
        return collector.message(self.dp_rank)

    def encode(self, message: BatchMessage) -> bytes:
        """The engine's default wire."""
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

    def decode(self, data: bytes) -> BatchMessage:
        """What the detokenizer does with it."""
        return pickle.loads(data)

    def cached_details(self, request: BaselineRequest) -> dict[str, Any] | None:
        """Which tier the cached prompt tokens came from."""
        storage = request.cached_tokens_storage
        if request.cached_tokens_device > 0 or request.cached_tokens_host > 0 or storage > 0:
            details = {"device": request.cached_tokens_device, "host": request.cached_tokens_host}
            return details | {"storage": storage} if storage > 0 or self.storage_tier else details
        return {"device": request.cached_tokens, "host": 0} if request.cached_tokens > 0 else None

    def _log_finished(self, request: BaselineRequest) -> None:
        if request.finished() and self.log_time_stats:
            raise NotImplementedError("the baseline logs nothing")
