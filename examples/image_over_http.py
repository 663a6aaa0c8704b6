"""Ask a server about an image with OpenAI's client: the picture travels as a data: URL.

pip install openai
python examples/image_over_http.py [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from openai import OpenAI

import asyncllm
from asyncllm.vl import encode_image_base64

PICTURE = Path(__file__).with_name("shapes.png")


def main(model: str = "tiny-vlm") -> None:
    url = f"data:image/png;base64,{encode_image_base64(PICTURE)}"
    image = {"type": "image_url", "image_url": {"url": url}}
    with (
        asyncllm.serve(model, "served", server_port=0, api_keys="secret") as server,
        OpenAI(base_url=f"{server.api_server_url}/v1", api_key="secret") as client,
    ):
        for text in ("How many shapes are there?", "What shape is red?", "Describe this image."):
            message = {"role": "user", "content": [image, {"type": "text", "text": text}]}
            answer = client.chat.completions.create(model="served", messages=[message], temperature=0, max_tokens=48)
            print(f"{text} -> {answer.choices[0].message.content}")


if __name__ == "__main__":
    main(*sys.argv[1:])
