"""The Python API: a model in this process, or split over several processes."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
from tqdm import tqdm

from lopa_ascend.config import (
    DecodingParams,
    EngineConfig,
    GraphParams,
    ParameterError,
    fitting_defaults,
)
from lopa_ascend.config.errors import FieldPath
from lopa_ascend.config.settings import refuse_unknown
from lopa_ascend.core import Request
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.engine.ranks import start_engine
from lopa_ascend.families import recommended_decoding
from lopa_ascend.hub import on_this_machine
from lopa_ascend.text.gaps import Gap, gapped_text, pieces_of, whole_text
from lopa_ascend.text.output_stream import GapsStream, OutputStream
from lopa_ascend.text.pass_events import PassEvents
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.tokenizer_files import load_template, load_tokenizer
from lopa_ascend.types import GenerationOutput, Progress, Update


class GenerationError(RuntimeError):
    """A request failed inside the engine: its logits were not finite, or a step had no memory."""


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Holds back Ctrl-C (SIGINT) until the end of the ``with`` block: nothing in it is left half done."""
    handler = signal.getsignal(signal.SIGINT)
    # Python runs signal handlers in the main thread alone. None is a handler that Python could not put back.
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


class LLM:
    """A loaded model that is ready to generate.

    With ``tensor_parallel_size`` or ``branch_parallel_size`` above 1 other ranks start on this machine, and end with
    ``close`` or with this process. Under torchrun every rank must make the same calls, and gets the same outputs.

    Calls from several threads wait for one another: prompts run together if one call has them all. Ctrl-C takes effect
    between two steps, and aborts the requests of its call.

    Args:
        model: Hugging Face directory of a Dream or of a registered model, or its name on the hub, ORG/NAME or
            ORG/NAME@REVISION; None: the bundled model. Code beside a model is never run.
        options: other fields of ``lopa_ascend.config.EngineConfig``, e.g. ``lora``, ``dtype``, ``max_model_len``,
            ``kv_cache_memory``, ``max_num_seqs``, ``seed``. ``graph_params``: what graphs are compiled for; by default
            what the model's directory recommends.

    Raises:
        CheckpointError, ConfigError, ModelError, TokenizerError: the directory cannot be served. No weights were
            loaded, unless their values are wrong, such as NaN.
        ParameterError: an option is unknown or not allowed, so many ranks cannot split the model, or a name on the hub
            cannot be downloaded or does not fit into this machine.
        RankError: a rank did not start. Later calls raise it when a rank has ended or hangs.
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        refuse_unknown(options.keys() - {"graph_params"}, EngineConfig.names())
        paths = {"model": model, "lora": options.pop("lora", None)}
        options |= {name: None if path is None else str(path) for name, path in paths.items()}
        graph_params = options.pop("graph_params", None)
        config = on_this_machine(EngineConfig(**options))
        directory = config.model or DEMO_MODEL
        # Checked before the weights are loaded, so that a broken file is reported at once.
        load_template(directory)
        self._recommended = recommended_decoding(directory)
        graph_params = graph_params or GraphParams.of(DecodingParams(**self._recommended))
        self.engine = start_engine(replace(config, graph_params=graph_params))
        self.config = self.engine.model_config
        try:
            self.tokenizer = load_tokenizer(directory, self.config.vocab_size)
        except BaseException:  # the caller gets nothing that could be closed
            self.engine.close()
            raise
        self.prompts = Prompts(
            self.tokenizer, self.config.vocab_size, self.config.mask_token_id, self.engine.model_name
        )
        self._ids = itertools.count()
        self._updates: dict[str, deque[Update]] = {}
        """By id of a running request: updates that its reader has not received yet."""
        # Reentrant: a stream may be collected as garbage, and so ended, in the middle of another call.
        self._lock = threading.RLock()
        self._is_stepping = False
        self._ended: list[str] = []
        """Requests to abort after this step: their streams were collected as garbage during it."""

    def close(self) -> None:
        """Ends the other ranks, and the processes of grammars and chat templates."""
        self.engine.close()
        self.prompts.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.engine.close(None if kind is None else kind.__name__)
        self.prompts.close()

    # ---- requests --------------------------------------------------------------------------------------------------

    def params(self, **options: Any) -> DecodingParams:
        """Decoding parameters for this model: ``options``, then what ``generation_config.json`` recommends, then usual
        defaults. Raises ParameterError for an option that is unknown or not allowed."""
        refuse_unknown(options, tuple(DecodingParams.all_parameters()))
        return DecodingParams(**{**fitting_defaults(self._recommended, options), **options})

    def tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt. Raises ParameterError if it is empty, has ids that the model does not have, or is
        text without a tokenizer."""
        return self.prompts.encode(prompt)

    def tokenize_chat(
        self, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The token ids of a conversation. Raises ParameterError if there is no chat template, it refuses the messages,
        or it does not read a variable."""
        return self.prompts.encode_chat(messages, variables=chat_template_kwargs)

    def check(self, prompt_token_ids: Sequence[int], params: DecodingParams) -> None:
        """Raises ParameterError for a request that this model could never run: it does not fit, or has stop strings or
        bad words without a tokenizer."""
        self.engine.limits.check(len(prompt_token_ids), self.prompts.for_engine(params))

    def stream(
        self, prompt: str | Sequence[int], params: DecodingParams | None = None, *, trace: bool = False
    ) -> Generator[Progress, None, None]:
        """Generates for one prompt, and yields what is final after each forward pass; the last item has the output.

        Several streams may run at the same time; reading one of them advances all. The request ends when the iterator
        is closed or an error is raised.

        Args:
            params: by default ``self.params()``.
            trace: the output has a record of each forward pass.

        Raises:
            ParameterError: see ``tokenize`` and ``check``.
            GenerationError: the request failed.
        """
        params = params or self.params()
        token_ids = self.tokenize(prompt)
        request_id: str | None = None
        try:
            with self._lock, deferred_interrupts():
                request_id, output = self._begin(token_ids, params, trace)
            finished = False
            while not finished:
                while not self._updates[request_id]:
                    with self._lock, deferred_interrupts():
                        self._step()
                finished = _push(output, self._updates[request_id].popleft()) is not None
                yield output.progress
        finally:
            if request_id is not None:
                with self._lock, deferred_interrupts():
                    self._end(request_id)

    def _begin(
        self, prompt: Sequence[int], params: DecodingParams, trace: bool, is_conversation: bool = False
    ) -> tuple[str, OutputStream]:
        """Hands a request to the engine; ``_end`` must follow."""
        self.prompts.check_thinking(vars(params), is_conversation=is_conversation)
        params = self.prompts.for_engine(params, self.prompts.thinking(prompt) if is_conversation else None)
        request = Request(f"request-{next(self._ids)}", tuple(prompt), params, trace)
        return self._add(request), OutputStream(prompt, params, self.tokenizer)

    def _add(self, request: Request) -> str:
        """As ``_begin``, for a request; returns its id."""
        self.engine.add(request)
        self._updates[request.request_id] = deque()
        return request.request_id

    def _end(self, request_id: str) -> None:
        del self._updates[request_id]
        if self._is_stepping:
            self._ended.append(request_id)
        else:
            self.engine.abort(request_id)

    def _step(self) -> None:
        """Makes a step, and hands its updates to the readers of the requests."""
        self._is_stepping = True
        try:
            for update in self.engine.step():
                if (updates := self._updates.get(update.request_id)) is not None:
                    updates.append(update)
        finally:
            self._is_stepping = False
            while self._ended:
                self.engine.abort(self._ended.pop())

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: DecodingParams | None = None,
        *,
        trace: bool = False,
        quiet: bool = False,
    ) -> list[GenerationOutput]:
        """Generates for several prompts, which run together. Outputs have the order of the prompts.

        Args:
            prompts: texts or lists of token ids, or one of these alone.
            params: of all prompts; by default ``self.params()``.
            trace: the outputs have a record of each forward pass.
            quiet: show no progress bar.

        Raises:
            ParameterError: a prompt or a parameter cannot be served; nothing was generated.
            GenerationError: a request failed; the other requests were ended.
        """
        return self._generate_all([self.tokenize(prompt) for prompt in _prompts(prompts)], params, trace, quiet)

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: DecodingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trace: bool = False,
        quiet: bool = False,
    ) -> list[GenerationOutput]:
        """Generates the next message of several conversations, which run together; otherwise as ``generate``.

        Args:
            conversations: lists of messages with "role" and "content", or one such list alone.
            chat_template_kwargs: variables for the chat template, e.g. ``{"enable_thinking": False}``.

        Raises:
            ParameterError: see ``generate`` and ``tokenize_chat``.
            GenerationError: a request failed; the other requests were ended.
        """
        prompts = [self.tokenize_chat(rows, chat_template_kwargs) for rows in _conversations(conversations)]
        return self._generate_all(prompts, params, trace, quiet, is_conversation=True)

    def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        params: DecodingParams | None = None,
    ) -> list[tuple[float, ...]]:
        """The log probability of each token of several continuations of a prompt, in nats.

        All places are masked: no token sees the others, so their sum is no log probability of the text. Causal models
        predict each token from those before it.

        Args:
            continuations: texts, each tokenized by itself, or lists of token ids.
            params: give attention and blocks; by default ``self.params()``.

        Raises:
            ParameterError: a text or a token id cannot be used, or the continuations do not fit into one pass.
            GenerationError: the request failed.
        """
        if not continuations:
            raise ParameterError("continuations", "must not be empty")
        token_ids, texts = self.tokenize(prompt), tuple(tuple(self.tokenize(text)) for text in continuations)
        params = (params or self.params()).for_continuations(max(map(len, texts)))
        with self._lock, deferred_interrupts():
            request = Request(f"request-{next(self._ids)}", tuple(token_ids), params, continuations=texts)
            request_id = self._add(request)
            updates = self._updates[request_id]
            try:
                while not updates or updates[-1].finish_reason is None:
                    self._step()
            finally:
                self._end(request_id)
        update = updates[-1]
        if update.error is not None:
            raise GenerationError(update.error)
        return list(update.continuation_logprobs)

    def infill(
        self, parts: Sequence[str | Sequence[int] | Gap], params: DecodingParams | None = None
    ) -> GenerationOutput:
        """Fills the gaps of a text.

        Args:
            parts: texts, each tokenized by itself, lists of token ids, and ``Gap``; the first part is no gap.
            params: with a decoding of a whole canvas, e.g. "parallel"; by default ``self.params()``.

        Returns:
            The output. ``gaps`` has the content of each gap. ``text`` is the whole text, given parts unchanged; None
            without a tokenizer, or if a part was given as token ids.

        Raises:
            ParameterError: a part cannot be used, the parts do not fit, or the decoding fills no gaps.
            GenerationError: the request failed.
        """
        prompt, pieces = pieces_of(parts, self._tokenize_part)
        asked = params or self.params()
        gapped = gapped_text(pieces, asked.max_new_tokens, self.config.mask_token_id)
        params = self.prompts.for_engine(asked).with_valid(max_new_tokens=len(gapped.tokens))
        stream = GapsStream(prompt, params, self.tokenizer, gapped)
        with self._lock, deferred_interrupts():
            request = Request(f"request-{next(self._ids)}", tuple(prompt), params, gapped=gapped)
            try:
                request_id = self._add(request)
            except ParameterError as error:
                raise error.renamed(dict.fromkeys(("gaps", "max_new_tokens", "prompt"), "parts")) from None
            unfinished: dict[int, tuple[str, OutputStream]] = {0: (request_id, stream)}
            outputs = dict[int, GenerationOutput]()
            try:
                while unfinished:
                    outputs |= self._step_and_drain(unfinished)
            finally:
                for request_id, _ in unfinished.values():
                    self._end(request_id)
        return replace(outputs[0], text=whole_text(parts, [gap.text for gap in outputs[0].gaps]))

    def _tokenize_part(self, part: str | Sequence[int], field: FieldPath) -> list[int]:
        try:
            return self.tokenize(part)
        except ParameterError as error:
            raise error.at(field) from None

    def save_trace(self, path: str | Path, output: GenerationOutput, params: DecodingParams | None = None) -> None:
        """Writes the forward passes of an output to a file of JSON lines, which the server's page at / opens. An
        existing file is overwritten. ``params`` are those of the output.

        Raises:
            ValueError: the output was not made with ``trace=True``.
            OSError: the file cannot be written.
        """
        if output.trace is None:
            raise ValueError("output: has no trace; make it with trace=True")
        head = {"id": f"trace-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.engine.model_name}
        params, properties = params or self.params(), self.engine.limits.properties
        passes, text = PassEvents(head, output.prompt_token_ids, params, properties, self.tokenizer), output.text or ""
        marked = zip(output.trace, output.trace_marks, strict=True)
        steps = [passes.step(record, seconds, text[:length]) for record, (seconds, length) in marked]
        events = [passes.start(with_prompt=True), *steps, passes.done(output, text)]
        Path(path).write_bytes(msgspec.json.Encoder().encode_lines(events))

    def _generate_all(
        self,
        prompts: list[list[int]],
        params: DecodingParams | None,
        trace: bool,
        quiet: bool,
        *,
        is_conversation: bool = False,
    ) -> list[GenerationOutput]:
        """As ``generate``, for token ids."""
        params = params or self.params()
        unfinished: dict[int, tuple[str, OutputStream]] = {}
        outputs: dict[int, GenerationOutput] = {}
        with self._lock:
            try:
                with deferred_interrupts():
                    for index, prompt in enumerate(prompts):
                        unfinished[index] = self._begin(prompt, params, trace, is_conversation)
                # With None, tqdm shows the bar on a terminal only. Without a stderr it has nowhere to write.
                hidden = True if quiet or sys.stderr is None else None
                with tqdm(total=len(prompts), desc="prompts", disable=hidden) as bar:
                    while unfinished:
                        with deferred_interrupts():
                            outputs |= self._step_and_drain(unfinished)
                        bar.update(len(outputs) - bar.n)
            finally:
                with deferred_interrupts():
                    for request_id, _ in unfinished.values():
                        self._end(request_id)
        return [outputs[index] for index in range(len(prompts))]

    def _step_and_drain(self, unfinished: dict[int, tuple[str, OutputStream]]) -> dict[int, GenerationOutput]:
        """Makes a step. Moves the requests that it finishes from ``unfinished`` into the returned outputs."""
        self._step()
        outputs: dict[int, GenerationOutput] = {}
        for index, (request_id, stream) in list(unfinished.items()):
            updates = self._updates[request_id]
            output = None
            while updates and output is None:
                output = _push(stream, updates.popleft())
            if output is not None:
                outputs[index] = output
                del unfinished[index]
                self._end(request_id)
        return outputs


def _push(output: OutputStream, update: Update) -> GenerationOutput | None:
    """The output of a request, if an update is its last one. Raises GenerationError if the request has failed."""
    if update.error is not None:
        raise GenerationError(update.error)
    return output.push(update)


def _prompts(value: object) -> list[str | Sequence[int]]:
    if isinstance(value, str):
        return [value]
    if _is_list(value) and all(isinstance(item, str) or _is_list(item) for item in value):
        return list(value)
    if _is_list(value):
        return [value]
    raise ParameterError("prompts", f"must be a text, token ids, or a list of either, got {value!r:.100}")


def _conversations(value: object) -> list[Sequence[Mapping[str, Any]]]:
    if _is_conversation(value):
        return [value]
    if _is_list(value) and value and all(map(_is_conversation, value)):
        return list(value)
    expected = 'a list of messages such as {"role": "user", "content": "hello"}, or a list of such lists'
    raise ParameterError("conversations", f"must be {expected}, got {value!r:.100}")


def _is_conversation(value: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return _is_list(value) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
