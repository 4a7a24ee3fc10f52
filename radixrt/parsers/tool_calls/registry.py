"""The tool-call formats by the names that ``--tool-call-parser`` gives them."""

from radixrt.parsers.tool_calls.format import ToolCallFormat
from radixrt.parsers.tool_calls.functiongemma import FunctionGemma
from radixrt.parsers.tool_calls.harmony import Harmony
from radixrt.parsers.tool_calls.hermes import Hermes
from radixrt.parsers.tool_calls.llama3_json import Llama3Json
from radixrt.parsers.tool_calls.mistral import Mistral, MistralV3
from radixrt.parsers.tool_calls.phi4_mini import Phi4Mini
from radixrt.parsers.tool_calls.pythonic import Pythonic
from radixrt.parsers.tool_calls.qwen3_coder import Qwen3Coder

FORMATS: dict[str, ToolCallFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "qwen3_coder": Qwen3Coder(),
    "mistral": Mistral(),
    "mistral_v3": MistralV3(),
    "pythonic": Pythonic(),
    "functiongemma": FunctionGemma(),
    "phi4_mini": Phi4Mini(),
    "harmony": Harmony(),
}
