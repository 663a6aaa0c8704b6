"""Fakes for testing programs that use asyncllm: the real engine on a device that needs no model."""

from __future__ import annotations

from asyncllm.testing.byte_tokenizer import ByteTokenizer
from asyncllm.testing.fake_device import FakeDevice, StepViolation
from asyncllm.testing.fake_engine import FakeEngine, FakePipeline, FakeTemplate, fake_parts
from asyncllm.testing.fake_executor import FakeExecutor
from asyncllm.testing.fault_plan import FaultPlan
from asyncllm.testing.faults import Fault, InjectedFault
from asyncllm.testing.oracles import Oracle, hash_hidden, hash_oracle, script_oracle

__all__ = [
    "ByteTokenizer",
    "FakeDevice",
    "FakeEngine",
    "FakeExecutor",
    "FakePipeline",
    "FakeTemplate",
    "Fault",
    "FaultPlan",
    "InjectedFault",
    "Oracle",
    "StepViolation",
    "fake_parts",
    "hash_hidden",
    "hash_oracle",
    "script_oracle",
]
