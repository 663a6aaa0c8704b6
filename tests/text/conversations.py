"""Chat templates and conversations that several tests share."""

from __future__ import annotations

from asyncllm.types import Message

JINJA = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
        "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "trimming": (
        "{{ bos_token }}{%- for message in messages %}\n    {%- if loop.first and message.role == 'system' %}\n"
        "[sys]{{ message.content | trim }}[/sys]\n    {%- continue %}{%- endif %}\n"
        "    {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content | trim ~ '<|im_end|>\n' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "alternating": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
        "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
    "helpers": (
        "{{ messages | tojson }}{{ {'ü<': [1, none]} | tojson(indent=2) }}{{ strftime_now('%Y') }}"
        "{{ tools is none }}{{ undefined_name }}{% if pad_token is defined %}pad{% endif %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    ),
}


def turns(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]
