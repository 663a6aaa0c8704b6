"""The tiny models of families whose code is their authors' alone, by kind."""

from __future__ import annotations

from collections.abc import Mapping

from tests.vl.published.cogvlm import CogVLM, CogVLM2
from tests.vl.published.deepseek_ocr import DeepseekOCR
from tests.vl.published.deepseek_vl2 import DeepseekVL2, DeepseekVL2Tiny
from tests.vl.published.dots_ocr import DotsOCR
from tests.vl.published.eva import Glm4v9b
from tests.vl.published.kimi_vl import KimiVL
from tests.vl.published.mgm import MGM, MGMHD
from tests.vl.published.minicpm_v import MiniCPMV25, MiniCPMV26, MiniCPMV40, MiniCPMV45
from tests.vl.published.model import PublishedModel
from tests.vl.published.molmo import MolmoD, MolmoO
from tests.vl.published.phi3_v import Phi3V
from tests.vl.published.phi4 import Phi4, Phi4Published
from tests.vl.published.qwen_visual import QwenVisual
from tests.vl.published.xcomposer2 import XComposer2, XComposer24khd, XComposer25

__all__ = ["PUBLISHED"]

PUBLISHED: Mapping[str, type[PublishedModel]] = {
    "cogvlm": CogVLM,
    "cogvlm2": CogVLM2,
    "deepseek_ocr": DeepseekOCR,
    "deepseek_vl2": DeepseekVL2,
    "deepseek_vl2_tiny": DeepseekVL2Tiny,
    "dots_ocr": DotsOCR,
    "glm4v_9b": Glm4v9b,
    "kimi_vl": KimiVL,
    "mgm": MGM,
    "mgm_hd": MGMHD,
    "minicpm_v_2_5": MiniCPMV25,
    "minicpm_v_2_6": MiniCPMV26,
    "minicpm_v_4_0": MiniCPMV40,
    "minicpm_v_4_5": MiniCPMV45,
    "molmo_d": MolmoD,
    "molmo_o": MolmoO,
    "phi3_v": Phi3V,
    "phi4": Phi4,
    "phi4_mm": Phi4Published,
    "qwen_visual": QwenVisual,
    "xcomposer2": XComposer2,
    "xcomposer2_4khd": XComposer24khd,
    "xcomposer2_5": XComposer25,
}
