"""Asks a question through litellm, whole and streamed. Arguments: URL, MODEL, QUESTION."""

import json
import sys
from typing import Any

import litellm


def main() -> None:
    url, model, question = sys.argv[1:]
    messages = [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    streamed = "".join(
        part.choices[0].delta.content or "" for part in litellm.completion(messages=messages, stream=True, **asked)
    )
    whole = litellm.completion(messages=messages, **asked).choices[0].message.content
    print(json.dumps({"whole": whole, "streamed": streamed}))


if __name__ == "__main__":
    main()
