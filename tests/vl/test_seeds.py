"""LMDeploy's documented programs with images run on the bundled tiny-vlm, after changing the import, the model and the
addresses, and see what the image shows."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig, Response
from asyncllm.server.request.media import MediaFetcher
from asyncllm.text.templates.registry import MODELS
from asyncllm.vl import loading
from tests.server.serving import serving

SHAPES = Path(__file__).parents[2] / "examples" / "shapes.png"
"""A red circle, a blue one and a blue square."""
TIGER = "https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/tests/data/tiger.jpeg"
POSE = "https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/demo/resources/human-pose.jpg"
DETECTED = "https://raw.githubusercontent.com/open-mmlab/mmdeploy/main/demo/resources/det.jpg"

LOCAL_LIMITS = {"tp=2": "tp=1"}
"""What goes with the replaced model on one CPU."""

_IMAGE = f"image = load_image('{TIGER}')\nresponse = pipe(('describe this image', image))\n"
_IMAGES = f"""
image_urls=[
    '{POSE}',
    '{DETECTED}'
]
"""

SAMPLES = {
    "one image": f"""
from lmdeploy import pipeline
from lmdeploy.vl import load_image

pipe = pipeline('OpenGVLab/InternVL2-8B')

{_IMAGE}
print(response)
""",
    "a message": f"""
from lmdeploy import pipeline

pipe = pipeline('liuhaotian/llava-v1.6-vicuna-7b')

prompts = [
    {{
        'role': 'user',
        'content': [
            {{'type': 'text', 'text': 'describe this image'}},
            {{'type': 'image_url', 'image_url': {{'url': '{TIGER}'}}}}
        ]
    }}
]
response = pipe(prompts)
print(response)
""",
    "sampling": f"""
from lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig
from lmdeploy.vl import load_image

pipe = pipeline('liuhaotian/llava-v1.6-vicuna-7b',
                backend_config=TurbomindEngineConfig(tp=2, session_len=8192))
gen_config = GenerationConfig(top_k=40, top_p=0.8, temperature=0.6)
image = load_image('{TIGER}')
response = pipe(('describe this image', image), gen_config=gen_config)
print(response)
""",
    "a list of lists": f"""
from lmdeploy.vl import load_image
from lmdeploy import pipeline, TurbomindEngineConfig, ChatTemplateConfig
pipe = pipeline('liuhaotian/llava-v1.5-7b',
                backend_config=TurbomindEngineConfig(session_len=8192),
                chat_template_config=ChatTemplateConfig(model_name='vicuna'))
im = load_image('{POSE}')
response = pipe([('describe this image', [im])])
print(response)
""",
    "a changed template": f"""
from lmdeploy import pipeline, ChatTemplateConfig
from lmdeploy.vl import load_image
pipe = pipeline('/the/path/of/your/finetuned/internvl2/8b/model',
               chat_template_config=ChatTemplateConfig(
                   model_name='internvl2-internlm2',
                   meta_instruction='You are a helpful assistant'
               ))
{_IMAGE}
""",
    "a template of one's own": f"""
from lmdeploy import pipeline, ChatTemplateConfig
from lmdeploy.model import MODELS as registry
from lmdeploy.vl import load_image

@registry.register_module(name="awesome")
class MyChatTemplate:
    def __init__(self, *args, **kwargs):
        pass

    def get_prompt(self, prompt, sequence_start=True):
        return f'<|im_start|>user\\n{{prompt}}<|im_end|>\\n<|im_start|>assistant\\n'

    def messages2prompt(self, messages, sequence_start=True, **kwargs):
        if isinstance(messages, str):
            return self.get_prompt(messages, sequence_start)
        return ''.join(self.get_prompt(message['content']) for message in messages)

pipe = pipeline("/the/path/of/your/awesome/model",
               chat_template_config=ChatTemplateConfig(
                   model_name="awesome"))
{_IMAGE}
""",
    "several images": f"""
from lmdeploy import pipeline, TurbomindEngineConfig
from lmdeploy.vl import load_image

pipe = pipeline('OpenGVLab/InternVL2-8B',
                backend_config=TurbomindEngineConfig(session_len=10000))

{_IMAGES}
images = [load_image(img_url) for img_url in image_urls]
response = pipe(('describe these images', images))
print(response)
""",
    "a batch": f"""
from lmdeploy import pipeline, TurbomindEngineConfig
from lmdeploy.vl import load_image

pipe = pipeline('OpenGVLab/InternVL2-8B',
                backend_config=TurbomindEngineConfig(session_len=8192))

{_IMAGES}
prompts = [('describe this image', load_image(img_url)) for img_url in image_urls]
response = pipe(prompts)
print(response)
""",
    "turns": f"""
from lmdeploy import pipeline, TurbomindEngineConfig, GenerationConfig
from lmdeploy.vl import load_image

pipe = pipeline('OpenGVLab/InternVL2-8B',
                backend_config=TurbomindEngineConfig(session_len=8192))

image = load_image('{POSE}')
gen_config = GenerationConfig(top_k=40, top_p=0.8, temperature=0.6)
sess = pipe.chat(('describe this image', image), gen_config=gen_config)
print(sess.response.text)
response = sess.response
sess = pipe.chat('What is the woman doing?', session=sess, gen_config=gen_config)
print(sess.response.text)
assert sess.response.num_images == 1
""",
    "the place of an image": f"""
