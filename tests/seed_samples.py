"""Programs from the documents that asyncllm starts from, as they stand there. test_seed_samples.py runs them.

Every sample about text is here once; the documents repeat many. Later work has the rest:
- images (`asyncllm.vl`): tests/vl/test_seeds.py has the vision-language samples;
- the server: seed_server_samples.py has what is there of it; gradio is not;
- quantization: `model_format='awq'`, `quant_policy=8`, `lite`; LoRA: `adapters=`, `adapter_name=`;
- tensor parallelism: `tp=2`; all but one of those samples run with `tp=1` in its place;
- internals of another engine: its kernels, `patch`, `ModuleIOExtractor`; `convert` to its own weight format.
"""

from __future__ import annotations

__all__ = ["CUSTOM_TEMPLATE", "LONG_SAMPLES", "SAMPLES", "TEMPLATE_JSON"]

_SAMPLING = """
gen_config = GenerationConfig(top_p=0.8,
                              top_k=40,
                              temperature=0.8,
                              max_new_tokens=1024)
"""

_OPENAI_PROMPTS = """
prompts = [[{
    'role': 'user',
    'content': 'Hi, pls intro yourself'
}], [{
    'role': 'user',
    'content': 'Shanghai is'
}]]
"""

SAMPLES = {
    "default parameters": """
from lmdeploy import pipeline

pipe = pipeline('internlm/internlm2-chat-7b')
response = pipe(['Hi, pls intro yourself', 'Shanghai is'])
print(response)
""",
    "module name": """
import lmdeploy
pipe = lmdeploy.pipeline("internlm/internlm-chat-7b")
response = pipe(["Hi, pls intro yourself", "Shanghai is"])
print(response)
""",
    "cache ratio": """
from lmdeploy import pipeline, TurbomindEngineConfig

# decrease the ratio of the k/v cache occupation to 20%
backend_config = TurbomindEngineConfig(cache_max_entry_count=0.2)

pipe = pipeline('internlm/internlm2-chat-7b',
                backend_config=backend_config)
response = pipe(['Hi, pls intro yourself', 'Shanghai is'])
print(response)
""",
    "tensor parallel": """
from lmdeploy import pipeline, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(tp=2)
pipe = pipeline('internlm/internlm2-chat-7b',
                backend_config=backend_config)
response = pipe(['Hi, pls intro yourself', 'Shanghai is'])
print(response)
""",
    "sampling": f"""
from lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(tp=2)
{_SAMPLING}
pipe = pipeline('internlm/internlm2-chat-7b',
                backend_config=backend_config)
response = pipe(['Hi, pls intro yourself', 'Shanghai is'],
                gen_config=gen_config)
print(response)
""",
    "openai prompts": f"""
from lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(tp=2)
{_SAMPLING}
pipe = pipeline('internlm/internlm2-chat-7b',
                backend_config=backend_config)
{_OPENAI_PROMPTS}
response = pipe(prompts,
                gen_config=gen_config)
print(response)
""",
    "streaming": f"""
from lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(tp=2)
{_SAMPLING}
pipe = pipeline('internlm/internlm2-chat-7b',
                backend_config=backend_config)
{_OPENAI_PROMPTS}
for item in pipe.stream_infer(prompts, gen_config=gen_config):
    print(item)
""",
    "pytorch back end": f"""
from lmdeploy import pipeline, GenerationConfig, PytorchEngineConfig

backend_config = PytorchEngineConfig(session_len=2048)
{_SAMPLING}
pipe = pipeline('internlm/internlm-chat-7b',
                backend_config=backend_config)
{_OPENAI_PROMPTS}
response = pipe(prompts, gen_config=gen_config)
print(response)
""",
    "older pytorch back end": """
import lmdeploy
from lmdeploy.messages import GenerationConfig
from lmdeploy.pytorch import EngineConfig

# there are more arguments in EngineConfig set by default
backend_config = EngineConfig(tp = 1, session_len= 1024)

# there are more arguments in GenerationConfig set by default
gen_config = GenerationConfig(max_new_tokens=224)

# Initialize pipeline
pipe = lmdeploy.pipeline('internlm/internlm-chat-7b',  backend='pytorch', backend_config = backend_config)

# Perform inference on multiple inputs
response = pipe(['hi','say this is a test'], gen_config=gen_config)

print(response)
""",
    "older turbomind back end": """
import lmdeploy
from lmdeploy.messages import GenerationConfig
from lmdeploy.turbomind import EngineConfig

# there are more arguments in EngineConfig set by default
backend_config = EngineConfig(tp = 1, session_len= 1024)

# there are more arguments in GenerationConfig set by default
gen_config = GenerationConfig(max_new_tokens=224)

# Initialize pipeline
pipe = lmdeploy.pipeline('internlm/internlm-chat-7b',  backend='turbomind', backend_config = backend_config)

# Perform inference on multiple inputs
response = pipe(['hi','say this is a test'], gen_config=gen_config)

print(response)
""",
    "session length": """
from lmdeploy import pipeline

from lmdeploy import PytorchEngineConfig

pipe = pipeline(

   'OpenGVLab/InternVL2-8B',

   backend_config=PytorchEngineConfig(

       session_len=8192))
response = pipe('hi')
""",
    "batch size": """
from lmdeploy import pipeline

from lmdeploy import TurbomindEngineConfig

pipe = pipeline(

   'OpenGVLab/InternVL2-8B',

   backend_config=TurbomindEngineConfig(

       max_batch_size=256))
response = pipe('hi')
""",
    "prefix caching": """
from lmdeploy import pipeline

from lmdeploy import PytorchEngineConfig

pipe = pipeline(

    'OpenGVLab/InternVL2-8B',

    backend_config=PytorchEngineConfig(

        enable_prefix_caching=True))
response = pipe('hi')
""",
    "context length extrapolation": f"""
from lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(rope_scaling_factor=2.0, session_len=160000)
pipe = pipeline('internlm/internlm2-chat-7b', backend_config=backend_config)
prompt = 'Use a long prompt to replace this sentence'
{_SAMPLING}
response = pipe(prompt, gen_config=gen_config)
print(response)
""",
    "a million tokens": f"""
from lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig

backend_config = TurbomindEngineConfig(

       rope_scaling_factor=2.5,

       session_len=1000000,

       max_batch_size=1,

       cache_max_entry_count=0.9,

       tp=2)

pipe = pipeline('internlm/internlm2_5-7b-chat-1m', backend_config=backend_config)

prompt = 'Use a long prompt to replace this sentence'

{_SAMPLING}

response = pipe(prompt, gen_config=gen_config)

print(response)
""",
    "built-in template": """
from lmdeploy import pipeline, ChatTemplateConfig

pipe = pipeline('/the/path/of/your/finetuned/model',
               chat_template_config=ChatTemplateConfig(
                   model_name='internlm2'
               ))
response = pipe('hi')
""",
    "changed template": """
from lmdeploy import pipeline, ChatTemplateConfig

pipe = pipeline('/the/path/of/your/finetuned/model',
               chat_template_config=ChatTemplateConfig(
                   model_name='internlm2',
                   meta_instruction='You are a helpful assistant'
               ))
response = pipe('hi')
""",
    "multi-turn": """
from lmdeploy import pipeline, TurbomindEngineConfig, GenerationConfig

pipe = pipeline('liuhaotian/llava-v1.6-vicuna-7b',
                backend_config=TurbomindEngineConfig(session_len=8192))

gen_config = GenerationConfig(top_k=40, top_p=0.8, temperature=0.8)
sess = pipe.chat('describe this place', gen_config=gen_config)
print(sess.response.text)
sess = pipe.chat('What is the woman doing?', session=sess, gen_config=gen_config)
print(sess.response.text)
response = sess.response
""",
    "perplexity": """
from lmdeploy import TurbomindEngineConfig
from lmdeploy.turbomind import TurboMind
import numpy as np

# load model and tokenizer
engine_config = TurbomindEngineConfig(rope_scaling_factor=2.0, session_len=160000)
engine = TurboMind.from_pretrained('internlm/internlm2-chat-7b', engine_config)
tokenizer = engine.tokenizer
generator = engine.create_instance()

# get perplexity
text = 'Use a long prompt to replace this sentence'
input_ids = tokenizer.encode(text)
loss = generator.get_ppl(input_ids)[0]
ppl = np.exp(loss)
pipe = engine
""",
}

