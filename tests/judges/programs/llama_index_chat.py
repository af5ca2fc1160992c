"""Asks a question through LlamaIndex, whole and streamed. Arguments: URL, MODEL, QUESTION."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    url, model, question = sys.argv[1:]
    llm = OpenAILike(model=model, api_base=f"{url}/v1", api_key="none", is_chat_model=True, temperature=0)
    messages = [ChatMessage(role="user", content=question)]
    streamed = "".join(part.delta or "" for part in llm.stream_chat(messages))
    print(json.dumps({"whole": llm.chat(messages).message.content, "streamed": streamed}))


if __name__ == "__main__":
    main()
