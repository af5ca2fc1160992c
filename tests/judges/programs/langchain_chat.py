"""Asks a question through LangChain, whole and streamed. Arguments: URL, MODEL, QUESTION."""

import json
import sys

from langchain_openai import ChatOpenAI
from pydantic import SecretStr


def main() -> None:
    url, model, question = sys.argv[1:]
    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=SecretStr("none"), temperature=0)
    streamed = "".join(str(chunk.content) for chunk in chat.stream(question))
    print(json.dumps({"whole": chat.invoke(question).content, "streamed": streamed}))


if __name__ == "__main__":
    main()
