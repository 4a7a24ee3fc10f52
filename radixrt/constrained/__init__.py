"""Structured output: from what a request asks for to the tokens that may come next.

spec ──▶ json_schema (normalise, audit) ──▶ route ──▶ backend ──▶ Grammar ──▶ Matcher ──▶ bitmask
└────────── compiler pool, beside the tokenizer process ────────┘            └── worker ──┘
"""
