"""Structured output: from what a request asks for to the tokens that may come next.

    what users send ─▶ Spec ─▶ compiler ────────────────────────────────▶ Grammar ─▶ Matcher ─▶ bitmask
    requests,          spec     json_schema: normal form, audit, checks    grammar    backends
    structural_tags,            backends: llguidance, xgrammar, FSM
    tool_calls
    └──── api, LLM ───┘└─── helper processes of the tokenizer process ──┘            └──── worker ────┘

``checks`` is what happens to values that no grammar covers.
"""
