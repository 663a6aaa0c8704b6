"""Start a server that lives as long as this program, and call it with OpenAI's client: whole, streamed, cut short.

pip install openai
python examples/openai_client.py [MODEL]
"""

from __future__ import annotations

import sys

from openai import OpenAI

import asyncllm


def main(model: str = "tiny-chat") -> None:
    # port 0: any that is free
    with (
        asyncllm.serve(model, "served", server_port=0, api_keys="secret") as server,
        OpenAI(base_url=f"{server.api_server_url}/v1", api_key="secret") as client,
    ):
        print(f"{server.available_models} at {server.api_server_url}")
        question = {"role": "user", "content": "What is 17 + 25?"}

        answer = client.chat.completions.create(model="served", messages=[question], temperature=0, max_tokens=32)
        print(answer.choices[0].message.content, f"({answer.usage.completion_tokens} tokens)")

        with client.chat.completions.create(model="served", messages=[question], stream=True, max_tokens=32) as stream:
            for chunk in stream:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
                if chunk.choices[0].delta.content:
                    break  # leaving the block closes the connection, and the server drops the answer
        print(" (left early)")


if __name__ == "__main__":
    main(*sys.argv[1:])