LONG_SAMPLES = {
    "passkey retrieval": """
import numpy as np
from lmdeploy import pipeline
from lmdeploy import TurbomindEngineConfig

session_len = 160000
backend_config = TurbomindEngineConfig(rope_scaling_factor=2.0, session_len=session_len)
pipe = pipeline('internlm/internlm2-chat-7b', backend_config=backend_config)


def passkey_retrival(session_len, n_round=5):
    # create long context input
    tok = pipe.tokenizer
    task_description = 'There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about the important information there.'
    garbage = 'The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.'

    for _ in range(n_round):
        n_times = (session_len - 1000) // len(tok.encode(garbage))
        n_garbage_prefix = np.random.randint(0, n_times)
        n_garbage_suffix = n_times - n_garbage_prefix
        garbage_prefix = ' '.join([garbage] * n_garbage_prefix)
        garbage_suffix = ' '.join([garbage] * n_garbage_suffix)
        pass_key = np.random.randint(1, 50000)
        information_line = f'The pass key is {pass_key}. Remember it. {pass_key} is the pass key.'  # noqa: E501
        final_question = 'What is the pass key? The pass key is'
        lines = [
            task_description,
            garbage_prefix,
            information_line,
            garbage_suffix,
            final_question,
        ]

        # inference
        prompt = ' '.join(lines)
        response = pipe([prompt])
        print(pass_key, response)


passkey_retrival(session_len, 5)
""",  # noqa: E501
}

