"""Draw a picture and ask about it: one image, two images, and a conversation.

python examples/image_question.py [MODEL]
"""

from __future__ import annotations

import sys

from PIL import Image, ImageDraw

from asyncllm import GenerationConfig, pipeline


def shapes(*circles: str) -> Image.Image:
    """Return a picture of circles in these colours, and a blue square."""
    image = Image.new("RGB", (224, 224), "white")
    drawing = ImageDraw.Draw(image)
    drawing.rectangle((130, 130, 200, 200), fill="blue")
    for number, colour in enumerate(circles):
        drawing.ellipse((15 + 70 * number, 20, 65 + 70 * number, 70), fill=colour)
    return image


def main(model: str = "tiny-vlm") -> None:
    first, second = shapes("red", "red", "green"), shapes("yellow")
    config = GenerationConfig(top_k=1, max_new_tokens=32)
    questions = [
        ("How many red shapes are there?", first),
        ("What colour is the square?", first),
        ("Which image shows a yellow circle?", [first, second]),
    ]
    with pipeline(model) as pipe:
        for (text, _), answer in zip(questions, pipe(questions, config), strict=True):
            print(f"{text} -> {answer.text} ({answer.num_images} images, {answer.image_token_len} tokens of them)")
        session = pipe.chat(("How many shapes are there?", second), gen_config=config)
        print(session.response.text)
        session = pipe.chat("What shape is yellow?", session=session, gen_config=config)
        print(session.response.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