from lmdeploy import pipeline, VisionConfig
from lmdeploy.vl import load_image
from lmdeploy.vl.constants import IMAGE_TOKEN

pipe = pipeline('deepseek-ai/deepseek-vl-1.3b-chat', vision_config=VisionConfig(max_batch_size=16))

image = load_image('{TIGER}')
response = pipe((f'describe this image{{IMAGE_TOKEN}}', image))
print(response)
""",
    "both spellings": f"""
from lmdeploy import pipeline
from lmdeploy.vl import load_image
from lmdeploy.vl import encode_image_base64

pipe = pipeline('OpenGVLab/InternVL2-8B')

image = load_image('{TIGER}')
image_base64_data = encode_image_base64(image)
response = pipe([{{
    'role': 'user',
    'content': [
        {{'type': 'text', 'text': 'the input text prompt'}},
        {{'type': 'image_url', 'image_url': {{'url': f'data:image/jpeg;base64,{{image_base64_data}}'}}}},
        {{'type': 'image_data', 'image_data': {{'data': image}}}},
    ]
}}])
print(response)
""",
}

BLIND = ("a list of lists", "both spellings", "several images")
"""Whose template or question tiny-vlm has never seen."""


@pytest.fixture(autouse=True)
def _tiger(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all addresses give."""
    data = SHAPES.read_bytes()

    async def fetch(self: MediaFetcher, url: str, most: int = 0) -> bytes:
        assert url == TIGER
        return data

    monkeypatch.setattr(loading, "_fetched", lambda url, timeout, what="image": data)
    monkeypatch.setattr(MediaFetcher, "fetch", fetch)


def local(source: str) -> str:
    """Return a sample with what is to be changed in it."""
    assert "lmdeploy" in source
    for old, new in {"lmdeploy": "asyncllm", **LOCAL_LIMITS}.items():
        source = re.sub(rf"\b{old}\b", new, source)
    source, count = re.subn(r"pipeline\(\s*(['\"]).*?\1", "pipeline('tiny-vlm'", source)
    assert count == 1
    return source


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_runs(name: str) -> None:
    names: dict[str, Any] = {}
    try:
        exec(compile(local(SAMPLES[name]), "sample", "exec"), names)
        response = names["response"]
        answers = response if isinstance(response, list) else [response]
        for answer in answers:
            assert isinstance(answer, Response)
            assert answer.num_images == (2 if name in ("several images", "both spellings") else 1)
            assert answer.image_token_len == 64 * answer.num_images
            assert answer.generate_token_len > 0
            assert name in BLIND or answer.text == "I see 1 red circle, 1 blue circle and 1 blue square."
    finally:
        MODELS.users.pop("awesome", None)
        if "pipe" in names:
            names["pipe"].close()


_MESSAGES = """
messages=[{
    'role': 'user',
    'content': [{
        'type': 'text',
        'text': 'Describe the image please',
    }, {
        'type': 'image_url',
        'image_url': {
            'url': ADDRESS,
        },
    }],
}]
"""
_OPENAI = f"""
from openai import OpenAI

client = OpenAI(api_key='YOUR_API_KEY', base_url='http://0.0.0.0:23333/v1')
model_name = client.models.list().data[0].id
{_MESSAGES}
response = client.chat.completions.create(model=model_name, messages=messages, MORE)
print(response)
images = response.usage.prompt_tokens_details.images
text = response.choices[0].message.content
"""
SERVED = {
    "an address": _OPENAI.replace("ADDRESS", repr(TIGER)).replace("MORE", "temperature=0.8, top_p=0.8"),
    "base64": """
import base64
def encode_image(image_path):
 with open(image_path, "rb") as image_file:
   return base64.b64encode(image_file.read()).decode('utf-8')
base64_image = encode_image(IMAGE_PATH)
"""
    + _OPENAI.replace("ADDRESS", "f'data:image/jpeg;base64,{base64_image}'").replace("MORE", "max_tokens=300"),
    "more options": _OPENAI.replace("ADDRESS", repr(TIGER)).replace(
        "MORE", "temperature=0.8, top_p=0.8, extra_body={'repetition_penalty': 1.02}"
    ),
    "APIClient": f"""
from asyncllm.serve.openai.api_client import APIClient

api_client = APIClient('http://0.0.0.0:23333')
model_name = api_client.available_models[0]
{_MESSAGES.replace("ADDRESS", repr(TIGER))}
for item in api_client.chat_completions_v1(model=model_name, messages=messages):
    print(item)
images = item['usage']['prompt_tokens_details']['images']
text = item['choices'][0]['message']['content']
""",
}


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_samples_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(
        AsyncEngine("tiny-vlm", EngineConfig(num_gpu_blocks=64)),
        allowed_media_domains=["raw.githubusercontent.com"],
    ) as server:
        for name, source in SERVED.items():
            names: dict[str, Any] = {"IMAGE_PATH": str(SHAPES)}
            program = compile(source.replace("http://0.0.0.0:23333", server.url), "sample", "exec")
            await asyncio.to_thread(exec, program, names)
            assert names["images"] == 1, name
            assert "blue" in names["text"], name
        server.engine.check_idle()
