"""lm-eval's local-completions and local-chat-completions: log-likelihoods by echo, and generated answers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

URL, KEY = os.environ["ASYNCLLM_TEST_URL"], os.environ["ASYNCLLM_TEST_KEY"]
os.environ["OPENAI_API_KEY"] = KEY
FOLDER = Path.cwd() / "tasks"
SUMS = [(12, 30), (17, 25), (20, 22), (8, 9)]


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


FOLDER.mkdir()
data = FOLDER / "sums.json"
data.write_text(
    "\n".join(
        json.dumps({"question": f"What is {a} + {b}?", "choices": [str(a + b), "a horse"], "answer": str(a + b)})
        for a, b in SUMS
    )
)
COMMON = f"""
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
doc_to_text: "{{{{question}}}} "
"""
(FOLDER / "choose.yaml").write_text(
    f"task: choose\noutput_type: multiple_choice\n{COMMON}"
    'doc_to_choice: "{{choices}}"\ndoc_to_target: 0\nmetric_list:\n  - metric: acc\n'
)
(FOLDER / "say.yaml").write_text(
    f"task: say\noutput_type: generate_until\n{COMMON}"
    'doc_to_target: "{{answer}}"\ngeneration_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 16\n  do_sample: false\n'
    "filter_list:\n  - name: number\n    filter:\n      - function: regex\n        regex_pattern: '(-?\\d+)'\n"
    "        group_select: -1\n      - function: take_first\nmetric_list:\n  - metric: exact_match\n"
)
TASKS = TaskManager(include_path=str(FOLDER), include_defaults=False)


def score(model: str, path: str, task: str, metric: str, extra: str = "", **options: object) -> float:
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=f"model=tiny-chat,base_url={URL}{path},num_concurrent=1,max_retries=1{extra}",
        tasks=[task],
        task_manager=TASKS,
        bootstrap_iters=0,
        **options,
    )
    value: float = found["results"][task][metric]
    return value


tokenizer = f",tokenizer_backend=huggingface,tokenizer={os.environ['ASYNCLLM_TEST_MODEL']}"
for kind, tokenized in (("token ids", "True"), ("texts", "False")):
    extra = f"{tokenizer},tokenized_requests={tokenized}"
    assert score("local-completions", "/v1/completions", "choose", "acc,none", extra) == 1.0
    did(f"local-completions: log-likelihoods of {kind}")
    score("local-completions", "/v1/completions", "say", "exact_match,number", extra)
    did(f"local-completions: answers to {kind}")
right = score("local-chat-completions", "/v1/chat/completions", "say", "exact_match,number", apply_chat_template=True)
assert right >= 0.75, right
did("local-chat-completions: answers")
