"""LMDeploy's documented programs with images run after changing the import, the model and the addresses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncllm import Response
from asyncllm.vl import loading
from tests.vl.checkpoints import folder_of, picture

SAMPLES = {
    "one image": """
from lmdeploy import pipeline
from lmdeploy.vl import load_image

pipe = pipeline('OpenGVLab/InternVL2-8B')

image = load_image('https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/tests/data/tiger.jpeg')
response = pipe(('describe this image', image))
print(response)
""",
    "several images": """
from lmdeploy import pipeline, TurbomindEngineConfig
from lmdeploy.vl import load_image

pipe = pipeline('OpenGVLab/InternVL2-8B',
                backend_config=TurbomindEngineConfig(session_len=500))

image_urls=[
    'https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/demo/resources/human-pose.jpg',
    'https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/demo/resources/det.jpg'
]

images = [load_image(img_url) for img_url in image_urls]
response = pipe(('describe these images', images))
print(response)
""",
    "a batch": """
from lmdeploy import pipeline, TurbomindEngineConfig
from lmdeploy.vl import load_image

pipe = pipeline('OpenGVLab/InternVL2-8B',
                backend_config=TurbomindEngineConfig(session_len=500))

image_urls=[
    "https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/demo/resources/human-pose.jpg",
    "https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/demo/resources/det.jpg"
]
prompts = [('describe this image', load_image(img_url)) for img_url in image_urls]
response = pipe(prompts)
print(response)
""",
    "turns": """
from lmdeploy import pipeline, TurbomindEngineConfig, GenerationConfig
from lmdeploy.vl import load_image

pipe = pipeline('OpenGVLab/InternVL2-8B',
                backend_config=TurbomindEngineConfig(session_len=500))

image = load_image('https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/demo/resources/human-pose.jpg')
gen_config = GenerationConfig(top_k=40, top_p=0.8, temperature=0.6, max_new_tokens=8)
sess = pipe.chat(('describe this image', image), gen_config=gen_config)
print(sess.response.text)
sess = pipe.chat('What is the woman doing?', session=sess, gen_config=gen_config)
print(sess.response.text)
response = sess.response
""",
    "the place of an image": """
from lmdeploy import pipeline, VisionConfig
from lmdeploy.vl import load_image
from lmdeploy.vl.constants import IMAGE_TOKEN

pipe = pipeline('deepseek-ai/deepseek-vl-1.3b-chat', vision_config=VisionConfig(max_batch_size=16))

image = load_image('https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/tests/data/tiger.jpeg')
response = pipe((f'describe this image{IMAGE_TOKEN}', image))
print(response)
""",
    "messages": """
from lmdeploy import pipeline, GenerationConfig
from lmdeploy.vl import load_image
from lmdeploy.vl import encode_image_base64

pipe = pipeline('OpenGVLab/InternVL2-8B')

image = load_image('https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/tests/data/tiger.jpeg')
image_base64_data = encode_image_base64(image)
response = pipe([{
    'role': 'user',
    'content': [
        {'type': 'text', 'text': 'the input text prompt'},
        {'type': 'image_url', 'image_url': {'url': f'data:image/jpeg;base64,{image_base64_data}'}},
        {'type': 'image_data', 'image_data': {'data': image}},
    ]
}], gen_config=GenerationConfig(max_new_tokens=8))
print(response)
""",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    picture(1).save(tmp_path / "image.png")
    data = (tmp_path / "image.png").read_bytes()
    monkeypatch.setattr(loading, "_fetched", lambda url, timeout: data)
    source = SAMPLES[name].replace("lmdeploy", "asyncllm")
    source, count = re.subn(r"pipeline\('[^']*'", f"pipeline({str(folder_of('internvl'))!r}", source)
    assert count == 1
    names: dict[str, Any] = {}
    try:
        exec(compile(source, "sample", "exec"), names)
        response = names["response"]
        answers = response if isinstance(response, list) else [response]
        assert all(isinstance(answer, Response) and answer.generate_token_len > 0 for answer in answers)
        assert all(answer.input_token_len + answer.history_token_len > 4 for answer in answers)
    finally:
        if "pipe" in names:
            names["pipe"].close()
