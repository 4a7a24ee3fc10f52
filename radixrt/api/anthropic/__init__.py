"""Anthropic's Messages API, translated to and from the chat requests of
:mod:`radixrt.api.openai.chat`."""
