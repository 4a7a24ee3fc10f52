"""``python -m radixrt.tokenizer``: the tokenizer process. Imports make no garbage, as in
``radixrt/worker/__main__.py``."""

import gc

gc.disable()

from radixrt.base.child import run_child  # noqa: E402
from radixrt.tokenizer.process import run_tokenizer  # noqa: E402

gc.freeze()
gc.enable()
run_child("tokenizer", run_tokenizer)
