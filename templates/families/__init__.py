"""The families that come with titogym, one module for models of one maker and format."""

from titogym.templates.families.chatml import CHATML
from titogym.templates.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V3_1, DEEPSEEK_V3_2
from titogym.templates.families.glm import GLM_4_5, GLM_4_7
from titogym.templates.families.gpt_oss import GPT_OSS
from titogym.templates.families.kimi import KIMI_K2, KIMI_K2_5, KIMI_K2_THINKING
from titogym.templates.families.llama_3 import LLAMA_3
from titogym.templates.families.minimax_m2 import MINIMAX_M2
from titogym.templates.families.mistral import MISTRAL
from titogym.templates.families.nemotron_3 import NEMOTRON_3
from titogym.templates.families.quickstart import QUICKSTART
from titogym.templates.families.qwen2_5 import QWEN2_5
from titogym.templates.families.qwen3 import QWEN3, QWEN3_INSTRUCT, QWEN3_THINKING
from titogym.templates.families.qwen3_5 import QWEN3_5
from titogym.templates.families.qwen3_coder import QWEN3_CODER
from titogym.templates.families.smollm2 import SMOLLM2

__all__ = ["BUILT_IN", "QUICKSTART", "QWEN3", "SMOLLM2"]

BUILT_IN = (
    QUICKSTART,
    CHATML,
    SMOLLM2,
    QWEN2_5,
    QWEN3,
    QWEN3_INSTRUCT,
    QWEN3_THINKING,
    QWEN3_CODER,
    QWEN3_5,
    NEMOTRON_3,
    GLM_4_5,
    GLM_4_7,
    KIMI_K2,
    KIMI_K2_THINKING,
    KIMI_K2_5,
    MINIMAX_M2,
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    DEEPSEEK_V3_2,
    GPT_OSS,
    LLAMA_3,
    MISTRAL,
)
