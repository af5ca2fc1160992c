"""Text in and out: tokenizer, prompts to token ids, token ids to streamed text."""
