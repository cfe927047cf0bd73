"""Defines the task: prompts with a checkable answer, their tokens, and the verifier."""
