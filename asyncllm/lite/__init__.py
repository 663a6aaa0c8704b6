"""Tools that write a new checkpoint from another, under LMDeploy's names: `asyncllm lite`, or from Python.

    from asyncllm.lite import auto_awq

    auto_awq("internlm/internlm2-chat-7b", "internlm2-chat-7b-4bit", calib_dataset="texts.jsonl")

They run the model on calibration texts layer by layer, so that only one layer at a time is in the device's memory. The
new folder loads like any other checkpoint, and appears complete or not at all.
"""

from __future__ import annotations

from asyncllm.lite.merge_lora import merge_lora
from asyncllm.lite.quantize import QuantizeReport
from asyncllm.lite.tools import TOOLS, auto_awq, auto_gptq, blocked_fp8, calibrate, smooth_quant

__all__ = ["TOOLS", "QuantizeReport", "auto_awq", "auto_gptq", "blocked_fp8", "calibrate", "merge_lora", "smooth_quant"]
