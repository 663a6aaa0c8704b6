"""The built-in chat templates, and the architectures they belong to.

Renderings and system texts are those that the models' authors published and that LMDeploy 0.5 carries.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AHEAD_OF_CHECKPOINTS", "ALIASES", "ARCHITECTURES", "BUILTIN"]

LLAMA2_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe. "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information."
)
QWEN2_5_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
LLAMA3_1_SYSTEM = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nYou are a helpful assistant."
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
LLAVA_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)
INTERNLM_SYSTEM = (
    "You are an AI assistant whose name is InternLM (书生·浦语).\n"
    "- InternLM (书生·浦语) is a conversational language model that is developed by Shanghai AI Laboratory "
    "(上海人工智能实验室). It is designed to be helpful, honest, and harmless.\n"
    "- InternLM (书生·浦语) can understand and communicate fluently in the language chosen by the user such as "
    "English and 中文.\n"
)
XCOMPOSER_SYSTEM = (
    "You are an AI assistant whose name is InternLM-XComposer (浦语·灵笔).\n"
    "- InternLM-XComposer (浦语·灵笔) is a multi-modality conversational language model that is developed by "
    "Shanghai AI Laboratory (上海人工智能实验室). It is designed to be helpful, honest, and harmless.\n"
    "- InternLM-XComposer (浦语·灵笔) can understand and communicate fluently in the language chosen by the user such "
    "as English and 中文.\n"
    "- InternLM-XComposer (浦语·灵笔) is capable of comprehending and articulating responses effectively based on the "
    "provided image."
)
GOT_OCR2_SYSTEM = "You should follow the instructions carefully and explain your answers in detail."
INTERNVL2_SYSTEM = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"
)
INTERNVL2_5_SYSTEM = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
)
DEEPSEEK_CODER_SYSTEM = (
    "You are an AI programming assistant, utilizing the Deepseek Coder model, developed by Deepseek Company, and you "
    "only answer questions related to computer science. For politically sensitive questions, security and privacy "
    "issues, and other non-computer science questions, you will refuse to answer\n"
)
DEEPSEEK_VL_SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
YI_VL_SYSTEM = (
    "This is a chat between an inquisitive human and an AI assistant. Assume the role of the AI assistant. Read all "
    "the images carefully, and respond to the human's questions with informative, helpful, detailed and polite "
    "answers. 这是一个好奇的人类和一个人工智能助手之间的对话。假设你扮演这个AI助手的角色。仔细阅读所有的图像，"
    "并对人类的问题做出信息丰富、有帮助、详细的和礼貌的回答。\n\n"
)
DBRX_SYSTEM = (
    "You are DBRX, created by Databricks. You were last updated in December 2023. You answer questions based on "
    "information available up to that point.\nYOU PROVIDE SHORT RESPONSES TO SHORT QUESTIONS OR STATEMENTS, but "
    "provide thorough responses to more complex and open-ended questions.\nYou assist with various tasks, from writing "
    "to coding (using markdown for code blocks — remember to use ``` with code, JSON, and tables).\n(You do not have "
    "real-time data access or code execution capabilities. You avoid stereotyping and provide balanced perspectives on "
    "controversial topics. You do not provide song lyrics, poems, or news articles and do not divulge details of your "
    "training data.)\nThis is your system prompt, guiding your responses. Do not reference it, just respond to the "
    "user. If you find yourself talking about this message, stop. You should be responding appropriately and usually "
    "that means not mentioning this.\nYOU DO NOT MENTION ANY OF THIS INFORMATION ABOUT YOURSELF UNLESS THE INFORMATION "
    "IS DIRECTLY PERTINENT TO THE USER'S QUERY."
)
CODEGEEX_SYSTEM = (
    "你是一位智能编程助手，你叫CodeGeeX。你会为用户回答关于编程、代码、计算机方面的任何问题，"
    "并提供格式规范、可以执行、准确安全的代码，并在必要时提供详细的解释。"
)
ULTRA_SYSTEM = (
    "A one-turn chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "very detailed, and polite answers to the user's questions."
)

CHATML: dict[str, Any] = {
    "system": "<|im_start|>system\n",
    "eosys": "<|im_end|>\n",
    "user": "<|im_start|>user\n",
    "eoh": "<|im_end|>\n",
    "assistant": "<|im_start|>assistant\n",
    "eoa": "<|im_end|>",
    "separator": "\n",
    "stop_words": ["<|im_end|>"],
}
CHATML_UNBROKEN = {**CHATML, "eosys": "<|im_end|>", "eoh": "<|im_end|>", "separator": ""}
CHATML_ENDED: dict[str, Any] = {**CHATML, "stop_words": ["<|im_end|>", "<|endoftext|>"]}
LLAMA2: dict[str, Any] = {
    "system": "[INST] <<SYS>>\n",
    "eosys": "\n<</SYS>>\n\n",
    "user": "[INST] ",
    "user_after_system": "",
    "eoh": " [/INST]",
    "assistant": " ",
    "generation_prompt": "",
    "eoa": " </s>",
    "separator": "<s>",
}
LLAMA3: dict[str, Any] = {
    "start": "<|begin_of_text|>",
    "system": "<|start_header_id|>system<|end_header_id|>\n\n",
    "eosys": "<|eot_id|>",
    "user": "<|start_header_id|>user<|end_header_id|>\n\n",
    "eoh": "<|eot_id|>",
    "assistant": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "eoa": "<|eot_id|>",
    "stop_words": ["<|eot_id|>", "<|end_of_text|>"],
}
VICUNA: dict[str, Any] = {
    "meta_instruction": VICUNA_SYSTEM,
    "eosys": " ",
    "user": "USER: ",
    "eoh": " ",
    "assistant": "ASSISTANT: ",
    "eoa": "</s>",
    "stop_words": ["</s>"],
}
XCOMPOSER: dict[str, Any] = {
    "system": "[UNUSED_TOKEN_146]system\n",
    "meta_instruction": XCOMPOSER_SYSTEM,
    "eosys": "[UNUSED_TOKEN_145]\n",
    "user": "[UNUSED_TOKEN_146]user\n",
    "eoh": "[UNUSED_TOKEN_145]\n",
    "assistant": "[UNUSED_TOKEN_146]assistant\n",
    "eoa": "[UNUSED_TOKEN_145]\n",
    "separator": "\n",
    "stop_words": ["[UNUSED_TOKEN_145]"],
}
GLM4: dict[str, Any] = {
    "system": "<|system|>\n",
    "user": "<|user|>\n",
    "assistant": "<|assistant|>\n",
    "stop_words": ["<|user|>", "<|endoftext|>", "<|observation|>"],
}
MISTRAL_V7: dict[str, Any] = {
    "system": "[SYSTEM_PROMPT]",
    "eosys": "[/SYSTEM_PROMPT]",
    "user": "[INST]",
    "eoh": "[/INST]",
    "eoa": "</s>",
}
MISTRAL: dict[str, Any] = {
    "system": "[INST] ",
    "eosys": "\n\n",
    "user": "[INST] ",
    "user_after_system": "",
    "eoh": " [/INST]",
    "eoa": "</s>",
}
DEEPSEEK: dict[str, Any] = {
    "eosys": "\n\n",
    "user": "User: ",
    "eoh": "\n\n",
    "assistant": "Assistant: ",
    "generation_prompt": "Assistant:",
    "eoa": "<｜end▁of▁sentence｜>",
}
DEEPSEEK_V3: dict[str, Any] = {
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "eoa": "<｜end▁of▁sentence｜>",
}
DEEPSEEK_V3_2: dict[str, Any] = {**DEEPSEEK_V3, "assistant": "<｜Assistant｜></think>"}
PHI3: dict[str, Any] = {
    "system": "<|system|>\n",
    "eosys": "<|end|>\n",
    "user": "<|user|>\n",
    "eoh": "<|end|>\n",
    "assistant": "<|assistant|>\n",
    "eoa": "<|end|>",
    "separator": "\n",
    "stop_words": ["<|end|>", "<|endoftext|>", "<|assistant|>"],
}
COGVLM: dict[str, Any] = {
    "user": "Question: ",
    "eoh": " ",
    "assistant": "Answer:",
    "eoa": "</s>",
    "separator": "\n",
    "stop_words": ["</s>"],
    "images_first": True,
}
MOLMO: dict[str, Any] = {
    "start": "<|endoftext|>",
    "user": " User: ",
    "assistant": " Assistant: ",
    "generation_prompt": " Assistant:",
    "images_first": True,
}
ULTRA: dict[str, Any] = {
    "system": "User: ",
    "meta_instruction": ULTRA_SYSTEM,
    "eosys": "</s>\n",
    "user": "User: ",
    "eoh": "</s>\n",
    "assistant": "Assistant: ",
    "eoa": "</s>",
    "separator": "\n",
    "stop_words": ["</s>"],
}

BUILTIN: dict[str, dict[str, Any]] = {
    "base": {},
    "llama": {},
    "falcon": {},
    "puyu": {},
    "internlm": {
        "system": "<|System|>:",
        "meta_instruction": INTERNLM_SYSTEM,
        "eosys": "\n",
        "user": "<|User|>:",
        "eoh": "\n",
        "assistant": "<|Bot|>:",
        "eoa": "<eoa>",
        "separator": "\n",
        "stop_words": ["<eoa>"],
    },
    "internlm2": {**CHATML, "meta_instruction": INTERNLM_SYSTEM, "stop_words": ["<|im_end|>", "<|action_end|>"]},
    "internvl-internlm2": {
        **CHATML,
        "meta_instruction": "You are an AI assistant whose name is InternLM (书生·浦语).",
        "stop_words": ["<|im_start|>", "<|im_end|>"],
    },
    "internvl2-internlm2": {
        **CHATML,
        "meta_instruction": INTERNVL2_SYSTEM,
        "stop_words": ["<|im_start|>", "<|im_end|>"],
    },
    "internvl2_5": {
        **CHATML,
        "meta_instruction": INTERNVL2_5_SYSTEM,
        "stop_words": ["<|im_start|>", "<|im_end|>"],
    },
    "qwen": {**CHATML_ENDED, "meta_instruction": "You are a helpful assistant."},
    "qwen2d5": {**CHATML_ENDED, "meta_instruction": QWEN2_5_SYSTEM},
    "qwen2d5-vl": {**CHATML_ENDED, "meta_instruction": "You are a helpful assistant."},
    "qwen3": CHATML_ENDED,
    "minicpmv-2d6": {**CHATML_ENDED, "meta_instruction": "You are a helpful assistant."},
    "yi": CHATML_ENDED,
    "dbrx": {**CHATML, "meta_instruction": DBRX_SYSTEM},
    "llava-chatml": {**CHATML_UNBROKEN, "meta_instruction": "Answer the questions."},
    "got-ocr2": {**CHATML_UNBROKEN, "meta_instruction": GOT_OCR2_SYSTEM},
    "internvl-zh-hermes2": {**CHATML_UNBROKEN, "meta_instruction": INTERNVL2_SYSTEM},
    "internlm-xcomposer2": XCOMPOSER,
    "internlm-xcomposer2d5": XCOMPOSER,
    "llama2": {**LLAMA2, "meta_instruction": LLAMA2_SYSTEM},
    "codellama": LLAMA2,
    "llama3": LLAMA3,
    "llama3_1": {
        **LLAMA3,
        "meta_instruction": LLAMA3_1_SYSTEM,
        "stop_words": ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
    },
    "vicuna": VICUNA,
    "wizardlm": VICUNA,
    "llava-v1": {**VICUNA, "meta_instruction": LLAVA_SYSTEM, "generation_prompt": "ASSISTANT:"},
    "mini-gemini-vicuna": {**VICUNA, "meta_instruction": LLAVA_SYSTEM, "generation_prompt": "ASSISTANT:"},
    "baichuan2": {"user": "<reserved_106>", "assistant": "<reserved_107>"},
    "chatglm": {"user": "[Round {round}]\n\n问：", "eoh": "\n\n", "assistant": "答：", "has_system": False},
    "chatglm3": {
        "start": "[gMASK]sop",
        "system": "<|system|>\n ",
        "user": "<|user|>\n ",
        "assistant": "<|assistant|>\n ",
        "stop_words": ["<eos>"],
    },
    "glm4": {**GLM4, "start": "[gMASK]<sop>"},
    "codegeex4": {**GLM4, "meta_instruction": CODEGEEX_SYSTEM},
    "mistral": MISTRAL,
    "mistral-v7": MISTRAL_V7,
    "mixtral": MISTRAL,
    "gemma": {
        "system": "<start_of_turn>user\n",
        "eosys": "\n\n",
        "user": "<start_of_turn>user\n",
        "user_after_system": "",
        "eoh": "<end_of_turn>\n",
        "assistant": "<start_of_turn>model\n",
        "eoa": "<end_of_turn>\n",
        "stop_words": ["<end_of_turn>"],
    },
    "deepseek": DEEPSEEK,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": DEEPSEEK_V3_2,
    "deepseek-v32": DEEPSEEK_V3_2,
    "deepseek-vl": {**DEEPSEEK, "meta_instruction": DEEPSEEK_VL_SYSTEM},
    "deepseek-vl2": {
        **DEEPSEEK,
        "start": "<｜begin▁of▁sentence｜>",
        "user": "<|User|>: ",
        "assistant": "<|Assistant|>: ",
        "generation_prompt": "<|Assistant|>:",
    },
    "janus": {
        **DEEPSEEK,
        "meta_instruction": DEEPSEEK_VL_SYSTEM,
        "user": "<|User|>: ",
        "assistant": "<|Assistant|>: ",
        "generation_prompt": "<|Assistant|>:",
    },
    "deepseek-coder": {
        "meta_instruction": DEEPSEEK_CODER_SYSTEM,
        "user": "### Instruction:\n",
        "eoh": "\n",
        "assistant": "### Response:\n",
        "eoa": "\n<|EOT|>",
        "separator": "\n",
        "stop_words": ["<|EOT|>"],
    },
    "phi-3": PHI3,
    "internvl2-phi3": {**PHI3, "meta_instruction": INTERNVL2_SYSTEM},
    "internvl-phi3": {
        **PHI3,
        "meta_instruction": "You are an AI assistant whose name is Phi-3.",
        "eosys": "<|end|>",
        "eoh": "<|end|>",
        "separator": "",
    },
    "solar": {
        "system": "### System:\n",
        "eosys": "\n\n",
        "user": "### User:\n",
        "eoh": "\n\n",
        "assistant": "### Assistant:\n",
    },
    "yi-vl": {
        "meta_instruction": YI_VL_SYSTEM,
        "user": "### Human: ",
        "eoh": "\n",
        "assistant": "### Assistant:",
        "eoa": "\n",
        "stop_words": ["###"],
    },
    "cogvlm": COGVLM,
    "cogvlm2": {**COGVLM, "eoa": "<|end_of_text|>", "stop_words": ["<|end_of_text|>"]},
    "internvl-zh": {
        "user": "<human>: ",
        "eoh": " ",
        "assistant": "<bot>: ",
        "generation_prompt": "<bot>:",
        "eoa": "</s>",
    },
    "molmo": MOLMO,
    "ultracm": ULTRA,
    "ultralm": ULTRA,
}
"""Name -> parts, as keyword arguments of BaseChatTemplate."""

ALIASES: dict[str, str] = {
    alias: name
    for name, aliases in {
        "base": "internlm-20b internlm2-1_8b internlm2-7b internlm2-20b baichuan-7b baichuan-base",
        "internlm": "internlm-chat internlm-chat-7b internlm-chat-7b-8k internlm-chat-20b",
        "internlm2": "internlm2-chat internlm2-chat-1_8b internlm2-chat-7b internlm2-chat-20b",
        "internlm-xcomposer2": "internlm-xcomposer2-4khd",
        "baichuan2": "baichuan2-7b",
        "llama2": "llama-2 llama-2-chat",
        "qwen": "qwen-7b qwen-14b",
        "chatglm": "chatglm2-6b",
        "solar": "solar-70b",
        "yi": "yi-chat yi-200k yi-34b",
        "mistral": "Mistral-7B-Instruct",
        "mixtral": "Mixtral-8x7B-Instruct",
        "deepseek": "deepseek-chat",
    }.items()
    for alias in aliases.split()
}
"""Names that templates had in LMDeploy up to 0.4 -> name."""

ARCHITECTURES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("InternLMForCausalLM", {}, "internlm"),
    ("InternLM2ForCausalLM", {}, "internlm2"),
    ("InternLM3ForCausalLM", {}, "internlm2"),
    ("InternLMXComposer2ForCausalLM", {}, "internlm-xcomposer2"),
    ("InternVLChatModel", {"template": "internlm2-chat"}, "internvl2-internlm2"),
    ("InternVLChatModel", {"template": "internvl2_5"}, "internvl2_5"),
    ("InternVLChatModel", {"template": "Hermes-2"}, "internvl-zh-hermes2"),
    ("InternVLChatModel", {"template": "phi3-chat"}, "internvl2-phi3"),
    ("InternVLChatModel", {"template": "internvl_zh"}, "internvl-zh"),
    ("InternVLChatModel", {}, "internvl2-internlm2"),
    ("GotOcr2ForConditionalGeneration", {}, "got-ocr2"),
    ("QWenLMHeadModel", {}, "qwen"),
    ("Qwen2ForCausalLM", {}, "qwen"),
    ("Qwen2MoeForCausalLM", {}, "qwen"),
    ("Qwen3ForCausalLM", {}, "qwen3"),
    ("Qwen3MoeForCausalLM", {}, "qwen3"),
    ("YiForCausalLM", {}, "yi"),
    ("LlamaForCausalLM", {"vocab_size": 64000}, "yi"),
    ("LlamaForCausalLM", {"vocab_size": 128256, "rope_scaling.rope_type": "llama3"}, "llama3_1"),
    ("LlamaForCausalLM", {"vocab_size": 128256, "rope_parameters.rope_type": "llama3"}, "llama3_1"),
    ("LlamaForCausalLM", {"vocab_size": 128256}, "llama3"),
    ("LlamaForCausalLM", {"vocab_size": 32016}, "codellama"),
    ("LlamaForCausalLM", {"vocab_size": 32256}, "deepseek-coder"),
    ("LlamaForCausalLM", {"vocab_size": 102400}, "deepseek"),
    ("LlavaLlamaForCausalLM", {"mm_projector_type": "mlp2x_gelu_Norm"}, "yi-vl"),
    ("LlavaLlamaForCausalLM", {"vocab_size": 64000}, "llava-chatml"),
    ("LlavaLlamaForCausalLM", {}, "llava-v1"),
    ("LlavaMistralForCausalLM", {}, "mistral"),
    ("MGMLlamaForCausalLM", {}, "mini-gemini-vicuna"),
    ("MiniGeminiLlamaForCausalLM", {}, "mini-gemini-vicuna"),
    ("MiniCPMV", {"version": 2.6}, "qwen"),
    ("MiniCPMV", {"version": 4.0}, "qwen"),
    ("MiniCPMV", {"version": 4.5}, "qwen"),
    ("MiniCPMV", {}, "llama3"),
    ("BaichuanForCausalLM", {"vocab_size": 125696}, "baichuan2"),
    ("BaiChuanForCausalLM", {"vocab_size": 125696}, "baichuan2"),
    ("ChatGLMModel", {"padded_vocab_size": 151552}, "glm4"),
    ("ChatGLMForConditionalGeneration", {"padded_vocab_size": 151552}, "glm4"),
    ("ChatGLMModel", {}, "chatglm"),
    ("ChatGLMForConditionalGeneration", {}, "chatglm"),
    ("GlmForCausalLM", {}, "glm4"),
    ("Glm4ForCausalLM", {}, "glm4"),
    ("MolmoForCausalLM", {}, "molmo"),
    ("MistralForCausalLM", {"vocab_size": 131072}, "mistral-v7"),
    ("MistralForCausalLM", {}, "mistral"),
    ("MixtralForCausalLM", {}, "mixtral"),
    ("GemmaForCausalLM", {}, "gemma"),
    ("Gemma2ForCausalLM", {}, "gemma"),
    ("Gemma3ForCausalLM", {}, "gemma"),
    ("DbrxForCausalLM", {}, "dbrx"),
    ("DeepseekForCausalLM", {}, "deepseek"),
    ("DeepseekV2ForCausalLM", {}, "deepseek"),
    ("DeepseekV3ForCausalLM", {"vocab_size": 129280}, "deepseek-v3"),
    ("DeepseekV32ForCausalLM", {}, "deepseek-v3.2"),
    ("DeepseekVLV2ForCausalLM", {}, "deepseek-vl2"),
    ("MultiModalityCausalLM", {"gen_vision_config.model_type": "gen_vision"}, "janus"),
    ("MultiModalityCausalLM", {}, "deepseek-vl"),
    ("Phi3ForCausalLM", {}, "phi-3"),
    ("Phi3VForCausalLM", {}, "phi-3"),
    ("CogVLMForCausalLM", {"vocab_size": 128256}, "cogvlm2"),
    ("CogVLMForCausalLM", {}, "cogvlm"),
    ("FalconForCausalLM", {}, "falcon"),
)
"""(architecture, entries of config.json that must match too, name); the first matching row applies. Llama 2, Vicuna and
plain Llama checkpoints have the same config.json, so there is no row for them: they get "base"."""


AHEAD_OF_CHECKPOINTS = frozenset({"molmo"})
"""Built-in templates that take precedence over a checkpoint's, because the latter relies on the authors' code for the
beginning of a prompt."""
