"""The built-in templates, rendered for [system S, user U, assistant A, user V]."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.errors import InvalidParameter, UnsupportedFeature
from asyncllm.text.templates.builtin import ARCHITECTURES, BUILTIN
from asyncllm.text.templates.composed import BaseChatTemplate
from asyncllm.text.templates.registry import MODELS, Registry, builtin_name, names

CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
CHATML = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
)
CHATML_UNBROKEN = CHATML.replace("<|im_end|>\n", "<|im_end|>")
XCOMPOSER = (
    "[UNUSED_TOKEN_146]system\nS[UNUSED_TOKEN_145]\n[UNUSED_TOKEN_146]user\nU[UNUSED_TOKEN_145]\n"
    "[UNUSED_TOKEN_146]assistant\nA[UNUSED_TOKEN_145]\n\n[UNUSED_TOKEN_146]user\nV[UNUSED_TOKEN_145]\n"
    "[UNUSED_TOKEN_146]assistant\n"
)
LLAMA2 = "[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]"
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
VICUNA = "S USER: U ASSISTANT: A</s>USER: V ASSISTANT: "
GLM4 = "<|system|>\nS<|user|>\nU<|assistant|>\nA<|user|>\nV<|assistant|>\n"
MISTRAL = "[INST] S\n\nU [/INST]A</s>[INST] V [/INST]"
DEEPSEEK_V3_2 = "S<｜User｜>U<｜Assistant｜></think>A<｜end▁of▁sentence｜><｜User｜>V<｜Assistant｜></think>"
DEEPSEEK = "User: U\n\nAssistant: A<｜end▁of▁sentence｜>User: V\n\nAssistant:"
PHI3 = "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n"
ULTRA = "User: S</s>\nUser: U</s>\nAssistant: A</s>\nUser: V</s>\nAssistant: "
COGVLM = "SQuestion: U Answer:A</s>\nQuestion: V Answer:"

TABLE: dict[str, tuple[str, list[str]]] = {
    "internlm2": (CHATML, ["<|im_end|>", "<|action_end|>"]),
    "internvl-internlm2": (CHATML, ["<|im_start|>", "<|im_end|>"]),
    "internvl2-internlm2": (CHATML, ["<|im_start|>", "<|im_end|>"]),
    "internvl2_5": (CHATML, ["<|im_start|>", "<|im_end|>"]),
    "qwen": (CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "qwen2d5": (CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "qwen2d5-vl": (CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "minicpmv-2d6": (CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": (CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "yi": (CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "dbrx": (CHATML, ["<|im_end|>"]),
    "llava-chatml": (CHATML_UNBROKEN, ["<|im_end|>"]),
    "got-ocr2": (CHATML_UNBROKEN, ["<|im_end|>"]),
    "internvl-zh-hermes2": (CHATML_UNBROKEN, ["<|im_end|>"]),
    "internlm": ("<|System|>:S\n<|User|>:U\n<|Bot|>:A<eoa>\n<|User|>:V\n<|Bot|>:", ["<eoa>"]),
    "internlm-xcomposer2": (XCOMPOSER, ["[UNUSED_TOKEN_145]"]),
    "internlm-xcomposer2d5": (XCOMPOSER, ["[UNUSED_TOKEN_145]"]),
    "llama2": (LLAMA2, []),
    "codellama": (LLAMA2, []),
    "llama3": (LLAMA3, ["<|eot_id|>", "<|end_of_text|>"]),
    "llama3_1": (LLAMA3, ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
    "vicuna": (VICUNA, ["</s>"]),
    "wizardlm": (VICUNA, ["</s>"]),
    "llava-v1": (VICUNA[:-1], ["</s>"]),
    "mini-gemini-vicuna": (VICUNA[:-1], ["</s>"]),
    "baichuan2": ("S<reserved_106>U<reserved_107>A<reserved_106>V<reserved_107>", []),
    "chatglm": ("[Round 1]\n\n问：U\n\n答：A[Round 2]\n\n问：V\n\n答：", []),
    "chatglm3": (
        "[gMASK]sop<|system|>\n S<|user|>\n U<|assistant|>\n A<|user|>\n V<|assistant|>\n ",
        ["<eos>"],
    ),
    "glm4": ("[gMASK]<sop>" + GLM4, ["<|user|>", "<|endoftext|>", "<|observation|>"]),
    "codegeex4": (GLM4, ["<|user|>", "<|endoftext|>", "<|observation|>"]),
    "mistral": (MISTRAL, []),
    "mistral-v7": ("[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>[INST]V[/INST]", []),
    "mixtral": (MISTRAL, []),
    "gemma": (
        "<start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
        ["<end_of_turn>"],
    ),
    "deepseek": ("S\n\n" + DEEPSEEK, []),
    "deepseek-v3": ("S<｜User｜>U<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>V<｜Assistant｜>", []),
    "deepseek-v3.2": (DEEPSEEK_V3_2, []),
    "deepseek-v32": (DEEPSEEK_V3_2, []),
    "deepseek-vl": ("S\n\n" + DEEPSEEK, []),
    "deepseek-vl2": (
        "<｜begin▁of▁sentence｜>S\n\n" + DEEPSEEK.replace("User", "<|User|>").replace("Assistant", "<|Assistant|>"),
        [],
    ),
    "janus": ("S\n\n" + DEEPSEEK.replace("User", "<|User|>").replace("Assistant", "<|Assistant|>"), []),
    "deepseek-coder": (
        "S### Instruction:\nU\n### Response:\nA\n<|EOT|>\n### Instruction:\nV\n### Response:\n",
        ["<|EOT|>"],
    ),
    "phi-3": (PHI3, ["<|end|>", "<|endoftext|>", "<|assistant|>"]),
    "internvl2-phi3": (PHI3, ["<|end|>", "<|endoftext|>", "<|assistant|>"]),
    "internvl-phi3": (PHI3.replace("<|end|>\n", "<|end|>"), ["<|end|>", "<|endoftext|>", "<|assistant|>"]),
    "solar": ("### System:\nS\n\n### User:\nU\n\n### Assistant:\nA### User:\nV\n\n### Assistant:\n", []),
    "yi-vl": ("S### Human: U\n### Assistant:A\n### Human: V\n### Assistant:", ["###"]),
    "cogvlm": (COGVLM, ["</s>"]),
    "cogvlm2": (COGVLM.replace("</s>", "<|end_of_text|>"), ["<|end_of_text|>"]),
    "internvl-zh": ("S<human>: U <bot>: A</s><human>: V <bot>:", []),
    "molmo": ("<|endoftext|>S User: U Assistant: A User: V Assistant:", []),
    "ultracm": (ULTRA, ["</s>"]),
    "ultralm": (ULTRA, ["</s>"]),
    "base": ("SUAV", []),
    "llama": ("SUAV", []),
    "falcon": ("SUAV", []),
    "puyu": ("SUAV", []),
}


def test_every_template_is_in_the_table() -> None:
    assert set(TABLE) == set(BUILTIN)
    assert set(names()) >= set(TABLE)
    assert names() == sorted(names())


@pytest.mark.parametrize("name", TABLE)
def test_renders_as_tabled(name: str) -> None:
    text, stop_words = TABLE[name]
    template = MODELS.build(name, {})
    assert template.messages2prompt(CONVERSATION) == text
    assert template.stop_words == (stop_words or None)


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"chatglm"}))
def test_turns_of_a_session_add_up_to_the_conversation(name: str) -> None:
    template = MODELS.build(name, {"meta_instruction": "S"})
    first = template.get_prompt("U")
    later = template.get_prompt("V", sequence_start=False)
    # These models write the space behind "Assistant:" themselves.
    blank = " " if template.generation_prompt is not None else ""
    assert first + blank + "A" + template.eoa + later == TABLE[name][0]


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"chatglm"}))
def test_the_assistants_last_word_is_continued(name: str) -> None:
    template = MODELS.build(name, {})
    text = template.messages2prompt(CONVERSATION[:3])
    assert text.endswith("A")
    assert TABLE[name][0].startswith(text)
    whole = template.messages2prompt(CONVERSATION[:3], add_generation_prompt=False)
    assert whole == text + template.eoa + template.separator


SYSTEM = {
    "codegeex4": "你是一位智能编程助手，你叫CodeGeeX。",
    "dbrx": "You are DBRX, created by Databricks. You were last updated in December 2023.",
    "deepseek-coder": "You are an AI programming assistant, utilizing the Deepseek Coder model,",
    "deepseek-vl": "You are a helpful language and vision assistant. You are able to understand the visual content",
    "janus": "You are a helpful language and vision assistant. You are able to understand the visual content",
    "internlm": "You are an AI assistant whose name is InternLM (书生·浦语).\n- InternLM (书生·浦语)",
    "internlm2": "You are an AI assistant whose name is InternLM (书生·浦语).\n- InternLM (书生·浦语)",
    "internlm-xcomposer2": "You are an AI assistant whose name is InternLM-XComposer (浦语·灵笔).\n",
    "internlm-xcomposer2d5": "You are an AI assistant whose name is InternLM-XComposer (浦语·灵笔).\n",
    "internvl-internlm2": "You are an AI assistant whose name is InternLM (书生·浦语).",
    "internvl-phi3": "You are an AI assistant whose name is Phi-3.",
    "internvl-zh-hermes2": "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL,",
    "internvl2-internlm2": "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL,",
    "internvl2-phi3": "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL,",
    "internvl2_5": "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的",
    "llama2": "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible,",
    "llama3_1": "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nYou are a helpful assistant.",
    "llava-chatml": "Answer the questions.",
    "got-ocr2": "You should follow the instructions carefully and explain your answers in detail.",
    "llava-v1": "A chat between a curious human and an artificial intelligence assistant. The assistant",
    "mini-gemini-vicuna": "A chat between a curious human and an artificial intelligence assistant. The assistant",
    "minicpmv-2d6": "You are a helpful assistant.",
    "qwen": "You are a helpful assistant.",
    "qwen2d5": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "qwen2d5-vl": "You are a helpful assistant.",
    "ultracm": "A one-turn chat between a curious user and an artificial intelligence assistant.",
    "ultralm": "A one-turn chat between a curious user and an artificial intelligence assistant.",
    "vicuna": "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, de",
    "wizardlm": "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful,",
    "yi-vl": "This is a chat between an inquisitive human and an AI assistant. Assume the role of the AI assistant.",
}
"""How the system prompts begin that stand in for a missing one; the other templates have none."""


def test_system_prompts() -> None:
    for name in TABLE:
        template, user = MODELS.build(name, {}), {"role": "user", "content": "U"}
        instruction = template.meta_instruction
        if name not in SYSTEM:
            assert instruction is None, name
            continue
        assert instruction is not None, name
        assert instruction.startswith(SYSTEM[name])
        system = {"role": "system", "content": instruction}
        assert template.messages2prompt([user]) == template.messages2prompt([system, user])
        assert instruction in template.messages2prompt([user])


def test_the_meta_instruction_stands_in_for_a_missing_system_message() -> None:
    template = MODELS.build("qwen", {})
    user = [{"role": "user", "content": "U"}]
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    assert template.messages2prompt(user) == text + "<|im_start|>assistant\n"
    assert template.messages2prompt("U") == template.messages2prompt(user) == template.get_prompt("U")
    assert MODELS.build("yi", {}).get_prompt("U").startswith("<|im_start|>user")
    assert MODELS.build("yi", {"meta_instruction": ""}).get_prompt("U").startswith("<|im_start|>system\n<|im_end|>")
    assert MODELS.build("llama2", {"meta_instruction": None}).get_prompt("U") == "[INST] U [/INST]"
    assert MODELS.build("codellama", {}).get_prompt("U") == "[INST] U [/INST]"


def test_consecutive_messages_of_one_role_are_written_one_after_the_other() -> None:
    users = [{"role": "user", "content": "U"}, {"role": "user", "content": "V"}]
    assert MODELS.build("mistral", {}).messages2prompt(users) == "[INST] U [/INST][INST] V [/INST]"


def test_tools_are_refused_by_composed_templates() -> None:
    for message in ({"role": "tool", "content": "x"}, {"role": "user", "content": "x", "name": "y"}):
        with pytest.raises(UnsupportedFeature, match="no place for"):
            MODELS.build("qwen", {}).messages2prompt([message])


def test_every_architecture_names_a_template() -> None:
    assert {template for _, _, template in ARCHITECTURES} <= set(BUILTIN)


LLAMA_3 = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256}


@pytest.mark.parametrize(("config", "name"), [
    ({"architectures": ["InternLM2ForCausalLM"]}, "internlm2"),
    ({"architectures": ["Qwen2ForCausalLM"], "_name_or_path": "vicuna"}, "qwen"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "qwen3"),
    ({"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280}, "deepseek-v3"),
    ({"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840}, "base"),
    ({"architectures": ["DeepseekV32ForCausalLM"]}, "deepseek-v3.2"),
    ({"architectures": ["LlamaForCausalLM"], "vocab_size": 32000}, "base"),
    (LLAMA_3, "llama3"),
    ({**LLAMA_3, "rope_scaling": {"rope_type": "llama3"}}, "llama3_1"),
    ({**LLAMA_3, "rope_scaling": None}, "llama3"),
    ({"architectures": ["ChatGLMModel"], "padded_vocab_size": 151552}, "glm4"),
    ({"architectures": ["ChatGLMModel"], "padded_vocab_size": 65024}, "chatglm"),
    ({"architectures": ["BaichuanForCausalLM"], "vocab_size": 64000}, "base"),
    ({"architectures": ["InternVLChatModel"], "template": "Hermes-2"}, "internvl-zh-hermes2"),
    ({"architectures": []}, "base"),
    ({"architectures": ["Unheard"]}, "base"),
    ({}, "base"),
])  # fmt: skip
def test_the_architecture_decides(config: dict[str, object], name: str) -> None:
    assert builtin_name(config) == name


def test_registering_a_class() -> None:
    registry = Registry()

    @registry.register_module(name="mine")
    class Mine(BaseChatTemplate):
        def __init__(self, user: str = "Q: ", **parts: Any) -> None:
            super().__init__(user=user, eoh="\n", assistant="A:", **parts)

    assert registry.get("mine") is Mine
    assert "mine" in registry.names()
    assert registry.build("mine", {}).get_prompt("x") == "Q: x\nA:"
    assert registry.build("mine", {"user": "Question: "}).get_prompt("x") == "Question: x\nA:"
    registry.register_module(name="mine")(Mine)
    registry.register_module(["one", "two"], module=Mine)
    assert registry.get("one") is registry.get("two") is Mine
    registry.register_module()(Mine)
    assert registry.get("Mine") is Mine


def test_a_taken_name_is_refused() -> None:
    registry = Registry()

    class Other(BaseChatTemplate):
        pass

    for name in ("qwen", "vicuna"):
        with pytest.raises(InvalidParameter, match="already"):
            registry.register_module(name=name)(Other)
    registry.register_module(name="qwen", force=True)(Other)
    assert registry.get("qwen") is Other
    assert isinstance(registry.build("qwen", {}), Other)


def test_a_class_that_is_no_template_is_refused() -> None:
    class Nothing:
        pass

    with pytest.raises(InvalidParameter, match="no method get_prompt"):
        Registry().register_module(name="nothing")(Nothing)


def test_a_class_that_does_not_take_a_part_is_named() -> None:
    registry = Registry()

    class Fixed(BaseChatTemplate):
        def __init__(self) -> None:
            super().__init__()

    registry.register_module(name="fixed")(Fixed)
    with pytest.raises(InvalidParameter, match="'fixed' cannot be built with"):
        registry.build("fixed", {"user": "x"})
