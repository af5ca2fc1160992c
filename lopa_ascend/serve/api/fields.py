"""Fields of other servers and of clients that have no meaning here: which are taken, why, and what to do instead of the
others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, create_model

from lopa_ascend.serve.http.body import WITHOUT_EFFECT, HarmlessValues

M = TypeVar("M", bound=BaseModel)

REQUEST = "(the request)"
MESSAGES_REQUEST = "(the request to /v1/messages)"
STREAM_OPTIONS = "stream_options"
MESSAGE = "messages[], input[]"
PART = "messages[].content[], input[].content[]"
REASONING_ITEM = 'input[] of the type "reasoning"'
TOOL = "tools[], tools[].function"
CALL_ITEM = 'input[] of the types "function_call" and "function_call_output"'
CALL = "messages[].tool_calls[]"
CALLED = "messages[].tool_calls[].function"

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]

_EARLIER_REASONING = "The chat template gets the reasoning as text alone."
_OWN_CACHE = "The cache of prefixes needs no hints, and changes no answer."
_LABEL = "A label for the client's own records."
_COPIES = (
    ("cache_control", dict[str, Any], _OWN_CACHE),
    ("provider_specific_fields", dict[str, Any], "litellm's copy of an earlier answer's other fields."),
    ("extra_content", dict[str, Any], "A copy of what another server's answer had."),
    ("thought_signature", str, "Another server's mark of an earlier answer."),
)
"""What clients of several servers keep with each part of a conversation: field, type, and why it changes nothing."""


class Ignored(NamedTuple):
    """A field that cannot change an answer."""

    field: str
    where: str
    """The path of the objects that may have it."""
    type: Any
    """What it holds. Values of another type are refused."""
    why: str
    """Why it changes nothing."""


IGNORED = (
    Ignored("user", REQUEST, str, "Says for whom the client asks."),
    Ignored("safety_identifier", REQUEST, str, "Says for whom the client asks."),
    Ignored("metadata", REQUEST, dict[str, Any], _LABEL),
    Ignored("client_metadata", REQUEST, dict[str, Any], _LABEL),
    Ignored("store", REQUEST, bool, "Nothing is kept."),
    Ignored("service_tier", REQUEST, str, "There is one."),
    Ignored("reasoning_effort", REQUEST, str, "A hint for chat templates."),
    Ignored("include_reasoning", REQUEST, bool, "A text has no reasoning apart from it."),
    Ignored("verbosity", REQUEST, str, "A hint to models that were trained for it."),
    Ignored("cache_salt", REQUEST, str, "All requests share one prefix cache, which changes no answer."),
    Ignored("request_id", REQUEST, str, "Send the header X-Request-Id."),
    Ignored("prompt_cache_key", REQUEST, str, _OWN_CACHE),
    Ignored("prompt_cache_retention", REQUEST, str, _OWN_CACHE),
    Ignored("prompt_cache_options", REQUEST, dict[str, Any], _OWN_CACHE),
    Ignored("cache_control", MESSAGES_REQUEST, dict[str, Any], _OWN_CACHE),
    Ignored("context_management", MESSAGES_REQUEST, dict[str, Any], "The model sees the whole conversation."),
    Ignored("betas", MESSAGES_REQUEST, Texts, "There are no others than these fields."),
    Ignored("fallbacks", MESSAGES_REQUEST, Objects | str, "No request is declined."),
    Ignored("diagnostics", MESSAGES_REQUEST, dict[str, Any], _OWN_CACHE),
    Ignored("inference_geo", MESSAGES_REQUEST, str, "There is one place."),
    Ignored("speed", MESSAGES_REQUEST, str, "There is one."),
    Ignored("user_profile_id", MESSAGES_REQUEST, str, "Says for whom the client asks."),
    Ignored("include_obfuscation", STREAM_OPTIONS, bool, "Streams are not padded."),
    Ignored("id", MESSAGE, str, _LABEL),
    Ignored("status", MESSAGE, Literal["in_progress", "completed", "incomplete"], "How an earlier answer ended."),
    Ignored("phase", MESSAGE, Literal["commentary", "final_answer"], "What an earlier answer was part of."),
    Ignored("parsed", MESSAGE, Any, "The text, as the client has parsed it."),
    Ignored("annotations", MESSAGE, Objects, "Links that go with the text."),
    Ignored("reasoning_details", MESSAGE, Objects, _EARLIER_REASONING),
    Ignored("thinking_blocks", MESSAGE, Objects, _EARLIER_REASONING),
    Ignored("id", PART, str, _LABEL),
    Ignored("name", PART, str, _LABEL),
    Ignored("index", PART, int | str, "The place of an earlier answer's part in its stream."),
    Ignored("extras", PART, dict[str, Any], "LangChain's copy of an earlier answer's other fields."),
    Ignored("parsed", PART, Any, "The text, as the client has parsed it."),
    Ignored("annotations", PART, Objects, "Links that go with the text."),
    Ignored("citations", PART, Objects, "Links that go with the text."),
    Ignored("logprobs", PART, Objects, "How probable an earlier answer was."),
    Ignored("prompt_cache_breakpoint", PART, dict[str, Any], _OWN_CACHE),
    Ignored("index", CALL, int | str, "The place of an earlier answer's call in its stream."),
    Ignored("parsed_arguments", CALLED, Any, "The arguments, as the client has parsed them."),
    Ignored("id", CALL_ITEM, str, _LABEL),
    Ignored("status", CALL_ITEM, Literal["in_progress", "completed", "incomplete"], "How an earlier call ended."),
    Ignored("namespace", CALL_ITEM, str, "Functions are known by their names."),
    Ignored("parsed_arguments", CALL_ITEM, Any, "The arguments, as the client has parsed them."),
    Ignored("id", REASONING_ITEM, str, _LABEL),
    Ignored("status", REASONING_ITEM, str, "How an earlier answer ended."),
    Ignored("summary", REASONING_ITEM, Objects, _EARLIER_REASONING),
    Ignored("encrypted_content", REASONING_ITEM, str, _EARLIER_REASONING),
    Ignored("strict", TOOL, bool, "Calls that tool_choice forces always have such arguments."),
    Ignored("defer_loading", TOOL, bool, "The model is told of all functions at once."),
    Ignored("output_schema", TOOL, dict[str, Any], "The model is told of the arguments."),
    Ignored("input_examples", TOOL, Objects, "The model is told of the arguments by their schema."),
    Ignored("allowed_callers", TOOL, Texts, "The model alone calls functions."),
    Ignored("eager_input_streaming", TOOL, bool, "Arguments are streamed as they are written."),
    Ignored("caller", CALL_ITEM, dict[str, Any], "The model alone calls functions."),
    *(
        Ignored(field, where, kind, why)
        for where in (MESSAGE, PART, TOOL, CALL, CALLED, CALL_ITEM, REASONING_ITEM)
        for field, kind, why in _COPIES
    ),
)
"""What is taken wherever it stands, with any value of its type. The API's description shows the table."""


