"""Streams an answer from a running server with the openai package: python examples/client.py [URL]

Start the server with ./scripts/serve.sh. Fields that OpenAI does not have go into ``extra_body``.
"""

from __future__ import annotations

import sys

from openai import OpenAI

QUESTION = "Tom has 12 apples. Tom buys 35 more. How many apples does Tom have now?"


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": QUESTION}]
    stream = client.chat.completions.create(model=model, messages=messages, stream=True, extra_body={"num_branches": 7})
    for chunk in stream:
        print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
