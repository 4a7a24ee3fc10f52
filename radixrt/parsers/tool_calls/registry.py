"""The tool-call formats by the names that ``--tool-call-parser`` gives them."""

from radixrt.parsers.harmony import Harmony
from radixrt.parsers.tool_calls.format import ToolCallFormat
from radixrt.parsers.tool_calls.json_calls import (
    Exaone4,
    Falcon,
    Granite,
    Hermes,
    Llama3Json,
    Mistral,
    MistralV3,
    NemotronJson,
    Phi4Mini,
)
from radixrt.parsers.tool_calls.parameter_tags import Glm45, Glm47, MinimaxM2, Qwen3Coder, SeedOss
from radixrt.parsers.tool_calls.pythonic import FunctionGemma, Gemma4, Lfm2, Olmo3, Pythonic
from radixrt.parsers.tool_calls.sections import DeepseekV3, DeepseekV31, Hunyuan, KimiK2

FORMATS: dict[str, ToolCallFormat] = {
    "hermes": Hermes(),
    "exaone4": Exaone4(),
    "llama3_json": Llama3Json(),
    "qwen3_coder": Qwen3Coder(),
    "seed_oss": SeedOss(),
    "minimax_m2": MinimaxM2(),
    "glm45": Glm45(),
    "glm47": Glm47(),
    "mistral": Mistral(),
    "mistral_v3": MistralV3(),
    "granite": Granite(),
    "phi4_mini": Phi4Mini(),
    "nemotron_json": NemotronJson(),
    "falcon": Falcon(),
    "hunyuan": Hunyuan(),
    "deepseek_v3": DeepseekV3(),
    "deepseek_v31": DeepseekV31(),
    "kimi_k2": KimiK2(),
    "pythonic": Pythonic(),
    "lfm2": Lfm2(),
    "olmo3": Olmo3(),
    "functiongemma": FunctionGemma(),
    "gemma4": Gemma4(),
    "harmony": Harmony(),
}
