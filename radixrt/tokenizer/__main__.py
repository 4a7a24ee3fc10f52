"""``python -m radixrt.tokenizer``: the tokenizer process."""

from radixrt.base.child import run_child

run_child("tokenizer", "radixrt.tokenizer.process:run_tokenizer")
