"""AutoRound, as Intel's library writes it: files in GPTQ's first format or AWQ's, under a `quant_method` of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.awq import AWQ
from asyncllm.quant.gptq import GPTQ
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["AutoRound"]

_LAYOUT_KEYS = ("packing_format", "backend")
"""Keys that name the layout; earlier versions wrote the second."""
_GPTQ = re.compile(r"(auto_round:)?(auto_)?gptq(:.*)?")
_AWQ = re.compile(r"(auto_round:)?(auto_)?awq(:.*)?")
_PLAIN_BITS = 16


@register("auto-round", "intel/auto-round")
class AutoRound(Scheme):
    """`extra_config` has other settings for single modules, by name or by a regular expression that matches the whole
    name. Modules of 16 bits are unquantized, as the files show."""

    def __init__(self, usual: Scheme, own: Mapping[str, Scheme], patterns: Sequence[tuple[re.Pattern[str], Scheme]]):
        self._usual = usual
        self._own = own
        self._patterns = patterns

    @classmethod
    def read(cls, settings: QuantSettings) -> AutoRound:
        own, patterns = {}, []
        several = settings.object("extra_config")
        for name in several.fields:
            fields = several.object(name)
            if fields.integer("bits", default=0) >= _PLAIN_BITS:
                continue
            one = _of_layout(QuantSettings({**settings.fields, **fields.fields}, fields.source))
            own[name] = one
            try:
                patterns.append((re.compile(name), one))
            except (re.error, RecursionError):
                several.invalid(name, "whose name is not a regular expression")
        return cls(_of_layout(settings), own, patterns)

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        scheme = self._own.get(module) or next(
            (one for pattern, one in self._patterns if pattern.fullmatch(module)), self._usual
        )
        return scheme.method(module, tensors)


def _of_layout(settings: QuantSettings) -> Scheme:
    """Return the scheme of the files' layout. Raises InvalidCheckpoint, UnsupportedModel."""
    settings.expect("data_type", "int")
    if settings.integer("act_bits", default=_PLAIN_BITS) < _PLAIN_BITS:
        settings.unsupported("act_bits", "Supported: activations of 16 bits.")
    key = next((each for each in _LAYOUT_KEYS if settings.get(each) not in (None, "auto")), _LAYOUT_KEYS[0])
    name = str(settings.get(key) or "auto_round:auto_gptq")
    shared = {each: settings.get(each) for each in ("bits", "group_size")}
    if _GPTQ.fullmatch(name):
        return GPTQ.read(QuantSettings({**shared, "sym": settings.flag("sym", True)}, settings.source))
    if _AWQ.fullmatch(name):
        return AWQ.read(QuantSettings(shared, settings.source))
    settings.unsupported(key, "Supported: auto_round:auto_gptq, auto_round:auto_awq.")
