"""Text of real models: tokenizer, chat template, incremental detokenizer and stop strings."""
