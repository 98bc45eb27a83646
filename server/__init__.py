"""The HTTP process: text, OpenAI wire format, limits, metrics. Never imports torch."""
