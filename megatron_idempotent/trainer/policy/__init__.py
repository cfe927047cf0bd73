"""The policy: a decoder built, sampled, trained and saved through stock Megatron."""
