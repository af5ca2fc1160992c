"""Text in and out of the engine, which itself knows token ids only: tokenizer, prompts, streamed text, outputs."""
