"""Qwen3.5 with its eyes: the tower of Qwen3-VL without DeepStack, beside a language model with
recurrent layers."""

from radixrt.models.hybrids.qwen3_next import Qwen3_5ForCausalLM
from radixrt.models.vision.qwen import Qwen3Encoder, QwenVL


class Qwen3_5ForConditionalGeneration(QwenVL, Qwen3_5ForCausalLM):
    """The language model is that of Qwen3.5, dense or with experts."""

    encoder_class = Qwen3Encoder
