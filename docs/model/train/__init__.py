"""The program that makes Lockstep's embedded default model: text, tokenizer, training, evaluation."""
