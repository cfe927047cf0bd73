"""The task: prompts with verifiable answers, their tokenizer, and the verifier."""
