"""``python -m radixrt.tokenizer``: the tokenizer process."""

from radixrt.base.child import run_child
from radixrt.tokenizer.process import run_tokenizer

run_child("tokenizer", lambda config, channels, arguments: run_tokenizer(config, channels))
