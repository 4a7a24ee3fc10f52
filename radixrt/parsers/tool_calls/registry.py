"""The tool-call formats by the names that ``--tool-call-parser`` gives them."""

from radixrt.parsers.tool_calls.format import ToolCallFormat
from radixrt.parsers.tool_calls.hermes import Hermes
from radixrt.parsers.tool_calls.llama3_json import Llama3Json
from radixrt.parsers.tool_calls.qwen3_coder import Qwen3Coder

FORMATS: dict[str, ToolCallFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "qwen3_coder": Qwen3Coder(),
}
