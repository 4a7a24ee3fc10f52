"""Structured output: constraint → grammar → matcher → mask of the tokens that may come next.

    request fields  ─▶ Constraint ─▶ compiler ──────────────────────────▶ Grammar ─▶ Matcher ─▶
    bitmask requests,          constraint    json_schema: normal form, checks      grammar
    backends structural_tags,                 backends: llguidance, fsm tool_calls └──── api, LLM
    ───┘└─── helper processes of the tokenizer process ──┘            └──── worker ────┘

The helper processes also validate the values of an answer that no grammar covers; the tokenizer
process finds them and retries invalid ones (:mod:`radixrt.tokenizer.retry`).
"""
