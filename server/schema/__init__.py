"""OpenAI request bodies as strict models, and what they ask of the engine."""
