"""Every message that crosses a process border.

    api ── tokenizer ── scheduler ── worker

All are ``msgspec.Struct``s in msgpack, distinguished by a tag. :mod:`radixrt.messages.links` lists
those of each link. Token ids travel as packed int32 bytes (:mod:`radixrt.messages.ids`). Nothing is
ever unpickled.
"""