def ignoring(where: str) -> Callable[[type[M]], type[M]]:
    """A class decorator that adds the ignored fields of the objects at a path."""
    rows = [row for row in IGNORED if row.where == where]
    fields: dict[str, Any] = {
        row.field: (row.type | None, Field(None, description=f"{WITHOUT_EFFECT} {row.why}")) for row in rows
    }
    return lambda model: create_model(model.__name__, __base__=model, __module__=model.__module__, **fields)


HARMLESS: HarmlessValues = {
    "length_penalty": (1,),
    "prompt_logprobs": (0,),
    "use_beam_search": (False,),
    "priority": (0,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True,),
    "add_special_tokens": (True, False),  # byte-level BPE adds none
    "skip_special_tokens": (True,),
}
"""Fields of OpenAI's and vLLM's APIs that are taken with values that ask for nothing."""
HARMLESS_TEMPLATE: HarmlessValues = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
}
"""Fields about the chat template, taken likewise."""

_IDS = "send return_token_ids: true, which adds the ids of all tokens"
_FORM = "send response_format or structured_outputs"
_RENDERED = "render the conversation yourself, and send the text to /v1/completions"
_TEXT = "send text alone"
_TOOLS = "send tools and tool_choice"
_CALLS = (
    "send a call as {type: 'function', function: {name, arguments}}, and its result in a message with the role tool"
)
_TEMPLATE = "start the server with --chat-template"
_WAIT = "send stream: true, and read until the end"
_CONVERSATION = "send the whole conversation in input: this server keeps no responses"

INSTEAD: Mapping[str, str] = {
    "length_penalty": "set min_tokens",
    "prompt_logprobs": "measure likelihoods with /score",
    "use_beam_search": "set num_branches",
    "cfg_scale": "leave it out: there is no classifier-free guidance, which computes every pass twice",
    "best_of": "set n, and choose among the answers by their logprobs",
    "include_stop_str_in_output": "read stop_reason, which names the stop string",
    "detokenize": _IDS,
    "skip_special_tokens": _IDS,
    "guided_whitespace_pattern": "send a regex or a grammar",
    "tools": "take /v1/chat/completions, which has tools",
    "tool_choice": "take /v1/chat/completions, which has tools",
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "tool_calls": _CALLS,
    "max_tool_calls": "set parallel_tool_calls",
    "web_search_options": "put what was found into a message",
    "add_generation_prompt": _RENDERED,
    "continue_final_message": _RENDERED,
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": "take /v1/chat/completions, which has a chat template",
    "modalities": _TEXT,
    "audio": _TEXT,
    "refusal": "put it into the content",
    "prediction": "leave it out: it would change no answer",
    "suffix": "take /v1/completions, which fills gaps",
    "echo": "put the prompt before the text yourself",
    "moderation": "check the texts yourself",
    "truncation": "leave out the oldest messages",
    "context_management": "leave out the oldest messages",
    "background": _WAIT,
    "background_options": _WAIT,
    "conversation": _CONVERSATION,
    "previous_response_id": _CONVERSATION,
    "prompt": "put its text into messages or input",
    "top_logprobs": "take /v1/chat/completions, which has log probabilities",
    "logprobs": "take /v1/chat/completions, which has log probabilities",
    "n": "send the request several times",
    "return_token_ids": "take /v1/chat/completions, which has token ids",
    "mcp_servers": "list their functions in tools",
    "container": "put what is in its files into messages",
    "compaction": "ask for a summary in a message",
    "extra_body": "put its fields into the body itself",
}
"""By name of a field that is refused: what to do instead."""
