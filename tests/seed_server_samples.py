"""Programs and commands about serving, from the documents that asyncllm starts from. test_seed_server_samples.py runs
them. Those with images, gradio and quantized checkpoints are left to later work; tests/server/distributor has that of
the proxy."""

from __future__ import annotations

__all__ = ["API_CLIENT", "COMMANDS", "CURL", "OPENAI", "SERVE"]

OPENAI = {
    "chat": """
from openai import OpenAI
client = OpenAI(
    api_key='YOUR_API_KEY',
    base_url="http://0.0.0.0:23333/v1"
)
model_name = client.models.list().data[0].id
response = client.chat.completions.create(
  model=model_name,
  messages=[
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": " provide three suggestions about time management"},
  ],
    temperature=0.8,
    top_p=0.8
)
print(response)
""",
    "async chat": """
import asyncio
from openai import AsyncOpenAI

async def main():
    client = AsyncOpenAI(api_key='YOUR_API_KEY',
                         base_url='http://0.0.0.0:23333/v1')
    model_cards = await client.models.list()._get_page()
    response = await client.chat.completions.create(
        model=model_cards.data[0].id,
        messages=[
            {
                'role': 'system',
                'content': 'You are a helpful assistant.'
            },
            {
                'role': 'user',
                'content': ' provide three suggestions about time management'
            },
        ],
        temperature=0.8,
        top_p=0.8)
    print(response)

asyncio.run(main())
""",
    "extra body": """
from openai import OpenAI

client = OpenAI(

   api_key='YOUR_API_KEY', # dummy key to pass openai checking key

   base_url='http://0.0.0.0:23333/v1')

model_name = client.models.list().data[0].id

response = client.chat.completions.create(

   model=model_name,

   messages=[{

       'role': 'user', 'content': [{

           'type': 'text', 'text': 'Describe the image',

       }],

   }],

   temperature=0.8,

   top_p=0.8,

   extra_body={"repetition_penalty": 1.02}

   )

print(response)
""",
}

API_CLIENT = {
    "chat completions": """
from lmdeploy.serve.openai.api_client import APIClient
api_client = APIClient('http://{server_ip}:{server_port}')
model_name = api_client.available_models[0]
messages = [{"role": "user", "content": "Say this is a test!"}]
for item in api_client.chat_completions_v1(model=model_name, messages=messages):
    print(item)
""",
    "completions": """
from lmdeploy.serve.openai.api_client import APIClient
api_client = APIClient('http://{server_ip}:{server_port}')
model_name = api_client.available_models[0]
for item in api_client.completions_v1(model=model_name, prompt='hi'):
    print(item)
""",
    "interactive": """
from lmdeploy.serve.openai.api_client import APIClient
api_client = APIClient(f'http://{server_ip}:{server_port}')
messages = [
    "hi, what's your name?",
    "who developed you?",
    "Tell me more about your developers",
    "Summarize the information we've talked so far"
]
for message in messages:
    for item in api_client.chat_interactive_v1(prompt=message,
                                               session_id=1,
                                               interactive_mode=True,
                                               stream=False):
        print(item)
""",
}

CURL = {
    "models": """
curl http://{server_ip}:{server_port}/v1/models
""",
    "chat completions": """
curl http://{server_ip}:{server_port}/v1/chat/completions \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "internlm-chat-7b",
    "messages": [{"role": "user", "content": "Hello! How are you?"}]
  }'
""",
    "completions": """
curl http://{server_ip}:{server_port}/v1/completions \\
  -H 'Content-Type: application/json' \\
  -d '{
  "model": "llama",
  "prompt": "two steps to build a house:"
}'
""",
    "interactive": """
curl http://{server_ip}:{server_port}/v1/chat/interactive \\
  -H "Content-Type: application/json" \\
  -d '{
    "prompt": "Hello! How are you?",
    "session_id": 1,
    "interactive_mode": true
  }'
""",
}

SERVE = {
    "client": """
import lmdeploy
client = lmdeploy.serve('internlm/internlm-chat-7b', 'internlm-chat-7b')
for output in client.chat('hi', 1):
   print(output)
""",
    "chat template": """
from lmdeploy import ChatTemplateConfig, serve
client = serve('internlm/internlm2-chat-7b',
      chat_template_config=ChatTemplateConfig.from_json('${JSON_FILE}'))
""",
}

COMMANDS = [
    "lmdeploy serve api_server internlm/internlm2-chat-7b --server-port 23333",
    "lmdeploy serve api_server internlm/internlm2-chat-7b --cache-max-entry-count 0.2",
    "lmdeploy serve api_server $repo_id --model-name $model_name --tp 1",
    "lmdeploy serve api_server internlm/internlm2-chat-7b --chat-template ${JSON_FILE}",
    "lmdeploy serve api_server meta_llama/Meta-Llama-3-8B-Instruct --max-batch-size 256",
    "lmdeploy serve api_server ./workspace --server-name ${server_ip} --server-port ${server_port} --tp 1",
    "lmdeploy serve api_server internlm/internlm-chat-7b --server-port 8000 --qos-config-path qos_config.json",
    "lmdeploy serve api_server ./internlm2-chat-7b-4bit --backend turbomind --model-format awq",
    "lmdeploy serve api_server internlm/internlm2-chat-7b --quant-policy 8",
]
