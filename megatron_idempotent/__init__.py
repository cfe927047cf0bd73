"""Version-gated patches that make NVIDIA Megatron's train path safe to call again."""