CUSTOM_TEMPLATE = """
from lmdeploy.model import MODELS, BaseChatTemplate


@MODELS.register_module(name='customized_model')
class CustomizedModel(BaseChatTemplate):
    \"\"\"A customized chat template.\"\"\"

    def __init__(self,
                 system='<|im_start|>system\\n',
                 meta_instruction='You are a robot developed by LMDeploy.',
                 user='<|im_start|>user\\n',
                 assistant='<|im_start|>assistant\\n',
                 eosys='<|im_end|>\\n',
                 eoh='<|im_end|>\\n',
                 eoa='<|im_end|>',
                 separator='\\n',
                 stop_words=['<|im_end|>', '<|action_end|>']):
        super().__init__(system=system,
                         meta_instruction=meta_instruction,
                         eosys=eosys,
                         user=user,
                         eoh=eoh,
                         assistant=assistant,
                         eoa=eoa,
                         separator=separator,
                         stop_words=stop_words)


from lmdeploy import ChatTemplateConfig, pipeline

messages = [{'role': 'user', 'content': 'who are you?'}]
pipe = pipeline('internlm/internlm2-chat-7b',
                chat_template_config=ChatTemplateConfig('customized_model'))
for response in pipe.stream_infer(messages):
    print(response.text, end='')
"""

TEMPLATE_JSON = """
{
    "model_name": "your awesome chat template name",
    "system": "<|im_start|>system\\n",
    "meta_instruction": "You are a robot developed by LMDeploy.",
    "eosys": "<|im_end|>\\n",
    "user": "<|im_start|>user\\n",
    "eoh": "<|im_end|>\\n",
    "assistant": "<|im_start|>assistant\\n",
    "eoa": "<|im_end|>",
    "separator": "\\n",
    "capability": "chat",
    "stop_words": ["<|im_end|>"]
}
"""
