"""Fields of other servers and clients without a meaning here: which are taken, and what to do instead of the others."""

from __future__ import annotations

from collections.abc import Mapping

from lopa_ascend.serve.http.body import HarmlessValues

_OWN_CACHE = "The cache of prefixes needs no hints, and changes no answer."
_WHOM = "Says for whom the client asks."
_LABEL = "A label for the client's own records."
_COPY = "A copy of what an earlier answer had."

IN_REQUEST: Mapping[str, str] = {
    "user": _WHOM,
    "safety_identifier": _WHOM,
    "metadata": _LABEL,
    "client_metadata": _LABEL,
    "store": "Nothing is kept.",
    "service_tier": "There is one.",
    "reasoning_effort": "A hint for chat templates.",
    "include_reasoning": "A text has no reasoning apart from it.",
    "verbosity": "A hint to models that were trained for it.",
    "cache_salt": "All requests share one prefix cache, which changes no answer.",
    "request_id": "Send the header X-Request-Id.",
    "prompt_cache_key": _OWN_CACHE,
    "prompt_cache_retention": _OWN_CACHE,
    "prompt_cache_options": _OWN_CACHE,
}
"""Why a field of a request changes nothing. It is taken with any value."""
IN_MESSAGES_REQUEST: Mapping[str, str] = {
    **IN_REQUEST,
    "cache_control": _OWN_CACHE,
    "context_management": "The model sees the whole conversation.",
    "betas": "There are no others than these fields.",
    "fallbacks": "No request is declined.",
    "diagnostics": _OWN_CACHE,
    "inference_geo": "There is one place.",
    "speed": "There is one.",
    "user_profile_id": _WHOM,
}
INSIDE: Mapping[str, str] = {
    **dict.fromkeys(("id", "name", "status", "phase", "index"), _LABEL),
    **dict.fromkeys(("parsed", "parsed_arguments"), "What the client made of the text."),
    **dict.fromkeys(("annotations", "citations"), "Links that go with the text."),
    **dict.fromkeys(("logprobs", "extras", "provider_specific_fields", "extra_content", "thought_signature"), _COPY),
    **dict.fromkeys(
        ("reasoning_details", "thinking_blocks", "summary", "encrypted_content"),
        "The chat template gets the reasoning as text alone.",
    ),
    **dict.fromkeys(("cache_control", "prompt_cache_breakpoint"), _OWN_CACHE),
    **dict.fromkeys(("allowed_callers", "caller"), "The model alone calls functions."),
    **dict.fromkeys(
        ("defer_loading", "output_schema", "input_examples"), "The model is told of all functions by their parameters."
    ),
    "strict": "Calls that tool_choice forces always have such arguments.",
    "eager_input_streaming": "Arguments are streamed as they are written.",
    "namespace": "Functions are known by their names.",
    "include_obfuscation": "Streams are not padded.",
}
"""The same inside messages, their parts, calls and tools."""

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
"""Fields of OpenAI's and vLLM's APIs, taken with values that ask for nothing."""
HARMLESS_TEMPLATE: HarmlessValues = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
}
"""The same about the chat template."""

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
"""What to do instead of a field that is refused."""
